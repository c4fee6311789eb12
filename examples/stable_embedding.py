"""The ablation of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861, section 5) at a small scale.

    python examples/stable_embedding.py --jobs 2       # about an hour; a second start continues
    python examples/stable_embedding.py --report       # no runs: the table of what is there

A byte-level GPT is trained by AdamW whose moments are quantized as the paper does it: to the nearest of 256 levels, which are
those of dynamic tree quantization or evenly spaced, relative to the largest value of a block of 2,048 or of the whole tensor; and
with a plain embedding or `qcompile.nn.StableEmbedding`, whose state stays in 32 bits. As in the paper, a positive second moment
may become 0, which our own formats never do; that is what makes a run unstable. Each cell is trained with the same settings
of learning rate, epsilon and beta2, from the same weights and on the same text. A run has diverged when its loss is not
finite, or its last losses are above that of guessing. Each run is a line of `--out`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy_runs import CONTEXT, data, update
from grid import Run, finished, one_thread, run_missing
from study_report import markdown
from torch import Tensor, nn
from train_gpt import GPT, batch_of, loss_of

from qcompile.nn import is_stable_embedding
from qcompile.runtime.dynamic_map import dynamic_map

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK, BATCH = 2048, 16
RATES, EPSILONS, BETAS = (3e-3, 1e-2), (1e-8, 1e-7, 1e-6), (0.95, 0.999)
# Unstable runs in per cent and perplexity of the paper's model of 209 M parameters, as far as they are known.
PUBLISHED = {
    ("32-bit", "", False): "0, 16.7",
    ("32-bit", "", True): "0, 16.3",
    ("linear", "tensor", False): "90, 253",
    ("linear", "tensor", True): "50, 194",
    ("dynamic", "tensor", False): "10, 18.6",
    ("dynamic", "tensor", True): "0, 17.7",
    ("dynamic", "block", False): "0, 16.8",
    ("dynamic", "block", True): "0, 16.4",
}


@dataclass(frozen=True)
class Spec:
    """One run. `levels` is "32-bit", "linear" or "dynamic"; `scale` "block", "tensor" or, of 32 bits, nothing."""

    levels: str
    scale: str
    stable: bool
    rate: float
    eps: float
    beta2: float
    seed: int
    steps: int

    @property
    def cost(self) -> float:
        return self.steps

    @property
    def cell(self) -> tuple[str, str, bool]:
        return self.levels, self.scale, self.stable


@functools.cache
def levels_of(name: str, signed: bool) -> Tensor:
    """256 levels (255 where there are two signs), ascending, of which 0 is one."""
    if name == "dynamic":
        return dynamic_map(signed).float()
    return torch.linspace(-1.0, 1.0, 255) if signed else torch.linspace(0.0, 1.0, 256)


def stored(x: Tensor, levels: Tensor, block: int | None) -> Tensor:
    """What is read back of x: each value goes to the nearest level, relative to the largest of its block, or of all.

    The last block may be shorter.
    """
    flat = x.flatten()
    size = block or flat.numel()
    blocks = nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
    scale = blocks.abs().amax(1, keepdim=True)
    borders = (levels[1:] + levels[:-1]) / 2
    nearest = levels[torch.bucketize(blocks / scale.where(scale > 0, 1.0), borders)]
    return (nearest * scale).flatten()[: flat.numel()].view_as(x)


class LiteralAdamW(torch.optim.Optimizer):
    """AdamW of the paper: exact update, moments of 4,096 elements or more quantized as they are stored."""

    def __init__(self, params: Iterable[nn.Parameter], spec: Spec) -> None:
        super().__init__(params, {"lr": spec.rate})
        self.spec, self.t = spec, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.t += 1
        spec, group = self.spec, self.param_groups[0]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            m = state["m"].lerp(p.grad, 0.1)
            v = state["v"].lerp(p.grad.square(), 1 - spec.beta2)
            denominator = (v / (1 - spec.beta2**self.t)).sqrt() + spec.eps
            p.mul_(1 - 0.1 * group["lr"]).sub_(group["lr"] * m / (1 - 0.9**self.t) / denominator)
            if spec.levels != "32-bit" and p.numel() >= 4096 and not is_stable_embedding(p):
                block = BLOCK if spec.scale == "block" else None
                m, v = stored(m, levels_of(spec.levels, True), block), stored(v, levels_of(spec.levels, False), block)
            state["m"], state["v"] = m, v


def train(spec: Spec) -> Run:
    """Train once."""
    start = time.perf_counter()
    torch.manual_seed(spec.seed)
    model = GPT(2, 64, CONTEXT, stable=spec.stable)
    optimizer = LiteralAdamW(model.parameters(), spec)
    warmup = max(1, spec.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / warmup, (spec.steps - t) / (spec.steps - warmup))
    )
    generator = torch.Generator().manual_seed(spec.seed)
    losses: list[float] = []
    for _ in range(spec.steps):
        loss = loss_of(model, *batch_of(data()[0], generator, BATCH, CONTEXT))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        update(loss, optimizer, optimizer.step, schedule)
    final = statistics.mean(losses[-20:])
    diverged = not final <= math.log(256)
    return {
        "loss": None if diverged else final,
        "steps_done": len(losses),
        "seconds": round(time.perf_counter() - start, 1),
    }


def grid_of(seeds: int, steps: int) -> list[Spec]:
    """All cells, setting by setting, so that what is there can be compared."""
    cells = [(("32-bit", ""), stable) for stable in (False, True)]
    cells += itertools.product(itertools.product(("linear", "dynamic"), ("tensor", "block")), (False, True))
    settings = itertools.product(range(seeds), RATES, EPSILONS, BETAS)
    return [
        Spec(levels, scale, stable, rate, eps, beta2, seed, steps)
        for seed, rate, eps, beta2 in settings
        for (levels, scale), stable in cells
    ]


def report(runs: dict[Spec, Run]) -> list[str]:
    """A row per cell; losses are medians over all settings, a diverged run counting as the worst."""
    rows: list[list[Any]] = []
    for cell in dict.fromkeys(spec.cell for spec in runs):
        own = [run["loss"] for spec, run in runs.items() if spec.cell == cell]
        median = statistics.median(math.inf if loss is None else loss for loss in own)
        diverged = sum(loss is None for loss in own)
        levels, scale, stable = cell
        embedding = "stable" if stable else "plain"
        share = f"{100 * diverged / len(own):.0f} % of {len(own)}"
        rows.append([levels, scale, embedding, share, f"{median:.4f}", PUBLISHED.get(cell, "")])
    header = [
        "levels",
        "scale per",
        "embedding",
        "diverged",
        "median loss",
        "published: unstable %, perplexity (209 M)",
    ]
    return markdown(header, rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="of each setting")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS / "stable_embedding.jsonl", help="the table goes beside it")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    grid = grid_of(args.seeds, args.steps)
    if not args.report:
        shown = lambda run: "diverged" if run["loss"] is None else f"{run['loss']:.4f}"  # noqa: E731
        run_missing(grid, train, args.out, args.jobs, shown)
    done = finished(args.out, Spec)
    runs = {spec: done[spec] for spec in grid if spec in done}
    heading = [
        f"Made by `python examples/stable_embedding.py --report` from {len(runs)} runs in `{args.out.name}`.",
        "",
    ]
    text = "\n".join([*heading, *report(runs)])
    print(text)
    args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    one_thread()
    main()
