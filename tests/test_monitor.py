"""Telemetry: the figures are those of the state that was stored, on the steps that are due, in every kind of compiled step."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_params, set_grads
from torch import nn

import qcompile
from qcompile.monitoring import ERROR_EDGES, Figures, _histogram
from qcompile.runtime import launch
from qcompile.runtime.state import QuantizedState


def run(
    steps: int, recipe: str = "8bit", scale: Any = 1.0, **keywords: Any
) -> tuple[list[list[Figures]], torch.optim.Optimizer]:
    """AdamW on one parameter of 64x128; the figures of every look."""
    params = make_params((64, 128))
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    seen: list[list[Figures]] = []
    found = qcompile.monitor(optimizer, to=seen.append, **keywords)
    step = torch.compile(optimizer.step, backend="qstate", options={"recipe": recipe})
    for i in range(steps):
        set_grads(params, i)
        params[0].grad.mul_(scale)
        step()
    found.close()
    return seen, optimizer


def test_figures_are_those_of_the_stored_state() -> None:
    """Against fp32 AdamW from zero: after one step the exact state is known."""
    seen, optimizer = run(1)
    params = make_params((64, 128))
    dense = torch.optim.AdamW(params, lr=1e-2)
    set_grads(params, 0)
    dense.step()
    ((p, state),) = optimizer.state.items()
    figures = {f.key: f for f in seen[0]}
    assert figures.keys() == {"exp_avg", "exp_avg_sq"}
    for key, found in figures.items():
        exact, stored = dense.state[params[0]][key], state[key].dequantize()
        assert found.storage_error == pytest.approx(float((stored - exact).norm() / exact.norm()), rel=1e-3)
        assert found.elements == p.numel()
        assert (found.step, found.non_finite, found.zero_share) == (1, 0, 0.0)
        assert 0 < found.update_error < 0.05
        codes = state[key].codes.view(torch.uint8)
        ends = (codes == codes.min()) | (codes == codes.max())
        assert found.extreme_share == pytest.approx(float(ends.float().mean()))
        relative = ((stored - exact).double() / exact.double()).abs().numpy()
        counts, _edges = np.histogram(relative, [0, *ERROR_EDGES, np.inf])
        assert sum(found.error_histogram) == p.numel()
        assert (
            np.abs(counts - np.array(found.error_histogram)).sum() < 0.01 * p.numel()
        )  # an fma in one, not in the other
    assert qcompile.explain(optimizer).figures == (), "nobody looks any more"


def test_errors_fall_into_half_decades() -> None:
    """Nothing, 2 %, all of it (stored as 0), and an exact 0 that is stored as something; what is not finite does not count."""
    whole = torch.tensor([1.0, 1.0, 2.0, 0.0, float("inf"), 1.0])
    error = torch.tensor([0.0, 0.02, -2.0, 0.5, 1.0, float("nan")])
    counts = _histogram(error, whole)
    assert len(counts) == len(ERROR_EDGES) + 1
    near = [sum(edge <= relative for edge in ERROR_EDGES) for relative in (0.0, 0.02, 1.0, float("inf"))]
    assert [counts[i] for i in near] == [1, 1, 1, 1]
    assert sum(counts) == 4


def test_only_on_steps_that_are_due() -> None:
    seen, _ = run(7, every=3)
    assert [figures[0].step for figures in seen] == [1, 4, 7]
    assert launch.observers == [], "somebody still looks"


def test_a_bounded_part() -> None:
    seen, _ = run(1, elements=300)
    assert {f.elements for f in seen[0]} == {256}


def test_four_bits_are_coarser() -> None:
    eight, four = (run(3, recipe, every=2)[0][-1] for recipe in ("8bit", "4bit"))
    for fine, coarse in zip(eight, four, strict=True):
        assert coarse.update_error > 3 * fine.update_error
        assert coarse.stale_share > fine.stale_share


def test_stale_codes() -> None:
    """After 600 steps a second moment moves by 1/600 a step, less than half of what lies between two codes: rounded to
    nearest it stays where it is."""
    stale = {f.key: f for f in run(600, "torchao-8bit", every=599)[0][-1]}
    assert stale["exp_avg_sq"].stale_share > 0.6
    assert stale["exp_avg"].stale_share < 0.3


def test_a_bad_buffer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="qcompile"):
        _, optimizer = run(5, "bred-4bit", every=1)
    lines = [record.message for record in caplog.records if "overrides" in record.message]
    assert lines, "bred-4bit is off by more than half of an update"
    assert len(lines) == len({line.partition(":")[0] for line in lines})
    assert "exp_avg" in lines[0]
    assert """options={"overrides": {'0': "8bit"}}""" in lines[0]
    assert isinstance(optimizer, torch.optim.AdamW)


def test_non_finite_elements() -> None:
    scale = torch.ones(64, 128)
    scale[0, 3] = float("inf")
    seen, _ = run(1, scale=scale)
    assert all(f.non_finite == 1 for f in seen[0])
    assert all(f.storage_error < 0.05 for f in seen[0])


def test_one_graph() -> None:
    """The update is an operator inside of the graph, and state arrives in parts."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @qcompile.train_step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = qcompile.monitor(optimizer, every=2)
    for _ in range(3):
        step(torch.randn(16, 128))
    assert step.explain().not_one_graph is None
    assert {(f.step, f.param, f.key) for f in found.figures} == {(3, "weight", "exp_avg"), (3, "weight", "exp_avg_sq")}
    assert all(0 < f.update_error < 0.05 for f in found.figures)
    found.close()


def test_csv_and_tensorboard(tmp_path: Path) -> None:
    class Scalars:
        def __init__(self) -> None:
            self.rows: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.rows.append((tag, scalar_value, global_step))

    params = make_params((64, 128))
    optimizer, scalars = torch.optim.AdamW(params, lr=1e-2), Scalars()
    step = torch.compile(optimizer.step, backend="qstate")
    for target in (tmp_path / "figures.csv", scalars):
        found = qcompile.monitor(optimizer, every=1, to=target)
        for i in range(2):
            set_grads(params, i)
            step()
        found.close()
    rows = list(csv.DictReader((tmp_path / "figures.csv").open()))
    assert [(row["step"], row["key"]) for row in rows] == [(s, k) for s in "12" for k in ("exp_avg", "exp_avg_sq")]
    assert float(rows[0]["storage_error"]) > 0
    assert ("qcompile/0/exp_avg/storage_error", pytest.approx(0, abs=0.1), 2) in scalars.rows
    assert isinstance(optimizer.state[params[0]]["exp_avg"], QuantizedState)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"elements": 1.5}])
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW(make_params((4, 4)))
    with pytest.raises(qcompile.InvalidOptionError, match="a whole number, 1 or more"):
        qcompile.monitor(optimizer, **wrong)
