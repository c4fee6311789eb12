"""Roots and logarithms that quantization could turn to NaN, in real optimizers and in small updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from handmade import Handmade, only_program
from torch import Tensor
from torch.optim import Optimizer

from qcompile.passes.find_constraints import find_constraints
from qcompile.passes.infer_sign import infer_sign


@pytest.fixture
def constraints(capture, analyse) -> Callable[[Optimizer], dict[str, list[str]]]:
    """For each condition, the states that it depends on."""

    def run(optimizer: Optimizer) -> dict[str, list[str]]:
        program, names = only_program(capture, analyse, optimizer)
        found = find_constraints(program, infer_sign(program))
        return {constraint.show(names): [names[i] for i in constraint.states] for constraint in found}

    return run


@pytest.fixture
def handmade(constraints, params) -> Callable[..., dict[str, list[str]]]:
    def run(update: Callable[..., None], *keys: str) -> dict[str, list[str]]:
        return constraints(Handmade(params((8, 8)), update, *keys))

    return run


def test_centered_rmsprop(constraints, params) -> None:
    found = constraints(torch.optim.RMSprop(params((8, 8)), centered=True, momentum=0.9))
    assert found == {"square_avg - grad_avg**2 >= 0": ["square_avg", "grad_avg"]}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.9),
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Rprop,
        torch.optim.ASGD,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
    ids=["AdamW", "RMSprop", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "SGD"],
)
def test_none(constraints, params, make) -> None:
    assert constraints(make(params((8, 8)))) == {}


ROOTS = {
    "one_state": (lambda p, g, m: p.sub_(m.lerp_(g, 0.1).sqrt()), ["m >= 0"]),
    "fraction": (lambda p, g, m: p.sub_((m.lerp_(g, 0.1) + 1) ** 0.25), ["m + 1 >= 0"]),
    "whole_power": (lambda p, g, m: p.sub_((m.lerp_(g, 0.1) + 1) ** -3), []),
    "rsqrt": (lambda p, g, m: p.sub_((2 - m.lerp_(g, 0.1) / p).rsqrt()), ["2 - m / param >= 0"]),
    "log": (lambda p, g, m: p.sub_((m.lerp_(g, 0.1) * 3).log()), ["m * 3 >= 0"]),
    "log1p": (lambda p, g, m: p.sub_(m.lerp_(g, 0.1).log1p()), ["m >= -1"]),
    "log1p_above": (lambda p, g, m: p.sub_(m.lerp_(g.tanh(), 0.1).mul(0.9).log1p()), []),
    "clamp": (lambda p, g, m: p.sub_(m.lerp_(g, 0.1).clamp(min=0).sqrt()), []),
    "abs": (lambda p, g, m: p.sub_(m.lerp_(g, 0.1).abs().sqrt()), []),
    "maximum": (lambda p, g, m: p.sub_(torch.maximum(m.lerp_(g, 0.1), g * g).sqrt()), []),
    "clamped_too_low": (lambda p, g, m: p.sub_(m.lerp_(g, 0.1).clamp(min=-1).sqrt()), ["clamp(m, -1) >= 0"]),
    "of_no_state": (lambda p, g, m: p.sub_(m.lerp_(g, 0.1)).add_(g.sqrt()), []),
    "division": (lambda p, g, m: p.sub_(g / m.lerp_(g, 0.1)), []),
    "old_value": (lambda p, g, m: p.sub_((m - g).sqrt()).add_(m.lerp_(g, 0.1)), ["m - grad >= 0"]),
    "twice": (lambda p, g, m: p.sub_(m.lerp_(g, 0.1).sqrt()).add_(m.sqrt()), ["m >= 0"]),
}


@pytest.mark.parametrize(("update", "expected"), ROOTS.values(), ids=ROOTS)
def test_roots(handmade, update, expected: list[str]) -> None:
    assert handmade(update, "m") == {needs: ["m"] for needs in expected}


def test_through_another_state(handmade) -> None:
    """The root is of one state, which is made of two others in the same step."""

    def update(p: Tensor, g: Tensor, v: Tensor, m: Tensor, spread: Tensor) -> None:
        v.lerp_(g * g, 0.1)
        m.lerp_(g, 0.1)
        spread.copy_(v - m * m)
        p.sub_(spread.sqrt())

    assert handmade(update, "v", "m", "spread") == {"spread >= 0": ["v", "m"]}


def test_a_state_that_is_not_written(handmade) -> None:
    """Nothing is known of it, not even that it stays what it is."""

    def update(p: Tensor, g: Tensor, v: Tensor, prior: Tensor) -> None:
        v.lerp_(g * g, 0.1)
        p.sub_((v + prior).sqrt())

    assert handmade(update, "v", "prior") == {"v + prior >= 0": ["v", "prior"]}


def test_names_are_optional(capture, analyse, params) -> None:
    optimizer = Handmade(params((8, 8)), lambda p, g, m: p.sub_(m.lerp_(g, 0.1).sqrt()), "m")
    program, names = only_program(capture, analyse, optimizer)
    (constraint,) = find_constraints(program, infer_sign(program))
    assert str(constraint) == f"operand{names.index('m')} >= 0"
