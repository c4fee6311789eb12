"""One run of the accuracy lab: a byte-level GPT of some size, trained by a recipe or by another package's optimizer."""

from __future__ import annotations

import dataclasses
import functools
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from train_gpt import GPT, batch_of, loss_of, standard_library

import qcompile
from qcompile.bench_peers import find_peers

BATCH, CONTEXT, LR = 16, 128, 3e-3
CURVE = 20  # points of the training loss that are kept
RECIPES = [name for name, recipe in qcompile.RECIPES.items() if recipe.quantized]
CHOSEN = ["8bit", "4bit", "zip-sr", "ze-eden", "torchao-4bit"]


@dataclass(frozen=True)
class Size:
    """A model, how long it is trained, and what with."""

    name: str
    layers: int
    width: int
    tokens_per_parameter: float
    seeds: int
    recipes: tuple[str, ...]
    validation_batches: int = 64

    @functools.cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model().parameters())

    @property
    def steps(self) -> int:
        return round(self.tokens_per_parameter * self.parameters / (BATCH * CONTEXT))

    def model(self) -> GPT:
        return GPT(self.layers, self.width, CONTEXT)


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 1, 64, 0.75, 2, ("dense", "8bit", "4bit"), validation_batches=8),
        Size("small", 2, 64, 10, 8, ("dense", *RECIPES)),
        Size("medium", 3, 96, 5, 3, ("dense", *RECIPES)),
        Size("large", 6, 128, 2, 3, ("dense", *CHOSEN)),
    )
}


@dataclass(frozen=True)
class Spec:
    """One run: which size, which recipe or package, which seed."""

    size: str
    name: str
    seed: int

    @property
    def cost(self) -> float:
        """What it takes, in parameters times steps."""
        size = SIZES[self.size]
        return size.parameters * size.steps * (1.5 if " " in self.name else 1.0)


def learning_rate(t: int, steps: int) -> float:
    """Warmup, flat, cooldown; relative to the peak."""
    tenth = max(1, steps // 10)
    return min(1.0, (t + 1) / tenth) * (1 - max(0.0, (t - steps + tenth) / tenth) ** 0.5)


def optimizer_of(model: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    params, options = list(model.parameters()), {"betas": (0.9, 0.95)}
    for peer in find_peers(torch.device("cpu"))[0]:
        if peer.name == spec.name:
            return dataclasses.replace(peer, options={**peer.options, **options}).make(params, LR, 0.1)
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1, **options)


def step_of(optimizer: torch.optim.Optimizer, spec: Spec) -> Callable[[], object]:
    """What is called to step: our backend for a recipe, the optimizer's own for a package."""
    if " " in spec.name:
        return optimizer.step
    options = {"recipe": spec.name, "train_steps": SIZES[spec.size].steps, "seed": spec.seed, "strict": True}
    return torch.compile(optimizer.step, backend="qstate", options=options)


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    return standard_library()


def update(
    loss: Tensor,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """One step from a loss, with gradients of at most norm 1."""
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    step()
    schedule.step()
    optimizer.zero_grad()


def train(spec: Spec) -> dict[str, Any]:
    """Train once; what becomes a line of the file. A run whose loss is not finite, or above that of guessing, has diverged."""
    size, start = SIZES[spec.size], time.perf_counter()
    torch.compiler.reset()
    torch.manual_seed(spec.seed)
    model = size.model()
    optimizer = optimizer_of(model, spec)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(learning_rate, steps=size.steps))
    step = step_of(optimizer, spec)
    generator = torch.Generator().manual_seed(spec.seed)
    losses: list[float] = []
    for _ in range(size.steps):
        loss = loss_of(model, *batch_of(data()[0], generator, BATCH, CONTEXT))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]) or (len(losses) > 100 and statistics.mean(losses[-50:]) > math.log(256)):
            break
        update(loss, optimizer, step, schedule)
    every = max(1, size.steps // CURVE)
    found = validation(model, size.validation_batches)
    return {
        "parameters": size.parameters,
        "steps": size.steps,
        "validation": found if len(losses) == size.steps and math.isfinite(found) else None,
        "diverged_at": len(losses) if len(losses) < size.steps else None,
        "curve": [round(statistics.mean(losses[i : i + every]), 4) for i in range(0, len(losses), every)],
        "bytes_per_parameter": qcompile.explain(optimizer).state_bytes / size.parameters
        if " " not in spec.name
        else None,
        "seconds": round(time.perf_counter() - start, 1),
        "versions": {"torch": torch.__version__, "qcompile": qcompile.__version__, "python": platform.python_version()},
    }


@torch.no_grad()
def validation(model: GPT, count: int) -> float:
    generator = torch.Generator().manual_seed(1)
    batches = [batch_of(data()[1], generator, BATCH, CONTEXT) for _ in range(count)]
    return statistics.mean(loss_of(model, x, y).item() for x, y in batches)
