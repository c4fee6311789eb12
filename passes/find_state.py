"""Which graph inputs are parameters, and which are optimizer state.

Before: Dynamo's graph, whose inputs are `get_attr` nodes and placeholders, and the real tensors behind them.
After: a record. Tensors are matched by identity against the `state` and `param_groups` of the optimizers that are alive,
never by name: Dynamo's names are positional, and `exp_avg` may not occur in them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a state buffer lives: `optimizer.state[param][key]`."""

    optimizer: weakref.ref[Optimizer]
    param: Tensor
    key: str


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a graph.

    Attributes:
        tensors: each tensor input's real tensor.
        params: inputs that an optimizer updates.
        state: inputs that are optimizer state of floating dtype with at least one dimension, and where they live.
        numbers: inputs that are 0-d tensors in optimizer state, such as step counters, and where they live.
    """

    tensors: dict[fx.Node, Tensor]
    params: frozenset[fx.Node]
    state: dict[fx.Node, Slot]
    numbers: dict[fx.Node, Slot]


# Attribute of a class whose objects are optimizers although it does not derive from Optimizer (see `one_graph`).
TWIN_MARK = "_qstate_twin"


def live_optimizers() -> list[Optimizer]:
    """Every optimizer that is alive in this process."""
    return [o for o in gc.get_objects() if _is_optimizer(type(o)) and hasattr(o, "param_groups")]


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
        reference = weakref.ref(optimizer)
        params.update(id(p) for group in optimizer.param_groups for p in group["params"])
        for param, buffers in optimizer.state.items():
            if isinstance(param, Tensor) and isinstance(buffers, dict):
                slots.update({id(b): Slot(reference, param, k) for k, b in buffers.items() if isinstance(b, Tensor)})
    return Inputs(
        tensors,
        frozenset(n for n, t in tensors.items() if id(t) in params),
        {n: slots[id(t)] for n, t in tensors.items() if id(t) in slots and is_state_buffer(t)},
        {n: slots[id(t)] for n, t in tensors.items() if id(t) in slots and t.dim() == 0},
    )


def is_state_buffer(value: object) -> bool:
    """Whether a value in `optimizer.state` is one that could be quantized: floating, with at least one dimension."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and (value.is_floating_point() or value.is_complex())
        and value.dim() > 0
    )
