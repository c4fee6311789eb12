"""State is found by identity in live optimizers."""

from __future__ import annotations

import torch
from torch import nn

from qcompile.passes.find_state import find_state, live_optimizers


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
