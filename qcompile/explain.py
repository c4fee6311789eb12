"""`explain`: what the compiler found, decided and generated for an optimizer."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from qcompile._compat_distributed import local_of
from qcompile.dense_step import breaks
from qcompile.kernel_reports import KernelReport, report_of
from qcompile.monitoring import ERROR_EDGES, Figures, last_figures
from qcompile.names import named
from qcompile.passes.find_state import Slot, is_state_buffer, marked_slot, owner_of, state_of
from qcompile.plan import ClassSummary, Record, record_of
from qcompile.runtime.formats import Format
from qcompile.runtime.launch import Kernel
from qcompile.runtime.marks import MARKS, marks
from qcompile.runtime.state import QuantizedState
from qcompile.saved_kernels import save_kernels

NEVER_COMPILED = "no step of this optimizer was compiled with backend='qstate' yet"
WHOLE = "(optimizer)"
NEW = "created or replaced after the last compiled step; the next one plans it"


@dataclass(frozen=True, slots=True)
class StateReport:
    """One state buffer.

    Attributes:
        param: name of the parameter in its module, or its position; `(optimizer)` for state that belongs to no parameter.
        key: name of the buffer in `optimizer.state[param]`, or the path to it (`Q.0`).
        shape, dtype: what the buffer shows.
        sign: "non-negative" where that was proved, else "signed".
        format: how it is stored, or "dense".
        reason: why it is dense; None where it is quantized.
        dense_bytes: size without quantization.
        stored_bytes: size now.
        note: what its format does not promise; None for most.
        facts: what the compiler found out: the interval that its values are proved to stay in, with the proof; what it
            remembers; the functions h through which it enters the update, in the optimizer's own scalars.
        update_class: index into `Report.classes`, or None.
    """

    param: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sign: str
    format: str
    reason: str | None
    dense_bytes: int
    stored_bytes: int
    note: str | None
    facts: tuple[str, ...]
    update_class: int | None


@dataclass(frozen=True, slots=True)
class ClassReport:
    """An update class.

    Attributes:
        regions: how many parameters it updates.
        kernels: indices of its kernels in `Report.kernels`.
        launches: of kernels in a step: one per kernel, or one per kernel and region where it takes no table of addresses.
        program: the update as Python, one operation per line.
    """

    regions: int
    kernels: tuple[int, ...]
    launches: int
    program: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NonFiniteReport:
    """A parameter with elements that are Inf or NaN now: how many there are in itself, in its gradient, in its dense state.

    Quantized blocks of state have none: where a new value is not finite, 0 is stored. So such an element of a parameter means that
    its gradient was not finite in some step, or that it moved out of range; no other element was harmed. State that is dense, and
    the tail that fills no block, keep Inf and NaN as in fp32.
    """

    param: str
    numel: int
    parameter: int
    gradient: int
    state: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `explain` returns. `print` shows it as tables.

    Attributes:
        states: every tensor in the state of the optimizers.
        classes: the update classes.
        kernels: the generated kernels.
        graphs: graphs compiled so far: those that update state, or all of a step that `train_step` made.
        not_one_graph: why a step that `train_step` made is several graphs; None if it is one, or was not made by it.
        breaks: why graphs of this process that `qstate` compiled end before their function does, with the place, and how many do.
        non_finite: the parameters with elements that are Inf or NaN, counted when the report is made.
        figures: the errors that `qcompile.monitor` measured in the last step that it looked at.
    """

    states: tuple[StateReport, ...]
    classes: tuple[ClassReport, ...]
    kernels: tuple[KernelReport, ...]
    graphs: int
    not_one_graph: str | None = None
    non_finite: tuple[NonFiniteReport, ...] = ()
    figures: tuple[Figures, ...] = ()
    breaks: tuple[tuple[str, int], ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of all state as it is stored."""
        return sum(state.stored_bytes for state in self.states)

    @property
    def dense_state_bytes(self) -> int:
        """Bytes of all state if none were quantized."""
        return sum(state.dense_bytes for state in self.states)

    def to_dict(self) -> dict[str, Any]:
        """All of it as what `json.dump` takes: dicts, lists, strings and numbers, under the names of the attributes.

        `version` is raised when a key goes or changes its meaning.
        """
        found = cast("dict[str, Any]", _plain(self))
        totals = {
            "state_bytes": self.state_bytes,
            "dense_state_bytes": self.dense_state_bytes,
            "error_edges": [*ERROR_EDGES],
        }
        return {"version": 1, **found, **totals}

    def save_kernels(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write each kernel to a file in `folder`, and give the paths.

        A Triton kernel's file needs torch and triton only: `python FILE` runs it on random gradients and compares what it writes
        with the graph that it was generated from, in eager PyTorch. A C++ kernel's is to be read.

        Raises:
            OSError: a file cannot be written.
        """
        return save_kernels([report.kernel for report in self.kernels], Path(folder))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one page that needs nothing else: it is read with any browser, also without a network.

        Raises:
            OSError: `path` cannot be written.
        """
        template = (importlib.resources.files("qcompile") / "report.html").read_text(encoding="utf-8")
        data = json.dumps(self.to_dict(), allow_nan=False).replace("</", "<\\/")  # which would end the script
        Path(path).write_text(template.replace("@DATA@", data), encoding="utf-8")

    def __str__(self) -> str:
        facts = _fact_lines(self.states)
        bad = [_non_finite_line(report) for report in self.non_finite]
        ends = [f"graph break, in {count} graph(s): {reason}" for reason, count in self.breaks]
        return "\n".join([*_state_lines(self.states), "", *facts, *_class_lines(self), "", *bad, *ends, _totals(self)])


def explain(*optimizers: Optimizer) -> Report:
    """Report on the state of optimizers whose step was compiled with `backend="qstate"`.

    Every tensor in `optimizer.state` is in the report, as quantized or with the reason why it is dense. Without arguments
    it reports on the state that `mark_state` and `state_like` gave. It is a tool to look with: it searches the process for modules, to name parameters, and is not meant for the inside of a loop.
    """
    optimizers = tuple(map(owner_of, optimizers)) or (cast(Optimizer, MARKS),)
    found = named(p for o in optimizers for group in o.param_groups for p in group["params"])
    names = {key: value.name for key, value in found.items()}
    classes: list[ClassSummary] = []
    states = []
    for optimizer in optimizers:
        record = record_of(optimizer)
        slots = state_of(optimizer).values() if optimizer is not MARKS else [marked_slot(m) for m in marks()]
        for slot in slots:
            value = slot.get()
            if slot.param is not None or is_state_buffer(value):
                name = WHOLE if slot.param is None else names.get(id(slot.param), "?")
                states.append(_state(name, slot, value, record, classes))
    kernels, class_reports = _kernels(classes)
    graphs = sum(record_of(optimizer).graphs for optimizer in optimizers)
    figures = tuple(f for optimizer in optimizers if optimizer is not MARKS for f in last_figures(optimizer))
    bad = _non_finite(optimizers, names)
    ends = tuple(breaks.items())
    return Report(tuple(states), class_reports, kernels, graphs, non_finite=bad, figures=figures, breaks=ends)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        shown = (f.name for f in dataclasses.fields(value) if f.metadata.get("shown", True))
        return {name: _plain(getattr(value, name)) for name in shown}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _non_finite(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> tuple[NonFiniteReport, ...]:
    reports = []
    params = {id(p): (p, o.state.get(p, {})) for o in optimizers for g in o.param_groups for p in g["params"]}
    for key, (param, state) in params.items():
        tensors = (local_of(v) for v in state.values() if isinstance(v, Tensor))
        dense = [v.tail if isinstance(v, QuantizedState) else v for v in tensors]
        parameter, gradient, others = _count_bad([param]), _count_bad([param.grad]), _count_bad(dense)
        if parameter or gradient or others:
            reports.append(NonFiniteReport(names.get(key, "?"), param.numel(), parameter, gradient, others))
    return tuple(reports)


def _count_bad(tensors: Iterable[Tensor | None]) -> int:
    """How many elements of floating tensors are Inf or NaN."""
    floating = (local_of(t).detach() for t in tensors if t is not None and (t.is_floating_point() or t.is_complex()))
    values = (t.coalesce().values() if t.is_sparse else t for t in floating)
    return sum(t.numel() - int(t.isfinite().sum()) for t in values)


def _state(name: str, slot: Slot, value: Tensor, record: Record, classes: list[ClassSummary]) -> StateReport:
    plan = record.plans.get(slot.place)
    group = record.classes.get(slot.place)
    if group is not None and not any(group is other for other in classes):
        classes.append(group)
    dense_bytes = value.numel() * value.element_size()
    reason = None
    if not isinstance(value, QuantizedState):
        if not value.is_floating_point() and not value.is_complex():
            reason = f"{value.dtype} is not floating"
        elif value.dim() == 0:
            reason = "a number"
        elif record.dense_reason is not None:
            reason = record.dense_reason
        else:
            reason = (plan.reason or NEW) if plan is not None else (NEW if record.plans else NEVER_COMPILED)
    return StateReport(
        param=name,
        key=slot.key,
        shape=tuple(value.shape),
        dtype=value.dtype,
        sign="non-negative" if plan is not None and plan.non_negative else "signed",
        format=str(value.format) if isinstance(value, QuantizedState) else "dense",
        reason=reason,
        dense_bytes=dense_bytes,
        stored_bytes=value.stored_bytes if isinstance(value, QuantizedState) else dense_bytes,
        note=note_of(value.format) if isinstance(value, QuantizedState) else None,
        facts=() if plan is None else plan.facts,
        update_class=next((i for i, other in enumerate(classes) if other is group), None),
    )


def note_of(fmt: Format) -> str | None:
    """What a careful user should know of a format, or None."""
    if fmt.positive_to_zero:
        return "a positive value can become 0; what it divides then moves by up to 1 / eps"
    if fmt.moves_zero:
        return "a value of 0 can become something else"
    if fmt.dithered:
        return "an unchanged value changes its code at every store"
    return None


def _kernels(classes: list[ClassSummary]) -> tuple[tuple[KernelReport, ...], tuple[ClassReport, ...]]:
    found: list[Kernel] = []
    kernels, reports = [], []
    for group in classes:
        indices = []
        for kernel, role in ((group.quantized, "quantized blocks"), (group.dense, "dense tensors and tails")):
            if kernel is None:
                continue
            if not any(kernel is other for other in found):
                found.append(kernel)
                kernels.append(report_of(kernel, role))
            indices.append(next(i for i, other in enumerate(found) if other is kernel))
        own = [kernel for kernel in (group.quantized, group.dense) if kernel is not None]
        by_table = all(kernel.call_table is not None for kernel in own)
        launches = len(own) * (1 if by_table else group.regions)
        reports.append(ClassReport(group.regions, tuple(indices), launches, group.program))
    return tuple(kernels), tuple(reports)


def _state_lines(states: tuple[StateReport, ...]) -> list[str]:
    rows = [("parameter", "state", "shape", "sign", "format", "dense B", "stored B", "class")]
    numbers: dict[tuple[str, str], int] = {}
    for s in states:
        if not s.shape:
            numbers[s.key, s.reason or s.format] = numbers.get((s.key, s.reason or s.format), 0) + 1
            continue
        where = "-" if s.update_class is None else str(s.update_class)
        fmt = s.format if s.reason is None else f"dense: {s.reason}"
        shape = "x".join(map(str, s.shape))
        rows.append((s.param, s.key, shape, s.sign, fmt, f"{s.dense_bytes:,}", f"{s.stored_bytes:,}", where))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {5, 6, 7}
    lines = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return (
        [line.rstrip() for line in lines]
        + [f"{key}: {count} buffer(s), dense: {reason}" for (key, reason), count in numbers.items()]
        + [f"note on {fmt}: {note}" for fmt, note in dict.fromkeys((s.format, s.note) for s in states if s.note)]
    )


def _fact_lines(states: tuple[StateReport, ...]) -> list[str]:
    """What was found out about each kind of state, once."""
    lines = []
    for key, facts in dict.fromkeys((s.key, s.facts) for s in states if s.facts):
        proof, *others = facts
        lines += [*proof.splitlines(), *(f"  {key}: {fact}" for fact in others)]
    return [*lines, ""] if lines else []


def _class_lines(report: Report) -> list[str]:
    lines = []
    for i, group in enumerate(report.classes):
        kernels = "; ".join(str(report.kernels[k]) for k in group.kernels)
        lines.append(f"class {i}: {group.regions} region(s), {group.launches} launch(es) a step; {kernels}")
        same = next(j for j, other in enumerate(report.classes) if other.program == group.program)
        lines += [
            f"  {line}" for line in (group.program.splitlines() if same == i else [f"the update of class {same}"])
        ]
    return lines or ["no update class was compiled"]


def _non_finite_line(found: NonFiniteReport) -> str:
    kinds = {"": found.parameter, " of its gradient": found.gradient, " of its dense state": found.state}
    counts = [f"{count:,} elements{of}" for of, count in kinds.items() if count]
    return f"Inf or NaN: {found.param} ({found.numel:,} elements): {', '.join(counts)}"


def _totals(report: Report) -> str:
    dense, stored = report.dense_state_bytes, report.state_bytes
    quantized = [s for s in report.states if s.reason is None]
    share = f" ({stored / dense:.3f} of dense)" if dense else ""
    total = (
        f"state: {stored:,} bytes, dense {dense:,}{share}; {len(quantized)} of {len(report.states)} buffers quantized"
    )
    if quantized:
        own = sum(s.stored_bytes for s in quantized) / sum(s.dense_bytes for s in quantized)
        total += f", these at {own:.4f} of dense"
    total += f"; {report.graphs} graph(s), {len(report.kernels)} kernel(s)"
    return total if report.not_one_graph is None else f"{total}\nseveral graphs per step: {report.not_one_graph}"
