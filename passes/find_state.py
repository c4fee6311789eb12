"""Which graph inputs are parameters, and which are optimizer state.

Before: Dynamo's graph, whose inputs are `get_attr` nodes and placeholders, and the real tensors behind them.
After: a record. Tensors are matched by identity against the `state` and `param_groups` of the optimizers that are alive,
never by name: Dynamo's names are positional, and `exp_avg` may not occur in them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile._compat_distributed import local_of, with_local
from qcompile.names import alive
from qcompile.runtime.marks import MARKS, Mark, marks

# How many containers deep a tensor may lie in the state of a parameter, or in an attribute of the optimizer.
DEPTH = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a state buffer lives.

    Attributes:
        optimizer: whose state it is.
        owner: the parameter it belongs to, or None where it belongs to the optimizer as a whole.
        path: keys that lead to it from `optimizer.state[parameter]`, or from the optimizer's attributes.
        others: other places that hold the same tensor.
        marked: the tensor itself, where the user marked it as state: no other can take its place.
    """

    optimizer: weakref.ref[Optimizer]
    owner: weakref.ref[Tensor] | None
    path: tuple[Hashable, ...]
    others: tuple[Slot, ...] = ()
    marked: weakref.ref[Tensor] | None = None

    @property
    def key(self) -> str:
        """The path as text: `exp_avg`, `Q.0`."""
        return ".".join(map(str, self.path))

    @property
    def param(self) -> Tensor | None:
        return None if self.owner is None else self.owner()

    @property
    def place(self) -> tuple[int, tuple[Hashable, ...]]:
        """What tells it from all other state of its optimizer."""
        whose = self.param if self.marked is None else self.marked()
        return id(whose) if whose is not None else 0, self.path

    def get(self) -> Any:
        """What is there now, of a DTensor what this rank holds; None where the optimizer is gone or has dropped it."""
        return local_of(self.raw())

    def raw(self) -> Any:
        """What is there now, as it is."""
        if self.marked is not None:
            return self.marked()
        value = self._root()
        try:
            for key in self.path:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
        return value

    def holders(self) -> list[Any]:
        """The containers in which the tensor lies."""
        found = []
        for slot in (self, *self.others):
            holder = slot._root()
            for key in slot.path[:-1]:
                holder = holder[key]
            found.append(holder)
        return found

    def set(self, tensor: Tensor) -> None:
        """Put another tensor there, or into the DTensor that is there, and wherever else the old one was."""
        assert self.marked is None
        tensor = with_local(self.raw(), tensor)
        _put(self._root(), self.path, tensor)
        for other in self.others:
            _put(other._root(), other.path, tensor)

    def _root(self) -> Any:
        optimizer, param = self.optimizer(), self.param
        if optimizer is None or (self.owner is not None and param is None):
            return None
        return vars(optimizer) if param is None else optimizer.state.get(param)


def _put(holder: Any, path: tuple[Hashable, ...], value: Any) -> Any:
    """Put a value at the end of a path; gives the holder, or the tuple that takes its place."""
    if not path:
        return value
    new = _put(holder[path[0]], path[1:], value)
    if isinstance(holder, tuple):
        items = [*holder]
        items[path[0]] = new  # type: ignore[call-overload]
        return type(holder)(*items) if hasattr(holder, "_fields") else tuple(items)
    if new is not holder[path[0]]:
        holder[path[0]] = new
    return holder


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a graph.

    Attributes:
        given: each tensor input's real tensor.
        tensors: the same, of a DTensor what this rank holds.
        params: inputs that an optimizer updates.
        state: inputs that are optimizer state of floating dtype with at least one dimension, and where they live.
        numbers: inputs that are 0-d tensors in optimizer state, such as step counters, and where they live.
    """

    given: dict[fx.Node, Tensor]
    tensors: dict[fx.Node, Tensor]
    params: frozenset[fx.Node]
    state: dict[fx.Node, Slot]
    numbers: dict[fx.Node, Slot]


# Attribute of a class whose objects are optimizers although it does not derive from Optimizer (see `one_graph`).
TWIN_MARK = "_qstate_twin"


_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def note_optimizer(optimizer: Optimizer) -> None:
    """Remember an optimizer that steps, which is not found among live objects if the user called `gc.freeze()`."""
    _stepped.add(optimizer)


def live_optimizers() -> list[Optimizer]:
    """Every optimizer that is alive in this process."""
    found = {id(o): o for o in [*alive(_is_optimizer), *_stepped]}
    whole = [o for o in found.values() if hasattr(o, "param_groups") and hasattr(o, "state")]
    owners = {id(o.state) for o in whole if "state" in vars(o)}
    return [o for o in whole if "state" in vars(o) or id(o.state) not in owners]


def owner_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose state it shows, where it is a wrapper without its own, as Accelerate's are."""
    if "state" in vars(optimizer):
        return optimizer
    return next((o for o in live_optimizers() if o.state is optimizer.state), optimizer)


def _is_optimizer(kind: type) -> bool:
    return issubclass(kind, Optimizer) or TWIN_MARK in vars(kind)


def find_state(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Inputs:
    """Classify the inputs of `gm`; `example_inputs` are the real values of its placeholders, in order."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = {n: value for n, value in zip(placeholders, example_inputs, strict=True) if isinstance(value, Tensor)}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(value := getattr(gm, node.target), Tensor):
            tensors[node] = value
    slots: dict[int, Slot] = {}
    params: set[int] = set()
    for optimizer in live_optimizers():
        params.update(id(p) for group in optimizer.param_groups for p in group["params"])
        slots.update(state_of(optimizer))
    for mark in marks():
        slots[id(mark.state())] = marked_slot(mark)
        if mark.owner is not None:
            params.add(id(mark.owner()))
    return Inputs(
        tensors,
        {n: local_of(t) for n, t in tensors.items()},
        frozenset(n for n, t in tensors.items() if id(t) in params),
        {n: slots[id(t)] for n, t in tensors.items() if id(t) in slots and is_state_buffer(t)},
        {n: slots[id(t)] for n, t in tensors.items() if id(t) in slots and t.dim() == 0},
    )


def marked_slot(mark: Mark) -> Slot:
    """Where a tensor lives that the user marked."""
    return Slot(weakref.ref(MARKS), mark.owner, (mark.name,), marked=mark.state)  # type: ignore[arg-type]


def state_of(optimizer: Optimizer, of: Iterable[Tensor] | None = None) -> dict[int, Slot]:
    """Where every tensor of an optimizer's state lives, by id: that of parameters first, then what the optimizer itself holds.

    `of` asks for the state of some parameters alone.
    """
    reference = weakref.ref(optimizer)
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, list[Slot]] = {}
    for param in list(optimizer.state) if of is None else of:
        if isinstance(param, Tensor):
            for path, tensor in _tensors_in(optimizer.state.get(param), (), DEPTH):
                found.setdefault(id(tensor), []).append(Slot(reference, weakref.ref(param), path))
    for name, value in vars(optimizer).items() if of is None else ():
        items = {k: v for k, v in value.items() if not isinstance(k, Tensor)} if name == "state" else value
        for path, tensor in _tensors_in(items, (name,), DEPTH):
            if id(tensor) not in params and not tensor.requires_grad:
                found.setdefault(id(tensor), []).append(Slot(reference, None, path))
    return {key: dataclasses.replace(first, others=tuple(others)) for key, (first, *others) in found.items()}


def _tensors_in(value: Any, path: tuple[Hashable, ...], depth: int) -> Iterator[tuple[tuple[Hashable, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth and isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, Tensor | dict | list | tuple) and not isinstance(key, Tensor) and key != "params":
                yield from _tensors_in(item, (*path, key), depth - 1)


def is_state_buffer(value: object) -> bool:
    """Whether a value in `optimizer.state` is one that could be quantized: floating, with at least one dimension."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and (value.is_floating_point() or value.is_complex())
        and value.dim() > 0
    )
