"""Levels and nearest levels as arithmetic, against the readable tables: over all codes, random inputs and near every tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qcompile.runtime.codebooks import (
    BITS,
    BOTH_SIGNS,
    COMPANDED,
    FLOATS,
    NON_NEGATIVE,
    bottom_index,
    levels,
    nearest_index,
    top_index,
    value_of,
)
from qcompile.runtime.codecs import decode_blocks, encode_blocks
from qcompile.runtime.dynamic_map import dynamic_map
from qcompile.runtime.formats import Format

BOOKS = [
    (codebook, bits, signed)
    for signed, codebooks in ((True, BOTH_SIGNS), (False, NON_NEGATIVE))
    for codebook in sorted(codebooks)
    for bits in BITS[codebook]
    if codebook != "affine"  # steps between the two ends of a block, no levels
]
# -1 has no level in the 4-bit maps that are the published ones
SYMMETRIC = [book for book in BOOKS if book[2] and book[0] not in ("nf4", "sdyn4")]

# papers.md section 3.2, from arXiv 2610.12444, appendix A, and arXiv 2305.14314, appendix E
DYN4 = [0, 0.00325, 0.00775, 0.02125, 0.04375, 0.06625, 0.08875, 0.15625]
DYN4 += [0.26875, 0.38125, 0.49375, 0.60625, 0.71875, 0.83125, 0.94375, 1]
SDYN4 = [-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0]
SDYN4 += [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1]
NF4 = [-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1]
FP4 = [-1, -2 / 3, -1 / 2, -1 / 3, -1 / 4, -1 / 6, -1 / 48, 0, 1 / 48, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1]
LIN4_NZ = [i / 16 for i in range(1, 17)]
PUBLISHED = {"dyn4": DYN4, "dyn4-nz": DYN4[1:], "lin4-nz": LIN4_NZ, "sdyn4": SDYN4, "nf4": NF4, "fp4": FP4}


def published_dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values of `create_dynamic_map`, as papers.md section 2 states them: a twin written another way."""
    values = []
    for i in range(7):
        edges = np.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1)
        centres = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        values += [*centres, *(-centres if signed else ())]
    return np.sort(np.array([*values, 0.0, 1.0]))


def rounded_to(codebook: str, bits: int, signed: bool) -> Tensor:
    """All indices that a value can be rounded to in ascending order, fp32; of an 8-bit float, the values that it has."""
    if codebook in FLOATS:
        return (levels(codebook, bits, signed) * FLOATS[codebook][1]).float()
    ends = (end(codebook, bits, signed) for end in (bottom_index, top_index))
    bottom, top = ends
    return torch.arange(bottom, top + 1, dtype=torch.float32)


def indices(codebook: str, bits: int, signed: bool) -> Tensor:
    """All indices of `levels`: the unsigned dynamic map has a 0 to which no value is rounded, for what is exactly 0."""
    found = rounded_to(codebook, bits, signed)
    return torch.cat([torch.zeros(1), found]) if codebook == "dynamic" and not signed else found


def rounded(u: Tensor, codebook: str, bits: int, signed: bool) -> Tensor:
    index = nearest_index(u, codebook, bits, signed)
    return index.to(FLOATS[codebook][0]).float() if codebook in FLOATS else index


def in_equal_steps(u: Tensor, codebook: str) -> Tensor:
    """Where "nearest" is measured: companded levels are nearest in the coordinate in which their steps are equal."""
    c = COMPANDED.get(codebook, 1.0)
    return c * u / (1 + (c - 1) * u.abs())


def many_inputs(codebook: str, bits: int, signed: bool) -> Tensor:
    """fp32 in the codebook's range: uniform, log-uniform, all levels, and 3e-6 beside all midpoints."""
    g = torch.Generator().manual_seed(0)
    exact = levels(codebook, bits, signed)
    z = in_equal_steps(exact, codebook)
    middle = (z[1:] + z[:-1]) / 2
    c = COMPANDED.get(codebook, 1.0)
    border = middle / (c - (c - 1) * middle.abs())
    u = torch.cat([torch.rand(4000, generator=g), 10 ** (-8 * torch.rand(4000, generator=g))])
    u = torch.cat([u, -u]) if signed else u
    u = torch.cat([u.double(), exact, border * (1 + 3e-6), border * (1 - 3e-6), torch.tensor([0.0, 1e-38])])
    return u.float()


@pytest.mark.parametrize(("codebook", "bits", "signed"), BOOKS)
def test_every_index_has_its_level(codebook: str, bits: int, signed: bool) -> None:
    values = value_of(indices(codebook, bits, signed), codebook, bits, signed)
    assert values.dtype == torch.float32
    # 1e-6: a few roundings of fp32
    torch.testing.assert_close(values.double(), levels(codebook, bits, signed), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("codebook", "bits", "signed"), BOOKS)
def test_levels_fill_the_codes_and_the_range(codebook: str, bits: int, signed: bool) -> None:
    exact = levels(codebook, bits, signed)
    assert (exact.diff() > 0).all()
    assert exact[-1] == 1
    assert exact[0] >= (-1 if signed else 0)
    unused = {"dyn4-nz": 1, "sdyn4": 0, "nf4": 0, "dyn4": 0, "lin4-nz": 0, "fp4": 1}
    unused |= {"e4m3": 3, "e5m2": 9}  # -0 beside 0; not finite are two patterns of e4m3 and eight of e5m2
    if codebook in FLOATS and not signed:
        assert len(exact) == (2**bits - unused[codebook] + 1) / 2
    else:
        assert len(exact) == 2**bits - unused.get(codebook, int(signed))  # signed: no code for the least number


@pytest.mark.parametrize(("codebook", "bits", "signed"), BOOKS)
def test_nearest_is_the_level_that_a_search_finds(codebook: str, bits: int, signed: bool) -> None:
    u = many_inputs(codebook, bits, signed)
    z = in_equal_steps(levels(codebook, bits, signed), codebook)
    distance = (in_equal_steps(u.double(), codebook)[:, None] - z).abs()
    near, second = distance.topk(2, dim=1, largest=False).values.T
    clear = second - near > 2e-6 * u.abs()  # inputs within 1e-6 of a tie may go either way
    best = indices(codebook, bits, signed)[distance.argmin(dim=1)]
    if codebook == "dynamic" and not signed:
        best = best.clamp(min=1)  # positive values never become 0, and exact zeros are the caller's
    assert clear.double().mean() > 0.99
    assert torch.equal(rounded(u, codebook, bits, signed)[clear], best[clear])


@pytest.mark.parametrize(("codebook", "bits", "signed"), BOOKS)
def test_levels_are_their_own_nearest(codebook: str, bits: int, signed: bool) -> None:
    index = rounded_to(codebook, bits, signed)
    values = value_of(index, codebook, bits, signed)
    nudged = [values, values * (1 + 2**-22), values * (1 - 2**-22)]  # as far as rounding errors move a decoded value
    for u in nudged:
        assert torch.equal(rounded(u, codebook, bits, signed), index)


def test_the_unsigned_dynamic_map_never_rounds_to_0() -> None:
    assert bottom_index("dynamic", 8, False) == 1
    least = float(levels("dynamic", 8, False)[1])
    u = torch.tensor([0.0, 1e-45, 1e-38, least / 4, least])
    assert nearest_index(u, "dynamic", 8, False).tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("codebook", FLOATS)
def test_an_8_bit_float_is_its_cast(codebook: str) -> None:
    dtype, largest = FLOATS[codebook]
    u = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert torch.finfo(dtype).max == largest
    assert torch.equal(rounded(u, codebook, 8, True), (u * largest).to(dtype).float())


@pytest.mark.parametrize("codebook", PUBLISHED)
def test_tables_are_the_published_ones(codebook: str) -> None:
    signed = codebook in BOTH_SIGNS
    assert levels(codebook, 4, signed).tolist() == pytest.approx(PUBLISHED[codebook], rel=1e-15)


def test_softsign_is_flashoptims_companding() -> None:
    """arXiv 2602.23349: int8 = round(127 * 2x / (1 + |x|)), and back by z / (2 - |z|)."""
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    code = 127 * (2 * x.double() / (1 + x.double().abs()))
    clear = (code - code.floor() - 0.5).abs() > 1e-4  # fp32 errors of a number up to 127
    assert torch.equal(nearest_index(x, "softsign", 8, True)[clear].double(), code.round()[clear])
    z = torch.arange(-127, 128, dtype=torch.float64) / 127
    torch.testing.assert_close(levels("softsign", 8, True), z / (2 - z.abs()), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("codebook", "bits", "signed"), SYMMETRIC)
def test_signed_levels_are_symmetric(codebook: str, bits: int, signed: bool) -> None:
    exact = levels(codebook, bits, signed)
    assert torch.equal(exact, -exact.flip(0))
    assert exact[0] == -1
    assert (exact == 0).sum() == 1
    u = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(-u, codebook, bits, signed), -rounded(u, codebook, bits, signed))


def test_unsigned_dynamic_map_is_the_published_one() -> None:
    np.testing.assert_allclose(dynamic_map(False), published_dynamic_map(False), rtol=1e-14)
    assert dynamic_map(False)[:4].tolist() == pytest.approx([0, 3.25e-7, 7.75e-7, 2.125e-6])


def test_signed_dynamic_map_is_the_published_one_made_symmetric() -> None:
    ours, theirs = dynamic_map(True).numpy(), published_dynamic_map(True)
    assert len(theirs) == 256
    np.testing.assert_allclose(ours[128:], theirs[129:], rtol=1e-14)  # the positive side, without its least value
    np.testing.assert_allclose(ours[1:127], theirs[:126], rtol=1e-14)  # the negative side; ours begins with -1
    assert ours[0] == -1
    assert theirs[[126, 128]].tolist() == pytest.approx([-5.5e-7, 5.5e-7])


def test_4_bit_dynamic_maps_follow_the_same_construction() -> None:
    """Three decades: cells of [0.1, 1] scaled by powers of ten, papers.md section 2."""
    for signed, expected in ((False, DYN4), (True, SDYN4)):
        values = [0.0, 1.0]
        for i in range(3):
            edges = np.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1)
            centres = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 2)
            values += [*centres, *(-centres if signed else ())]
        assert sorted(values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("top", [6, 7])
def test_neighbouring_dynamic_levels_are_never_farther_apart_than_a_cell(top: int) -> None:
    values = dynamic_map(top == 6)
    gaps = values[values >= 0].diff()
    assert float(gaps.max()) == pytest.approx(0.9 / 2**top)


def test_codebooks_rank_as_published_on_normal_blocks() -> None:
    """Mean squared error of 4-bit first moments, N(0, 1) in blocks of 128: papers.md section 3.5 has sdyn4 2.745e-3,
    fp4 1.888e-3 and nf4 1.171e-3 of the block's largest magnitude squared, from samples of its own (hence 3 %)."""
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    x = x / x.abs().amax(dim=1, keepdim=True)
    for codebook, expected in (("sdyn4", 2.745e-3), ("fp4", 1.888e-3), ("nf4", 1.171e-3)):
        fmt = Format(True, 4, codebook, block_size=128)
        error = float((decode_blocks(*encode_blocks(x, fmt), fmt) - x).square().mean())
        assert math.isclose(error, expected, rel_tol=0.03), codebook
