"""Inf, NaN and the ends of the range: in gradients, under GradScaler, and in the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcompile
from qcompile.runtime.state import QuantizedState

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Tensor, bool], None]
OPTIONS = {"min_numel": 0, "block_size": 64}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def backward(model: nn.Module, scaler: torch.amp.GradScaler, x: Tensor, bad: bool) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    if bad:
        model[0].weight.grad[3, 5] = float("inf")


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @qcompile.train_step(**OPTIONS)
    def step(scaler: torch.amp.GradScaler, x: Tensor, bad: bool) -> None:
        optimizer.zero_grad()
        backward(model, scaler, x, bad)
        scaler.step(optimizer)
        scaler.update()

    return lambda *args: step(*args[2:])


def update_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    optimizer.step = torch.compile(optimizer.step, backend="qstate", options=OPTIONS)  # type: ignore[method-assign]
    return eager(model, optimizer)


def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, x: Tensor, bad: bool) -> None:
        optimizer.zero_grad()
        backward(model, scaler, x, bad)
        scaler.step(optimizer)
        scaler.update()

    return step


def scaled_run(make: Callable[..., Step], fused: bool, bad: set[int]) -> tuple[nn.Module, Any, list[tuple[Any, ...]]]:
    """Six steps; after each the scale, the step counter, and the codes or values of the first moment."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    step, seen = make(model, optimizer), []
    for i in range(6):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(i))
        step(model, optimizer, scaler, x, i in bad)
        state = optimizer.state.get(model[0].weight) or {"step": torch.zeros(()), "exp_avg": torch.zeros(0)}
        first = state["exp_avg"]
        values = (first.codes if isinstance(first, QuantizedState) else first).clone()
        seen.append((scaler.get_scale(), float(state["step"]), values))
    return model, optimizer, seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [update_alone, whole])
@pytest.mark.parametrize("bad", [{2, 4}, {0, 3}], ids=str)
def test_steps_that_grad_scaler_skips_leave_every_code(make: Callable[..., Step], fused: bool, bad: set[int]) -> None:
    model, optimizer, seen = scaled_run(make, fused, bad)
    other, _, expected = scaled_run(eager, fused, bad)
    assert [(scale, step) for scale, step, _ in seen] == [(scale, step) for scale, step, _ in expected]
    for i in sorted(bad - {0}):
        assert torch.equal(seen[i][2], seen[i - 1][2]), f"step {i} was skipped and changed the state"
    assert isinstance(optimizer.state[model[0].weight]["exp_avg"], QuantizedState)
    assert optimizer.param_groups[0]["fused"] is fused
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        # Four updates, each at most lr in size and, of state in 8 bits, within a tenth of the right one.
        assert (ours - theirs).abs().max() <= 4 * 1e-3 / 10


def test_the_report_counts_bad_numbers() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(optimizer.step, backend="qstate", options={"min_numel": 64, "block_size": 64})
    for i in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if i == 1:
            model[2].weight.grad.view(-1)[[7, 700]] = torch.tensor([float("nan"), float("inf")])
            model[2].bias.grad[1] = float("nan")
        step()
        found = qcompile.explain(optimizer).non_finite
        if i == 0:
            assert found == ()
    # The bias has dense state, which keeps both moments' NaN, as in fp32; the weight's is stored as 0.
    assert [(r.param, r.numel, r.parameter, r.gradient, r.state) for r in found] == [
        ("2.weight", 1024, 2, 0, 0),
        ("2.bias", 32, 1, 0, 2),
    ]
    text = str(qcompile.explain(optimizer))
    assert "Inf or NaN: 2.weight (1,024 elements): 2 elements\n" in text
    assert "Inf or NaN: 2.bias (32 elements): 1 elements, 2 elements of its dense state\n" in text
    model[0].weight.grad[0, 0] = float("inf")
    assert qcompile.explain(optimizer).non_finite[0].gradient == 1


@pytest.mark.parametrize("size", [1e38, 1e-38, 1e-45, 0.0])
def test_the_ends_of_the_range_stay_in_their_block(size: float) -> None:
    """Gradients of one size in one block and ordinary ones in the next: that one goes on as if alone, no number is bad."""
    runs = []
    for scale in (size, 1.0):
        p = nn.Parameter(torch.ones(128))
        optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.0)
        step = torch.compile(optimizer.step, backend="qstate", options=OPTIONS)
        for i in range(4):
            p.grad = torch.randn(128, generator=torch.Generator().manual_seed(i)).clamp(-3, 3)  # 3.4e38 is Inf
            p.grad[:64] *= scale
            step()
        runs.append((p.detach(), optimizer.state[p]))
    (extreme, state), (ordinary, _) = runs
    assert torch.equal(extreme[64:], ordinary[64:])
    assert extreme.isfinite().all()
    assert all(state[key].dequantize().isfinite().all() for key in ("exp_avg", "exp_avg_sq"))
    assert (extreme - 1).abs().max() <= 4 * 3e-3, "no element moves by more than 3 lr in a step"
    if size == 0.0:
        assert torch.equal(extreme[:64], torch.ones(64))


def test_squares_that_fp16_does_not_hold() -> None:
    """1e-8 is below the least number above zero of fp16: eager torch keeps a second moment of 0, and takes steps of 1 / eps."""
    p = nn.Parameter(torch.ones(4, 64, dtype=torch.float16))
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.0)
    step = torch.compile(optimizer.step, backend="qstate", options={"min_numel": 0})
    before = p.detach().float()
    for _ in range(3):
        p.grad = torch.full_like(p, 1e-4)
        step()
    found = optimizer.state[p]["exp_avg_sq"].float().dequantize()
    assert (found / (1e-8 * (1 - 0.999**3)) - 1).abs().max() < 0.05
    assert (before - p.float()).abs().max() < 4e-3
