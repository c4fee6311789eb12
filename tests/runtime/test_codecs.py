"""The closed-form codec against the published map: over all codes, random inputs, and the numbers' contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qcompile.runtime.codebooks import dynamic_map
from qcompile.runtime.codecs import LARGEST_SCALE, LEAST_SCALE, decode_blocks, encode_blocks
from qcompile.runtime.formats import Format, is_block_size

SIGNED, UNSIGNED = Format(True, 256), Format(False, 256)


def published_map(signed: bool) -> np.ndarray:
    """The 256 values of `create_dynamic_map`, as papers.md section 2 states them: a twin written another way."""
    values = []
    for i in range(7):
        edges = np.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1)
        centres = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        values += [*centres, *(-centres if signed else ())]
    return np.sort(np.array([*values, 0.0, 1.0]))


def all_codes(fmt: Format) -> Tensor:
    return (torch.arange(-127, 128) if fmt.signed else torch.arange(256)).to(fmt.code_dtype)[None]


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Index of the nearest of sorted values, by search."""
    return torch.bucketize(x.double(), (values[1:] + values[:-1]) / 2)


def test_unsigned_map_is_the_published_one() -> None:
    np.testing.assert_allclose(dynamic_map(False), published_map(False), rtol=1e-14)
    assert dynamic_map(False)[:4].tolist() == pytest.approx([0, 3.25e-7, 7.75e-7, 2.125e-6])


def test_signed_map_is_the_published_one_made_symmetric() -> None:
    ours, theirs = dynamic_map(True).numpy(), published_map(True)
    assert np.array_equal(ours, -ours[::-1])
    assert len(theirs) == 256
    np.testing.assert_allclose(ours[128:], theirs[129:], rtol=1e-14)  # the positive side, without its least value
    np.testing.assert_allclose(ours[1:127], theirs[:126], rtol=1e-14)  # the negative side; ours begins with -1
    assert ours[0] == -1
    assert theirs[[126, 128]].tolist() == pytest.approx([-5.5e-7, 5.5e-7])


@pytest.mark.parametrize("fmt", [SIGNED, UNSIGNED], ids=str)
def test_every_code_decodes_to_its_value(fmt: Format) -> None:
    decoded = decode_blocks(all_codes(fmt), torch.ones(1, 1), fmt)[0]
    torch.testing.assert_close(decoded.double(), dynamic_map(fmt.signed), rtol=1e-6, atol=0)
    assert decoded[-1] == 1
    assert decoded[127 if fmt.signed else 0] == 0


@pytest.mark.parametrize("fmt", [SIGNED, UNSIGNED], ids=str)
def test_encode_is_nearest_code_for_a_million_inputs(fmt: Format) -> None:
    uniform = torch.rand(500_000)
    x = torch.cat([torch.ones(1), uniform, 10 ** (-8 * torch.rand(500_000))])
    if fmt.signed:
        x = x * torch.where(torch.rand_like(x) < 0.5, -1, 1)
    values = dynamic_map(fmt.signed)
    expected = nearest(x, values) - 127 if fmt.signed else nearest(x, values).clamp_min(1) * (x > 0)
    codes = encode_blocks(x[None], fmt)[0][0].long()
    wrong = (codes != expected).nonzero()[:, 0]
    ties = (values[1:] + values[:-1]) / 2
    assert all(((ties - x[i]).abs().min() / x[i].abs()) < 1e-6 for i in wrong), "differs away from a tie"
    assert len(wrong) < 100


@pytest.mark.parametrize("fmt", [SIGNED, UNSIGNED], ids=str)
@given(data=st.data())
def test_encoding_what_was_decoded_changes_nothing(fmt: Format, data: st.DataObject) -> None:
    scale = data.draw(st.floats(LEAST_SCALE, LARGEST_SCALE, width=32))
    seed = data.draw(st.integers(0, 1000))
    codes = all_codes(fmt)[0][torch.randint(255, (4, 64), generator=torch.Generator().manual_seed(seed))]
    codes[:, 0] = codes.new_tensor(127 if fmt.signed else 255)  # a stored block holds its own maximum
    scales = torch.full((4, 1), scale)
    again, scales_again = encode_blocks(decode_blocks(codes, scales, fmt), fmt)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)


@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=64, max_size=64))
def test_positive_never_becomes_zero_and_zero_stays(values: list[float]) -> None:
    x = torch.tensor([values])
    decoded = decode_blocks(*encode_blocks(x, UNSIGNED), UNSIGNED)
    assert torch.equal(decoded == 0, x == 0)
    assert torch.isfinite(decoded).all()


def test_signed_codes_are_symmetric() -> None:
    x = torch.randn(8, 256)
    codes, scale = encode_blocks(x, SIGNED)
    mirrored, mirrored_scale = encode_blocks(-x, SIGNED)
    assert torch.equal(mirrored, -codes)
    assert torch.equal(mirrored_scale, scale)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("fmt", [SIGNED, UNSIGNED], ids=str)
def test_a_bad_element_harms_itself_alone(fmt: Format, bad: float) -> None:
    clean = torch.rand(1, 256)
    clean[0, 7] = 0
    x = clean.clone()
    x[0, 7] = bad
    for got, expected in zip(encode_blocks(x, fmt), encode_blocks(clean, fmt), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("fmt", [SIGNED, UNSIGNED], ids=str)
def test_extreme_blocks_stay_finite(fmt: Format, magnitude: float) -> None:
    x = torch.linspace(0, 1, 256)[None] * magnitude
    decoded = decode_blocks(*encode_blocks(x, fmt), fmt)
    assert torch.isfinite(decoded).all()
    assert decoded[0, 0] == 0
    if 1e-30 <= magnitude <= 1e30:
        assert (decoded - x).abs().max() <= 0.008 * magnitude


def test_a_zero_block_decodes_to_zero() -> None:
    for fmt in (SIGNED, UNSIGNED):
        codes, scale = encode_blocks(torch.zeros(2, 256), fmt)
        assert not codes.any()
        assert not scale.any()
        assert not decode_blocks(codes, scale, fmt).any()


def test_relative_error_of_the_map() -> None:
    """Within the top decade a stored value is off by at most half a cell: 0.9 / 2^top / 2 of the block's maximum."""
    for fmt, cell in ((SIGNED, 0.9 / 64), (UNSIGNED, 0.9 / 128)):
        x = torch.rand(64, 256) * 0.9 + 0.1
        decoded = decode_blocks(*encode_blocks(x, fmt), fmt)
        assert ((decoded - x).abs() / x.amax(1, keepdim=True)).max() <= cell / 2 * 1.001


@pytest.mark.parametrize("value", [31, 48, 8192, 0, -256, 256.0, True, "256"])
def test_block_sizes_that_are_not(value: object) -> None:
    assert not is_block_size(value)


def test_block_sizes_that_are() -> None:
    assert all(is_block_size(2**i) for i in range(5, 13))
