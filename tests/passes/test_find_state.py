"""State is found by identity in live optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import set_grads
from torch import Tensor, nn
from torch.optim import Optimizer

import qcompile
from qcompile.passes.find_state import find_state, live_optimizers, state_of
from qcompile.runtime.state import QuantizedState


def test_adamw(capture, params) -> None:
    p = params((8, 8), (16, 8))
    optimizer = torch.optim.AdamW(p)
    for q in p:
        q.grad = torch.randn_like(q)
    gm, example_inputs = capture(optimizer.step)
    inputs = find_state(gm, example_inputs)
    assert {id(inputs.tensors[n]) for n in inputs.params} == {id(q) for q in p}
    assert sorted(slot.key for slot in inputs.state.values()) == ["exp_avg", "exp_avg", "exp_avg_sq", "exp_avg_sq"]
    assert [slot.key for slot in inputs.numbers.values()] == ["step", "step"]
    for node, slot in [*inputs.state.items(), *inputs.numbers.items()]:
        assert optimizer.state[slot.param][slot.key] is inputs.tensors[node]
        assert slot.optimizer() is optimizer


def test_other_tensors_are_not_state(capture) -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    average = torch.zeros(8, 8)

    def step() -> None:
        with torch.no_grad():
            average.lerp_(weight, 0.1)

    gm, example_inputs = capture(step)
    inputs = find_state(gm, example_inputs)
    assert not inputs.state
    assert not inputs.params


def test_dead_optimizers_are_forgotten() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert any(o is optimizer for o in live_optimizers())
    identity = id(optimizer)
    del optimizer
    assert all(id(o) != identity for o in live_optimizers())


class Moments(NamedTuple):
    """A container that is replaced as a whole, not written into."""

    m: Tensor
    v: Tensor


class Holding(Optimizer):
    """State in every kind of container: `place(optimizer, parameter)` puts it there and returns what reads it in the step."""

    def __init__(
        self, params: list[nn.Parameter], place: Callable[[Any, Tensor], None], read: Callable[..., list[Tensor]]
    ):
        super().__init__(params, {"lr": torch.tensor(0.1), "rate": 0.5})
        self.read = read
        for p in self.param_groups[0]["params"]:
            place(self, p)

    def step(self) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                for state in self.read(self, p):
                    p.sub_(state.mul_(0.9).add_(p.grad))


def zeros() -> Tensor:
    return torch.zeros(8, 8)


PLACES: dict[str, tuple[Callable[[Any, Tensor], object], Callable[..., list[Tensor]], list[str]]] = {
    "list": (
        lambda o, p: o.state[p].update(q=[zeros(), zeros()]),
        lambda o, p: o.state[p]["q"],
        ["q.0", "q.1"],
    ),
    "tuple": (
        lambda o, p: o.state[p].update(q=(zeros(), zeros())),
        lambda o, p: list(o.state[p]["q"]),
        ["q.0", "q.1"],
    ),
    "namedtuple": (
        lambda o, p: o.state[p].update(moments=Moments(zeros(), zeros())),
        lambda o, p: list(o.state[p]["moments"]),
        ["moments.0", "moments.1"],
    ),
    "nested": (
        lambda o, p: o.state[p].update(side={"left": [{"q": zeros()}]}),
        lambda o, p: [o.state[p]["side"]["left"][0]["q"]],
        ["side.left.0.q"],
    ),
    "attribute": (
        lambda o, p: setattr(o, "flat_m", zeros()),
        lambda o, p: [o.flat_m],
        ["flat_m"],
    ),
    "attribute by parameter's number": (
        lambda o, p: setattr(o, "buffers", {0: [zeros()]}),
        lambda o, p: o.buffers[0],
        ["buffers.0.0"],
    ),
    "group": (
        lambda o, p: o.param_groups[0].update(m=zeros()),
        lambda o, p: [o.param_groups[0]["m"]],
        ["param_groups.0.m"],
    ),
    "state by name": (
        lambda o, p: o.state.update(shared={"m": zeros()}),
        lambda o, p: [o.state["shared"]["m"]],
        ["state.shared.m"],
    ),
}


@pytest.mark.parametrize("kind", list(PLACES))
def test_containers(capture, params, kind: str) -> None:
    """Found in the graph with the path to it; `set` puts another tensor there, and nowhere else."""
    place, read, keys = PLACES[kind]
    (p,) = params((8, 8))
    optimizer = Holding([p], place, read)
    p.grad = torch.randn_like(p)
    inputs = find_state(*capture(optimizer.step))
    assert sorted(slot.key for slot in inputs.state.values()) == keys
    of_parameter = kind in ("list", "tuple", "namedtuple", "nested")
    for node, slot in inputs.state.items():
        assert slot.get() is inputs.tensors[node]
        assert slot.param is (p if of_parameter else None)
        assert slot.optimizer() is optimizer
    before = read(optimizer, p)
    (first, *_) = [slot for slot in inputs.state.values() if slot.key == keys[0]]
    new = torch.ones(8, 8)
    first.set(new)
    after = read(optimizer, p)
    assert first.get() is new
    assert [t is new for t in after] == [True, *[False] * (len(after) - 1)]
    assert all(a is b for a, b in zip(after[1:], before[1:], strict=True))
    if kind == "namedtuple":
        assert type(optimizer.state[p]["moments"]) is Moments


def test_the_same_tensor_in_two_places(capture, params) -> None:
    """One slot; both places get what takes its place."""

    def place(optimizer: Any, p: Tensor) -> None:
        shared = zeros()
        optimizer.state[p] = {"m": shared, "again": (shared,)}
        optimizer.flat_m = shared

    (p,) = params((8, 8))
    optimizer = Holding([p], place, lambda o, p: [o.state[p]["m"]])
    p.grad = torch.randn_like(p)
    (slot,) = find_state(*capture(optimizer.step)).state.values()
    assert slot.key == "m"
    assert [other.key for other in slot.others] == ["again.0", "flat_m"]
    new = torch.ones(8, 8)
    slot.set(new)
    assert all(t is new for t in (optimizer.state[p]["m"], optimizer.state[p]["again"][0], optimizer.flat_m))


def test_parameters_and_rates_are_no_state(capture, params) -> None:
    """Neither the parameters in the groups, nor a list of them, nor a learning rate that is a tensor."""

    def place(optimizer: Any, p: Tensor) -> None:
        optimizer.state[p] = {"m": zeros(), "step": torch.zeros(())}
        optimizer.mine = [p]
        optimizer.rate = torch.tensor(0.5)

    def read(optimizer: Any, p: Tensor) -> list[Tensor]:
        optimizer.state[p]["step"].add_(1)
        p.mul_(1 - optimizer.rate * optimizer.param_groups[0]["lr"]).add_(optimizer.mine[0])
        return [optimizer.state[p]["m"]]

    (p,) = params((8, 8))
    optimizer = Holding([p], place, read)
    p.grad = torch.randn_like(p)
    inputs = find_state(*capture(optimizer.step))
    assert [slot.key for slot in inputs.state.values()] == ["m"]
    numbers = [optimizer.state[p]["step"], optimizer.rate, optimizer.param_groups[0]["lr"]]
    assert {id(inputs.tensors[n]) for n in inputs.numbers} == {id(number) for number in numbers}
    assert [inputs.tensors[n] is p for n in inputs.params] == [True]


def test_slots_outlive_what_they_point_to() -> None:
    """A slot does not keep an optimizer or a parameter alive, and says None when they are gone."""
    p = nn.Parameter(torch.zeros(8, 8))
    optimizer = Holding([p], PLACES["list"][0], PLACES["list"][1])
    slots = [*state_of(optimizer).values()]
    (first,) = [slot for slot in slots if slot.key == "q.0"]
    assert first.get() is optimizer.state[p]["q"][0]
    optimizer.state[p]["q"] = []
    assert first.get() is None
    optimizer.state.clear()
    assert first.get() is None
    del optimizer
    assert first.get() is None


class Flat(Optimizer):
    """All momentum in one buffer."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.flat = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))

    def step(self) -> None:
        with torch.no_grad():
            params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            self.flat.mul_(0.9).add_(torch.cat([p.grad.reshape(-1) for p in params]), alpha=0.1)
            start = 0
            for p in params:
                p.sub_(self.flat[start : start + p.numel()].view(p.shape), alpha=0.01)
                start += p.numel()


def test_one_flat_buffer_is_quantized_as_one(params) -> None:
    """And trains like eager: each of three stores errs by half a cell of the largest, and fades by 0.9 per step."""
    shapes = ((64, 64), (32, 64), (50,))
    ours, theirs = params(*shapes), params(*shapes)
    optimizer, reference = Flat(ours), Flat(theirs)
    step = torch.compile(optimizer.step, backend="qstate", options={"min_numel": 0, "block_size": 64})
    largest = 0.0
    for i in range(4):
        set_grads(ours, i)
        set_grads(theirs, i)
        step()
        reference.step()
        largest = max(largest, float(reference.flat.abs().max()))
    assert isinstance(optimizer.flat, QuantizedState)
    assert optimizer.flat.shape == (64 * 64 + 32 * 64 + 50,)
    cell = 0.0071 * largest
    assert (optimizer.flat.dequantize() - reference.flat).abs().max() <= (1 + 0.9 + 0.81 + 0.73) * cell
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).abs().max() <= 0.01 * (0.9 + (0.9 + 0.81) + (0.9 + 0.81 + 0.73)) * cell + 4e-7
    (state,) = qcompile.explain(optimizer).states
    assert (state.param, state.key, state.reason) == ("(optimizer)", "flat", None)
    assert state.stored_bytes < 0.3 * state.dense_bytes
