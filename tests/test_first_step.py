"""Hand-written optimizers, which make state in their first step: one parameter at a time, or as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import qcompile
from qcompile import first_step
from qcompile.runtime.state import QuantizedState


class Handwritten(Optimizer):
    """Adam as people write it: state made in the loop, a Python counter per parameter and one per group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-group["lr"])


class CountsLate(Handwritten):
    """A counter that does not exist before the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = 0
            group["step"] += 1
            for p in group["params"]:
                state = self.state[p]
                if p.grad is None:
                    continue
                if len(state) == 0:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(state["m"] / (1 - 0.9 ** group["step"]), alpha=0.1)


class Coupled(Handwritten):
    """The same with one norm over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            state = self.state[p]
            if len(state) == 0:
                state["m"] = torch.zeros_like(p)
            state["m"].mul_(0.9).add_(p.grad / norm)
            p.sub_(state["m"], alpha=0.1)


class NeedsAllGradients(Handwritten):
    """One that fails where a gradient is missing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(state["m"], alpha=0.1)


def compiled(optimizer: Optimizer) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend="qstate")


def test_state_is_made_one_parameter_at_a_time(params, train, count_dense, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = params(*[(64, 128)] * 6), params(*[(64, 128)] * 6)
    optimizer, reference = Handwritten(ours), Handwritten(theirs)
    dense = count_dense(64 * 128)
    step = compiled(optimizer)
    a = train(ours, step, 1)
    assert len(dense.made) >= 10, "the optimizer's own state was not counted"
    assert dense.most <= 2
    quantized = [isinstance(s[k], QuantizedState) for s in optimizer.state.values() for k in ("m", "v")]
    assert sum(quantized) == 10, "all but the parameter that is left for the compiled step"
    monkeypatch.undo()
    for x, y in zip(a, train(theirs, reference.step, 1), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    assert all(p.grad is not None for p in ours), "the gradients were not given back"
    train(ours, step, 4)
    train(theirs, reference.step, 4)
    assert [s["step"] for s in optimizer.state.values()] == [5] * 6
    assert optimizer.param_groups[0]["calls"] == 5
    assert all(isinstance(s[k], QuantizedState) for s in optimizer.state.values() for k in ("m", "v"))
    assert max((x - y).abs().max() for x, y in zip(ours, theirs, strict=True)) < 2e-3
    states = [s for s in qcompile.explain(optimizer).states if s.shape]
    assert {(s.key, s.sign) for s in states} == {("m", "signed"), ("v", "non-negative")}


def test_a_counter_that_the_first_step_makes_counts_it_once(params, train) -> None:
    ours, theirs = params(*[(64, 128)] * 4), params(*[(64, 128)] * 4)
    optimizer, reference = CountsLate(ours), CountsLate(theirs)
    for x, y in zip(train(ours, compiled(optimizer), 1), train(theirs, reference.step, 1), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["step"] == reference.param_groups[0]["step"] == 1


@pytest.mark.parametrize("kind", [Coupled, NeedsAllGradients])
def test_others_take_their_first_step_as_they_are(params, train, kind: type[Handwritten]) -> None:
    ours, theirs = params((64, 128), (128, 64)), params((64, 128), (128, 64))
    optimizer, reference = kind(ours), kind(theirs)
    a, b = train(ours, compiled(optimizer), 1), train(theirs, reference.step, 1)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_whole_step_with_a_handwritten_optimizer() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(64, 128) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    losses = []
    for model, wrap in zip(models, (qcompile.train_step, lambda f: f), strict=True):
        optimizer = Handwritten(model.parameters())

        def step(x: Tensor, model: Any = model, optimizer: Optimizer = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = wrap(step)
        generator = torch.Generator().manual_seed(0)
        losses.append([float(run(torch.randn(16, 64, generator=generator))) for _ in range(6)])
        if model is models[0]:
            assert run.explain().not_one_graph is None, run.explain().not_one_graph
            assert any(s.reason is None for s in run.explain().states)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_apart() -> None:
    from torch import fx

    def build(shared: bool) -> tuple[fx.GraphModule, list[Tensor]]:
        g = fx.Graph()
        nodes = [g.placeholder(n) for n in ("p", "q", "gp", "gq")]
        tensors = [torch.zeros(4) for _ in nodes]
        for node, tensor in zip(nodes, tensors, strict=True):
            node.meta["example_value"] = tensor
        p, q, gp, gq = nodes
        norm = g.call_function(torch.norm, (gp,))
        norm.meta["example_value"] = torch.zeros(())
        g.call_method("sub_", (p, g.call_function(torch.div, (gp, norm))))
        g.call_method("sub_", (q, g.call_function(torch.div, (gq, norm if shared else 2.0))))
        g.output(())
        return fx.GraphModule({}, g), tensors

    for shared in (False, True):
        gm, tensors = build(shared)
        assert first_step.apart(gm, tensors, {id(tensors[0]), id(tensors[1])}) is not shared


class Replaces(Optimizer):
    """State is a new tensor each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["m"] = 0.9 * state["m"] + 0.1 * p.grad if state else 0.1 * p.grad
                    p.sub_(state["m"], alpha=group["lr"])


class Mixes(Replaces):
    """The update mixes elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].mul_(0.9).add_(p.grad)
                    p.sub_(state["m"] @ state["m"].t() @ p.grad, alpha=1e-4)


class WritesData(Replaces):
    """Old style: through `.data`, in place."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p.data)
                    state["m"].mul_(0.9).add_(p.grad.data, alpha=0.1)
                    p.data.add_(state["m"], alpha=-group["lr"])


@pytest.mark.parametrize("whole", [False, True], ids=["update alone", "whole step"])
@pytest.mark.parametrize("kind", [Replaces, Mixes, WritesData])
def test_handwritten_optimizers(kind: type[Replaces], whole: bool) -> None:
    results, optimizer = [], None
    for ours in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(2)])
        current = kind(model.parameters())
        optimizer = optimizer or current
        update_alone = torch.compile(current.step, backend="qstate") if ours and not whole else current.step

        def step(x: Tensor, model: Any = model, current: Any = current, update_alone: Any = update_alone) -> Tensor:
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            if whole:
                current.step()
            else:
                update_alone()
            current.zero_grad()
            return loss.detach()

        run_step = qcompile.train_step(step) if ours and whole else step
        results.append(
            [float(run_step(torch.randn(16, 64, generator=torch.Generator().manual_seed(i)))) for i in range(5)]
        )
    assert results[0] == pytest.approx(results[1], rel=2e-3)
    assert results[1][-1] != results[1][0]
    states = [s for s in qcompile.explain(optimizer).states if s.shape]
    assert len(states) == 2
    assert all(s.reason is None for s in states), states
