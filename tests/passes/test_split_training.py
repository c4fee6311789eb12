"""Updates that mix elements train like the uncut ones, and their state is quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import make_params, set_grads
from cut_updates import CASES, RATE, SHAPE, Case, EachItsOwn
from torch import Tensor
from torch.optim import Optimizer

import qcompile
from qcompile.runtime.state import QuantizedState


@dataclass(frozen=True, slots=True)
class Trained:
    """What 4 steps on the same gradients came to."""

    begin: list[Tensor]
    params: list[Tensor]
    states: list[dict[str, Tensor]]
    returned: list[Any]
    optimizer: Optimizer

    def moved(self, i: int) -> Tensor:
        return (self.params[i] - self.begin[i]).abs().max()


def trained(
    make: Callable[[], tuple[list[torch.nn.Parameter], Optimizer]], recipe: str | None, steps: int = 4
) -> Trained:
    torch._dynamo.reset()
    torch.manual_seed(5)
    params, optimizer = make()
    begin = [p.detach().clone() for p in params]
    options = {"recipe": recipe, "min_numel": 0, "block_size": 64, "inductor": {"fallback_random": True}}
    step = optimizer.step if recipe is None else torch.compile(optimizer.step, backend="qstate", options=options)
    returned = []
    for i in range(steps):
        set_grads(params, i)
        returned.append(step())
    states = [dict(optimizer.state[p]) for p in params]
    return Trained(begin, [p.detach().clone() for p in params], states, returned, optimizer)


def trained_on(cases: list[Case]) -> dict[str | None, Trained]:
    def make() -> tuple[list[torch.nn.Parameter], Optimizer]:
        params = make_params(*[SHAPE] * len(cases))
        return params, EachItsOwn(params, cases)

    return {recipe: trained(make, recipe) for recipe in (None, "dense", "8bit")}


TOGETHER = [case for case in CASES if case != "constants"]


@pytest.fixture(scope="module")
def results() -> dict[str | None, Trained]:
    """All updates in one optimizer, so that little is compiled."""
    return trained_on([CASES[case] for case in TOGETHER])


def rounding(result: Trained, i: int, steps: int = 4) -> Tensor:
    """Each step rounds the new parameter once."""
    return steps * torch.finfo(torch.float32).eps * result.params[i].abs().max()


# Sums over all elements, products and factorizations run in another order.
REORDERED = {"soap": 1e-4, "shampoo": 1e-4, "previous": 1e-4, "read_before": 1e-5, "two_results": 1e-5, "lamb": 1e-5}


def check(results: dict[str | None, Trained], i: int, case: str) -> None:
    """Dense and 8 bits against eager."""
    eager = results[None]
    for recipe, error in (("dense", REORDERED.get(case, 1e-6)), ("8bit", CASES[case].error)):
        difference = (eager.params[i] - results[recipe].params[i]).abs().max()
        assert difference <= error * eager.moved(i) + rounding(eager, i), (recipe, CASES[case].why)
        if "step" in eager.states[i]:
            assert results[recipe].states[i]["step"] == eager.states[i]["step"] == 4
    for key, expected in eager.states[i].items():
        got = results["dense"].states[i][key]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("case", TOGETHER)
def test_trains_like_eager(results, case: str) -> None:
    check(results, TOGETHER.index(case), case)


def test_constants_train_like_eager() -> None:
    check(trained_on([CASES["constants"]]), 0, "constants")


def test_what_the_step_returns(results) -> None:
    """The results of the last step: numbers that were made from a region's results."""
    i = TOGETHER.index("two_results")
    for recipe, tolerance in (("dense", 1e-4), ("8bit", 0.1)):
        for step in range(4):
            expected, got = results[None].returned[step][i], results[recipe].returned[step][i]
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 0.01)


def test_all_of_it_is_compiled_once(results) -> None:
    """Once for state as it was, at most once more after its conversion."""
    assert qcompile.explain(results["8bit"].optimizer).graphs <= 2
    assert qcompile.explain(results["dense"].optimizer).graphs == 1


def test_state_is_quantized(results) -> None:
    states = dict(zip(TOGETHER, results["8bit"].states, strict=True))
    kept = {(case, key) for case, named in states.items() for key, v in named.items() if type(v) is Tensor}
    numbers = {("lamb", "step"), ("counted", "step")}
    assert kept - numbers <= {("soap", "stat"), ("shampoo", "stat"), ("read_before", "w"), ("lamb", "v")}


def test_muon_trains_like_eager() -> None:
    """Newton-Schulz runs in bfloat16: one rounding there is 2**-8, and an iteration's slope at zero is 3.4."""

    def make() -> tuple[list[torch.nn.Parameter], Optimizer]:
        params = make_params((64, 64), (128, 64))
        return params, torch.optim.Muon(params, lr=RATE, ns_steps=1)

    eager, dense, ours = (trained(make, recipe) for recipe in (None, "dense", "8bit"))
    assert all(isinstance(state["momentum_buffer"], QuantizedState) for state in ours.states)
    for i in range(2):
        for result, error in ((dense, 3.4 * 2**-8), (ours, 3.4 * (2**-8 + 3 * 0.0071))):
            assert (eager.params[i] - result.params[i]).abs().max() <= error * eager.moved(i)


def test_stores_are_exact_when_nothing_changes(params) -> None:
    """Three steps without gradient and without decay leave every code as it is, although the update is cut."""

    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.copy_(torch.where(g == 0, m, 0.9 * m + g))
        p.sub_(m / m.norm(), alpha=RATE)

    optimizer = EachItsOwn(params(SHAPE), [replace(CASES["two_levels"], update=update)])
    (p,) = optimizer.param_groups[0]["params"]
    optimizer.state[p]["m"] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    step = torch.compile(optimizer.step, backend="qstate", options={"min_numel": 0, "block_size": 64})
    p.grad = torch.zeros_like(p)
    step()
    before = optimizer.state[p]["m"]
    assert isinstance(before, QuantizedState)
    codes = before.codes.clone()
    for _ in range(2):
        step()
    assert torch.equal(optimizer.state[p]["m"].codes, codes)
