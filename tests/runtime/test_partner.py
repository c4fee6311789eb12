"""A first moment in update space: what it decodes to depends on the second moment, and nothing may pull them apart."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from qcompile.exc import LostPartnerError
from qcompile.recipes import RECIPES
from qcompile.runtime.state import QuantizedState

FIRST, SECOND = RECIPES["8bit"].first, RECIPES["8bit"].second


def pair(numel: int = 1000) -> tuple[QuantizedState, QuantizedState]:
    squares = torch.rand(numel) ** 4
    v = QuantizedState.quantize(squares, SECOND, key=3)
    return QuantizedState.quantize(torch.randn(numel) * 0.3 * squares.sqrt(), FIRST, partner=v), v


def close(m: Tensor, expected: Tensor, v: Tensor) -> None:
    """Half a step of the block's largest update, times what divides it; 1e-3 of that for the short scale."""
    denominator = v.sqrt() + 1e-8
    largest = (expected / denominator)[:768].view(-1, 256).abs().amax(1).repeat_interleave(256)
    bound = largest * denominator[:768] * (0.5 / 127 + 1e-3)
    assert ((m - expected)[:768].abs() <= bound).all()
    assert torch.equal(m[768:], expected[768:]), "the tail is exact"


def test_the_error_is_the_error_of_the_update() -> None:
    squares = torch.rand(1000) ** 4
    v = QuantizedState.quantize(squares, SECOND)
    dense = torch.randn(1000) * 0.3 * squares.sqrt()
    close(QuantizedState.quantize(dense, FIRST, partner=v).dequantize(), dense, v.dequantize())


def test_writing_the_second_moment_keeps_the_first() -> None:
    m, v = pair()
    before = m.dequantize()
    v.mul_(0.01)
    close(m.dequantize(), before, v.dequantize())
    v.requantize_(RECIPES["dettmers-8bit"].second)
    assert ((m.dequantize() - before).abs() <= 0.05 * before.abs().max()).all()


def test_both_written_by_one_operator() -> None:
    for order in (0, 1):
        m, v = pair()
        expected_m, expected_v = m.dequantize() * 0.5, v.dequantize() * 0.5
        torch._foreach_mul_([m, v][:: 1 - 2 * order], 0.5)
        close(m.dequantize(), expected_m, v.dequantize())
        assert (v.dequantize() - expected_v).abs().max() <= 0.12 * expected_v.max()


def test_a_clone_does_not_follow_the_original() -> None:
    m, v = pair()
    twin, before = m.clone(), m.dequantize()
    v.zero_()
    assert torch.equal(twin.dequantize(), before)
    assert not m.dequantize()[:768].any(), "where the second moment is 0 no first moment is stored"
    assert torch.equal(m.dequantize()[768:], before[768:])


def test_a_detached_alias_follows() -> None:
    m, v = pair()
    alias = m.detach()
    before = m.dequantize()
    del m
    v.mul_(0.25)
    close(alias.dequantize(), before, v.dequantize())


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_of_a_state_dict_are_pairs_again(how: str) -> None:
    m, v = pair()
    state = {"exp_avg": m, "exp_avg_sq": v}
    if how == "deepcopy":
        again = copy.deepcopy(state)
    else:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert again["exp_avg"].partner is again["exp_avg_sq"]
    assert again["exp_avg_sq"] is not v
    for name, value in state.items():
        assert torch.equal(again[name].dequantize(), value.dequantize())
        assert again[name].format == value.format
    assert torch.equal(again["exp_avg_sq"].counter, v.counter)
    again["exp_avg_sq"].mul_(0.5)
    close(again["exp_avg"].dequantize(), m.dequantize(), again["exp_avg_sq"].dequantize())


def test_a_lost_partner_is_an_error_that_says_what_to_do() -> None:
    m, v = pair()
    expected = m.dequantize()
    names, metadata = m.__tensor_flatten__()
    alone = QuantizedState.__tensor_unflatten__({n: getattr(m, n) for n in names}, metadata, m.shape, m.stride())
    with pytest.raises(LostPartnerError, match=r"relative to 'exp_avg_sq'.*attach_"):
        alone.dequantize()
    alone.attach_(v)
    assert torch.equal(alone.dequantize(), expected)


def test_storing_what_was_read_changes_no_bit() -> None:
    m, v = pair()
    codes, scale, values = m.codes.clone(), m.scale.clone(), m.dequantize()
    for _ in range(3):
        dense_m, dense_v = m.dequantize(), v.dequantize()
        v.store_(dense_v)
        m.store_(dense_m)
    assert torch.equal(m.codes, codes)
    assert torch.equal(m.scale, scale)
    assert torch.equal(m.dequantize(), values)


def test_an_element_whose_second_moment_overflowed_does_not_take_its_block() -> None:
    dense = torch.full((256,), 0.01)
    squares = torch.full((256,), 1e-4)
    clean = QuantizedState.quantize(dense, FIRST, partner=QuantizedState.quantize(squares, SECOND))
    dense[7], squares[7] = 1e19, float("inf")
    m = QuantizedState.quantize(dense, FIRST, partner=QuantizedState.quantize(squares, SECOND))
    others = torch.arange(256) != 7
    assert torch.equal(m.dequantize()[others], clean.dequantize()[others])
    assert m.dequantize()[7] == 0


def test_a_compiled_function_reads_its_values() -> None:
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters())
    step = torch.compile(optimizer.step, backend="qstate")
    norm = torch.compile(lambda: optimizer.state[layer.weight]["exp_avg"].norm(), backend="qstate")
    for _ in range(3):
        layer(torch.randn(4, 64)).square().mean().backward()
        step()
        state = optimizer.state[layer.weight]["exp_avg"]
        assert state.format.coordinate == "update"
        torch.testing.assert_close(norm(), state.dequantize().norm())
