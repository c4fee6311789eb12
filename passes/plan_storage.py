"""Which format each state buffer of a region gets, or why it stays dense.

Before: a region, its program (or the reason why it has none) and what was proved about signs and quotients. After: one
`StatePlan` per state buffer. Nothing is converted here. A refusal is no error: it is a reason that the user can read.

All quantized buffers of a region share one block size, the least of those that their formats ask for: the kernel runs
over the blocks of all of them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile.exc import FormatMismatchError
from qcompile.options import Choices
from qcompile.passes.find_state import Inputs, Slot
from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.infer_preconditioner import Preconditioner
from qcompile.passes.outline_updates import Region
from qcompile.recipes import Recipe
from qcompile.runtime.formats import Format, row_block_size
from qcompile.runtime.state import QuantizedState


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The decision for one state buffer.

    Attributes:
        slot: where the buffer lives.
        non_negative: whether the state was proved to stay non-negative, and is so now.
        format: how it is stored; None means dense.
        reason: why it stays dense; None when it is quantized.
        by_choice: whether the user asked for dense (recipe, `min_numel`, override), so that `strict` does not object.
        partner: the second moment that a first moment in update space is stored relative to.
    """

    slot: Slot
    non_negative: bool
    format: Format | None
    reason: str | None
    by_choice: bool = False
    partner: Slot | None = None


@dataclass(slots=True)
class _Choice:
    """What is being decided for one operand."""

    node: fx.Node
    tensor: Tensor
    written: bool
    non_negative: bool
    format: Format | None
    reason: str | None = None
    by_choice: bool = False
    partner: Slot | None = None
    parts: int = 0


@dataclass(frozen=True, slots=True)
class Analysed:
    """A region and what is known of it."""

    region: Region
    program: UpdateProgram
    signs: tuple[bool, ...]
    preconditioners: tuple[Preconditioner, ...]

    def state(self) -> Iterator[tuple[int, fx.Node]]:
        """Operands of the program that are state, and the inputs of the region that they are."""
        for i, operand in enumerate(self.program.operands):
            if operand.role == "state":
                yield i, self.region.inputs[operand.index]


def plan_storage(
    parts: Sequence[Analysed], dense: Mapping[fx.Node, str], inputs: Inputs, wanted: Choices
) -> dict[fx.Node, StatePlan]:
    """Plans of all state that the regions of one update touch; `dense` are those that had better stay so, with reasons."""
    choices: dict[fx.Node, _Choice] = {}
    for part in parts:
        for i, node in part.state():
            tensor, written = inputs.tensors[node], part.program.operands[i].written
            choice = choices.setdefault(node, _Choice(node, tensor, False, False, None))
            choice.parts += 1
            choice.written |= written
            choice.non_negative |= written and part.signs[i] and not has_negative(tensor)
    pairs = {first: second for part in parts for first, second in _pairs(part, choices)}
    for node, choice in choices.items():
        kind = "first" if node in pairs else "second" if choice.non_negative else "signed"
        _choose(choice, kind, inputs, wanted)
        if choice.format is not None and node in dense:
            choice.format, choice.reason = None, dense[node]
    for node, choice in choices.items():
        if choice.format is not None:
            choice.format = _fitted(node, choices, pairs, inputs, wanted)
    for shape in {choice.tensor.shape for choice in choices.values()}:
        same = [c for c in choices.values() if c.format is not None and c.tensor.shape == shape]
        least = min((c.format.block_size for c in same if c.format is not None), default=0)
        for choice in same:
            assert choice.format is not None
            choice.format = dataclasses.replace(choice.format, block_size=least)
    return {node: _plan(choice, inputs) for node, choice in choices.items()}


def _pairs(part: Analysed, choices: dict[fx.Node, _Choice]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """First moments and the second moments that divide them, both read and written in this region alone."""
    nodes = dict(part.state())
    for found in part.preconditioners:
        if found.first in nodes and found.second in nodes:
            first, second = nodes[found.first], nodes[found.second]
            if choices[second].non_negative and choices[first].parts == choices[second].parts == 1:
                yield first, second


def refuse_state(node: fx.Node, inputs: Inputs, reason: str, wanted: Choices) -> StatePlan:
    """The plan of a state buffer that no region could take."""
    choice = _Choice(node, inputs.tensors[node], True, False, None)
    _choose(choice, "signed", inputs, wanted)
    choice.format = None
    if not choice.by_choice:
        choice.reason = reason
    return _plan(choice, inputs)


def node_of_param(region: Region, inputs: Inputs) -> fx.Node:
    """The region's parameter, or a state buffer where it updates none: what the strides of a launch follow."""
    return next((n for n in region.inputs if n in inputs.params), None) or next(
        n for n in region.inputs if n in inputs.state
    )


def has_negative(tensor: Tensor) -> bool:
    """Whether a state holds a negative value now."""
    if isinstance(tensor, QuantizedState):
        return tensor.format.signed and bool((tensor.dequantize() < 0).any())
    return bool((tensor < 0).any())


def new_state_format(slot: Slot, state: Tensor, wanted: Choices) -> Format | None:
    """How state is stored about which only its values are known yet, until the graph says more.

    What the first step left all non-negative is stored so that nothing > 0 becomes 0: it may be about to divide.
    """
    given = wanted.recipe_for(slot.param, slot.key)
    recipe = wanted.options.chosen if isinstance(given, Format) else given
    fmt = recipe.second if bool(state.any()) and not has_negative(state) else recipe.signed
    return None if fmt is None else _sized(fmt, state, recipe, wanted)


def is_copy(state: Tensor, param: Tensor) -> bool:
    """Whether a state is nearly the parameter itself: an average of it, or where it was some steps ago."""
    if isinstance(state, QuantizedState) or state.shape != param.shape or not state.is_floating_point():
        return False
    own, other = state.detach().float(), param.detach().float()
    norm = torch.linalg.vector_norm(other)
    return bool(norm > 0) and bool(torch.linalg.vector_norm(own - other) < 0.1 * norm)


def _choose(choice: _Choice, kind: str, inputs: Inputs, wanted: Choices) -> None:
    """The format that recipe and overrides ask for, or the reason why there is none."""
    slot = inputs.state[choice.node]
    given = wanted.recipe_for(slot.param, slot.key)
    if isinstance(given, Format):
        fmt = given
        if not fmt.signed and not choice.non_negative:
            raise FormatMismatchError(slot.key, tuple(choice.tensor.shape), str(fmt), "it may be negative")
    elif (of_recipe := getattr(given, kind)) is not None:
        fmt = _sized(of_recipe, choice.tensor, given, wanted)
        start = wanted.late_start(slot.param) if given.late and kind != "second" else None
        if start is not None:
            fmt = dataclasses.replace(fmt, rounding="stochastic", late=start)
    else:
        is_chosen = given is wanted.options.chosen
        choice.reason = f"recipe {given.name!r} keeps state dense" if is_chosen else "an override keeps it dense"
        choice.by_choice = True
        return
    choice.reason, choice.by_choice = _refusal(choice, fmt, wanted)
    choice.format = None if choice.reason else fmt


def _sized(fmt: Format, state: Tensor, recipe: Recipe, wanted: Choices) -> Format:
    block_size = wanted.options.block_size or fmt.block_size
    if recipe.rows and state.dim() > 1 and state.numel():
        outermost = max(range(state.dim()), key=lambda d: (state.stride(d), state.shape[d]))
        block_size = row_block_size(state.numel() // state.shape[outermost], block_size)
    return dataclasses.replace(fmt, block_size=block_size)


def _refusal(choice: _Choice, fmt: Format, wanted: Choices) -> tuple[str | None, bool]:
    numel, least = choice.tensor.numel(), wanted.options.min_numel
    if numel < least:
        return f"{numel} elements, fewer than min_numel={least}", True
    if numel < fmt.block_size:
        return f"{numel} elements, fewer than a block of {fmt.block_size}", True
    if not choice.written:
        return "the update reads it but does not write it", False
    return None, False


def _fitted(
    i: fx.Node,
    choices: dict[fx.Node, _Choice],
    pairs: dict[fx.Node, fx.Node],
    inputs: Inputs,
    wanted: Choices,
) -> Format:
    """The format with what it needs to know of the optimizer, or the next best where the update does not offer that."""
    choice = choices[i]
    fmt, slot = choice.format, inputs.state[choice.node]
    assert fmt is not None
    if fmt.coordinate == "update":
        partner = choices[pairs[i]] if i in pairs else None
        if partner is not None and partner.format is not None:
            choice.partner = inputs.state[partner.node]
            return dataclasses.replace(fmt, partner=choice.partner.key, eps=_eps_of(slot.optimizer(), slot.param))
        given = wanted.recipe_for(slot.param, slot.key)
        if isinstance(given, Format) or given.signed is None:
            found = "no quantized second moment divides it"
            raise FormatMismatchError(slot.key, tuple(choice.tensor.shape), str(fmt), found)
        return _sized(given.signed, choice.tensor, given, wanted)
    if fmt.rounding == "preconditioner":
        if i in pairs.values():
            return dataclasses.replace(fmt, eps=_eps_of(slot.optimizer(), slot.param))
        return dataclasses.replace(fmt, rounding="stochastic", eps=0.0)
    return fmt


def _eps_of(optimizer: Optimizer | None, param: Tensor | None) -> float:
    for group in optimizer.param_groups if optimizer is not None else ():
        if any(param is p for p in group["params"]) and isinstance(group.get("eps"), float | Tensor):
            return float(group["eps"])
    return 1e-8


def _plan(choice: _Choice, inputs: Inputs) -> StatePlan:
    slot = inputs.state[choice.node]
    return StatePlan(
        slot,
        choice.non_negative,
        choice.format,
        choice.reason,
        choice.by_choice,
        choice.partner,
    )
