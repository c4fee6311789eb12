"""Which format each state buffer of a region gets, or why it stays dense.

Before: a region, its program (or the reason why it has none) and what was proved about signs. After: one `StatePlan` per
state buffer. Nothing is converted here. A refusal is no error: it is a reason that the user can read.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile.options import Options
from qcompile.passes.find_state import Inputs
from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.outline_updates import Region
from qcompile.runtime.formats import Format
from qcompile.runtime.state import QuantizedState


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The decision for one state buffer.

    Attributes:
        optimizer, param, key: the buffer is `optimizer.state[param][key]`.
        non_negative: whether the state was proved to stay non-negative, and is so now.
        format: how it is stored; None means dense.
        reason: why it stays dense; None when it is quantized.
        by_choice: whether the user asked for dense (recipe, `min_numel`), so that `strict` does not object.
    """

    optimizer: weakref.ref[Optimizer]
    param: weakref.ref[Tensor]
    key: str
    non_negative: bool
    format: Format | None
    reason: str | None
    by_choice: bool = False


def plan_storage(
    region: Region, program: UpdateProgram, signs: tuple[bool, ...], inputs: Inputs, options: Options
) -> dict[int, StatePlan]:
    """Plans by operand index of `program`, for the operands that are state."""
    plans = {}
    for i, (operand, proved) in enumerate(zip(program.operands, signs, strict=True)):
        if operand.role != "state":
            continue
        node = region.inputs[operand.index]
        tensor = inputs.tensors[node]
        non_negative = proved and not has_negative(tensor)
        fmt = options.format(signed=not non_negative)
        reason, by_choice = _refusal(tensor, operand.written, fmt, options)
        plans[i] = _plan(node, inputs, non_negative, None if reason else fmt, reason, by_choice)
    return plans


def refuse_state(node: fx.Node, inputs: Inputs, reason: str, options: Options) -> StatePlan:
    """The plan of a state buffer that no region could take."""
    chosen, by_choice = _refusal(inputs.tensors[node], True, options.format(signed=True), options)
    return _plan(node, inputs, False, None, chosen if by_choice else reason, by_choice)


def node_of_param(region: Region, inputs: Inputs) -> fx.Node:
    """The region's parameter, or a state buffer where it updates none: what the strides of a launch follow."""
    return next((n for n in region.inputs if n in inputs.params), None) or next(
        n for n in region.inputs if n in inputs.state
    )


def has_negative(tensor: Tensor) -> bool:
    """Whether a state holds a negative value now."""
    if isinstance(tensor, QuantizedState):
        return tensor.format.signed and bool((tensor.codes < 0).any() or (tensor.tail < 0).any())
    return bool((tensor < 0).any())


def _plan(
    node: fx.Node, inputs: Inputs, non_negative: bool, fmt: Format | None, reason: str | None, by_choice: bool
) -> StatePlan:
    slot = inputs.state[node]
    return StatePlan(slot.optimizer, weakref.ref(slot.param), slot.key, non_negative, fmt, reason, by_choice)


def _refusal(tensor: Tensor, written: bool, fmt: Format | None, options: Options) -> tuple[str | None, bool]:
    if fmt is None:
        return f"recipe {options.recipe!r} keeps state dense", True
    if tensor.numel() < options.min_numel:
        return f"{tensor.numel()} elements, fewer than min_numel={options.min_numel}", True
    if tensor.numel() < fmt.block_size:
        return f"{tensor.numel()} elements, fewer than a block of {fmt.block_size}", True
    if not written:
        return "the update reads it but does not write it", False
    return None, False
