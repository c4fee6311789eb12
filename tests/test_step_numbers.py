"""Numbers that change from step to step: they cost no compilation each, and proofs hold for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import qcompile
from qcompile.runtime.state import QuantizedState


class Decays(Optimizer):
    """Adam without bias correction, whose second decay is what `decay` says of the step: a Python number."""

    def __init__(self, params: Any, decay: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "step": 0})
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            decay = self.decay(group["step"])
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(decay).addcmul_(p.grad, p.grad, value=1 - decay)
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-group["lr"])


class Counts(Optimizer):
    """The same, with a step counter that is a tensor and is read by `item`, and decays that remove the bias."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"], state["step"] = torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())
                state["step"].add_(1)
                t = state["step"].item()
                decay = 0.99 * (1 - 0.99 ** (t - 1)) / (1 - 0.99**t)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(decay).addcmul_(p.grad, p.grad, value=1 - decay)
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-group["lr"])


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))]


def run(optimizer: Optimizer, step: Any, steps: int) -> list[int]:
    """Graphs after each step."""
    graphs = []
    for i in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 + i))
        step()
        graphs.append(qcompile.explain(optimizer).graphs)
    return graphs


def compiled(optimizer: Optimizer) -> Any:
    return torch.compile(optimizer.step, backend="qstate", options={"min_numel": 0, "block_size": 64})


def state_of(optimizer: Optimizer, key: str) -> torch.Tensor:
    (state,) = optimizer.state.values()
    return state[key]


@pytest.mark.parametrize(
    "decay",
    [lambda t: 1 - t**-0.8, lambda t: 1.0 - math.pow(t, -0.8), lambda t: 0.99 * math.sqrt(1 - 0.5**t)],
    ids=["power", "math.pow", "math.sqrt"],
)
def test_a_decay_that_changes_compiles_no_more(decay: Any) -> None:
    ours, theirs = weights(), weights()
    optimizer, reference = Decays(ours, decay), Decays(theirs, decay)
    graphs = run(optimizer, compiled(optimizer), 7)
    assert graphs[-1] == graphs[3], graphs
    run(reference, reference.step, 7)
    v = state_of(optimizer, "v")
    assert isinstance(v, QuantizedState)
    assert not v.format.signed
    begin = weights()[0].detach()
    assert (ours[0] - theirs[0]).norm() <= 0.03 * (theirs[0] - begin).norm()


def test_a_number_that_changes_sign_is_compiled_for() -> None:
    """v is proved non-negative for decays in [0, 1] only; beyond them the proof, and with it the format, is another."""
    decays = [0.5, 0.6, 0.7, 0.8, 1.25]
    ours, theirs = weights(), weights()
    optimizer = Decays(ours, lambda t: decays[t - 1])
    reference = Decays(theirs, lambda t: decays[t - 1])
    step = compiled(optimizer)
    run(optimizer, step, 4)
    v = state_of(optimizer, "v")
    assert isinstance(v, QuantizedState)
    assert not v.format.signed
    run(reference, reference.step, 4)
    for p in (*ours, *theirs):
        p.grad = torch.full_like(p, 1e-3)  # too small to make v negative: eager has no NaN either
    step()
    reference.step()
    assert torch.isfinite(ours[0]).all()
    v = state_of(optimizer, "v")
    assert not isinstance(v, QuantizedState) or v.format.signed
    assert (ours[0] - theirs[0]).norm() <= 0.03 * (theirs[0] - weights()[0].detach()).norm()


def test_a_step_counter_that_item_reads_is_one_graph_and_a_proof() -> None:
    ours, theirs = weights(), weights()
    optimizer, reference = Counts(ours), Counts(theirs)
    graphs = run(optimizer, compiled(optimizer), 6)
    assert graphs[-1] <= 2, graphs
    run(reference, reference.step, 6)
    v = state_of(optimizer, "v")
    assert isinstance(v, QuantizedState)
    assert not v.format.signed  # decay in [0, 0.99] for each step that fp32 counts
    assert float(state_of(optimizer, "step")) == 6
    assert (ours[0] - theirs[0]).norm() <= 0.03 * (theirs[0] - weights()[0].detach()).norm()


def test_dynamo_is_as_it_was_after_a_step() -> None:
    import torch._dynamo.config as config

    before = config.capture_scalar_outputs, config.recompile_limit
    optimizer = Counts(weights())
    run(optimizer, compiled(optimizer), 2)
    assert (config.capture_scalar_outputs, config.recompile_limit) == before


class CountsOnce(Optimizer):
    """One step counter for the whole group, a tensor, that the update of each parameter reads by `item`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "step": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"].add_(1)
            correction = 1 - 0.9 ** group["step"].item()
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                p.sub_(state["m"], alpha=group["lr"] / correction)


def test_a_counter_of_several_classes_counts_once() -> None:
    ours, theirs = ([*weights(), nn.Parameter(torch.ones(10))] for _ in range(2))
    optimizer, reference = CountsOnce(ours), CountsOnce(theirs)
    run(optimizer, compiled(optimizer), 5)
    run(reference, reference.step, 5)
    assert len(qcompile.explain(optimizer).classes) == 2
    assert float(optimizer.param_groups[0]["step"]) == 5
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-7)  # what stays dense
    assert (ours[0] - theirs[0]).norm() <= 0.03 * (theirs[0] - weights()[0].detach()).norm()


class Alternates(Optimizer):
    """Two first moments, of which each step updates one, and one second moment for both: as in AdaPNM."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update({key: torch.zeros_like(p) for key in ("odd", "even", "v")})
                m, other = (state["odd"], state["even"]) if group["step"] % 2 else (state["even"], state["odd"])
                m.lerp_(p.grad, 0.1)
                state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.addcdiv_(2 * m - other, state["v"].sqrt().add_(1e-8), value=-group["lr"])


def test_a_first_moment_that_is_not_written_with_its_second_keeps_its_values(train) -> None:
    ours, theirs = weights(), weights()
    optimizer, reference = Alternates(ours), Alternates(theirs)
    step = torch.compile(optimizer.step, backend="qstate")
    train(ours, step, 8)
    train(theirs, reference.step, 8)
    state, expected = optimizer.state[ours[0]], reference.state[theirs[0]]
    for key in ("odd", "even"):
        assert isinstance(state[key], QuantizedState)
        assert state[key].format.coordinate != "update"
        error = (state[key] - expected[key]).norm() / expected[key].norm()
        assert error < 0.02, f"{key}: {error}"  # one store adds 0.007 (dynamic8); it was 0.3
    graphs = qcompile.explain(optimizer).graphs
    train(ours, step, 4)
    assert qcompile.explain(optimizer).graphs == graphs, "compiled again"


class Measures(Optimizer):
    """A number that is read from state which the step has just updated decides about the next step: as in D-Adaptation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            longest = group.setdefault("longest", torch.zeros(1))
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                longest.lerp_(p.grad.abs().sum(), 0.5)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(state["m"], alpha=group["d"])
            group["d"] = max(group["d"], min((longest / 1e5).item(), 1.5 * group["d"]))


def test_a_number_read_from_new_state_is_that_of_the_eager_step(train) -> None:
    ours, theirs = weights(), weights()
    optimizer, reference = Measures(ours), Measures(theirs)
    train(ours, torch.compile(optimizer.step, backend="qstate"), 6)
    train(theirs, reference.step, 6)
    found, expected = optimizer.param_groups[0], reference.param_groups[0]
    assert expected["d"] > 2e-3, "the number did not change"
    torch.testing.assert_close(found["longest"], expected["longest"])
    assert found["d"] == pytest.approx(expected["d"], rel=1e-6)
    assert isinstance(optimizer.state[ours[0]]["m"], QuantizedState)
