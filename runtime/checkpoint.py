"""An optimizer's state outside of the process: as plain tensors, and as what torch.optim reads without qcompile.

`torch.save(optimizer.state_dict())` and `torch.load`, also with `weights_only=True`, need nothing from here: a
`QuantizedState` is written as its codes and scales and comes back bit for bit. The flat form is for writers that take a
dict of plain tensors, such as safetensors and `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qcompile._compat_distributed import is_dtensor, local_of, with_local
from qcompile.exc import CheckpointError
from qcompile.runtime.state import LAYOUT, QuantizedState, parts_of, rebuild

# The entry of the flat form that says what the others are: JSON, as bytes. It holds no numbers that change from step to
# step, so that `torch.distributed.checkpoint`, which reads into tensors of the same size, can read it too.
STRUCTURE = "structure"
NUMBERS = {"int": (int, torch.int64), "float": (float, torch.float64)}


def dense_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with every quantized state as a dense tensor, of the dtype and strides that it shows.

    What torch.optim itself would have saved, up to rounding: the stock optimizer loads it without qcompile.
    """

    return {key: dense_values(value) for key, value in optimizer.state_dict().items()}


def dense_values(value: Any) -> Any:
    """A value, dicts, lists and tuples of them, with quantized states as dense tensors."""
    if isinstance(local := local_of(value), QuantizedState):
        return with_local(value, local.dequantize())
    if isinstance(value, dict):
        return {key: dense_values(item) for key, item in value.items()}
    return type(value)(map(dense_values, value)) if type(value) in (list, tuple) else value


def flat_state_dict(optimizer: Optimizer) -> dict[str, Tensor]:
    """`optimizer.state_dict()` as a dict of plain tensors, contiguous and without shared memory.

    A quantized state `state.0.exp_avg` is `state.0.exp_avg.codes`, `.scale`, `.tail` and, where it is rounded randomly,
    `.counter`; numbers are 0-d tensors; `structure` holds the rest as JSON.

    Raises:
        CheckpointError: the state dict holds something that is neither a tensor, a number, a string, None, nor a dict,
            list or tuple of these.
    """
    writer = _Writer()
    tree = writer.encode(optimizer.state_dict(), "")
    structure = json.dumps({"layout": LAYOUT, "tree": tree, "partners": writer.partners()})
    return writer.flat | {STRUCTURE: torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8).clone()}


def load_flat_state_dict(optimizer: Optimizer, flat: Mapping[str, Tensor]) -> None:
    """Load what `flat_state_dict` gave, bit for bit, through `optimizer.load_state_dict`.

    Raises:
        CheckpointError: `flat` is not of this form, lacks a tensor, or was written by a version with another layout.
            Nothing was loaded.
    """
    if STRUCTURE not in flat:
        raise CheckpointError(f"there is no entry {STRUCTURE!r}", "what qcompile.flat_state_dict gave")
    record = json.loads(bytes(flat[STRUCTURE].tolist()).decode())
    if record.get("layout") != LAYOUT:
        raise CheckpointError(f"the flat form has layout {record.get('layout')!r}", f"layout {LAYOUT}")
    optimizer.load_state_dict(_Reader(flat).state_dict(record))


@dataclass(slots=True)
class _Writer:
    """Turns values into JSON, and tensors and numbers into entries of the flat form under their path."""

    flat: dict[str, Tensor] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)  # of tensors, by id
    relative: list[tuple[str, QuantizedState]] = field(default_factory=list)

    def encode(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        for name, (kind, dtype) in NUMBERS.items():
            if isinstance(value, kind):
                self.flat[path] = torch.tensor(value, dtype=dtype)
                return {name: path}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {"dict": [[key, self._item(item, path, key)] for key, item in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self._item(item, path, i) for i, item in enumerate(value)]}
        found = f"{path or 'the state dict'} is of type {type(value).__name__}"
        raise CheckpointError(found, "tensors, numbers, strings, None, and dicts, lists and tuples of these")

    def partners(self) -> dict[str, Any]:
        """Of each state that is stored relative to another, where that is; one that no key leads to is written as well."""
        found = {}
        for path, partner in self.relative:
            at = f"{path}.partner"
            found[path] = {"same": self.paths[id(partner)]} if id(partner) in self.paths else self.encode(partner, at)
        return found

    def _item(self, value: Any, path: str, key: str | int) -> Any:
        return self.encode(value, f"{path}.{key}".removeprefix("."))

    def _tensor(self, value: Tensor, path: str) -> Any:
        if is_dtensor(value):
            raise CheckpointError(
                f"{path} is a DTensor", "what one process holds; DTensors: torch.distributed.checkpoint"
            )
        if id(value) in self.paths:
            return {"same": self.paths[id(value)]}
        self.paths[id(value)] = path
        strides = list(value.stride())
        if not isinstance(value, QuantizedState):
            self.flat[path] = value.detach().contiguous().clone()
            return {"tensor": path, "stride": strides}
        for name, part in zip(parts_of(value.format), value.stored, strict=True):
            self.flat[f"{path}.{name}"] = part.detach().clone()
        if value.partner is not None:
            self.relative.append((path, value.partner))
        fields = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in dataclasses.asdict(value.format).items()}
        about = {"shape": list(value.shape), "stride": strides, "dtype": str(value.dtype), "is_apart": value.is_apart}
        return {"quantized": path, "format": fields, **about}


@dataclass(slots=True)
class _Reader:
    """The other way round."""

    flat: Mapping[str, Tensor]
    made: dict[str, Tensor] = field(default_factory=dict)

    def state_dict(self, record: dict[str, Any]) -> Any:
        found = self.decode(record["tree"])
        for path, tree in record["partners"].items():
            self.made[path].attach_(self.decode(tree))  # type: ignore[attr-defined]
        return found

    def decode(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        kind, value = next(iter(tree.items()))
        if kind in NUMBERS:
            return NUMBERS[kind][0](self._entry(value).item())
        if kind == "dict":
            return {key: self.decode(item) for key, item in value}
        if kind in ("list", "tuple"):
            items = [self.decode(item) for item in value]
            return items if kind == "list" else tuple(items)
        if kind == "same":
            return self.made[value]
        if kind == "tensor":
            saved = self._entry(value)
            made = torch.empty_strided(saved.shape, tree["stride"], dtype=saved.dtype, device=saved.device)
            self.made[value] = made.copy_(saved)
        elif kind == "quantized":
            fields = {k: _dtype(v) if k.endswith("dtype") else v for k, v in tree["format"].items()}
            record = (LAYOUT, tree["shape"], tree["stride"], _dtype(tree["dtype"]), fields, tree["is_apart"])
            codes, scale, tail = (self._entry(f"{value}.{name}").clone() for name in ("codes", "scale", "tail"))
            counter = self.flat.get(f"{value}.counter")
            self.made[value] = rebuild(record, codes, scale, tail, None if counter is None else counter.clone())
        else:
            raise CheckpointError(f"an entry is a {kind!r}", f"those of layout {LAYOUT}")
        return self.made[value]

    def _entry(self, name: str) -> Tensor:
        if name not in self.flat:
            raise CheckpointError(f"tensor {name!r} is missing", "all tensors that qcompile.flat_state_dict gave")
        return self.flat[name]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"there is a dtype {name!r}", "dtypes of the installed torch")
    return found
