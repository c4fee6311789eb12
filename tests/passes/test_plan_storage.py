"""Formats and reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from handmade import Handmade
from torch import Tensor, nn

from qcompile.overrides import Override
from qcompile.passes.plan_storage import AVERAGE, COPY, SUM
from qcompile.plan import converted
from qcompile.recipes import RECIPES
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import row_order
from qcompile.runtime.state import QuantizedState

PAIRS = [
    pytest.param(torch.optim.Adam, "exp_avg_sq", id="Adam"),
    pytest.param(lambda p: torch.optim.Adam(p, amsgrad=True), "max_exp_avg_sq", id="amsgrad"),
    pytest.param(torch.optim.AdamW, "exp_avg_sq", id="AdamW"),
    pytest.param(torch.optim.NAdam, "exp_avg_sq", id="NAdam"),
    pytest.param(torch.optim.RAdam, "exp_avg_sq", id="RAdam"),
]


def plans(capture, analyse, optimizer, **options):
    """Plans by (position of the parameter, key)."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.randn_like(p)
    if not optimizer.state:
        optimizer.step()
    compiled = analyse(*capture(optimizer.step), **options)
    found = [plan for group in compiled.classes for item in group.regions for plan in item.plans.values()]
    found += compiled.refused.values()
    where = {id(p): i for i, p in enumerate(params)}
    return {(where[id(plan.slot.param)], plan.slot.key): plan for plan in found}


def test_formats_follow_the_part_that_a_state_plays(capture, analyse, params) -> None:
    found = plans(capture, analyse, torch.optim.AdamW(params((64, 128)), eps=1e-6), block_size=128)
    first = replace(RECIPES["8bit"].first, block_size=128, partner="exp_avg_sq", eps=1e-6)
    assert found[0, "exp_avg"].format == first
    assert found[0, "exp_avg_sq"].format == replace(RECIPES["8bit"].second, block_size=128)
    assert found[0, "exp_avg_sq"].non_negative
    sgd = plans(capture, analyse, torch.optim.SGD(params((64, 128)), lr=0.1, momentum=0.9), block_size=128)
    assert sgd[0, "momentum_buffer"].format == replace(RECIPES["8bit"].signed, block_size=128)


@pytest.mark.parametrize(("make", "second"), PAIRS)
def test_first_moments_of_stock_optimizers_know_what_divides_them(capture, analyse, params, make, second) -> None:
    found = plans(capture, analyse, make(params((64, 128))))
    assert found[0, "exp_avg"].format.partner == second
    assert found[0, second].format.coordinate == "pseudo-log"


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((64, 96), 32), ((64, 768), 256), ((64, 1600), 64), ((64, 100), 256), ((16, 32, 3, 3), 32), ((8192,), 256)],
)
def test_no_block_straddles_a_row(capture, analyse, params, shape, block_size) -> None:
    found = plans(capture, analyse, torch.optim.AdamW(params(shape)))
    assert {plan.format.block_size for plan in found.values()} == {block_size}
    as_published = plans(capture, analyse, torch.optim.AdamW(params((64, 96))), recipe="torchao-8bit")
    assert as_published[0, "exp_avg"].format.block_size == 256


def test_preconditioner_rounding_needs_something_that_is_divided(capture, analyse, params) -> None:
    adam = plans(capture, analyse, torch.optim.Adam(params((64, 128))), recipe="zip-sr")
    assert adam[0, "exp_avg_sq"].format.rounding == "preconditioner"
    rmsprop = plans(capture, analyse, torch.optim.RMSprop(params((64, 128))), recipe="zip-sr")
    assert rmsprop[0, "square_avg"].format.rounding == "stochastic"


def test_a_region_has_one_block_size(capture, analyse, params) -> None:
    small = replace(RECIPES["torchao-8bit"].second, block_size=64)
    overrides = [Override("*", small, "exp_avg_sq")]
    found = plans(capture, analyse, torch.optim.AdamW(params((64, 128))), recipe="torchao-8bit", overrides=overrides)
    assert {plan.format.block_size for plan in found.values()} == {64}


def test_small_state_is_dense_by_choice(capture, analyse, params) -> None:
    found = plans(capture, analyse, torch.optim.AdamW(params((64, 64), (63, 65), (10,))))
    assert found[0, "exp_avg"].format is not None
    assert found[1, "exp_avg"].reason == "4095 elements, fewer than min_numel=4096"
    assert found[2, "exp_avg"].by_choice


def test_fewer_elements_than_a_block(capture, analyse, params) -> None:
    found = plans(capture, analyse, torch.optim.AdamW(params((10, 10))), min_numel=0)
    assert found[0, "exp_avg"].reason == "100 elements, fewer than a block of 256"


def test_dense_recipe(capture, analyse, params) -> None:
    found = plans(capture, analyse, torch.optim.AdamW(params((64, 64))), recipe="dense")
    assert all(p.reason == "recipe 'dense' keeps state dense" and p.by_choice for p in found.values())


def test_a_negative_value_now_keeps_it_dense_where_a_root_is_taken(capture, analyse, params) -> None:
    (p,) = params((64, 64))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"][0, 0] = -1
    found = plans(capture, analyse, optimizer)
    assert found[0, "exp_avg_sq"].proved == "unknown"
    assert found[0, "exp_avg_sq"].format is None
    assert found[0, "exp_avg_sq"].reason == "the update needs exp_avg_sq >= 0, which rounding can break"
    assert not found[0, "exp_avg_sq"].by_choice
    assert found[0, "exp_avg"].format is not None
    assert found[0, "exp_avg"].format.partner is None, "a root of it would not be a number"


def test_a_negative_value_now_makes_it_signed(capture, analyse, params) -> None:
    """Where nothing needs it to be positive. Its proof is made again from the values that are there."""
    found = {}
    for lowest in (0, -100):
        torch._dynamo.reset()
        optimizer = Handmade(params((64, 64)), lambda p, g, v: p.sub_(v.mul_(0.9).addcmul_(g, g)), "v")
        optimizer.state[optimizer.param_groups[0]["params"][0]]["v"][0, 0] = lowest
        found[lowest] = plans(capture, analyse, optimizer)[0, "v"]
    assert [found[0].proved, found[-100].proved] == ["non-negative", "unknown"]
    assert [found[0].format.signed, found[-100].format.signed] == [False, True]
    assert found[0].facts[0].startswith("v in [0, inf) is kept")
    assert found[-100].facts[0].startswith("v in [-8"), "the step that was captured has run"


def test_state_that_begins_at_lr_is_proved_from_there(capture, analyse, params) -> None:
    """Proofs begin at zero; Rprop's step size, clamped from above, begins at lr: 60 would be outside."""
    found = plans(capture, analyse, torch.optim.Rprop(params((64, 64)), lr=60.0, step_sizes=(1e-6, 80.0)))
    assert found[0, "step_size"].proved == "non-negative"
    assert found[0, "step_size"].facts[0].startswith("step_size in [0, 80] is kept")


@pytest.mark.parametrize(
    ("update", "proved", "kind"),
    [
        (lambda p, g, m: p.sub_(m.lerp_(g * g, 0.1)), "non-negative", "second"),
        (lambda p, g, m: p.sub_(m.lerp_(-g.abs(), 0.1)), "non-positive", "signed"),
        (lambda p, g, m: p.sub_(m.lerp_(g.sign(), 0.1)), "bounded", "signed"),
        (lambda p, g, m: p.sub_(m.lerp_(g, 0.1)), "unknown", "signed"),
    ],
    ids=["non-negative", "non-positive", "bounded", "unknown"],
)
def test_what_is_proved_and_what_follows(capture, analyse, params, update, proved: str, kind: str) -> None:
    plan = plans(capture, analyse, Handmade(params((64, 64)), update, "m"))[0, "m"]
    assert (plan.proved, plan.non_negative) == (proved, proved == "non-negative")
    assert plan.format == replace(getattr(RECIPES["8bit"], kind), block_size=64)


def averaged(p: Tensor, g: Tensor, ema: Tensor) -> None:
    p.sub_(0.1 * g)
    ema.lerp_(p, 0.01)


def copied(p: Tensor, g: Tensor, last: Tensor) -> None:
    p.sub_(0.1 * g)
    last.copy_(p)


def summed(p: Tensor, g: Tensor, total: Tensor) -> None:
    p.sub_(total.add_(g))


def magnified(p: Tensor, g: Tensor, product: Tensor) -> None:
    product.mul_(0.9).add_(0.1 * (g * g).clamp(max=0.99))
    p.sub_(g / (1 - product))


MAGNIFIED = "h(v) = -1/(v - 1) magnifies what rounding changes 99 times"


@pytest.mark.parametrize(
    ("update", "key", "reason"),
    [(averaged, "ema", AVERAGE), (copied, "last", COPY), (summed, "total", SUM), (magnified, "product", MAGNIFIED)],
)
def test_dense_whatever_the_recipe(capture, analyse, params, update, key: str, reason: str) -> None:
    optimizer = Handmade(params((64, 64)), update, key)
    for recipe in ("8bit", "4bit", "torchao-8bit"):
        torch._dynamo.reset()
        plan = plans(capture, analyse, optimizer, recipe=recipe)[0, key]
        assert (plan.format, plan.reason, plan.by_choice) == (None, reason, False)


def test_a_root_of_a_difference_keeps_both_dense(capture, analyse, params) -> None:
    found = plans(capture, analyse, torch.optim.RMSprop(params((64, 64)), centered=True, momentum=0.9))
    needs = "the update needs square_avg - grad_avg**2 >= 0, which rounding can break"
    assert {key: plan.reason for (_, key), plan in found.items()} == {
        "square_avg": needs,
        "grad_avg": needs,
        "momentum_buffer": None,
    }


def test_a_sum_that_only_grows_is_quantized(capture, analyse, params) -> None:
    assert plans(capture, analyse, torch.optim.Adagrad(params((64, 64))))[0, "sum"].format is not None


def test_slots_say_where_state_is(capture, analyse, params) -> None:
    optimizer = torch.optim.AdamW(params((64, 64)))
    (p,) = optimizer.param_groups[0]["params"]
    for (_, key), plan in plans(capture, analyse, optimizer).items():
        assert (plan.slot.key, plan.slot.path, plan.slot.param) == (key, (key,), p)
        assert plan.slot.optimizer() is optimizer
        assert plan.slot.get() is optimizer.state[p][key]
        assert plan.partner is None or plan.partner.get() is optimizer.state[p]["exp_avg_sq"]


def test_state_in_another_order_than_its_parameter(capture, analyse, params) -> None:
    (p,) = params((64, 64))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t().contiguous().t()
    found = plans(capture, analyse, optimizer)
    assert found[0, "exp_avg"].format is not None
    transposed = QuantizedState.quantize(optimizer.state[p]["exp_avg"], Format(True, block_size=256))
    stored = converted(transposed, Format(True, block_size=256), row_order(p))
    assert stored.stride() == p.stride()
    assert (stored - transposed).abs().max() <= 0.0071 * transposed.abs().max()


@pytest.mark.parametrize("storage", [(64, 128), (128, 64)])
def test_a_parameter_with_gaps_has_contiguous_state(capture, analyse, storage) -> None:
    p = nn.Parameter(torch.randn(storage)[:64, :64])
    found = plans(capture, analyse, torch.optim.AdamW([p]))
    assert found[0, "exp_avg"].format is not None


def test_quantized_state_is_planned_again(capture, analyse, params) -> None:
    (p,) = params((64, 64))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][key] = QuantizedState.quantize(optimizer.state[p][key], Format(True, block_size=256))
    found = plans(capture, analyse, optimizer)
    assert found[0, "exp_avg_sq"].format == replace(RECIPES["8bit"].second, block_size=64)


def test_a_sum_is_rounded_without_bias_in_its_value(capture, analyse, params) -> None:
    """What is added up for ever must not drift: 8bit rounds other second moments without bias in their logarithm."""
    adagrad = plans(capture, analyse, torch.optim.Adagrad(params((64, 128))))
    rmsprop = plans(capture, analyse, torch.optim.RMSprop(params((64, 128))))
    assert adagrad[0, "sum"].format.rounding == "stochastic"
    assert rmsprop[0, "square_avg"].format.rounding == "coordinate"
