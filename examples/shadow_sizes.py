"""How far the updates of `8bit` and `4bit` are from the exact ones, and those of their rivals, on real gradients at three sizes.

    python examples/shadow_sizes.py --jobs 2      # about an hour; a second start continues
    python examples/shadow_sizes.py --report      # no runs: the tables of what is there

A byte-level GPT is trained exactly, at three sizes, with its head apart and tied to the embeddings, at two values of beta2. Beside it
copies of AdamW's moments in each recipe are fed with its gradients (`qcompile.analysis.shadow`); what is compared is how far the
update they would give is from the exact one, over the last 60 steps. bitsandbytes has the formats of `torchao-8bit` since its blocks
are of 256. Each training run is a line of `--out`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grid import Run, finished, one_thread, run_missing
from quantization_error import SIZES, follow, part_of
from study_report import markdown

from qcompile.recipes import Recipe

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("body", "head", "embeddings")
# What the errors of a recipe are held against, and how far below the least of them they should be.
RIVALS = {"8bit": (("torchao-8bit",), 0.6), "4bit": (("zip-sr", "ze-eden", "torchao-4bit"), 0.85)}


@dataclass(frozen=True)
class Spec:
    """One training run, of a size by its name."""

    size: str
    tied: bool
    beta2: float
    seed: int
    steps: int

    @property
    def cost(self) -> float:
        layers, width = SIZES[self.size]
        return self.steps * layers * width**2


def train(spec: Spec) -> Run:
    """Train once; gives the relative error of the update, by recipe and part of the model."""
    start = time.perf_counter()
    recipes: list[str | Recipe] = [name for ours, (others, _) in RIVALS.items() for name in (ours, *others)]
    copies = follow(recipes, spec.beta2, spec.steps, spec.seed, SIZES[spec.size], spec.tied, quiet=True)
    errors = {name: {part: round(e, 6) for part, e in own.items()} for name, own in copies.errors(part_of).items()}
    return {"errors": errors, "seconds": round(time.perf_counter() - start, 1)}


def shown(run: Run) -> str:
    return f"4bit {run['errors']['4bit']['body']:.3f} in the body"


def report(runs: dict[Spec, Run]) -> list[str]:
    """A table for each of our recipes: its errors, each over the least of its rivals'. A tied head counts as embeddings."""
    lines: list[str] = []
    for ours, (others, most) in RIVALS.items():
        rows: list[list[Any]] = []
        for spec, run in runs.items():
            errors = run["errors"]
            ratios = {p: errors[ours][p] / min(errors[o][p] for o in others) for p in errors[ours]}
            cells = [f"{errors[ours][p]:.4f}, {ratios[p]:.2f}" if p in ratios else "tied" for p in PARTS]
            verdict = "yes" if max(ratios.values()) <= most else "no"
            rows.append([spec.size, "tied" if spec.tied else "apart", spec.beta2, spec.seed, *cells, verdict])
        header = ["parameters", "head", "β2", "seed", *PARTS, f"all at most {most}"]
        against = ", ".join(f"`{name}`" for name in others)
        lines += [f"## Error of the update with `{ours}`, and that over the least of {against}", ""]
        lines += markdown(header, rows)
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250, help="of each run; errors are summed over the last 60")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS / "shadow_sizes.jsonl", help="the tables go beside it")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    settings = itertools.product(args.sizes, range(args.seeds), (False, True), (0.95, 0.999))
    grid = [Spec(size, tied, beta2, seed, args.steps) for size, seed, tied, beta2 in settings]
    if not args.report:
        run_missing(grid, train, args.out, args.jobs, shown)
    done = finished(args.out, Spec)
    runs = {spec: done[spec] for spec in grid if spec in done}
    made = f"Made by `python examples/shadow_sizes.py --report` from {len(runs)} runs of {args.steps} steps in `{args.out.name}`."
    text = "\n".join([made, "", *report(runs)])
    print(text)
    args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    one_thread()
    main()
