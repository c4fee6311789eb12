"""What is proved about the states of real optimizers and of small updates, and that it is true when they run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from handmade import Handmade, only_program
from torch import Tensor
from torch.optim import Optimizer

from qcompile.passes.infer_sign import Proof, infer_sign, intervals_of
from qcompile.passes.intervals import ANY, Interval


@pytest.fixture
def proofs(capture, analyse) -> Callable[..., dict[str, Proof]]:
    """The proof of each state by its key; `starts` are given by key."""

    def run(optimizer: Optimizer, **starts: Interval) -> dict[str, Proof]:
        program, names = only_program(capture, analyse, optimizer)
        found = infer_sign(program, [starts.get(name) for name in names])
        return {name: proof for name, proof in zip(names, found, strict=True) if name not in ("param", "grad")}

    return run


@pytest.fixture
def text(capture, analyse) -> Callable[..., str]:
    """The printed proofs, all or those of some keys."""

    def run(optimizer: Optimizer, *keys: str) -> str:
        program, names = only_program(capture, analyse, optimizer)
        found = zip(names, infer_sign(program), strict=True)
        return "\n".join(p.show(names) for name, p in found if (name in keys if keys else p.steps))

    return run


@pytest.fixture
def handmade(proofs, params) -> Callable[..., dict[str, Proof]]:
    def run(update: Callable[..., None], *keys: str, **starts: Interval) -> dict[str, Proof]:
        return proofs(Handmade(params((8, 8)), update, *keys), **starts)

    return run


def test_adamw(text, params) -> None:
    assert_expected_inline(
        text(torch.optim.AdamW(params((8, 8)), amsgrad=True)),
        """\
exp_avg in (-inf, inf) is all that is known:
  lerp(exp_avg, grad, 0.1) in (-inf, inf)
exp_avg_sq in [0, inf) is kept:
  x1 = mul(exp_avg_sq, 0.999) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  fma(x2, 0.001, x1) in [0, inf)
max_exp_avg_sq in [0, inf) is kept:
  exp_avg_sq in [0, inf)
  x1 = mul(exp_avg_sq, 0.999) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  x3 = fma(x2, 0.001, x1) in [0, inf)
  maximum(max_exp_avg_sq, x3) in [0, inf)""",
    )


def test_sums_and_averages_of_squares(text, params) -> None:
    found = [text(make(params((8, 8)))) for make in (torch.optim.Adagrad, torch.optim.RMSprop)]
    assert_expected_inline(
        "\n".join(found),
        """\
sum in [0, inf) is kept:
  x1 = mul(grad, grad) in [0, inf)
  fma(x1, 1, sum) in [0, inf)
square_avg in [0, inf) is kept:
  x1 = mul(square_avg, 0.99) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  fma(x2, 0.01, x1) in [0, inf)""",
    )


def test_relatives_of_adam(text, params) -> None:
    found = [text(make(params((8, 8)))) for make in (torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)]
    assert_expected_inline(
        "\n".join(found),
        """\
exp_avg in (-inf, inf) is all that is known:
  lerp(exp_avg, grad, 0.1) in (-inf, inf)
exp_inf in [0, inf) is kept:
  x1 = mul(exp_inf, 0.999) in [0, inf)
  maximum(x1, grad) in [0, inf)
exp_avg in (-inf, inf) is all that is known:
  lerp(exp_avg, grad, 0.1) in (-inf, inf)
exp_avg_sq in [0, inf) is kept:
  x1 = mul(exp_avg_sq, 0.999) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  fma(x2, 0.001, x1) in [0, inf)
exp_avg in (-inf, inf) is all that is known:
  lerp(exp_avg, grad, 0.1) in (-inf, inf)
exp_avg_sq in [0, inf) is kept:
  x1 = mul(exp_avg_sq, 0.999) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  fma(x2, 0.001, x1) in [0, inf)""",
    )


def test_centered_rmsprop(text, params) -> None:
    assert_expected_inline(
        text(torch.optim.RMSprop(params((8, 8)), centered=True, momentum=0.9)),
        """\
square_avg in [0, inf) is kept:
  x1 = mul(square_avg, 0.99) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  fma(x2, 0.01, x1) in [0, inf)
grad_avg in (-inf, inf) is all that is known:
  lerp(grad_avg, grad, 0.01) in (-inf, inf)
momentum_buffer in (-inf, inf) is all that is known:
  square_avg in [0, inf)
  x1 = mul(square_avg, 0.99) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  x3 = fma(x2, 0.01, x1) in [0, inf)
  x4 = lerp(grad_avg, grad, 0.01) in (-inf, inf)
  x5 = addcmul(x3, x4, x4, value=-1) in (-inf, inf)
  x6 = sqrt(x5) in [0, inf)
  x7 = add(x6, 1e-08) in [1e-08, inf)
  x8 = mul(momentum_buffer, 0.9) in (-inf, inf)
  addcdiv(x8, grad, x7) in (-inf, inf)""",
    )


def test_adadelta(text, params) -> None:
    assert_expected_inline(
        text(torch.optim.Adadelta(params((8, 8)))),
        """\
square_avg in [0, inf) is kept:
  x1 = mul(square_avg, 0.9) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  fma(x2, 0.1, x1) in [0, inf)
acc_delta in [0, inf) is kept:
  square_avg in [0, inf)
  x1 = mul(square_avg, 0.9) in [0, inf)
  x2 = mul(grad, grad) in [0, inf)
  x3 = fma(x2, 0.1, x1) in [0, inf)
  x4 = add(x3, 1e-06) in [1e-06, inf)
  x5 = sqrt(x4) in [0.001, inf)
  x6 = add(acc_delta, 1e-06) in [1e-06, inf)
  x7 = sqrt(x6) in [0.001, inf)
  x8 = div(x7, x5) in [0, inf)
  x9 = mul(x8, grad) in (-inf, inf)
  x10 = mul(acc_delta, 0.9) in [0, inf)
  x11 = mul(x9, x9) in [0, inf)
  fma(x11, 0.1, x10) in [0, inf)""",
    )


def test_rprop(text, params) -> None:
    assert_expected_inline(
        text(torch.optim.Rprop(params((8, 8))), "step_size"),
        """\
step_size in [0, 50] is kept:
  number0 in [1.2, 1.2]
  number1 in [0.5, 0.5]
  number2 in [1, 1]
  x1 = mul(grad, prev) in (-inf, inf)
  x2 = sign(x1) in [-1, 1]
  x3 = gt(x2, 0) in [0, 1]
  x4 = where(x3, number0, x2) in [-1, 1.2]
  x5 = lt(x4, 0) in [0, 1]
  x6 = where(x5, number1, x4) in [-1, 1.2]
  x7 = eq(x6, 0) in [0, 1]
  x8 = where(x7, number2, x6) in [-1, 1.2]
  x9 = mul(step_size, x8) in [-50, 60]
  clamp(x9, 1e-06, 50) in [1e-06, 50]""",
    )


def test_asgd(text, params) -> None:
    assert_expected_inline(
        text(torch.optim.ASGD(params((8, 8)))),
        """\
ax in (-inf, inf) is all that is known:
  number0 in [0, inf)
  number1 in [0, inf)
  number2 in (-inf, 1]
  x1 = mul(param, number2) in (-inf, inf)
  x2 = mul(grad, number0) in (-inf, inf)
  x3 = fma(x2, -1, x1) in (-inf, inf)
  x4 = sub(x3, ax) in (-inf, inf)
  x5 = mul(x4, number1) in (-inf, inf)
  add(ax, x5) in (-inf, inf)""",
    )


def test_handmade(text, params) -> None:
    def lion(p: Tensor, g: Tensor, exp_avg: Tensor) -> None:
        p.sub_(exp_avg.lerp(g, 0.1).sign_(), alpha=1e-4)
        exp_avg.lerp_(g, 0.01)

    def voting(p: Tensor, g: Tensor, vote: Tensor, debt: Tensor) -> None:
        vote.mul_(0.9).add_(g.sign(), alpha=0.1)
        debt.mul_(0.5).sub_(g.abs())
        p.sub_(vote / (1 - debt))

    found = [text(Handmade(params((8, 8)), lion, "exp_avg")), text(Handmade(params((8, 8)), voting, "vote", "debt"))]
    assert_expected_inline(
        "\n".join(found),
        """\
exp_avg in (-inf, inf) is all that is known:
  lerp(exp_avg, grad, 0.01) in (-inf, inf)
vote in [-1, 1] is kept:
  x1 = mul(vote, 0.9) in [-0.9, 0.9]
  x2 = sign(grad) in [-1, 1]
  add(x1, x2, alpha=0.1) in [-1, 1]
debt in (-inf, 0] is kept:
  x1 = mul(debt, 0.5) in (-inf, 0]
  x2 = abs(grad) in [0, inf)
  sub(x1, x2) in (-inf, 0]""",
    )


SIGNS = {
    "AdamW": (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg_sq", "max_exp_avg_sq"}),
    "Adam": (lambda p: torch.optim.Adam(p, weight_decay=0.1), {"exp_avg_sq"}),
    "NAdam": (lambda p: torch.optim.NAdam(p), {"exp_avg_sq"}),
    "RAdam": (lambda p: torch.optim.RAdam(p), {"exp_avg_sq"}),
    "Adamax": (lambda p: torch.optim.Adamax(p), {"exp_inf"}),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), {"sum"}),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), {"square_avg", "acc_delta"}),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), {"square_avg"}),
    "SGD": (lambda p: torch.optim.SGD(p, momentum=0.9), set()),
    "ASGD": (lambda p: torch.optim.ASGD(p), set()),
    "Rprop": (lambda p: torch.optim.Rprop(p), {"step_size"}),
}


@pytest.mark.parametrize(("make", "expected"), SIGNS.values(), ids=SIGNS)
def test_which_are_non_negative(proofs, params, make, expected: set[str]) -> None:
    found = proofs(make(params((8, 8))))
    assert {key for key, proof in found.items() if proof.non_negative} == expected
    assert {key for key, proof in found.items() if proof.kind == "unknown"} == set(found) - expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("make", "expected"), SIGNS.values(), ids=SIGNS)
def test_a_real_run_stays_within(capture, analyse, params, make, expected: set[str], dtype: torch.dtype) -> None:
    (p,) = params((8, 8), dtype=dtype)
    optimizer = make([p])
    program, names = only_program(capture, analyse, optimizer)
    fresh = make(params((8, 8), dtype=dtype))
    first = {k: v for s in fresh.state.values() for k, v in s.items() if v.dim()}
    if isinstance(fresh, torch.optim.Rprop):
        first = {"step_size": torch.tensor(0.01)}
    starts = [
        Interval(v.min().item(), v.max().item()) if (v := first.get(name)) is not None else None for name in names
    ]
    found = dict(zip(names, infer_sign(program, starts), strict=True))
    (p,) = fresh.param_groups[0]["params"]
    for i in range(30):
        p.grad = (torch.randn(8, 8) * 10.0 ** (i % 7 - 3)).to(dtype)
        fresh.step()
        for key, value in fresh.state[p].items():
            if key in found:
                assert Interval(value.min().item(), value.max().item()) in found[key].interval, (key, i)


def test_average_of_signs_is_bounded(handmade) -> None:
    """The bound has room for the rounding of each step: 0.9 * m + 0.1 * sign(g) can pass 1 by some ulps."""

    def update(p: Tensor, g: Tensor, m: Tensor, slow: Tensor, total: Tensor) -> None:
        m.mul_(0.9).add_(g.sign(), alpha=0.1)
        slow.mul_(0.999).add_(m, alpha=0.001)
        total.mul_(0.9).add_(g.clamp(-2, 3))
        p.sub_(m + slow + total)

    found = handmade(update, "m", "slow", "total")
    assert [str(found[key].interval) for key in ("m", "slow", "total")] == ["[-1, 1]", "[-1, 1]", "[-20, 30]"]
    assert 1 < found["m"].interval.high < 1 + 1e-5 < found["slow"].interval.high < 1 + 1e-3
    assert {proof.kind for proof in found.values()} == {"bounded"}


def test_a_bound_up_to_rounding_proves_no_sign(handmade) -> None:
    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, w: Tensor) -> None:
        m.mul_(0.9).add_(g.sign(), alpha=0.1)
        v.add_(1 - m)
        w.add_(1 - g.sign())
        p.sub_(v + w)

    found = handmade(update, "m", "v", "w")
    assert found["v"].kind == "unknown"
    assert found["w"].kind == "non-negative"


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (lambda p, g, m: p.sub_(m.mul_(0.9).sub_(g * g)), "(-inf, 0]"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_(g)), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_(g * g).sub_(0.1)), "[-1, inf)"),
        (lambda p, g, m: p.sub_(m.add_(g * g).sub_(0.1)), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(-0.9).add_(g * g)), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(g / m.lerp_(g.square(), 0.1).sqrt()), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.lerp_(g.square(), 1.5)), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(m.lerp_(g.square(), g)), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(m.lerp_(g.square(), g.sigmoid())), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.add_((g.square() - m) * g.sigmoid())), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_(0.1 * g * g)), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).addcmul_(g, g.clone(), value=0.1)), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).addcmul_(g + p, p + g)), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).addcmul_(g + p, g + p)), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).addcmul_(g * p, g * p, value=-0.1)), "(-inf, 0]"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_(g * g * g)), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_((g / p) * g * p)), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_(g * g.half())), "[0, inf)"),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_((g - 1) * (g.half().float() - 1))), "(-inf, inf)"),
        (lambda p, g, m: p.sub_(m.copy_(torch.maximum(m * 0.5, g.abs()).clamp(max=3))), "[0, 3]"),
        (lambda p, g, m: p.sub_(m.mul_(1.5).add_(g * g).clamp_(1e-6, 50)), "[0, 50]"),
        (lambda p, g, m: p.sub_(m.copy_(g.tanh() * g.exp().sqrt().sin())), "[-1, 1]"),
        (lambda p, g, m: p.sub_(m.copy_(g.clamp(1e-30, 1) ** 2)), "[0, 1]"),  # the square of 1e-30 is zero in fp32
        (lambda p, g, m: p.sub_(m.add_(1).erfinv_()), "(-inf, inf)"),
    ],
)
def test_of_one_state(handmade, update, expected: str) -> None:
    assert str(handmade(update, "m")["m"].interval) == expected


def test_a_state_that_follows_one_of_unknown_sign(handmade) -> None:
    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, w: Tensor) -> None:
        w.mul_(0.9).add_(v)
        v.mul_(0.9).add_(m * m * m)
        m.lerp_(g, 0.1)
        p.sub_(w)

    assert {key: proof.kind for key, proof in handmade(update, "m", "v", "w").items()} == dict.fromkeys(
        "mvw", "unknown"
    )


def test_states_that_rely_on_each_other(handmade) -> None:
    def update(p: Tensor, g: Tensor, v: Tensor, w: Tensor) -> None:
        v.mul_(0.9).addcmul_(w, g.abs())
        w.mul_(0.9).addcmul_(v, g * g).add_(1)
        p.sub_(w)

    assert {proof.kind for proof in handmade(update, "v", "w").values()} == {"non-negative"}
    assert {proof.kind for proof in handmade(update, "v", "w", w=Interval(-1, 0)).values()} == {"unknown"}


def test_a_start_outside(proofs, params) -> None:
    optimizer = torch.optim.RMSprop(params((8, 8)))
    assert str(proofs(optimizer, square_avg=Interval(-0.1, 2))["square_avg"].interval) == "[-0.1, inf)"
    assert proofs(optimizer, square_avg=Interval(0.1, 2))["square_avg"].interval == Interval(0, math.inf)
    optimizer = torch.optim.Rprop(params((8, 8)))
    assert str(proofs(optimizer, step_size=Interval(100, 100))["step_size"].interval) == "[1e-06, 100]"


def test_numbers(capture, analyse, params) -> None:
    """A step counter is at least one after its step, so that Adam's corrections are in (0, 1]."""

    def update(p: Tensor, g: Tensor, m: Tensor, step: Tensor) -> None:
        step += 1
        m.lerp_(g.square(), 1 / step)
        p.sub_(m * (1 - 0.999**step).sqrt())

    program, names = only_program(capture, analyse, Handmade(params((8, 8)), update, "m", "step"))
    found = infer_sign(program)
    assert found[names.index("m")].non_negative
    values = intervals_of(program, found)
    numbers = [n for n in values if n.op == "placeholder"][len(names) :]
    assert sorted(str(values[n]) for n in numbers) == ["[0, 1]", "[0.03162, 1]"]
    assert infer_sign(program, None, [ANY] * len(program.numbers))[names.index("m")].kind == "unknown"


def test_an_unknown_number_as_weight(capture, analyse, params) -> None:
    def update(p: Tensor, g: Tensor, m: Tensor, rate: Tensor) -> None:
        m.lerp_(g.square(), rate)
        p.sub_(m)

    rate = torch.tensor(0.1)
    optimizer = Handmade(params((8, 8)), lambda p, g, m: update(p, g, m, rate), "m")
    program, names = only_program(capture, analyse, optimizer)
    assert infer_sign(program)[names.index("m")].kind == "unknown"


def test_operands_that_are_no_written_state(capture, analyse, params) -> None:
    def update(p: Tensor, g: Tensor, v: Tensor, mask: Tensor) -> None:
        v.addcmul_(g * mask, g * mask)
        p.sub_(v)

    program, names = only_program(capture, analyse, Handmade(params((8, 8)), update, "v", "mask"))
    found = dict(zip(names, infer_sign(program), strict=True))
    assert all(found[key].interval == ANY and not found[key].steps for key in ("param", "grad", "mask"))
    assert str(found["mask"]) == f"operand{names.index('mask')} in (-inf, inf) is all that is known"
