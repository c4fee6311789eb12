"""Updates whose new state is the old value of something else that they write: it is read before it is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from handmade import Handmade
from torch import Tensor

from qcompile.passes.functionalize import NotElementwise
from qcompile.passes.quantize_update import in_order


def previous(p: Tensor, g: Tensor, prev: Tensor) -> None:
    speed = p - prev
    prev.copy_(p)
    p.add_(0.5 * speed - 0.1 * g)


def chain(p: Tensor, g: Tensor, older: Tensor, old: Tensor) -> None:
    older.copy_(old)
    old.copy_(p)
    p.sub_(0.1 * g + 0.01 * older)


def swap(p: Tensor, g: Tensor, a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    a.add_(g)
    p.sub_(0.1 * a + 0.05 * b)


def pure_swap(p: Tensor, g: Tensor, a: Tensor, b: Tensor) -> None:
    a.add_(g)
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    p.sub_(0.1 * a)


def exchanged_with_the_parameter(p: Tensor, g: Tensor, other: Tensor) -> None:
    kept = p.clone()
    p.copy_(other)
    other.copy_(kept)


def of_the_gradient(p: Tensor, g: Tensor, prev: Tensor) -> None:
    change = g - prev
    prev.copy_(g)
    p.sub_(0.1 * g + 0.05 * change)


def cut(p: Tensor, g: Tensor, prev: Tensor) -> None:
    speed = p - prev
    prev.copy_(p)
    p.add_(0.5 * speed - 0.1 * g / g.norm())


class Replaces(Handmade):
    """Its state is a new tensor after each step."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            speed = p - self.state[p]["prev"]
            self.state[p]["prev"] = p.clone()
            p.add_(0.5 * speed - 0.1 * p.grad)


def replaced(p: Tensor, g: Tensor, prev: Tensor) -> None:
    """What `Replaces` does."""


UPDATES: dict[Callable[..., None], tuple[str, ...]] = {
    previous: ("prev",),
    chain: ("older", "old"),
    swap: ("a", "b"),
    pure_swap: ("a", "b"),
    exchanged_with_the_parameter: ("other",),
    of_the_gradient: ("prev",),
    cut: ("prev",),
    replaced: ("prev",),
}


def train(update: Callable[..., None], compile_with: Callable[[Any], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 128), (40, 7))]
    optimizer = (Replaces if update is replaced else Handmade)(params, update, *UPDATES[update])
    for p, state in optimizer.state.items():
        for value in state.values():
            value.copy_(torch.randn(p.shape))
    step = compile_with(optimizer.step)
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        step()
    return [p.detach() for p in params] + [v for state in optimizer.state.values() for v in state.values()]


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_old_values_are_read_as_they_were(update: Callable[..., None]) -> None:
    expected = train(update, lambda step: step)
    found = train(update, lambda step: torch.compile(step, backend="qstate", options={"recipe": "dense"}))
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", [previous, swap, exchanged_with_the_parameter], ids=lambda update: update.__name__)
def test_where_inductor_compiles_the_update(update: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what no kernel of ours can update, Inductor gets the operations."""

    def refuse(*args: Any) -> None:
        raise NotElementwise("a test")

    monkeypatch.setattr("qcompile.passes.functionalize.functional_graph", refuse)
    test_old_values_are_read_as_they_were(update)


@pytest.mark.parametrize("update", [previous, exchanged_with_the_parameter], ids=lambda update: update.__name__)
def test_in_triton_too(update: Callable[..., None], triton_on_cpu: None) -> None:
    test_old_values_are_read_as_they_were(update)


def test_assignments_in_order() -> None:
    assert in_order([0, 1, 2], {}) == ([0, 1, 2], set())
    assert in_order([0, 1, 2], {1: 0, 2: 1}) == ([2, 1, 0], set())
    assert in_order([0, 1], {1: 3}) == ([0, 1], set())  # what is not written can be read at any time
    order, kept = in_order([0, 1, 2], {0: 1, 1: 0, 2: 0})
    assert kept == {0}
    assert order.index(2) < order.index(0)
    assert set(order) == {0, 1, 2}
