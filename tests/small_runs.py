"""A short training in a module of its own, so that a spawned process can import it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from qcompile.runtime.state import QuantizedState

OPTIONS = {"min_numel": 0, "block_size": 64}


class Training:
    def __init__(self, seed: int, kind: str = "AdamW") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.p = nn.Parameter(torch.randn(40, 64, generator=self.generator))
        self.optimizer = getattr(torch.optim, kind)([self.p], lr=1e-3)
        self.step = torch.compile(self.optimizer.step, backend="qstate", options=OPTIONS)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.p.grad = torch.randn(40, 64, generator=self.generator)
            self.step()

    def left(self) -> list[Tensor]:
        """What training leaves of the parameter and its state's codes."""
        states = [value for value in self.optimizer.state[self.p].values() if isinstance(value, QuantizedState)]
        assert len(states) == 2
        return [self.p.detach(), *(state.codes for state in states)]


def trained(seed: int, steps: int, kind: str = "AdamW") -> list[Tensor]:
    training = Training(seed, kind)
    training.advance(steps)
    return training.left()


def train_and_save(rank: int, folder: str) -> None:
    torch.save(trained(5, 3), Path(folder, f"{rank}.pt"))
