"""What the state of real optimizers, of averages and of hand-written updates remembers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.optim import Optimizer

from qcompile.passes.infer_memory import infer_memory
from qcompile.passes.infer_sign import infer_sign

MAKE: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adam, L2": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.8, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


class HandWritten(Optimizer):
    """An optimizer with some states, which `update` gets after the parameter and its gradient."""

    def __init__(self, params, update: Callable[..., object], *keys: str) -> None:
        super().__init__(params, {})
        self.update = update
        for p in self.param_groups[0]["params"]:
            self.state[p] = {key: torch.zeros_like(p) for key in keys}

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, *self.state[p].values())


@pytest.fixture
def memory(capture, analyse, params) -> Callable[[Optimizer], str]:
    """Text for each state of an optimizer's only parameter."""

    def run(optimizer: Optimizer) -> str:
        torch._dynamo.reset()
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        optimizer.step()
        (group,) = analyse(*capture(optimizer.step), min_numel=0, block_size=32).classes
        (item,) = group.regions
        found = infer_memory(item.program, tuple(proof.non_negative for proof in infer_sign(item.program)))
        given = optimizer.param_groups[0]
        names = {k: v for k, v in given.items() if isinstance(v, float)}
        names |= {f"beta{i}": beta for i, beta in enumerate(given.get("betas", ()), 1)}
        roles = [operand.role for operand in item.program.operands]
        assert all((record is None) == (role != "state") for record, role in zip(found, roles, strict=True))
        nodes = [item.region.inputs[operand.index] for operand in item.program.operands]
        states = [(node, record) for node, record in zip(nodes, found, strict=True) if record is not None]
        texts = {item.plans[node].slot.key: record.text(names) for node, record in states}
        return "; ".join(f"{key}: {texts[key]}" for key in sorted(texts))

    return run


def test_text(memory, params) -> None:
    assert_expected_inline(
        "\n".join(f"{name} | {memory(make(params((8, 8))))}" for name, make in MAKE.items()),
        """\
SGD | momentum_buffer: moment, decay momentum
AdamW amsgrad | exp_avg: moment, decay beta1; exp_avg_sq: moment, decay beta2; max_exp_avg_sq: maximum
Adam, L2 | exp_avg: moment, decay beta1; exp_avg_sq: moment, decay beta2
NAdam | exp_avg: moment, decay beta1; exp_avg_sq: moment, decay beta2
RAdam | exp_avg: moment, decay beta1; exp_avg_sq: moment, decay beta2
Adamax | exp_avg: moment, decay beta1; exp_inf: maximum, decay beta2
Adagrad | sum: sum
Adadelta | acc_delta: moment, decay rho; square_avg: moment, decay rho
RMSprop | grad_avg: moment, decay alpha; momentum_buffer: moment, decay momentum; square_avg: moment, decay alpha
Rprop | prev: previous; step_size: other
ASGD | ax: average of the parameter, decay 1 - input_2""",
    )


def average(p: Tensor, g: Tensor, ema: Tensor) -> None:
    p.sub_(0.1 * g)
    ema.mul_(0.999).add_(p, alpha=1 - 0.999)


def lookahead(p: Tensor, g: Tensor, m: Tensor, slow: Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.mul_(1 - 0.1 * 0.01).sub_(0.1 * m)
    slow.lerp_(p, 0.5)
    p.copy_(slow)


def schedule_free(p: Tensor, g: Tensor, v: Tensor, z: Tensor) -> None:
    v.mul_(0.99).addcmul_(g, g, value=1 - 0.99)
    update = g / (v.sqrt() + 1e-8)
    p.lerp_(z, 0.05).add_(update, alpha=0.1 * (0.9 * 0.95 - 1))
    z.sub_(update, alpha=0.1)


def momentum_that_looks_like_an_average(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g + 0.1 * p)
    p.sub_(0.01 * m)


def copies(p: Tensor, g: Tensor, last: Tensor, before: Tensor) -> None:
    before.copy_(p)
    p.sub_(0.1 * g)
    last.copy_(p)


def masked(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.copy_(torch.where(g != 0, 0.9 * m + g, m))
    p.sub_(0.01 * m)


def bounded(p: Tensor, g: Tensor, v: Tensor) -> None:
    v.mul_(0.9).add_(g * g).clamp_(min=1e-12)
    p.sub_(g / v.sqrt())


def growing(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(1.5).add_(g)
    p.sub_(0.01 * m.tanh())


@pytest.mark.parametrize(
    ("update", "keys", "expected"),
    [
        (average, ("ema",), "ema: average of the parameter, decay 0.999"),
        (
            lookahead,
            ("m", "slow"),
            "m: moment, decay 0.9; slow: average of the parameter, decay 1 - 0.5",
        ),
        (schedule_free, ("v", "z"), "v: moment, decay 0.99; z: sum"),
        (momentum_that_looks_like_an_average, ("m",), "m: moment, decay 0.9"),
        (copies, ("last", "before"), "before: copy of the parameter; last: copy of the parameter"),
        (masked, ("m",), "m: moment, decay 0.9"),
        (bounded, ("v",), "v: moment, decay 0.9"),
        (growing, ("m",), "m: other"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_hand_written(memory, params, update, keys: tuple[str, ...], expected: str) -> None:
    assert memory(HandWritten(params((8, 8)), update, *keys)) == expected


def test_an_average_whose_weight_is_a_number_of_the_step(memory, params) -> None:
    weight = torch.tensor(0.25)

    def update(p: Tensor, g: Tensor, ema: Tensor) -> None:
        p.sub_(0.1 * g)
        ema.mul_(weight).add_(p * (1 - weight))

    assert memory(HandWritten(params((8, 8)), update, "ema")) == "ema: average of the parameter, decay input_0"
