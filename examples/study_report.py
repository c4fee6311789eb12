"""What the runs of `optimizer_study.py` say, a table per claim of "Beyond Outliers" (arXiv 2509.23500), its figures beside ours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]
Runs = dict[Any, Run]
METRICS = {"output_error": "R of the output", "mmr": "MMR", "kurtosis": "kurtosis"}
# At 760 M parameters; of accuracy after quantization, where a higher R is a lower accuracy, so with the other sign.
PUBLISHED_CORRELATION = {"output_error": "+.89", "mmr": "-.62", "kurtosis": "-.70"}
PUBLISHED_QAT = {"AdamW": "-2.63", "Muon": "-3.57", "Shampoo": "-.46"}  # points of accuracy at 760 M
PUBLISHED_RHO = {"AdamW": ".863", "Muon": ".852", "PSGD": ".739", "Scion": ".856", "Shampoo": ".879", "SOAP": ".822"}


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


@dataclass(frozen=True)
class AtLoss:
    """A model at the moment when its validation loss was that of all others: metrics between its two nearest evaluations."""

    spec: Any
    values: dict[str, float]
    kinds: dict[str, dict[str, float]]

    @property
    def increase(self) -> float:
        """Of the loss, by putting its linear layers in 4 bits."""
        return self.values["loss_4bit"] - self.values["loss"]

    @property
    def increase_rotated(self) -> float:
        return self.values["loss_4bit_rotated"] - self.values["loss"]


def common_loss(runs: Iterable[Run]) -> float:
    """The lowest loss that each run reaches."""
    return max(min(point["loss"] for point in run["points"]) for run in runs)


def at_loss(spec: Any, run: Run, loss: float) -> AtLoss | None:
    """The model when it first came down to `loss`; None where it never did, or began below it."""
    for before, after in zip(run["points"], run["points"][1:], strict=False):
        if before["loss"] > loss >= after["loss"]:
            part = (before["loss"] - loss) / (before["loss"] - after["loss"])
            names = [name for name, value in after.items() if isinstance(value, float)]
            values = {name: before[name] + part * (after[name] - before[name]) for name in names}
            return AtLoss(spec, values, (after if part >= 0.5 else before)["kinds"])
    return None


def at_common_loss(runs: Runs, size: str) -> list[AtLoss]:
    """All exact models of one size, at the lowest loss that all runs of their seed reach."""
    found = []
    exact = {s: r for s, r in runs.items() if s.size == size and s.forward == "exact" and not r["diverged"]}
    for seed in sorted({spec.seed for spec in exact}):
        own = {s: r for s, r in exact.items() if s.seed == seed}
        loss = common_loss(own.values())
        found += [model for spec, run in own.items() if (model := at_loss(spec, run, loss)) is not None]
    return found


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, of which equal values share the mean."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]

    return statistics.correlation(ranks(x), ranks(y)) if len(set(x)) > 1 and len(set(y)) > 1 else math.nan


def mean_of(values: Sequence[float]) -> str:
    """With its standard error, where there is more than one."""
    if not values:
        return ""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{error}"


def final_loss(run: Run) -> float:
    """Mean of the last three evaluations."""
    return statistics.mean(point["loss"] for point in run["points"][-3:])


def report(runs: Runs, sizes: Sequence[str]) -> list[str]:
    """All tables. Sizes and optimizers without runs are left out, runs that diverged are told."""
    sizes = [size for size in sizes if any(spec.size == size for spec in runs)]
    models = {size: at_common_loss(runs, size) for size in sizes}
    lines = [*at_equal_loss(models), *correlations(models), *propagation(models), *with_state(models)]
    lines += [*trained_in_4_bits(runs, sizes), *efficiency(runs, sizes)]
    diverged = [spec for spec, run in runs.items() if run["diverged"]]
    lines += [f"Diverged: {', '.join(map(str, diverged)) or 'none'}.", ""]
    dense = sorted(
        {f"{s.optimizer} in {s.state}" for s, r in runs.items() if s.state != "dense" and not r["quantized_share"]}
    )
    return [*lines, f"No state that could be quantized: {', '.join(dense) or 'none'}.", ""]


def optimizers_of(specs: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(spec.optimizer for spec in specs))


def at_equal_loss(models: dict[str, list[AtLoss]]) -> list[str]:
    lines = ["## Quantized after training, at equal loss", ""]
    header = ["optimizer", "rate", "loss +, W4A4", "loss +, rotated", *METRICS.values()]
    for size, own in models.items():
        dense = [m for m in own if m.spec.state == "dense"]
        if not dense:
            continue
        losses = mean_of([m.values["loss"] for m in dense if m.spec.optimizer == dense[0].spec.optimizer])
        lines += [f"{size}, at a validation loss of {losses}:", ""]
        rows = []
        for name in optimizers_of(m.spec for m in dense):
            of = [m for m in dense if m.spec.optimizer == name]
            metrics = [mean_of([m.values[key] for m in of]) for key in METRICS]
            increases = [mean_of([m.increase for m in of]), mean_of([m.increase_rotated for m in of])]
            rows.append([name, of[0].spec.rate, *increases, *metrics])
        lines += markdown(header, rows)
    return lines


def correlations(models: dict[str, list[AtLoss]]) -> list[str]:
    rows = []
    for key, name in METRICS.items():
        cells = [
            f"{rank_correlation([m.values[key] for m in own], [m.increase for m in own]):+.2f} (n = {len(own)})"
            for own in models.values()
            if len(own) > 1
        ]
        rows.append([name, *cells, PUBLISHED_CORRELATION[key]])
    sizes = [size for size, own in models.items() if len(own) > 1]
    title = "## Which metric predicts the increase of the loss: Spearman's rank correlation over models at equal loss"
    return [title, "", *markdown(["metric", *sizes, "published, 760 M"], rows)]


def propagation(models: dict[str, list[AtLoss]]) -> list[str]:
    lines = ["## Where the error comes from: medians over layers and models", ""]
    rows = []
    for kind in ("Linear", "LayerNorm", "Block"):
        parts = [m.kinds[kind] for own in models.values() for m in own if kind in m.kinds]
        if parts:
            shares = [
                statistics.median(p[name] / p["total"] for p in parts) for name in ("propagated", "local", "cross")
            ]
            gains = [p["gain"] for p in parts if "gain" in p]  # the input of a network has no error
            gain = f"{statistics.median(gains):.2f}" if gains else ""
            rows.append([kind, *(f"{share:.2f}" for share in shares), gain])
    lines += markdown(["module", "A / R", "B / R", "C / R", "gain"], rows)
    rows = []
    every = [m for own in models.values() for m in own if m.spec.state == "dense"]
    for name in optimizers_of(m.spec for m in every):
        of = [m for m in every if m.spec.optimizer == name]
        gain = mean_of([m.kinds["Linear"]["gain"] for m in of])
        rows.append([name, gain, mean_of([m.values["gain_1"] for m in of]), mean_of([m.values["gain_2"] for m in of])])
    return [*lines, *markdown(["optimizer", "gain of linear layers", "G1", "G2"], rows)]


def with_state(models: dict[str, list[AtLoss]]) -> list[str]:
    """Pairs of one optimizer, size and seed: quantized state minus dense state, relative."""
    rows = []
    for state in ("8bit", "4bit"):
        for key, name in {"output_error": "R of the output", "increase": "increase of the loss"}.items():
            pairs = []
            for own in models.values():
                value = {m.spec: m.increase if key == "increase" else m.values[key] for m in own}
                dense = {(s.optimizer, s.seed): v for s, v in value.items() if s.state == "dense"}
                found = [(v, dense.get((s.optimizer, s.seed))) for s, v in value.items() if s.state == state]
                pairs += [math.log(v / d) for v, d in found if d is not None and v > 0 and d > 0]
            rows.append([state, name, len(pairs), mean_of(pairs)])
    title = (
        "## Does quantized optimizer state change how a model takes quantization? Logarithm of the ratio to dense state"
    )
    return [title, "", *markdown(["state", "of", "pairs", "mean ± standard error"], rows)]


def trained_in_4_bits(runs: Runs, sizes: Sequence[str]) -> list[str]:
    lines = ["## Trained in 4 bits, straight-through: final validation loss", ""]
    for size in sizes:
        own = {s: r for s, r in runs.items() if s.size == size and s.state == "dense" and not r["diverged"]}
        rows = []
        for name in optimizers_of(own):
            finals: dict[str, dict[int, float]] = {}
            for spec, run in own.items():
                if spec.optimizer == name:
                    finals.setdefault(spec.forward, {})[spec.seed] = final_loss(run)
            exact = finals.get("exact", {})
            drops = [
                [loss - exact[seed] for seed, loss in finals.get(forward, {}).items() if seed in exact]
                for forward in ("4 bit", "4 bit, rotated")
            ]
            if any(drops):
                rows.append([name, mean_of(list(exact.values())), *map(mean_of, drops), PUBLISHED_QAT.get(name, "")])
        if rows:
            header = ["optimizer", "exact", "4 bit: +", "rotated: +", "published: points of accuracy"]
            lines += [f"{size}:", "", *markdown(header, sorted(rows, key=lambda row: row[1]))]
    return lines


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and value at 0 of the least-squares line."""
    slope, intercept = statistics.linear_regression(x, y)
    return slope, intercept


def efficiency(runs: Runs, sizes: Sequence[str]) -> list[str]:
    """rho: a model trained in 4 bits is as good as an exact one of rho times its parameters; from lines through log size."""
    rows = []
    for name in optimizers_of(runs):
        lines = {}
        for forward in ("exact", "4 bit"):
            points: dict[int, list[float]] = {}
            for spec, run in runs.items():
                if (spec.optimizer, spec.forward, spec.state) == (name, forward, "dense") and not run["diverged"]:
                    points.setdefault(run["parameters"], []).append(final_loss(run))
            if len(points) >= 2:
                x = [math.log(n) for n in points]
                lines[forward] = (x, [statistics.mean(own) for own in points.values()])
        if len(lines) == 2 and lines["exact"][0] == lines["4 bit"][0]:
            x, exact = lines["exact"]
            slope, start = line_through(x, exact)
            shifts = [(loss - start) / slope - at for at, loss in zip(x, lines["4 bit"][1], strict=True)]
            rows.append([name, len(x), f"{math.exp(statistics.mean(shifts)):.2f}", PUBLISHED_RHO[name]])
    if not rows:
        return []
    title = "## Effective parameters: rho, the horizontal shift of the loss over the logarithm of size"
    return [title, "", *markdown(["optimizer", "sizes", "rho, 4 bit", "published"], rows)]
