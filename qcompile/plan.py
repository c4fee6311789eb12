"""What was decided for each optimizer, kept for `explain`, and the conversion of its state that follows from it."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from qcompile._compat_distributed import local_of, offset_of
from qcompile.exc import MarkedStateError
from qcompile.options import Choices, Options
from qcompile.passes.analyse import range_now
from qcompile.passes.find_state import Slot, state_of
from qcompile.passes.pipeline import CompiledGraph
from qcompile.passes.plan_storage import StatePlan, new_state_format, same_levels
from qcompile.runtime.formats import Format
from qcompile.runtime.launch import Kernel
from qcompile.runtime.layout import like, order_of, same_order
from qcompile.runtime.rounding import key_of
from qcompile.runtime.state import QuantizedState, same_values


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """What is worth keeping of an update class: how many regions it has, its kernels, and the update as Python for people."""

    regions: int
    quantized: Kernel | None
    dense: Kernel | None
    program: str


log = logging.getLogger("qcompile")
# From here on it is worth a line that a step is compiled again and again.
MANY_GRAPHS = 24
Place = tuple[int, tuple[Hashable, ...]]


@dataclass(slots=True)
class Record:
    """Everything known about one optimizer.

    Attributes:
        plans: the newest decision per `Slot.place`.
        classes: the class of each planned buffer, by the same key.
        graphs: how many update graphs were compiled.
        dense_reason: why the whole step ran dense, if it did.
    """

    plans: dict[Place, StatePlan] = field(default_factory=dict)
    classes: dict[Place, ClassSummary] = field(default_factory=dict)
    graphs: int = 0
    dense_reason: str | None = None


RECORDS: weakref.WeakKeyDictionary[Optimizer, Record] = weakref.WeakKeyDictionary()


def record_of(optimizer: Optimizer) -> Record:
    """The record of an optimizer, empty if qcompile never saw it."""
    return RECORDS.setdefault(optimizer, Record())


def refusals(compiled: CompiledGraph) -> list[str]:
    """State that stays dense although nobody asked for it, one line each."""
    plans = [p for c in compiled.classes for item in c.regions for p in item.plans.values()]
    plans += compiled.refused.values()
    found = []
    for plan in plans:
        if plan.reason is not None and not plan.by_choice:
            param = plan.slot.param
            of = "the optimizer" if param is None else f"a parameter of shape {tuple(param.shape)}"
            found.append(f"state {plan.slot.key!r} of {of}: {plan.reason}")
    return found


def apply_plans(compiled: CompiledGraph, options: Options) -> bool:
    """Convert every state of the graph to what was planned, one tensor at a time, and record it.

    A second moment is converted before the first moment that is stored relative to it. A state that is relative to one
    which the graph writes, and is not written with it, would change its meaning: it is stored by itself from now on.
    True where Dynamo has traced another kind of tensor: a state that is an argument of the graph was converted, or one in
    the graph had values in another format, as a checkpoint leaves it.
    """
    seen: set[int] = set()
    arguments = [n for n in compiled.inputs.state if n.op == "placeholder"]
    before = [_traced(compiled.inputs.state[n]) for n in arguments]
    held = [slot for n, slot in compiled.inputs.state.items() if n.op != "placeholder"]
    # A fresh state is as it was made for a first step, and no Dynamo guard depends on its shapes yet.
    quantized = [
        (slot, _traced(slot)) for slot in held if isinstance(v := slot.get(), QuantizedState) and not v.is_fresh
    ]
    for group in compiled.classes:
        summary = ClassSummary(len(group.regions), group.quantized, group.dense, group.regions[0].show())
        for item in group.regions:
            for plan in sorted(item.plans.values(), key=_is_relative):
                _apply(plan, summary, seen, options.seed)
    for plan in compiled.refused.values():
        _apply(plan, None, seen, options.seed)
    plans = [plan for group in compiled.classes for item in group.regions for plan in item.plans.values()]
    set_apart = _set_apart([plan for plan in plans if plan.written], options)
    had_values = any(traced != _traced(slot) for slot, traced in quantized)
    return set_apart or had_values or before != [_traced(compiled.inputs.state[n]) for n in arguments]


def _set_apart(plans: Sequence[StatePlan], options: Options) -> bool:
    """Store by itself whatever is relative to state that these plans write, and is not written with it. Whether any was."""
    written = [(plan.slot.optimizer(), plan.slot.get()) for plan in plans]
    own = {id(state) for _, state in written}
    changed = False
    for optimizer, second in written:
        dependents = second.dependents() if isinstance(second, QuantizedState) else []
        for first in (state for state in dependents if id(state) not in own):
            slots = [] if optimizer is None else state_of(optimizer).values()
            slot = next((s for s in slots if s.get() is first), None)
            if slot is None:
                continue  # a copy that somebody keeps
            fmt = new_state_format(slot, first, Choices.of(options, [] if slot.param is None else [slot.param]))
            if fmt is None:
                slot.set(first.dequantize())
            else:
                fmt = dataclasses.replace(fmt, block_size=first.format.block_size)
                first.requantize_(fmt, buffer_key(slot, options.seed, fmt), _stores(slot))
                first.is_apart = True
            changed = True
    return changed


def convert_arguments(planned: Mapping[int, tuple[Tensor, StatePlan]], seed: int) -> None:
    """Convert state that a compiled function has just updated as it was stored.

    The plans were made for the tensors it was compiled with; these may be those of another parameter.
    """
    moved: dict[tuple[Hashable, ...], Slot] = {}
    found: list[StatePlan] = []
    for tensor, plan in planned.values():
        optimizer = plan.slot.optimizer()
        slot = state_of(optimizer).get(id(tensor)) if optimizer is not None else None
        if slot is not None:
            moved[plan.slot.place] = slot
            found.append(plan)
    for plan in sorted(found, key=_is_relative):
        partner = None if plan.partner is None else moved.get(plan.partner.place)
        if (plan.partner is None) == (partner is None):
            _apply(dataclasses.replace(plan, slot=moved[plan.slot.place], partner=partner), None, set(), seed)


def settle(pending: Sequence[tuple[Slot, Format]], seed: int) -> list[tuple[Slot, Format]]:
    """Store state by what its first values are, where nothing was known of it; gives what is still zero."""
    left = []
    for slot, fmt in pending:
        state = slot.get()
        if isinstance(state, QuantizedState) and not bool(state.any()):
            left.append((slot, fmt))
            continue
        if isinstance(state, QuantizedState) and not same_levels(state.format, fmt) and range_now(state).low >= 0:
            # Another object: what is compiled for this one finds its memory by address, and its guards must fail.
            slot.set(QuantizedState.quantize(state.dequantize(), fmt, buffer_key(slot, seed, fmt), _stores(slot)))
    return left


def _traced(slot: Slot) -> object:
    """What Dynamo's guards know of a state: its type, and shape, strides and dtype of what it holds."""
    value = slot.get()
    if not isinstance(value, QuantizedState):
        return type(value)
    return [(t.shape, t.stride(), t.dtype) for t in value.stored]


def _is_relative(plan: StatePlan) -> bool:
    return plan.format is not None and plan.format.partner is not None


def _apply(plan: StatePlan, group: ClassSummary | None, seen: set[int], seed: int) -> None:
    optimizer, slot, fmt = plan.slot.optimizer(), plan.slot, plan.format
    old = slot.get()
    if optimizer is None or not isinstance(old, Tensor):
        return
    record, key = record_of(optimizer), slot.place
    if plan.reads_only:
        record.plans.setdefault(key, plan)
        return
    if id(optimizer) not in seen:
        seen.add(id(optimizer))
        record.graphs += 1
        if record.graphs == MANY_GRAPHS:
            log.warning(
                "the step of %s was compiled %d times; TORCH_LOGS='recompiles' shows why",
                type(optimizer).__name__,
                MANY_GRAPHS,
            )
        record.dense_reason = None
    record.plans[key] = plan
    record.classes.pop(key, None)
    if group is not None:
        record.classes[key] = group
    random_key = 0 if fmt is None else buffer_key(slot, seed, fmt)
    partner = None if plan.partner is None else plan.partner.get()
    if slot.marked is not None and fmt is None:
        raise MarkedStateError(f"state {slot.key!r}", str(plan.reason))
    with torch.no_grad():
        new = converted(old, fmt, order_of(old, local_of(slot.param)), random_key, _stores(slot), partner)
    if new is not old:
        slot.set(new)


def buffer_key(slot: Slot, seed: int, fmt: Format) -> int:
    """The key of a buffer's random bits: from the seed, the parameter's place in its optimizer and the buffer's name, and
    where in it the part of this rank begins: ranks that hold the same part draw the same bits.

    0 for a format that draws none: the place is a search through all parameters.
    """
    if not fmt.random:
        return 0
    optimizer, param = slot.optimizer(), slot.param
    groups = [] if optimizer is None else optimizer.param_groups
    places = (i for i, p in enumerate(p for g in groups for p in g["params"]) if p is param)
    begin = offset_of(slot.raw())
    return key_of(seed, f"{next(places, -1)}.{slot.key}" + (f"@{begin}" if any(begin) else ""))


def _stores(slot: Slot) -> int:
    """How often the optimizer has stored its state, as far as it counts its steps."""
    step = 0 if slot.param is None or slot.marked is not None else dataclasses.replace(slot, path=("step",)).get()
    return int(step) if isinstance(step, int | float | Tensor) else 0


def converted(
    value: Tensor,
    fmt: Format | None,
    order: Tensor,
    key: int = 0,
    stores: int = 0,
    partner: QuantizedState | None = None,
) -> Tensor:
    """The state in a format (None: dense), its elements in storage as those of `order`; itself if it is so already."""
    if isinstance(value, QuantizedState):
        if fmt is None:
            return value.dequantize()
        if same_order(value, order):
            if value.format != fmt or not same_values(value.partner, partner):
                value.requantize_(fmt, key, stores, partner)
            elif value.partner is not partner:  # loaded with a copy of its own
                value.attach_(partner)
            return value
        value = value.dequantize()
    return value if fmt is None else QuantizedState.quantize(like(value.detach(), order), fmt, key, stores, partner)
