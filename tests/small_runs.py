"""A short training in a module of its own, so that a spawned process can import it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from qcompile.runtime.state import QuantizedState

OPTIONS = {"min_numel": 0, "block_size": 64}


def trained(seed: int, steps: int, kind: str = "AdamW") -> list[Tensor]:
    """What training leaves of a parameter and its state's codes."""
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(40, 64, generator=generator))
    optimizer = getattr(torch.optim, kind)([p], lr=1e-3)
    step = torch.compile(optimizer.step, backend="qstate", options=OPTIONS)
    for _ in range(steps):
        p.grad = torch.randn(40, 64, generator=generator)
        step()
    states = [value for value in optimizer.state[p].values() if isinstance(value, QuantizedState)]
    assert len(states) == 2
    return [p.detach(), *(state.codes for state in states)]


def train_and_save(rank: int, folder: str) -> None:
    torch.save(trained(5, 3), Path(folder, f"{rank}.pt"))
