"""`compile_step`: an optimizer whose `step` is compiled wherever it is called from."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from conftest import make_params, set_grads
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import qcompile
from qcompile.runtime.state import QuantizedState
from qcompile.step import _begins_with_closure


@pytest.mark.parametrize("when", ["before", "after", "no scheduler"])
def test_with_schedulers_made_before_and_after(when: str, recwarn: pytest.WarningsRecorder) -> None:
    """The same steps as `torch.compile(optimizer.step)`, and the scheduler sees that it was called."""
    results = []
    for compiled in (False, True):
        params = make_params((64, 128))
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        schedules = [LambdaLR(optimizer, lambda t: 0.5**t)] if when == "before" else []
        if compiled:
            assert qcompile.compile_step(optimizer) is optimizer
        step = torch.compile(optimizer.step, backend="qstate") if not compiled else None
        if when == "after":
            schedules = [LambdaLR(optimizer, lambda t: 0.5**t)]
        for i in range(3):
            set_grads(params, i)
            optimizer.step() if step is None else step()
            for schedule in schedules:
                schedule.step()
        results.append(params[0].detach().clone())
        assert isinstance(optimizer.state[params[0]]["exp_avg"], QuantizedState)
    assert torch.equal(*results)
    if when != "no scheduler":
        mine = [w for w in recwarn if "lr_scheduler.step()` before `optimizer.step()" in str(w.message)]
        assert len(mine) <= 1, "the compiled method hides from the scheduler that it was called"


def test_grad_scaler_and_closures() -> None:
    params = make_params((64, 128))
    optimizer = qcompile.compile_step(torch.optim.SGD(params, lr=1e-2, momentum=0.9), recipe="4bit")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(params[0].square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    state = optimizer.state[params[0]]["momentum_buffer"]
    assert isinstance(state, QuantizedState)
    assert state.format.bits == 4

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(float(params[0].detach().square().sum()), rel=0.1)


class TwiceClosure(torch.optim.SGD):
    """Asks for the loss again behind the update, as sharpness-aware optimizers do."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)
        with torch.enable_grad():
            return loss, closure()


def test_closures_that_are_called_before_the_step() -> None:
    known = {
        kind.__name__: _begins_with_closure(kind.step) for kind in vars(torch.optim).values() if isinstance(kind, type)
    }
    assert known["AdamW"]
    assert known["Muon"]
    assert not known["LBFGS"]
    assert not _begins_with_closure(TwiceClosure.step)


def test_a_closure_and_a_schedule_compile_twice() -> None:
    """The learning rate is a number that changes: one more compilation, not one for each value."""
    params = make_params((64, 128))
    optimizer = qcompile.compile_step(torch.optim.AdamW(params, lr=1e-2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(6):
        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses == sorted(losses, reverse=True)
    assert qcompile.explain(optimizer).graphs == 2


def test_copies_and_others_of_the_class_are_as_they_were() -> None:
    params = make_params((64, 128))
    optimizer = qcompile.compile_step(torch.optim.AdamW(params))
    for other in (torch.optim.AdamW(params), copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert "step" not in vars(other)


def test_wrong_options() -> None:
    with pytest.raises(qcompile.UnknownRecipeError):
        qcompile.compile_step(torch.optim.AdamW(make_params((4, 4))), recipe="9bit")


class Remembers(torch.optim.Optimizer):
    """Keeps what it knows in attributes, which it assigns in each step; every third step is another one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count, self.rate, self.scale = 0, 1.0, torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.rate = 0.1 / self.count
        for p in self.param_groups[0]["params"]:
            self.scale = 0.5 * self.scale + p.grad.abs().mean()
            self.state[p]["momentum"].lerp_(p.grad, 0.1)
            p.sub_(self.state[p]["momentum"] * self.scale, alpha=self.rate if self.count % 3 else 0.5)


@pytest.mark.parametrize("recipe", ["dense", "8bit"])
def test_what_a_step_assigns_to_its_optimizer_is_kept(recipe: str) -> None:
    """By plain `torch.compile(optimizer.step)`, in which Dynamo drops it whatever the backend (torch 2.13)."""
    found = []
    for compiled in (True, False):
        p = nn.Parameter(torch.ones(64, 128))
        optimizer = Remembers([p])
        optimizer.state[p]["momentum"] = torch.zeros(64, 128)
        step = (
            torch.compile(optimizer.step, backend="qstate", options={"recipe": recipe}) if compiled else optimizer.step
        )
        for t in range(7):
            p.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(t))
            step()
        found.append((optimizer.count, optimizer.rate, float(optimizer.scale), p.detach()))
    assert found[0][:2] == found[1][:2] == (7, 0.1 / 7)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-5)
    assert torch.allclose(found[0][3], found[1][3], atol=1e-6 if recipe == "dense" else 0.02)
