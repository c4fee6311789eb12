"""Every row of the table in the README that trains, cut in two by a checkpoint: the same bits as in one piece.

A row is left out where the optimizer itself does not resume: where eager torch, with dense state, goes on differently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import through_a_file
from torch import Tensor, nn

from qcompile.runtime.state import QuantizedState

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from handwritten import HANDWRITTEN
from optimizer_rows import PACKAGES, Row, row_of, rows_of, torch_rows

pytestmark = pytest.mark.slow
# A row by its title; the packages are those of the `bench` extra, as far as they are installed.
ROWS = {
    row.title: row
    for row in [
        *torch_rows(),
        *(row_of("by hand", cls, {}) for cls in HANDWRITTEN),
        *(row for package in PACKAGES for row in rows_of(package)),
    ]
    if not (row.refused or row.closure or row.create_graph or row.sparse)
}
BEFORE, AFTER = 3, 3


class Run:
    """A small network, trained on gradients that depend on the step alone."""

    def __init__(self, row: Row, compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128))
        self.optimizer = row.make(self.model)
        if hasattr(self.optimizer, "train"):  # schedulefree
            self.optimizer.train()
        step: Callable[[], Any] = self.optimizer.step
        self.step = torch.compile(step, backend="qstate") if compiled else step
        self.done = 0

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.done)
            torch.manual_seed(self.done)  # some optimizers draw numbers of their own
            for p in self.model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            self.step()
            self.done += 1
        return self

    def resumed(self, row: Row, compiled: bool) -> Run:
        """Another process, as far as it can be one here: everything comes from a file."""
        weights, state = through_a_file([self.model.state_dict(), self.optimizer.state_dict()], weights_only=False)
        other = Run(row, compiled)
        other.model.load_state_dict(weights)
        other.optimizer.load_state_dict(state)
        other.done = self.done
        return other

    def everything(self) -> list[Tensor]:
        found: list[Tensor] = [*self.model.parameters()]

        def look(value: Any) -> None:
            if isinstance(value, QuantizedState):
                found.extend(value.stored)
            elif isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    look(item)
            elif isinstance(value, dict):
                for key in sorted(value, key=str):
                    look(value[key])

        for p in self.model.parameters():
            look(self.optimizer.state.get(p, {}))
        return [t.detach() for t in found]


def goes_on_the_same(row: Row, compiled: bool) -> bool:
    first = Run(row, compiled).train(BEFORE)
    second = first.resumed(row, compiled)
    ours, theirs = second.train(AFTER).everything(), first.train(AFTER).everything()
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("title", ROWS)
def test_resumes_bit_for_bit(title: str) -> None:
    row = ROWS[title]
    try:
        resumes = goes_on_the_same(row, False)
    except Exception as error:
        pytest.skip(f"does not train or resume without us: {type(error).__name__} {str(error)[:80]}")
    if not resumes:
        pytest.skip("goes on differently after a checkpoint without us, too")
    torch._dynamo.reset()
    assert goes_on_the_same(row, True)
