"""Optimizer checkpoints of torch.optim, bitsandbytes, TorchAO and qcompile, made into each other.

Everything goes through the dense values, one state after the other. What a package calls its states and how it lays them
out is written here; nothing of it need be installed, but for TorchAO, whose tensors are classes of its own.

bitsandbytes (Adam, AdamW, LAMB, ...: `state1`, `state2`; Lion, SGD, RMSprop, Adagrad: `state1`): uint8 codes of the
parameter's shape, `qmap1` with the 256 values of its dynamic map (arXiv 2110.02861, section 2), `absmax1` with the largest
magnitude of each block; blocks have 256 elements, 2048 before version 0.43. States of fewer than 4096 elements are fp32.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qcompile.exc import CheckpointError
from qcompile.recipes import RECIPES, Recipe
from qcompile.runtime.checkpoint import dense_values
from qcompile.runtime.formats import Format
from qcompile.runtime.rounding import key_of
from qcompile.runtime.state import QuantizedState

LEAST = 4096  # elements from which on bitsandbytes, TorchAO and we quantize
BLOCKS = (256, 2048, 4096, 1024, 512, 128, 64)  # of bitsandbytes, the usual ones first
WRAPPED = "__bnb_optimizer_quant_state__"
# What torch.optim calls the one state of these optimizers of bitsandbytes; those with two have Adam's.
ONE_STATE = {"sgd": "momentum_buffer", "lion": "exp_avg", "rmsprop": "square_avg", "adagrad": "sum"}
TORCHAO = {"torchao-8bit": "OptimState8bit", "torchao-4bit": "OptimState4bit", "torchao-fp8": "OptimStateFp8"}
# Written by the package itself, in its classes; our recipes of the first two names are `qcompile:torchao-8bit` and so on.
TARGETS = ("torch", "bitsandbytes", *TORCHAO, *(f"qcompile:{r.name}" for r in RECIPES.values() if r.quantized))
SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf")


def convert(state_dict: dict[str, Any], to: str, optimizer: str | None = None) -> dict[str, Any]:
    """What `optimizer.state_dict()` of one package would be in another.

    Args:
        state_dict: of torch.optim, bitsandbytes, TorchAO, or with `QuantizedState`.
        to: one of `TARGETS`.
        optimizer: `sgd`, `lion`, `rmsprop` or `adagrad`, for files of bitsandbytes with one state, which do not say it.

    Raises:
        CheckpointError: it is no optimizer's state dict, `to` or `optimizer` is not known, or a state has no place in the target.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        found = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise CheckpointError(f"there is {found}", "an optimizer's state dict, with 'state' and 'param_groups'")
    if to not in TARGETS:
        raise CheckpointError(f"the target is {to!r}", ", ".join(TARGETS))
    if optimizer is not None and optimizer not in ONE_STATE:
        raise CheckpointError(f"the optimizer is {optimizer!r}", ", ".join(ONE_STATE))
    eps = {i: g.get("eps", 0.0) for g in state_dict["param_groups"] for i in g["params"]}
    state = {}
    for index, entry in state_dict["state"].items():
        dense = _read(entry, index, optimizer)
        writer = _writer(to, index, float(eps.get(index, 0.0)))
        state[index] = dict(writer(dense))
    groups = [{k: _number(v, to) if k == "lr" else v for k, v in g.items()} for g in state_dict["param_groups"]]
    return state_dict | {"state": state, "param_groups": groups}


def convert_file(source: Path, target: Path, to: str, key: str | None = None, optimizer: str | None = None) -> None:
    """Convert an optimizer's state dict in a file of `torch.save`; all else in the file is kept.

    Args:
        source, target: files; the target is written whole or not at all.
        to, optimizer: see `convert`.
        key: where in the file the optimizer is; None: the file is its state dict.

    Raises:
        CheckpointError: as `convert`; also where there is no such key, or the file is cut off.
    """
    _import_torchao()
    try:
        whole = torch.load(source, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        found = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{source} cannot be read, or not to its end ({found})", "files of torch.save") from error
    if key is not None and (not isinstance(whole, dict) or key not in whole):
        raise CheckpointError(f"{source} has no key {key!r}", ", ".join(map(repr, whole)))
    converted = convert(whole if key is None else whole[key], to, optimizer)
    written = target.with_name(f".{target.name}.part")
    try:
        torch.save(converted if key is None else whole | {key: converted}, written)
        os.replace(written, target)
    finally:
        written.unlink(missing_ok=True)


# -- Reading -----------------------------------------------------------------------------------------------------------


def _read(entry: dict[str, Any], index: Any, optimizer: str | None) -> dict[str, Any]:
    """The states of one parameter, dense, by the names that torch.optim has for them."""
    entry = {k: v for k, v in entry.items() if k != WRAPPED} | entry.get(WRAPPED, {})
    if "state1" in entry:
        return dict(_of_bitsandbytes(entry, index, optimizer))
    return {k: v.dequantize() if hasattr(type(v), "tensor_attrs") else dense_values(v) for k, v in entry.items()}


def _of_bitsandbytes(entry: dict[str, Any], index: Any, optimizer: str | None) -> Iterator[tuple[str, Any]]:
    names = {"state1": "exp_avg", "state2": "exp_avg_sq"}
    if "state2" not in entry:
        if optimizer is None:
            raise CheckpointError(
                f"parameter {index} has one state, 'state1'", f"it with optimizer={', '.join(ONE_STATE)}"
            )
        names = {"state1": ONE_STATE[optimizer]}
    for name, value in entry.items():
        if name in names:
            n = name[-1]
            quantized = value.dtype == torch.uint8
            yield names[name], _looked_up(value, entry[f"qmap{n}"], entry[f"absmax{n}"]) if quantized else value
        elif not name.startswith(("qmap", "absmax")):
            yield name, torch.tensor(float(value)) if name == "step" and not isinstance(value, Tensor) else value


def _looked_up(codes: Tensor, values: Tensor, absmax: Tensor) -> Tensor:
    count = codes.numel()
    sizes = [size for size in BLOCKS if -(-count // size) == absmax.numel()]
    if not sizes:
        raise CheckpointError(
            f"{absmax.numel()} blocks of {count} elements", f"blocks of {', '.join(map(str, BLOCKS))}"
        )
    scales = absmax.float().repeat_interleave(sizes[0])[:count]
    return (values.float()[codes.flatten().int()] * scales).view(codes.shape)


# -- Writing -----------------------------------------------------------------------------------------------------------

Writer = Callable[[dict[str, Any]], Iterator[tuple[str, Any]]]


def _writer(to: str, index: Any, eps: float) -> Writer:
    if to == "torch":
        return lambda entry: iter(entry.items())
    if to == "bitsandbytes":
        return lambda entry: _to_bitsandbytes(entry, index)
    if to in TORCHAO:
        return lambda entry: ((k, _to_torchao(k, v, TORCHAO[to]) if _is_large(v) else v) for k, v in entry.items())
    return lambda entry: iter(_to_recipe(entry, RECIPES[to.partition(":")[2]], index, eps).items())


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() >= LEAST


def _to_bitsandbytes(entry: dict[str, Any], index: Any) -> Iterator[tuple[str, Any]]:
    states = [name for name, v in entry.items() if isinstance(v, Tensor) and v.dim() and v.is_floating_point()]
    allowed = [["exp_avg", "exp_avg_sq"], *([name] for name in ONE_STATE.values())]
    if sorted(states) not in allowed:
        found = f"parameter {index} has states {', '.join(states) or 'of no kind'}"
        raise CheckpointError(found, f"for bitsandbytes {' or '.join(map(' and '.join, allowed))}")
    yield "step", int(entry.get("step", 0))
    for n, name in enumerate(sorted(states), start=1):
        if not _is_large(entry[name]):
            yield f"state{n}", entry[name].float()
            continue
        values = published_map(signed=name not in SECOND)
        blocks = torch.nn.functional.pad(entry[name].float().flatten(), (0, -entry[name].numel() % 256)).view(-1, 256)
        absmax = blocks.abs().amax(1)
        scaled = blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2).to(torch.uint8)
        yield f"state{n}", codes.flatten()[: entry[name].numel()].view(entry[name].shape)
        yield f"qmap{n}", values
        yield f"absmax{n}", absmax


def published_map(signed: bool) -> Tensor:
    """The 256 values of the dynamic map as published: fp32, ascending (arXiv 2110.02861, section 2).

    Decade e = 0..6 has 2^e values per sign where there are signs, else 2^(e+1); 0 and 1 complete it.
    """
    cells = [torch.linspace(0.1, 1, 2 ** (e + (not signed)) + 1, dtype=torch.float64) for e in range(7)]
    magnitudes = torch.cat([(c[1:] + c[:-1]) / 2 * 10.0 ** (e - 6) for e, c in enumerate(cells)])
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return torch.cat([*([-magnitudes] if signed else []), magnitudes, ends]).sort().values.float()


def _import_torchao() -> Any:
    """TorchAO's optimizers, if it is installed; importing them lets torch.load read their tensors."""
    try:
        import torchao.optim

        return torchao.optim
    except ImportError:
        return None


def _to_torchao(name: str, value: Tensor, kind: str) -> Tensor:
    package = _import_torchao()
    if package is None:
        raise CheckpointError(
            "torchao is not installed, whose classes its checkpoints are made of", "its files where it is"
        )
    block = 128 if kind == "OptimState4bit" else 256
    if value.numel() % block:
        return value
    module = __import__(f"torchao.optim.subclass_{kind.removeprefix('OptimState').lower()}", fromlist=[kind])
    signed = () if kind == "OptimStateFp8" else (name not in SECOND,)
    state = getattr(module, kind).zeros(value.shape, *signed, block_size=block, dtype=value.dtype)
    return state.copy_(value)  # type: ignore[no-any-return]


def _to_recipe(entry: dict[str, Any], recipe: Recipe, index: Any, eps: float) -> dict[str, Any]:
    out = dict(entry)

    def stored(name: str, fmt: Format | None, partner: QuantizedState | None = None) -> None:
        if fmt is not None and _is_large(out[name]):
            key = key_of(0, f"{index}.{name}") if fmt.random else 0
            out[name] = QuantizedState.quantize(out[name], fmt, key, int(entry.get("step", 0)), partner)

    for name in (n for n in entry if n in SECOND):
        stored(name, recipe.second)
    for name in (n for n in entry if n not in SECOND and n != "step"):
        second, fmt = out.get("exp_avg_sq"), recipe.signed
        if name == "exp_avg" and isinstance(second, QuantizedState) and recipe.first is not None:
            fmt = recipe.first
            if fmt.partner is not None:
                stored(name, dataclasses.replace(fmt, eps=eps), second)
                continue
        stored(name, fmt)
    return out


def _number(rate: Any, to: str) -> Any:
    """TorchAO keeps learning rates in tensors, and takes no others."""
    if to in TORCHAO:
        return torch.as_tensor(float(rate))
    return float(rate) if isinstance(rate, Tensor) else rate
