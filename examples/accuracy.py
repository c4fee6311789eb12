"""Does training stay the same? Whole runs of a byte-level GPT at three sizes, dense and with every recipe, in pairs.

    python examples/accuracy.py --quick                       # a minute: three runs for each of two seeds, of a tiny size
    python examples/accuracy.py --jobs 2                      # the grid; a second start continues with what is missing
    python examples/accuracy.py --jobs 2 --sizes small        # a part of it
    python examples/accuracy.py --report                      # no runs: table and figure of what is there

All runs of a seed begin with the same weights and see the same batches, so the gap of one run is its validation loss minus
that of the dense run of its seed. AdamW as in arXiv 2610.12444, section 5: beta 0.9 and 0.95, weight decay 0.1, clipping at
1.0, warmup of 10 %, flat for 80 %, cooldown of 10 % by 1 - sqrt(u). Text is the source of Python's standard library, a batch
is 16 x 128 bytes. Each finished run is a line of `--out`. Names with a space are other packages' own optimizers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from accuracy_runs import RECIPES, SIZES, Spec, train
from grid import Run, finished, one_thread, run_missing
from study_report import markdown

from qcompile.bench_peers import find_peers

FOUR_BITS = ["zip-sr", "ze-eden", "torchao-4bit", "bred-4bit"]
RESULTS = Path(__file__).resolve().parent / "results"


# -- The grid ----------------------------------------------------------------------------------------------------------


def specs_of(args: argparse.Namespace) -> list[Spec]:
    """All runs that are asked for; seed by seed, so that what is there is always pairs."""
    peers = [peer.name for peer in find_peers(torch.device("cpu"))[0]] if not args.quick else []
    found = []
    for size in (SIZES[name] for name in args.sizes):
        names = [n for n in (*size.recipes, *peers) if args.only is None or n in args.only or n == "dense"]
        found += [Spec(size.name, name, seed) for seed in range(args.seeds or size.seeds) for name in names]
    return found


def shown(run: Run) -> str:
    return "diverged" if run["validation"] is None else f"{run['validation']:.4f}"


# -- What came out -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """Validation loss minus that of the dense run of the same seed, in nats per byte."""

    name: str
    gaps: list[float]
    diverged: int
    bytes_per_parameter: float | None

    @property
    def mean(self) -> float:
        return statistics.mean(self.gaps) if self.gaps else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation of one pair."""
        return statistics.stdev(self.gaps) if len(self.gaps) > 1 else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean over pairs."""
        return self.spread / len(self.gaps) ** 0.5 if self.gaps else math.nan

    def pairs_for(self, difference: float) -> int | None:
        """How many pairs it takes until `difference` is two standard errors."""
        return max(2, math.ceil((2 * self.spread / difference) ** 2)) if math.isfinite(self.spread) else None


def gaps_of(runs: dict[Spec, Run], size: str) -> list[Gap]:
    """By recipe, of the seeds that have a dense run."""
    dense = {s.seed: r["validation"] for s, r in runs.items() if s.size == size and s.name == "dense"}
    names = dict.fromkeys([*RECIPES, *(s.name for s in runs)])
    found = []
    for name in names:
        own = [r for s, r in runs.items() if s.size == size and s.name == name and dense.get(s.seed) is not None]
        if not own or name == "dense":
            continue
        ended = [r for r in own if r["validation"] is not None]
        gaps = [r["validation"] - dense[r["seed"]] for r in ended]
        found.append(Gap(name, gaps, len(own) - len(ended), own[0]["bytes_per_parameter"]))
    return found


def table(runs: dict[Spec, Run], size: str) -> list[str]:
    """Markdown of one size."""
    dense = [r["validation"] for s, r in runs.items() if s.size == size and s.name == "dense" and r["validation"]]
    gaps = {gap.name: gap for gap in gaps_of(runs, size)}
    if not dense or not gaps:
        return []
    about = SIZES[size]
    reference = gaps.get("torchao-4bit")
    is_clear = reference is not None and reference.mean > 3 * reference.error
    header = [
        *("recipe", "bytes per parameter", "pairs", "diverged", "gap to dense, nats", "standard error"),
        *("of torchao-4bit's gap", "pairs that tell 0.005 nats"),
    ]
    trained = f"{about.steps} steps, {about.tokens_per_parameter:g} tokens per parameter"
    lines = [
        f"## {size}: {about.layers} layers of width {about.width}, {about.parameters / 1e6:.2f} M parameters",
        "",
        f"{trained}; dense validation loss {statistics.mean(dense):.4f} over {len(dense)} seeds.",
        "",
    ]
    rows = []
    for gap in gaps.values():
        ratio = f"{gap.mean / reference.mean:.2f}" if reference is not None and is_clear else "not told apart from 0"
        stored = "" if gap.bytes_per_parameter is None else f"{gap.bytes_per_parameter:.3f}"
        pairs = gap.pairs_for(0.005)
        cells = [
            gap.name,
            stored,
            len(gap.gaps),
            gap.diverged,
            f"{gap.mean:+.4f}",
            f"{gap.error:.4f}",
            ratio,
            pairs or "",
        ]
        rows.append(cells)
    return [*lines, *markdown(header, rows), *claims(gaps), ""]


def claims(gaps: dict[str, Gap]) -> list[str]:
    """What was asked of our recipes, and whether it holds."""
    found = []
    if (ours := gaps.get("8bit")) is not None:
        holds = abs(ours.mean) <= 2 * ours.error
        found.append(
            f"- `8bit` within two standard errors of zero: {'yes' if holds else 'no'} ({ours.mean:+.4f} ± {ours.error:.4f})."
        )
    if (ours := gaps.get("4bit")) is None:
        return found
    for name in FOUR_BITS:
        if (other := gaps.get(name)) is not None and other.gaps:
            error = math.hypot(ours.error, other.error)
            difference = ours.mean - other.mean
            verdict = "worse" if difference > 2 * error else "better" if difference < -2 * error else "not told apart"
            found.append(f"- `4bit` against `{name}`: {verdict} ({difference:+.4f} ± {error:.4f}).")
    return found


def draw(runs: dict[Spec, Run], sizes: list[str], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no figure: it needs matplotlib, pip install -e '.[examples]'", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(sizes), figsize=(4.5 * len(sizes), 5), layout="constrained", squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        ended = [gap for gap in gaps_of(runs, size) if gap.gaps]
        for i, gap in enumerate(ended):
            axis.plot(gap.gaps, [i] * len(gap.gaps), ".", color="0.7")
            axis.errorbar(gap.mean, i, xerr=2 * gap.error, fmt="o", capsize=3, color="C0")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(ended)), [gap.name for gap in ended])
        axis.invert_yaxis()
        axis.set(title=f"{size}, {SIZES[size].parameters / 1e6:.2f} M", xlabel="gap to dense, nats per byte")
    figure.suptitle("validation loss minus that of the dense run with the same seed: pairs, mean, two standard errors")
    figure.savefig(path)


def report(args: argparse.Namespace) -> None:
    runs = finished(args.out, Spec)
    sizes = [size for size in args.sizes if gaps_of(runs, size)]
    text = [line for size in sizes for line in table(runs, size)]
    print("\n".join(text))
    if sizes:
        draw(runs, sizes, args.out.with_suffix(".svg"))
        command = f"python examples/accuracy.py --report{'' if not args.quick else ' --quick'}"
        heading = [f"Made by `{command}` from {len(runs)} runs in `{args.out.name}`.", ""]
        args.out.with_suffix(".md").write_text("\n".join([*heading, *text]) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny size alone, in a file of its own")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="default: small, medium and large")
    parser.add_argument("--only", nargs="+", metavar="RECIPE", help="these recipes or packages, and dense")
    parser.add_argument("--seeds", type=int, help="how many; each size has a default")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, help="JSON lines; table and figure go beside it")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    args.sizes = args.sizes or (["tiny"] if args.quick else [name for name in SIZES if name != "tiny"])
    args.out = args.out or (Path("accuracy-quick.jsonl") if args.quick else RESULTS / "accuracy.jsonl")
    if not args.report:
        run_missing(specs_of(args), train, args.out, args.jobs, shown)
    report(args)


if __name__ == "__main__":
    one_thread()
    main()
