"""Which format each state buffer of a region gets, or why it stays dense.

Before: a region, its program (or the reason why it has none) and what was proved about signs and quotients. After: one
`StatePlan` per state buffer. Nothing is converted here. A refusal is no error: it is a reason that the user can read.

All quantized buffers of a region share one block size, the least of those that their formats ask for: the kernel runs
over the blocks of all of them at once.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass

from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile.exc import FormatMismatchError
from qcompile.options import Choices
from qcompile.passes.find_state import Inputs
from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.infer_preconditioner import Preconditioner, storage_pairs
from qcompile.passes.outline_updates import Region
from qcompile.recipes import Recipe
from qcompile.runtime.formats import Format, row_block_size
from qcompile.runtime.state import QuantizedState


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The decision for one state buffer.

    Attributes:
        optimizer, param, key: the buffer is `optimizer.state[param][key]`.
        non_negative: whether the state was proved to stay non-negative, and is so now.
        format: how it is stored; None means dense.
        reason: why it stays dense; None when it is quantized.
        by_choice: whether the user asked for dense (recipe, `min_numel`, override), so that `strict` does not object.
    """

    optimizer: weakref.ref[Optimizer]
    param: weakref.ref[Tensor]
    key: str
    non_negative: bool
    format: Format | None
    reason: str | None
    by_choice: bool = False


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


def plan_storage(
    region: Region,
    program: UpdateProgram,
    signs: tuple[bool, ...],
    preconditioners: tuple[Preconditioner, ...],
    inputs: Inputs,
    wanted: Choices,
) -> dict[int, StatePlan]:
    """Plans by operand index of `program`, for the operands that are state."""
    choices: dict[int, _Choice] = {}
    for i, (operand, proved) in enumerate(zip(program.operands, signs, strict=True)):
        if operand.role == "state":
            node = region.inputs[operand.index]
            tensor = inputs.tensors[node]
            choices[i] = _Choice(node, tensor, operand.written, proved and not has_negative(tensor), None)
    pairs = {
        i: pair
        for i, pair in storage_pairs(preconditioners).items()
        if pair.second in choices and choices[pair.second].non_negative
    }
    for i, choice in choices.items():
        kind = "first" if i in pairs else "second" if choice.non_negative else "signed"
        _choose(choice, kind, inputs, wanted)
    for i, choice in choices.items():
        if choice.format is not None:
            choice.format = _fitted(i, choices, pairs, inputs, wanted)
    blocks = [choice.format.block_size for choice in choices.values() if choice.format is not None]
    for choice in choices.values():
        if choice.format is not None:
            choice.format = dataclasses.replace(choice.format, block_size=min(blocks))
    return {i: _plan(choice, inputs) for i, choice in choices.items()}


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


def new_state_format(param: Tensor, key: str, wanted: Choices) -> Format | None:
    """How state is stored about which nothing is known yet: signed, until the graph says more."""
    given = wanted.recipe_for(param, key)
    recipe = wanted.options.chosen if isinstance(given, Format) else given
    return None if recipe.signed is None else _sized(recipe.signed, param, recipe, wanted)


def _choose(choice: _Choice, kind: str, inputs: Inputs, wanted: Choices) -> None:
    """The format that recipe and overrides ask for, or the reason why there is none."""
    slot = inputs.state[choice.node]
    given = wanted.recipe_for(slot.param, slot.key)
    if isinstance(given, Format):
        fmt = given
        if not fmt.signed and not choice.non_negative:
            raise FormatMismatchError(slot.key, tuple(choice.tensor.shape), str(fmt), "it may be negative")
    elif (of_recipe := getattr(given, kind)) is not None:
        fmt = _sized(of_recipe, slot.param, given, wanted)
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


def _sized(fmt: Format, param: Tensor, recipe: Recipe, wanted: Choices) -> Format:
    block_size = wanted.options.block_size or fmt.block_size
    if recipe.rows and param.dim() > 1 and param.numel():
        outermost = max(range(param.dim()), key=lambda d: (param.stride(d), param.shape[d]))
        block_size = row_block_size(param.numel() // param.shape[outermost], block_size)
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
    i: int, choices: dict[int, _Choice], pairs: dict[int, Preconditioner], inputs: Inputs, wanted: Choices
) -> Format:
    """The format with what it needs to know of the optimizer, or the next best where the update does not offer that."""
    choice = choices[i]
    fmt, slot = choice.format, inputs.state[choice.node]
    assert fmt is not None
    if fmt.coordinate == "update":
        partner = choices[pairs[i].second] if i in pairs else None
        if partner is not None and partner.format is not None:
            key = inputs.state[partner.node].key
            return dataclasses.replace(fmt, partner=key, eps=_eps_of(pairs[i], slot.optimizer(), slot.param))
        given = wanted.recipe_for(slot.param, slot.key)
        if isinstance(given, Format) or given.signed is None:
            found = "no quantized second moment divides it"
            raise FormatMismatchError(slot.key, tuple(choice.tensor.shape), str(fmt), found)
        return _sized(given.signed, slot.param, given, wanted)
    if fmt.rounding == "preconditioner":
        pair = next((pair for pair in pairs.values() if pair.second == i), None)
        if pair is not None:
            return dataclasses.replace(fmt, eps=_eps_of(pair, slot.optimizer(), slot.param))
        return dataclasses.replace(fmt, rounding="stochastic", eps=0.0)
    return fmt


def _eps_of(pair: Preconditioner, optimizer: Optimizer | None, param: Tensor) -> float:
    """As the update has it; where that depends on a number which is an input, as its group says."""
    if pair.eps is not None:
        return pair.eps
    for group in optimizer.param_groups if optimizer is not None else ():
        if any(param is p for p in group["params"]) and isinstance(group.get("eps"), float | Tensor):
            return float(group["eps"])
    return 1e-8


def _plan(choice: _Choice, inputs: Inputs) -> StatePlan:
    slot = inputs.state[choice.node]
    return StatePlan(
        slot.optimizer,
        weakref.ref(slot.param),
        slot.key,
        choice.non_negative,
        choice.format,
        choice.reason,
        choice.by_choice,
    )
