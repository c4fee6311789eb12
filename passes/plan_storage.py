"""Which format each state buffer of an update gets, or why it stays dense.

Before: the regions of an update, and what was proved about them. After: one `StatePlan` per state buffer. Nothing is
converted here. A refusal is no error: it is a reason that the user can read.

Dense, whatever the recipe, stays state that would not survive being rounded: what has to keep a relation to other state
that is not proved (the difference under the root of centered RMSprop), copies and averages of the parameter, signed sums
without decay, and matrices that are inverted.

All quantized buffers of an update that have one shape share one block size, the least of those that their formats ask for:
a kernel runs over the blocks of all its buffers at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile._compat_distributed import local_of
from qcompile.exc import FormatMismatchError, InvalidFormatError
from qcompile.options import Choices, Options
from qcompile.passes.analyse import Analysed, hyperparameters, range_now
from qcompile.passes.find_state import Inputs, Slot
from qcompile.passes.infer_preconditioner import Preconditioner, storage_pairs
from qcompile.passes.outline_updates import READ, Region
from qcompile.recipes import Recipe
from qcompile.runtime.formats import Format, row_block_size
from qcompile.runtime.state import QuantizedState

AVERAGE = "an average of the parameter: it is read as weights, and moves less per step than rounding does"
COPY = "a copy of the parameter: it is read as weights"
SUM = "it adds up without decay, so that rounding errors would add up too"
# Storing changes a value by a few per cent. What the update makes of it may change by about as much, or a few times that.
MOST_MAGNIFIED = 4.0


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The decision for one state buffer.

    Attributes:
        slot: where the buffer lives.
        proved: what was proved of its values: "non-negative", "non-positive", "bounded" or "unknown".
        format: how it is stored; None means dense.
        reason: why it stays dense; None when it is quantized.
        by_choice: whether the user asked for dense (recipe, `min_numel`, override), so that `strict` does not object.
        partner: the second moment that a first moment in update space is stored relative to.
        facts: what was found out, for people to read: the proof, what it remembers, how it enters the update.
        written: whether the graph writes it.
        if_positive: how it is stored once its first values turn out to be all non-negative, where nothing is known of it yet.
    """

    slot: Slot
    proved: str
    format: Format | None
    reason: str | None
    by_choice: bool = False
    partner: Slot | None = None
    facts: tuple[str, ...] = ()
    written: bool = True
    if_positive: Format | None = None

    @property
    def non_negative(self) -> bool:
        return self.proved == "non-negative"

    @property
    def reads_only(self) -> bool:
        """Whether nothing was decided, because another graph writes the state, if one does."""
        return self.reason == READ


@dataclass(slots=True)
class _Choice:
    """What is being decided for one state buffer; `parts` counts the regions that touch it."""

    node: fx.Node
    tensor: Tensor
    numel: int  # of a DTensor: on all ranks
    written: bool = False
    proved: str = "unknown"
    format: Format | None = None
    reason: str | None = None
    by_choice: bool = False
    partner: Slot | None = None
    parts: int = 0
    adds_up: bool = False
    facts: list[str] = field(default_factory=list)
    if_positive: Format | None = None


Pairs = dict[fx.Node, tuple[fx.Node, Preconditioner]]


def plan_storage(
    parts: Sequence[Analysed], dense: Mapping[fx.Node, str], inputs: Inputs, wanted: Choices
) -> dict[fx.Node, StatePlan]:
    """Plans of all state that the regions of one update touch; `dense` are those that had better stay so, with reasons."""
    choices: dict[fx.Node, _Choice] = {}
    fragile = dict(dense)
    for part in parts:
        fragile.update(_fragile(part, inputs))
        for i, node in part.state():
            choice = choices.setdefault(node, _Choice(node, inputs.tensors[node], inputs.given[node].numel()))
            choice.parts += 1
            if part.program.operands[i].written:
                choice.written, choice.proved = True, part.proofs[i].kind
                memory = part.memories[i]
                choice.adds_up = memory is not None and memory.kind == "sum"
                choice.facts += part.facts(i, inputs)
    pairs = {first: pair for part in parts for first, pair in _pairs(part, choices)}
    for node, choice in choices.items():
        _choose(choice, _kind(choice, node in pairs), inputs, wanted)
        if choice.format is not None and choice.written and node in fragile:
            choice.format, choice.reason = None, fragile[node]
    for node, choice in choices.items():
        if choice.format is not None and choice.written:
            choice.format = _fitted(node, choices, pairs, inputs, wanted)
    for shape in {choice.tensor.shape for choice in choices.values()}:
        same = [c for c in choices.values() if c.format is not None and c.tensor.shape == shape and c.written]
        least = min((c.format.block_size for c in same if c.format is not None), default=0)
        for choice in same:
            assert choice.format is not None
            choice.format = dataclasses.replace(choice.format, block_size=least)
    return {node: _plan(choice, inputs) for node, choice in choices.items()}


def _pairs(part: Analysed, choices: dict[fx.Node, _Choice]) -> Iterator[tuple[fx.Node, tuple[fx.Node, Preconditioner]]]:
    """First moments and the second moments that divide them, both read and written in this region alone."""
    nodes = dict(part.state())
    for i, found in storage_pairs(part.preconditioners).items():
        if i in nodes and found.second in nodes:
            first, second = nodes[i], nodes[found.second]
            alone = choices[first].parts == choices[second].parts == 1 and not is_apart(choices[first].tensor)
            if choices[second].proved == "non-negative" and alone:
                yield first, (second, found)


def _fragile(part: Analysed, inputs: Inputs) -> Iterator[tuple[fx.Node, str]]:
    """State of a region that would not survive being rounded, with reasons."""
    nodes = dict(part.state())
    for constraint in part.constraints:
        reason = f"the update needs {constraint.show(part.names(inputs))}, which rounding can break"
        yield from ((nodes[i], reason) for i in constraint.states if i in nodes)
    for record in part.preconditioners:
        times = record.magnifies(part.proofs[record.second].interval.high) if record.second in nodes else 0.0
        if times > MOST_MAGNIFIED:
            h = record.text(hyperparameters(inputs, nodes[record.second]))
            yield nodes[record.second], f"h(v) = {h} magnifies what rounding changes {times:.0f} times"
    for i, node in nodes.items():
        memory, param = part.memories[i], inputs.state[node].param
        if memory is None:
            continue
        if memory.kind == "copy of the parameter" or (
            param is not None and is_copy(inputs.tensors[node], local_of(param))
        ):
            yield node, COPY
        elif memory.kind == "average of the parameter":
            yield node, AVERAGE
        elif memory.kind == "sum" and not (part.proofs[i].non_negative or part.proofs[i].non_positive):
            yield node, SUM


def refuse_state(node: fx.Node, inputs: Inputs, reason: str, wanted: Choices) -> StatePlan:
    """The plan of a state buffer that no region could take."""
    choice = _Choice(node, inputs.tensors[node], inputs.given[node].numel(), written=True)
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


def new_state_format(slot: Slot, state: Tensor, wanted: Choices, fresh: bool = False) -> Format | None:
    """How state is stored about which only its values are known yet, until the graph says more.

    What the first step left all non-negative is stored so that nothing > 0 becomes 0: it may be about to divide. `fresh`
    state is zero, whatever `state` is, which only says how it lies.
    """
    given = wanted.recipe_for(slot.param, slot.key)
    recipe = wanted.options.chosen if isinstance(given, Format) else given
    fmt = recipe.second if not fresh and bool(state.any()) and range_now(state).low >= 0 else recipe.signed
    return None if fmt is None else sized(fmt, state, recipe, wanted.options)


def is_apart(state: Tensor) -> bool:
    """Whether a state is known to be written in other steps than the second moment that divides it."""
    return isinstance(state, QuantizedState) and state.is_apart


def is_copy(state: Tensor, param: Tensor) -> bool:
    """Whether a state is nearly the parameter itself: an average of it, or where it was some steps ago."""
    if isinstance(state, QuantizedState) or state.shape != param.shape or not state.is_floating_point():
        return False
    own, other = state.detach().float(), param.detach().float()
    norm = torch.linalg.vector_norm(other)
    return bool(norm > 0) and bool(torch.linalg.vector_norm(own - other) < 0.1 * norm)


def _kind(choice: _Choice, is_first: bool) -> str:
    """Which format of a recipe: "first", "second", "signed"; "unsure" where no value is negative, and nothing is proved."""
    if is_first or choice.proved == "non-negative":
        return "first" if is_first else "second"
    if not choice.written or choice.proved == "non-positive":
        return "signed"
    now = range_now(choice.tensor)
    return "unsure" if now.low >= 0 and now.high > 0 else "signed"


def _of_recipe(recipe: Recipe, kind: str) -> Format | None:
    """For "unsure" that of second moments, with a sign: what divides must not become 0, and may be negative."""
    if kind != "unsure":
        return cast("Format | None", getattr(recipe, kind))
    try:
        return None if recipe.second is None else dataclasses.replace(recipe.second, signed=True)
    except InvalidFormatError:
        return recipe.signed


def _choose(choice: _Choice, kind: str, inputs: Inputs, wanted: Choices) -> None:
    """The format that recipe and overrides ask for, or the reason why there is none."""
    slot = inputs.state[choice.node]
    given = wanted.recipe_for(slot.param, slot.key)
    if not choice.written:
        stored = choice.tensor.format if isinstance(choice.tensor, QuantizedState) else None
        choice.format = None if stored is None or stored.coordinate == "update" else stored
        choice.reason = None if choice.format else READ
        return
    if isinstance(given, Format):
        fmt = given
        if not fmt.signed and choice.proved != "non-negative":
            raise FormatMismatchError(slot.key, tuple(choice.tensor.shape), str(fmt), "it may be negative")
    elif (of_recipe := _of_recipe(given, kind := _kept_kind(choice, kind, given))) is not None:
        if kind == "signed" and choice.proved not in ("non-negative", "non-positive") and not bool(choice.tensor.any()):
            choice.if_positive = _of_recipe(given, "unsure")
        fmt = sized(of_recipe, choice.tensor, given, wanted.options)
        if choice.adds_up and fmt.rounding == "coordinate":
            fmt = dataclasses.replace(fmt, rounding="stochastic")  # a bias in the value would add up
        start = wanted.late_start(slot.param) if given.late and kind != "second" else None
        if start is not None:
            fmt = dataclasses.replace(fmt, rounding="stochastic", late=start)
    else:
        choice.reason, choice.by_choice = wanted.why_dense(slot.param, given), True
        return
    choice.reason, choice.by_choice = _refusal(choice, fmt, wanted)
    choice.format = None if choice.reason else fmt


def _kept_kind(choice: _Choice, kind: str, recipe: Recipe) -> str:
    """What values decided is decided once: later ones may say something else, and a run that is resumed must store the same."""
    tensor = choice.tensor
    if kind not in ("signed", "unsure") or not isinstance(tensor, QuantizedState) or not bool(tensor.any()):
        return kind
    for other in ("signed", "unsure"):
        fmt = _of_recipe(recipe, other)
        if fmt is not None and same_levels(fmt, tensor.format):
            return other
    return kind


def same_levels(a: Format, b: Format) -> bool:
    return (a.coordinate, a.codebook, a.bits) == (b.coordinate, b.codebook, b.bits)


def sized(fmt: Format, state: Tensor, recipe: Recipe, options: Options) -> Format:
    """The format with the block size that the options ask for and the rows of a state allow."""
    block_size = options.block_size or fmt.block_size
    if recipe.rows and state.dim() > 1 and state.numel():
        outermost = max(range(state.dim()), key=lambda d: (state.stride(d), state.shape[d]))
        block_size = row_block_size(state.numel() // state.shape[outermost], block_size)
    return dataclasses.replace(fmt, block_size=block_size)


def _refusal(choice: _Choice, fmt: Format, wanted: Choices) -> tuple[str | None, bool]:
    least = wanted.options.min_numel
    if choice.numel < least:
        return f"{choice.numel} elements, fewer than min_numel={least}", True
    if (numel := choice.tensor.numel()) < fmt.block_size:
        here = "" if numel == choice.numel else " on this rank"
        return f"{numel} elements{here}, fewer than a block of {fmt.block_size}", True
    return None, False


def _fitted(node: fx.Node, choices: dict[fx.Node, _Choice], pairs: Pairs, inputs: Inputs, wanted: Choices) -> Format:
    """The format with what it needs to know of the optimizer, or the next best where the update does not offer that."""
    choice = choices[node]
    fmt, slot = choice.format, inputs.state[node]
    assert fmt is not None
    if fmt.coordinate == "update":
        partner, pair = pairs.get(node, (None, None))
        if partner is not None and pair is not None and choices[partner].format is not None:
            choice.partner = inputs.state[partner]
            eps = _kept_eps(choice.tensor, _eps_of(pair, slot.optimizer(), slot.param))
            return dataclasses.replace(fmt, partner=choice.partner.key, eps=eps)
        given = wanted.recipe_for(slot.param, slot.key)
        if isinstance(given, Format) or given.signed is None:
            found = "no quantized second moment divides it"
            raise FormatMismatchError(slot.key, tuple(choice.tensor.shape), str(fmt), found)
        return sized(given.signed, choice.tensor, given, wanted.options)
    if fmt.rounding == "preconditioner":
        found_pair = next((pair for second, pair in pairs.values() if second is node), None)
        if found_pair is not None:
            return dataclasses.replace(fmt, eps=_eps_of(found_pair, slot.optimizer(), slot.param))
        return dataclasses.replace(fmt, rounding="stochastic", eps=0.0)
    return fmt


def _kept_eps(state: Tensor, eps: float) -> float:
    """The eps that a state in update space is stored with, if it is about the same: it may depend on a bias correction."""
    now = state.format.eps if isinstance(state, QuantizedState) and state.format.coordinate == "update" else 0.0
    return now if 0.5 * eps <= now <= 2 * eps else eps


def _eps_of(pair: Preconditioner, optimizer: Optimizer | None, param: Tensor | None) -> float:
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
        slot,
        choice.proved,
        choice.format,
        choice.reason,
        choice.by_choice,
        choice.partner,
        tuple(choice.facts),
        choice.written,
        choice.if_positive
        and choice.format
        and dataclasses.replace(choice.if_positive, block_size=choice.format.block_size),
    )
