"""Training steps that the tests of the one-graph step share: what they train, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def data(i: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(i))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().mean()


@dataclass
class Case:
    """A step, and what it trains."""

    step: Callable[[Tensor], Any]
    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    between: Callable[[int], None] = lambda i: None
    graphs: int = 1
    keep: list[Any] = field(default_factory=list)


def plain(model: nn.Module | None = None) -> Case:
    """Forward, backward, step and `zero_grad`, of `network()` or another model."""
    model = network() if model is None else model
    optimizer = adamw(model)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, [model], [optimizer])


def scheduled() -> Case:
    case = plain()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(case.optimizers[0], 30)
    case.between = lambda i: schedule.step()
    case.graphs, case.keep = 2, [schedule]
    return case


def run(case: Case, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], steps: int) -> tuple[list[Tensor], Any]:
    """Losses and the wrapped step. Warnings about the order of schedulers are errors."""
    torch._dynamo.reset()
    step = wrap(case.step)
    losses = []
    for i in range(steps):
        out = step(data(i))
        losses += [t.detach().clone() for t in (out if isinstance(out, tuple) else (out,))]
        case.between(i)
    return losses, step


def weights(case: Case) -> list[Tensor]:
    return [p.detach() for model in case.models for p in model.parameters()]
