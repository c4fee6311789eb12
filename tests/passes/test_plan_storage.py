"""Formats and reasons."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qcompile.plan import converted
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import row_order
from qcompile.runtime.state import QuantizedState


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
    return {(where[id(plan.param())], plan.key): plan for plan in found}


def test_formats_follow_sign_and_options(capture, analyse, params) -> None:
    found = plans(capture, analyse, torch.optim.AdamW(params((64, 64))), block_size=128)
    assert found[0, "exp_avg"].format == Format(True, 128)
    assert found[0, "exp_avg_sq"].format == Format(False, 128)
    assert found[0, "exp_avg_sq"].non_negative


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
    assert found[0, "exp_avg_sq"].format == Format(True, 256)
    assert not found[0, "exp_avg_sq"].non_negative


def test_state_in_another_order_than_its_parameter(capture, analyse, params) -> None:
    (p,) = params((64, 64))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t().contiguous().t()
    found = plans(capture, analyse, optimizer)
    assert found[0, "exp_avg"].format == Format(True, 256)
    transposed = QuantizedState.quantize(optimizer.state[p]["exp_avg"], Format(True, 256))
    stored = converted(transposed, Format(True, 256), row_order(p))
    assert stored.stride() == p.stride()
    assert (stored - transposed).abs().max() <= 0.0071 * transposed.abs().max()


@pytest.mark.parametrize("storage", [(64, 128), (128, 64)])
def test_a_parameter_with_gaps_has_contiguous_state(capture, analyse, storage) -> None:
    p = nn.Parameter(torch.randn(storage)[:64, :64])
    found = plans(capture, analyse, torch.optim.AdamW([p]))
    assert found[0, "exp_avg"].format == Format(True, 256)


def test_quantized_state_is_planned_again(capture, analyse, params) -> None:
    (p,) = params((64, 64))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][key] = QuantizedState.quantize(optimizer.state[p][key], Format(True, 256))
    found = plans(capture, analyse, optimizer)
    assert found[0, "exp_avg_sq"].format == Format(False, 256)
