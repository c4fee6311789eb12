"""Formats and reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from qcompile.overrides import Override
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


def test_a_negative_value_now_makes_it_signed(capture, analyse, params) -> None:
    (p,) = params((64, 64))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"][0, 0] = -1
    found = plans(capture, analyse, optimizer)
    assert found[0, "exp_avg_sq"].format.signed
    assert not found[0, "exp_avg_sq"].non_negative
    assert found[0, "exp_avg"].format.partner is None, "a root of it would not be a number"


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
