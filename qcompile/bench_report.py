"""What the benchmark found, as a table, a JSON file or a drawing."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FirstCall:
    """Seconds of the first step, which compiles; parts are None where they are unknown or where nothing is compiled.

    Attributes:
        total: wall time, with the run itself.
        dynamo: tracing and guards.
        passes: our passes, and conversion of state.
        inductor: Inductor up to the text of its kernels; for stock `torch.compile` with AOTAutograd.
        codegen: waiting for the C++ compiler, or for Triton and ptxas.
    """

    total: float
    dynamo: float | None = None
    passes: float | None = None
    inductor: float | None = None
    codegen: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate. What does not apply, or was not measured, is None.

    Attributes:
        name, kind: of the candidate.
        error: why there are no numbers.
        note: what to know of the numbers.
        times_ms: milliseconds of each timed step, in order.
        median_ms, spread_ms: their median and half their interquartile range.
        ratio: median over that of the base.
        moved_bytes: bytes that a step reads and writes, per parameter.
        bandwidth: moved bytes per second over those of the copy.
        first_call: seconds of the first step.
        launches: kernels launched per step.
        launches_counted: by "launcher" (update kernels of ours) or "profiler" (all kernels on the device).
        state_bytes: bytes of stored state per parameter; numbers without dimensions do not count.
    """

    name: str
    kind: str
    error: str | None = None
    note: str | None = None
    times_ms: tuple[float, ...] = ()
    median_ms: float | None = None
    spread_ms: float | None = None
    ratio: float | None = None
    moved_bytes: float | None = None
    bandwidth: float | None = None
    first_call: FirstCall | None = None
    launches: int | None = None
    launches_counted: str | None = None
    state_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All rows of one list of parameters.

    Attributes:
        name: of the model or the shapes; `scale` is what it was scaled by.
        tensors, parameters: how many there are.
        copy_bytes: bytes that the copy reads and writes; `copy_times_ms`: how long it took each time.
        base: name of the row that ratios refer to.
    """

    name: str
    scale: float
    tensors: int
    parameters: int
    copy_bytes: int
    copy_times_ms: tuple[float, ...]
    base: str | None
    rows: tuple[Row, ...]

    @property
    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by the copy, at its median."""
        return self.copy_bytes / (statistics.median(self.copy_times_ms) / 1e3)


def spread(values: Sequence[float]) -> float:
    """Half the interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


HEADINGS = ("", "ms", "+-", "of base", "B moved", "of copy", "first s", "Dynamo", "passes", "Inductor")
MORE = ("launches", "state B")


def table(result: Result, compiler: str) -> str:
    """Aligned rows with a heading; `compiler` is what compiles generated code on the device ("C++" or "ptxas")."""
    lines: list[tuple[str, ...]] = [(*HEADINGS, compiler, *MORE)]
    lines += [_cells(row) for row in result.rows if row.error is None]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = ["  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in lines]
    shown.insert(1, "-" * len(shown[0]))
    scaled = "" if result.scale == 1.0 else f", scaled by {result.scale:g}"
    title = f"{result.name}{scaled}: {result.parameters:,} parameters in {result.tensors:,} tensors"
    copy = f"copy of {result.copy_bytes // 2 / 2**20:.0f} MiB: {result.copy_bandwidth / 1e9:.1f} GB/s read and written"
    failed = [f"{row.name}: {row.error}" for row in result.rows if row.error is not None]
    notes = [f"{row.name}: {row.note}" for row in result.rows if row.note is not None]
    base = [] if result.base is None else [f"base: {result.base}; bytes are per parameter; - is not measured"]
    return "\n".join([title, *shown, copy, *base, *notes, *failed])


def _cells(row: Row) -> tuple[str, ...]:
    first = row.first_call or FirstCall(0.0)
    parts = (first.dynamo, first.passes, first.inductor, first.codegen)
    return (
        row.name,
        _number(row.median_ms, ".3f"),
        _number(row.spread_ms, ".3f"),
        _number(row.ratio, ".3f"),
        _number(row.moved_bytes, ".2f"),
        _number(row.bandwidth, ".2f"),
        _number(first.total, ".2f"),
        *(_number(part, ".2f") for part in parts),
        _number(row.launches, "d"),
        _number(row.state_bytes, ".3f"),
    )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def write_json(path: Path, environment: Mapping[str, object], results: Sequence[Result]) -> None:
    """Everything, with the raw times: `{"environment": {...}, "results": [...]}`, fields as `Result` and `Row` name them."""
    found = [{**dataclasses.asdict(r), "copy_bandwidth": r.copy_bandwidth} for r in results]
    path.write_text(json.dumps({"environment": environment, "results": found}, indent=1) + "\n")


def plot(path: Path, results: Sequence[Result]) -> None:
    """Draw the ratio to the base of every candidate, one panel for each list of parameters; needs matplotlib."""
    from matplotlib.figure import Figure

    most = max((len(r.rows) for r in results), default=1)
    figure = Figure(figsize=(5 * max(1, len(results)), 1.5 + 0.3 * most), layout="constrained")
    panels = figure.subplots(1, max(1, len(results)), squeeze=False)[0]
    for panel, result in zip(panels, results, strict=False):
        rows = [row for row in reversed(result.rows) if row.ratio is not None and row.median_ms]
        errors = [(row.spread_ms or 0.0) / (row.median_ms or 1.0) * (row.ratio or 0.0) for row in rows]
        panel.barh([row.name for row in rows], [row.ratio or 0.0 for row in rows], xerr=errors)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_xlabel(f"time of a step over {result.base}")
        panel.set_title(f"{result.name}, {result.parameters / 1e6:,.1f} M parameters")
    figure.savefig(path)
