"""Which optimizer takes quantization best: the claims of "Beyond Outliers" (arXiv 2509.23500), at a small scale.

    pip install -e '.[bench]' -c constraints.txt
    python examples/optimizer_study.py --quick            # a minute: two optimizers, a tiny size, a few steps
    python examples/optimizer_study.py --jobs 2           # all of it, hours; a second start continues
    python examples/optimizer_study.py --report           # no runs: the tables of what is there

AdamW, Muon, Scion, PSGD, Shampoo and SOAP (torch's and pytorch-optimizer's own code, as it is) train the byte-level GPT of
`accuracy.py` at three sizes, with dense state and with state in 8 and 4 bits, at a rate of their own that stays constant after
the warmup, the best of a sweep at the smallest size. As it trains, each model is evaluated as it is and with its linear layers
in 4 bits (`quantized_network.py`), so that models can be compared where their losses are equal. Other runs train with 4 bits
in the forward pass, from the start. Each run is a line of `--out`.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy_runs import BATCH, CONTEXT, data, update
from grid import Run, finished, one_thread, run_missing
from quantized_network import measure, output_error, quantize_linears, quantized_copy
from study_report import report
from torch import Tensor, nn
from train_gpt import GPT, batch_of, loss_of

import qcompile
from qcompile.analysis import ErrorParts

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = {"tiny": (1, 64), "small": (2, 64), "medium": (3, 96), "large": (4, 128)}  # layers, width
STATES = ("dense", "8bit", "4bit")
# Peak rates that are tried; factors of 3 around what each is usually trained with.
RATES = {
    "AdamW": (1e-3, 3e-3, 1e-2),
    "Muon": (3e-3, 1e-2, 3e-2),
    "Scion": (3e-3, 1e-2, 3e-2),
    "PSGD": (3e-4, 1e-3, 3e-3),
    "Shampoo": (1e-2, 3e-2, 1e-1),
    "SOAP": (1e-3, 3e-3, 1e-2),
}
POINTS = 20  # evaluations of a run, of which none is before step 8
PARTS = ("total", "propagated", "local", "cross", "gain")


@dataclass(frozen=True)
class Spec:
    """One run. `state` is a recipe; `forward` is "exact", "4 bit" or "4 bit, rotated"; `rate` the peak learning rate."""

    optimizer: str
    size: str
    state: str
    forward: str
    rate: float
    seed: int
    steps: int

    @property
    def cost(self) -> float:
        slow = {"AdamW": 1.0, "Muon": 1.3, "Scion": 1.3, "PSGD": 2.0, "Shampoo": 3.0, "SOAP": 2.0}[self.optimizer]
        layers, width = SIZES[self.size]
        return slow * self.steps * layers * width**2 * (1.5 if self.forward != "exact" else 1.0)


def optimizer_of(name: str, model: GPT, rate: float) -> torch.optim.Optimizer:
    """Of pytorch-optimizer, but for AdamW. Muon is for hidden matrices: its own AdamW trains the rest."""
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    import pytorch_optimizer

    hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is q for q in hidden)]
    if name == "Muon":
        groups = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}]
        return pytorch_optimizer.Muon(groups, lr=rate, weight_decay=0.1)
    kind = {"Scion": "SCION", "PSGD": "Kron", "Shampoo": "ScalableShampoo", "SOAP": "SOAP"}[name]
    options: dict[str, Any] = {"weight_decay": 0.1}
    if name == "Shampoo":
        options |= {"momentum": 0.9, "start_preconditioning_step": 5, "preconditioning_compute_steps": 10}
    return getattr(pytorch_optimizer, kind)(model.parameters(), lr=rate, **options)


def train(spec: Spec) -> Run:
    """Train once, and evaluate `POINTS` times."""
    start = time.perf_counter()
    torch.compiler.reset()
    torch.manual_seed(spec.seed)
    model = GPT(*SIZES[spec.size], CONTEXT)
    optimizer = optimizer_of(spec.optimizer, model, spec.rate)
    warmup = max(1, spec.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / warmup))
    step: Callable[[], object] = optimizer.step
    if spec.state != "dense":
        step = torch.compile(optimizer.step, backend="qstate", options={"recipe": spec.state, "seed": spec.seed})
    network: nn.Module = model
    if spec.forward != "exact":
        network = quantize_linears(model, rotate=spec.forward.endswith("rotated"))
    generator = torch.Generator().manual_seed(spec.seed)
    points: list[dict[str, Any]] = []
    every = max(8, spec.steps // POINTS)
    for t in range(1, spec.steps + 1):
        loss = loss_of(network, *batch_of(data()[0], generator, BATCH, CONTEXT))
        if not math.isfinite(loss.item()):
            break
        update(loss, optimizer, step, schedule)
        if t % every == 0:
            found = evaluate(network, is_exact=spec.forward == "exact")
            if not math.isfinite(found["loss"]):
                break
            points.append({"step": t, **found})
    states = qcompile.explain(optimizer).states if spec.state != "dense" else ()
    quantized = [s for s in states if s.reason is None]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "points": points,
        "diverged": len(points) < spec.steps // every,
        "quantized_share": sum(s.dense_bytes for s in quantized) / max(1, sum(s.dense_bytes for s in states)),
        "seconds": round(time.perf_counter() - start, 1),
    }


@functools.cache
def validation_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [batch_of(data()[1], generator, BATCH, CONTEXT) for _ in range(8)]


@torch.no_grad()
def mean_loss(model: nn.Module) -> float:
    return statistics.mean(loss_of(model, x, y).item() for x, y in validation_batches())


@torch.no_grad()
def evaluate(model: GPT, is_exact: bool) -> dict[str, Any]:
    """Validation loss; of a model that computes exactly also that in 4 bits, and the metrics of its layers."""
    found: dict[str, Any] = {"loss": mean_loss(model)}
    if not is_exact:
        return found
    tokens = validation_batches()[0][0][:8]
    quantized = quantized_copy(model)
    kinds = (nn.Linear, nn.LayerNorm, type(model.blocks[0]))
    layers = measure(model, quantized, tokens, lambda m: isinstance(m, kinds))
    linear = [layer for layer in layers if layer.kind == "Linear"]
    gains = [layer.gains for layer in linear if layer.gains is not None]
    return found | {
        "loss_4bit": mean_loss(quantized),
        "loss_4bit_rotated": mean_loss(quantized_copy(model, rotate=True)),
        "output_error": output_error(model, quantized, tokens),
        "mmr": statistics.mean(layer.mmr for layer in linear),
        "kurtosis": statistics.mean(layer.kurtosis for layer in linear),
        # of a model that no longer looks at its input no layer's input has an error
        "gain_1": statistics.median(g for g, _ in gains) if gains else math.nan,
        "gain_2": statistics.median(g for _, g in gains) if gains else math.nan,
        "kinds": {kind: medians([x.parts for x in layers if x.kind == kind]) for kind in {x.kind for x in layers}},
    }


def medians(parts: list[ErrorParts]) -> dict[str, float]:
    """Of each part over layers; of the gain over those whose input has an error."""
    values = {name: [value for p in parts if math.isfinite(value := getattr(p, name))] for name in PARTS}
    return {name: statistics.median(own) for name, own in values.items() if own}


# -- The grid ----------------------------------------------------------------------------------------------------------

SEEDS = {"tiny": 1, "small": 3, "medium": 2, "large": 1}
STEPS = 600


def sweep_of(args: argparse.Namespace) -> list[Spec]:
    """What finds the rate of each optimizer."""
    size = args.sizes[0]
    return [
        Spec(name, size, "dense", "exact", rate, 0, args.steps)
        for name in args.optimizers
        for rate in (RATES[name][:1] if args.quick else RATES[name])
    ]


def best_rates(runs: dict[Spec, Run], sweep: list[Spec]) -> dict[str, float]:
    """By optimizer, of the run that ended lowest."""
    ended = [spec for spec in sweep if spec in runs and not runs[spec]["diverged"]]
    return {
        name: min((s for s in ended if s.optimizer == name), key=lambda s: runs[s]["points"][-1]["loss"]).rate
        for name in {spec.optimizer for spec in ended}
    }


def grid_of(args: argparse.Namespace, rates: dict[str, float]) -> list[Spec]:
    """Seed by seed, the smallest size first, so that what is there can be compared."""
    found = []
    for size in args.sizes:
        variants = [(state, "exact") for state in (STATES[:2] if args.quick else STATES)] + [("dense", "4 bit")]
        variants += [("dense", "4 bit, rotated")] if size == "small" else []
        found += [
            Spec(name, size, state, forward, rates[name], seed, args.steps)
            for seed in range(SEEDS[size])
            for name in args.optimizers
            for state, forward in variants
            if name in rates
        ]
    return found


def shown(run: Run) -> str:
    return "diverged" if run["diverged"] else f"{run['points'][-1]['loss']:.4f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="AdamW and Muon, the tiny size, 24 steps, a file of its own"
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="default: small, medium and large")
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES))
    parser.add_argument("--steps", type=int, help=f"of each run; default {STEPS}")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, help="JSON lines; the tables go beside it")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    args.sizes = args.sizes or (["tiny"] if args.quick else [name for name in SIZES if name != "tiny"])
    args.optimizers = args.optimizers or (["AdamW", "Muon"] if args.quick else list(RATES))
    args.steps = args.steps or (24 if args.quick else STEPS)
    args.out = args.out or (Path("study-quick.jsonl") if args.quick else RESULTS / "optimizer_study.jsonl")
    sweep = sweep_of(args)
    if not args.report:
        run_missing(sweep, train, args.out, args.jobs, shown)
    rates = best_rates(finished(args.out, Spec), sweep)
    grid = grid_of(args, rates)
    if not args.report:
        run_missing(grid, train, args.out, args.jobs, shown)
    runs = finished(args.out, Spec)
    lines = report({spec: runs[spec] for spec in grid if spec in runs}, args.sizes)
    command = f"python examples/optimizer_study.py --report{' --quick' if args.quick else ''}"
    text = "\n".join([f"Made by `{command}` from {len(runs)} runs in `{args.out.name}`.", "", *lines])
    print(text)
    args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    one_thread()
    main()
