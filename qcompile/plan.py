"""What was decided for each optimizer, kept for `explain`, and the conversion of its state that follows from it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from qcompile.passes.find_state import Slot
from qcompile.passes.pipeline import CompiledGraph
from qcompile.passes.plan_storage import StatePlan
from qcompile.runtime.formats import Format
from qcompile.runtime.launch import Kernel
from qcompile.runtime.layout import like, row_order, same_order
from qcompile.runtime.state import QuantizedState


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """What is worth keeping of an update class: how many regions it has, and its kernels."""

    regions: int
    quantized: Kernel | None
    dense: Kernel | None


@dataclass(slots=True)
class Record:
    """Everything known about one optimizer.

    Attributes:
        plans: the newest decision per (id of parameter, key).
        classes: the class of each planned buffer, by the same key.
        graphs: how many update graphs were compiled.
        dense_reason: why the whole step ran dense, if it did.
    """

    plans: dict[tuple[int, str], StatePlan] = field(default_factory=dict)
    classes: dict[tuple[int, str], ClassSummary] = field(default_factory=dict)
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
            param = plan.param()
            shape = tuple(param.shape) if param is not None else ()
            found.append(f"state {plan.key!r} of a parameter of shape {shape}: {plan.reason}")
    return found


def apply_plans(compiled: CompiledGraph) -> bool:
    """Convert every state of the graph to what was planned, one tensor at a time, and record it.

    True where a state that is an argument of the graph changed its type: Dynamo has traced the other one.
    """
    seen: set[int] = set()
    arguments = [n for n in compiled.inputs.state if n.op == "placeholder"]
    before = [type(_now(compiled.inputs.state[n])) for n in arguments]
    for group in compiled.classes:
        summary = ClassSummary(len(group.regions), group.quantized, group.dense)
        for item in group.regions:
            for plan in item.plans.values():
                _apply(plan, summary, seen)
    for plan in compiled.refused.values():
        _apply(plan, None, seen)
    after = [type(_now(compiled.inputs.state[n])) for n in arguments]
    return before != after


def _now(slot: Slot) -> object:
    optimizer = slot.optimizer()
    return None if optimizer is None else optimizer.state[slot.param][slot.key]


def _apply(plan: StatePlan, group: ClassSummary | None, seen: set[int]) -> None:
    optimizer, param = plan.optimizer(), plan.param()
    if optimizer is None or param is None:
        return
    record, key = record_of(optimizer), (id(param), plan.key)
    if id(optimizer) not in seen:
        seen.add(id(optimizer))
        record.graphs += 1
        record.dense_reason = None
    record.plans[key] = plan
    record.classes.pop(key, None)
    if group is not None:
        record.classes[key] = group
    buffers = optimizer.state[param]
    with torch.no_grad():
        buffers[plan.key] = converted(buffers[plan.key], plan.format, row_order(param))


def converted(value: Tensor, fmt: Format | None, order: Tensor) -> Tensor:
    """The state in a format (None: dense), its elements in storage as those of `order`; itself if it is so already."""
    if isinstance(value, QuantizedState):
        if fmt is None:
            return value.dequantize()
        if same_order(value, order):
            if value.format != fmt:
                value.requantize_(fmt)
            return value
        value = value.dequantize()
    return value if fmt is None else QuantizedState.quantize(like(value.detach(), order), fmt)
