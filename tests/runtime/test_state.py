"""`QuantizedState` reads as the dense tensor, writes through, and keeps its storage where it should."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

from qcompile.recipes import RECIPES
from qcompile.runtime import state as state_module
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import flat, is_flat, like, same_order
from qcompile.runtime.state import QuantizedState

SIGNED = Format(True, block_size=256)


def close(a: Tensor, b: Tensor, rounding: float = 0.0) -> None:
    """Equal up to the signed map's half cell of the largest element, and up to rounding to a narrower dtype."""
    assert (a - b).abs().max() <= (0.9 / 64 / 2 * 1.001 + rounding) * b.abs().max()


@pytest.mark.parametrize("numel", [1, 2, 63, 255, 256, 257, 511, 4095, 4097])
def test_tails_are_kept_exactly(numel: int) -> None:
    x = torch.randn(numel)
    q = QuantizedState.quantize(x, SIGNED)
    assert q.codes.shape == (numel // 256, 256)
    assert q.scale.shape == (numel // 256, 1)
    close(q.dequantize(), x)
    assert torch.equal(q.dequantize()[numel - numel % 256 :], x[numel - numel % 256 :])


def test_empty_state() -> None:
    q = QuantizedState.quantize(torch.empty(0, 128), SIGNED)
    assert q.shape == (0, 128)
    assert q.stored_bytes == 0
    assert q.dequantize().shape == (0, 128)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(48, 64).t(),
        torch.randn(8, 16, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(48, 64).bfloat16(),
        torch.randn(48, 64).double(),
    ],
    ids=["transposed", "channels_last", "bf16", "fp64"],
)
def test_shape_stride_and_dtype_are_the_dense_ones(x: Tensor) -> None:
    q = QuantizedState.quantize(x, SIGNED)
    assert (q.shape, q.stride(), q.dtype, q.device) == (x.shape, x.stride(), x.dtype, x.device)
    assert q.dequantize().stride() == x.stride()
    close(q.dequantize().float(), x.float(), rounding=2**-8 if x.dtype == torch.bfloat16 else 0.0)


def test_reads_like_the_dense_tensor() -> None:
    x = torch.randn(30, 40)
    q = QuantizedState.quantize(x, SIGNED)
    dense = q.dequantize()
    assert torch.equal(q.norm(), dense.norm())
    assert torch.equal(q + 1, dense + 1)
    assert torch.equal(q[3], dense[3])
    assert torch.equal(q.t(), dense.t())
    assert torch.equal(torch.cat([q, q]), torch.cat([dense, dense]))
    assert float(q.sum()) == float(dense.sum())


def test_in_place_operators_write_through() -> None:
    x = torch.randn(30, 40)
    q = QuantizedState.quantize(x, SIGNED)
    assert q.mul_(2) is q
    close(q.dequantize(), 2 * x)
    q[3] = 0
    assert not q[3].any()
    torch._foreach_mul_([q], 0.5)
    close(q.dequantize()[4:], x[4:])
    torch.add(x, 1, out=q)
    close(q.dequantize(), x + 1)
    q.zero_()
    assert not q.codes.any()


def test_storing_unchanged_values_changes_no_code() -> None:
    q = QuantizedState.quantize(torch.randn(64, 64), SIGNED)
    codes, scale = q.codes.clone(), q.scale.clone()
    q.mul_(1)
    q.copy_(q.dequantize())
    assert torch.equal(q.codes, codes)
    assert torch.equal(q.scale, scale)


def test_chunks_do_not_change_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5000)
    whole = QuantizedState.quantize(x, SIGNED)
    monkeypatch.setattr(state_module, "CHUNK", 512)
    parts = QuantizedState.quantize(x, SIGNED)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.dequantize(), parts.dequantize())


def test_copies_keep_codes() -> None:
    q = QuantizedState.quantize(torch.randn(1000), SIGNED)
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    copies = {
        "clone": q.clone(),
        "deepcopy": copy.deepcopy(q),
        "detach": q.detach(),
        "pickle": pickle.loads(pickle.dumps(q)),
        "save": torch.load(buffer, weights_only=False),
    }
    for name, other in copies.items():
        assert isinstance(other, QuantizedState), name
        assert torch.equal(other.codes, q.codes), name
        assert torch.equal(other.scale, q.scale), name
        assert torch.equal(other.tail, q.tail), name
        assert other.format == q.format, name
    assert copies["deepcopy"].codes.data_ptr() != q.codes.data_ptr()


def test_cast_keeps_scales() -> None:
    q = QuantizedState.quantize(torch.randn(1000), SIGNED)
    narrow = q.to(torch.bfloat16)
    assert isinstance(narrow, QuantizedState)
    assert narrow.dtype == torch.bfloat16
    assert narrow.scale.dtype == torch.float32
    assert torch.equal(narrow.scale, q.scale)
    assert q.to(torch.int32).dtype == torch.int32


def test_requantize_changes_format_and_keeps_zero() -> None:
    x = torch.rand(1000)
    x[::3] = 0
    q = QuantizedState.quantize(x, SIGNED)
    q.requantize_(Format(False, block_size=64))
    assert q.codes.shape == (15, 64)
    assert torch.equal(q == 0, x == 0)


def test_bytes() -> None:
    q = QuantizedState.quantize(torch.randn(1000), SIGNED)
    assert q.stored_bytes == 3 * 256 + 3 * 4 + 232 * 4


def test_layout() -> None:
    x = torch.randn(4, 6)
    assert is_flat(x)
    assert is_flat(x.t())
    assert not is_flat(x[:, :3])
    assert not is_flat(x[:1].expand(4, 6))
    assert torch.equal(flat(x.t()), x.flatten())
    assert same_order(x, x.clone())
    assert not same_order(x, x.t().contiguous().t())
    moved = like(x, x.t().contiguous().t())
    assert torch.equal(moved, x)
    assert moved.stride() == (1, 4)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.signed is not None])
def test_a_format_changes_and_values_stay_where_all_codes_are_zero(name: str) -> None:
    """A constant negative state has the least code everywhere, which is 0 as that of a state that was just made."""
    fmt, other = RECIPES[name].signed, RECIPES["dettmers-8bit"].signed
    assert fmt is not None
    assert other is not None
    state = QuantizedState.quantize(torch.full((4, fmt.block_size), -2.0), fmt)
    before = state.dequantize()
    state.requantize_(other)
    assert torch.allclose(state.dequantize(), before, rtol=0.05)
