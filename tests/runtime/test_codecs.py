"""The codec's contract for every format that a recipe uses, and the promises of each way to scale and to round.

What random rounding gives on average is in `test_rounding.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qcompile.exc import InvalidFormatError
from qcompile.recipes import RECIPES
from qcompile.runtime.codebooks import BITS, COMPANDED, levels
from qcompile.runtime.codecs import (
    LARGEST_SCALE,
    LARGEST_UPDATE,
    LEAST_SCALE,
    Context,
    decode_blocks,
    encode_blocks,
    in_parts,
    update_denominator,
)
from qcompile.runtime.formats import CHOICES, Format
from qcompile.runtime.rounding import LARGEST_BELOW_ONE, Draw, key_of

BAD = [float("inf"), float("-inf"), float("nan")]


def pseudo_log(signed: bool, bits: int, rounding: str = "nearest", block_size: int = 128) -> Format:
    return Format(signed, bits, "linear", "pseudo-log", "minmax", rounding, block_size)


def affine(codebook: str, coordinate: str = "identity", rounding: str = "stochastic", signed: bool = True) -> Format:
    return Format(signed, 8, codebook, coordinate, "minmax", rounding, 128)


def allowed(scaling: str) -> list[Format]:
    """All formats of 4 or 8 bits that round to nearest, with blocks of 128."""
    found = []
    for codebook, signed, coordinate in itertools.product(BITS, (True, False), CHOICES["coordinate"]):
        for bits in {4, 8}.intersection(BITS[codebook]):
            partner = "exp_avg_sq" if coordinate == "update" else None
            try:
                found.append(Format(signed, bits, codebook, coordinate, scaling, block_size=128, partner=partner))
            except InvalidFormatError:
                continue
    return found


OF_RECIPES = [f for recipe in RECIPES.values() for f in (recipe.first, recipe.second, recipe.signed) if f is not None]
OTHERS = [
    *(pseudo_log(True, bits, rounding) for bits in (4, 8) for rounding in ("nearest", "stochastic")),
    *(pseudo_log(False, 4, rounding) for rounding in ("nearest", "stochastic", "preconditioner")),
    *(Format(True, 4, "nf4", rounding=rounding) for rounding in ("stochastic",)),
    Format(True, 4, "nf4", "update", "eden", partner="exp_avg_sq", eps=1e-8),
    Format(False, 4, "lin4-nz", scaling="eden"),
    Format(False, 8, "linear", "sqrt", rounding="coordinate", block_size=128),
    Format(False, 8, "dynamic", scale_dtype=torch.float16),
    affine("affine", rounding="nearest"),
    Format(False, 4, "linear", "log", "minmax", "dither", 128),
]
FORMATS = list(dict.fromkeys(OF_RECIPES + OTHERS))
OCTAVES = {"log": 1.0, "pseudo-log": 2.0**23}  # in the coordinate
UNSIGNED = [fmt for fmt in FORMATS if not fmt.signed]


def preconditioner(v: Tensor) -> Tensor:
    """h with a bias correction of 0.3 and an eps that is as large as the roots in these tests."""
    return 1 / (torch.sqrt(v / 0.3) + 1e-3)


class Least(Draw):
    def uniform(self, part: int, parts: int, per_block: bool = False) -> Tensor:
        return torch.full_like(super().uniform(part, parts, per_block), 2.0**-32)


class Largest(Draw):
    def uniform(self, part: int, parts: int, per_block: bool = False) -> Tensor:
        return torch.full_like(super().uniform(part, parts, per_block), LARGEST_BELOW_ONE)


def context(fmt: Format, x: Tensor, store: int = 0, bits: type[Draw] = Draw) -> Context:
    """What a kernel would give: a second moment of several decades (the same in every row), h, and random bits."""
    draw = bits(torch.tensor(key_of(0, "x"), dtype=torch.int32), torch.tensor(store, dtype=torch.int32), 0, *x.shape)
    v = 10 ** (-4 * torch.rand(x.shape[1], generator=torch.Generator().manual_seed(9))).expand(x.shape)
    return Context(update_denominator(in_parts(v, fmt.parts), fmt.eps), preconditioner, draw)


def stored(x: Tensor, fmt: Format, store: int = 0) -> Tensor:
    """What is read after a store."""
    c = context(fmt, x, store)
    return decode_blocks(*encode_blocks(x, fmt, c), fmt, c)


def blocks(fmt: Format, rows: int = 4, spread: float = 2.0, scale: float = 1e-3) -> Tensor:
    """Log-normal magnitudes, of both signs where the format has them; the largest one is positive."""
    g = torch.Generator().manual_seed(0)
    x = scale * torch.exp(spread * torch.randn(rows, fmt.block_size, generator=g))
    largest = x.amax(dim=1)
    if fmt.signed:
        x = x * torch.where(torch.rand(x.shape, generator=g) < 0.5, -1, 1)
    x[:, 3] = 1.5 * largest  # sdyn4 has no level -1, so that a largest value below 0 would not keep its scale
    if fmt.coordinate == "update":
        x = x * torch.cat(context(fmt, x).denominator or [], dim=1)
    return x


def in_coordinate(x: Tensor, fmt: Format) -> Tensor:
    """fp64; the bits of an fp32 keep the sign of the value."""
    if fmt.coordinate == "pseudo-log":
        return x.sign().double() * x.abs().view(torch.int32).double()
    if fmt.coordinate == "log":
        return torch.log2(x.double())
    if fmt.coordinate == "update":
        return x.double() / torch.cat(context(fmt, x).denominator or [], dim=1).double()
    return x.double().sqrt() if fmt.coordinate == "sqrt" else x.double()


def step_of(x: Tensor, fmt: Format) -> Tensor:
    """The distance of two levels in the coordinate, of formats with equal steps; the narrowest range that covers x (but
    not zeros with a code of their own), of at most 5 octaves per bit."""
    y = in_coordinate(x, fmt)
    if not fmt.two_scales:
        return y.abs().amax(dim=1, keepdim=True) / (2 ** (fmt.bits - fmt.signed) - 1)
    y = y.abs() if fmt.coordinate == "pseudo-log" else y
    steps = 2 ** (fmt.bits - (fmt.signed and fmt.logarithmic)) - (1 if fmt.codebook == "affine" else 2)
    high = y.amax(dim=1, keepdim=True)
    low = torch.where((x == 0) & fmt.zero_code, high, y).amin(dim=1, keepdim=True)
    return (high - low).clamp(max=5 * fmt.bits * OCTAVES.get(fmt.coordinate, torch.inf)) / steps


def largest_decoded(x: Tensor, fmt: Format) -> Tensor:
    """What no magnitude that is read exceeds, fp64 [rows, 1]; x are updates for that coordinate, and not all 0.

    Without a dither the largest value: it is an end of its range, or the level 1 times its scale. A scale below
    LEAST_SCALE is read as that, and the largest value as the next level up: a tiny one is read as at most the least
    level times LEAST_SCALE, with EDEN too, whose factor is at most 1 there.
    With a dither half a step of the coordinate more: the index is round(position + offset), and index - offset is read,
    which is half a step off at most and is not cut at the upper end. 0.0001 of a step: fp32.
    """
    largest = x.abs().amax(dim=1, keepdim=True)
    if fmt.two_scales:
        largest = largest.clamp(min=2.0**-126) if fmt.coordinate == "log" else largest  # the least it knows
        y = in_coordinate(largest, fmt) + (0.5001 * step_of(x, fmt) if fmt.dithered else 0)
        if fmt.coordinate == "pseudo-log":  # a whole number of bits is read, at most those of the largest float
            return y.round().clamp(max=0x7F7FFFFF).to(torch.int32).view(torch.float32).double()
        if fmt.coordinate == "log":  # 2^-16: three roundings of up to 128 octaves
            return torch.exp2(y + 2.0**-16).clamp(max=torch.finfo(torch.float32).max)
        return y.square() if fmt.coordinate == "sqrt" else y
    scale = largest.double().clamp(LEAST_SCALE, LARGEST_SCALE)
    if fmt.dithered:
        return largest + 0.5001 * scale / (2 ** (fmt.bits - fmt.signed) - 1)
    exact = levels(fmt.codebook, fmt.bits, fmt.signed) ** (2 if fmt.coordinate == "sqrt" else 1)
    ups = [torch.where(s >= largest / scale, s, s.amax()).amin(dim=1, keepdim=True) for s in (exact, -exact)]
    if fmt.scaling == "eden":
        scale = (1.1 * largest.double()).clamp(LEAST_SCALE, LARGEST_SCALE)  # 1.1: more than its factor on equal steps
    return torch.maximum(*ups) * scale * (1 + torch.finfo(fmt.scale_dtype).eps)


# -- What holds for every format -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [Draw, Least, Largest])
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if not fmt.dithered], ids=str)
def test_storing_what_was_read_changes_nothing(fmt: Format, bits: type[Draw]) -> None:
    """Whatever the random bits: the extreme ones show what a rounding error can do once in a million stores."""
    x = torch.cat([blocks(fmt, spread=spread) for spread in (2.0, 0.5)])
    codes, scales = encode_blocks(x, fmt, context(fmt, x, 0))
    decoded = decode_blocks(codes, scales, fmt, context(fmt, x, 0))
    again, scales_again = encode_blocks(decoded, fmt, context(fmt, x, 1, bits))
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    decoded_again = decode_blocks(again, scales_again, fmt, context(fmt, x, 1))
    if fmt.scale_dtype == torch.float32 and (fmt.coordinate == "update" or fmt.scaling == "eden"):
        # m / d * d, or a quotient of two sums, is off by a few roundings, but no drift (see below) nor in a short scale
        torch.testing.assert_close(decoded_again, decoded, rtol=1e-6, atol=0)
    else:
        assert torch.equal(decoded_again, decoded)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.coordinate == "update" or f.scaling == "eden"], ids=str)
def test_rounding_errors_of_a_scale_do_not_add_up(fmt: Format) -> None:
    x = blocks(fmt)
    first = decoded = stored(x, fmt)
    for store in range(50):
        decoded = stored(decoded, fmt, store)
    torch.testing.assert_close(decoded, first, rtol=1e-6, atol=0)  # as after one store; 50 would give up to 5e-6


@pytest.mark.parametrize("width", [1e-2, 1e-3])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.two_scales and f.random and not f.dithered], ids=str)
def test_storing_what_was_read_changes_nothing_in_narrow_blocks(fmt: Format, width: float) -> None:
    """Steps of 4e-5 or 4e-6 of the values: some hundred or thirty times what fp32 resolves, so that the codes are still
    well defined, and an element counts as on its level within `ranges.resolution`."""
    x = 1 + width * torch.rand(256, fmt.block_size, generator=torch.Generator().manual_seed(0))
    codes, scales = encode_blocks(x, fmt, context(fmt, x, 0))
    again, _ = encode_blocks(decode_blocks(codes, scales, fmt, context(fmt, x, 0)), fmt, context(fmt, x, 1))
    assert (again != codes).sum() == 0


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_zero_and_positive_values_keep_their_kind(fmt: Format) -> None:
    x = blocks(fmt, rows=16, spread=4.0)
    x[:, 10::7] = 0
    x[:8, 11] = 1e-42
    x[8] = 0
    for store in range(4):
        decoded = stored(x, fmt, store)
        if not fmt.moves_zero:
            assert (decoded[x == 0] == 0).all()
        if not fmt.signed:
            assert (decoded >= 0).all()
            assert fmt.positive_to_zero or (decoded[x > 0] > 0).all()


@pytest.mark.parametrize("fmt", UNSIGNED, ids=str)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=8, max_size=8), st.integers(0, 2**31 - 1))
def test_any_positive_value_stays_positive(fmt: Format, values: list[float], store: int) -> None:
    x = torch.tensor(values).repeat(1, 4)
    decoded = stored(x, replace(fmt, block_size=32), store)
    assert torch.isfinite(decoded).all()
    assert (decoded >= 0).all()
    assert fmt.moves_zero or (decoded[x == 0] == 0).all()
    assert fmt.positive_to_zero or (decoded[x > 0] > 0).all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_bad_element_harms_itself_alone(fmt: Format, bad: float) -> None:
    clean = blocks(fmt)
    clean[:, 7] = 0
    x = clean.clone()
    x[:, 7] = bad
    assert torch.equal(stored(x, fmt), stored(clean, fmt))


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e5, 1e30, 1e38, 3.4e38])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_extreme_blocks_stay_in_their_range(fmt: Format, magnitude: float) -> None:
    """Rows: from one end to the other, all values equal, a lone value; in update space, of updates."""
    x = torch.linspace(-1 if fmt.signed else 0, 1, fmt.block_size).repeat(3, 1) * magnitude
    x[1] = x[2, 0] = magnitude
    x[2, 1:] = 0
    unit = torch.ones_like(x)
    if fmt.coordinate == "update":
        unit = torch.cat(context(fmt, x).denominator or [], dim=1)
    bound = largest_decoded(x, fmt) * (1 + 2.0**-20) if x.any() else torch.zeros(3, 1)  # a few roundings of fp32
    for store in range(6 if fmt.random else 1):
        decoded = stored(x * unit, fmt, store)
        assert torch.isfinite(decoded).all()
        assert ((decoded.double() / unit).abs() <= bound).all()
        if not fmt.signed and not fmt.positive_to_zero:
            assert (decoded[x > 0] > 0).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e4, 1e30])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if not f.dithered and f.scaling != "eden"], ids=str)
def test_the_largest_value_is_exact(fmt: Format, magnitude: float) -> None:
    """But for the precision of its scale, in the range of the scale's dtype, and rounding errors of fp32 (1e-6)."""
    if fmt.scale_dtype == torch.float16 and not 1e-4 <= magnitude <= 6e4:
        magnitude = 1.0
    if fmt.coordinate == "update":
        magnitude = min(magnitude, LARGEST_UPDATE / 100)
    x = blocks(fmt, scale=magnitude, spread=0.1)
    largest = x.abs().argmax(dim=1, keepdim=True)
    if fmt.coordinate == "update":
        largest = (x / torch.cat(context(fmt, x).denominator or [], dim=1)).abs().argmax(dim=1, keepdim=True)
    tolerance = 1e-6 if fmt.scale_dtype == torch.float32 else 2 * torch.finfo(fmt.scale_dtype).eps
    torch.testing.assert_close(stored(x, fmt).gather(1, largest), x.gather(1, largest), rtol=tolerance, atol=0)


@pytest.mark.parametrize("fmt", [f for f in allowed("absmax") if f.coordinate != "update"], ids=str)
def test_nearest_rounding_is_what_a_search_finds(fmt: Format) -> None:
    """A twin in fp64: coordinate, scale, nearest of the levels, and back."""
    x = blocks(fmt, rows=2)
    y = in_coordinate(x, fmt)
    scale = y.abs().amax(dim=1, keepdim=True)
    c = COMPANDED.get(fmt.codebook, 1.0)
    exact = levels(fmt.codebook, fmt.bits, fmt.signed)
    z, steps = (c * u / (1 + (c - 1) * u.abs()) for u in (y / scale, exact))
    distance = (z[..., None] - steps).abs()
    near, second = distance.topk(2, dim=-1, largest=False).values.unbind(-1)
    clear = second - near > 1e-5 * z.abs()  # inputs within some rounding errors of a tie may go either way
    if fmt.codebook == "dynamic" and not fmt.signed:
        distance[..., 0] = torch.where(x > 0, 1.0, distance[..., 0])  # positive values never become 0
    value = exact[distance.argmin(dim=-1)] * scale
    value = value.square() if fmt.coordinate == "sqrt" else value
    assert clear.double().mean() > 0.98
    torch.testing.assert_close(stored(x, fmt).double()[clear], value[clear], rtol=1e-5, atol=0)


@pytest.mark.parametrize("fmt", [f for f in allowed("minmax") if f.coordinate != "log"], ids=str)
def test_ranges_err_by_half_a_step(fmt: Format) -> None:
    """In the coordinate, to which the module's docstring of `ranges` refers; "log" is the same but for its logarithm."""
    x = blocks(fmt, spread=0.7)  # within the range that a block may have
    decoded = stored(x, fmt)
    error = (in_coordinate(decoded, fmt) - in_coordinate(x, fmt)).abs()
    one_bit = 1.0 if fmt.coordinate == "pseudo-log" else 0.0  # decoding rounds to a whole number of bits
    assert (error <= 0.5001 * step_of(x, fmt) + one_bit).all()  # 0.0001 of a step: fp32
    largest = x.abs().argmax(dim=1, keepdim=True)
    assert torch.equal(decoded.gather(1, largest), x.gather(1, largest))


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("signed", [False, True])
def test_relative_error_of_pseudo_log(signed: bool, bits: int) -> None:
    """Half a step of bits, and half a bit, each at most 2^-23 of a value: what the bits of an fp32 count."""
    fmt = pseudo_log(signed, bits)
    x = blocks(fmt, rows=32, spread=0.7)
    bound = (step_of(x, fmt) / 2 + 1) / 2**23
    error = (stored(x, fmt).double() / x - 1).abs()
    assert (error <= bound).all()
    assert (error > bound / 3).any()


def test_the_range_of_pseudo_log_ends_at_5_octaves_per_bit() -> None:
    x = torch.ones(1, 128)
    x[0, 1], x[0, 2] = 2.0**-20, 2.0**-30
    assert stored(x, pseudo_log(False, 4))[0, :3].tolist() == [1, 2.0**-20, 2.0**-20]


@pytest.mark.parametrize("fmt", [Format(True, 8, "dynamic"), Format(True, 4, "fitted"), pseudo_log(True, 4)], ids=str)
def test_signs_are_mirrored(fmt: Format) -> None:
    x = blocks(fmt)
    assert torch.equal(stored(-x, fmt), -stored(x, fmt))


def test_sdyn4_has_no_level_minus_1() -> None:
    """As published: a largest value below 0 is stored as -0.8875 of itself."""
    x = torch.zeros(1, 128)
    x[0, 0] = -2.0
    assert stored(x, Format(True, 4, "sdyn4", block_size=128))[0, 0] == pytest.approx(-2 * 0.8875)


# -- Scales and coordinates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [f for f in allowed("eden") if f.coordinate != "update"], ids=str)
def test_eden_scale(fmt: Format) -> None:
    """absmax * <x, x> / <x, Q(x)> of arXiv 2610.12444, section 3.2, Q without the correction; in fp64."""
    x = blocks(fmt, rows=32, spread=1.0)
    codes, scales = encode_blocks(x, fmt)
    largest = x.abs().amax(dim=1, keepdim=True)
    plain = decode_blocks(codes, [largest], replace(fmt, scaling="absmax")).double()
    ratio = x.double().square().sum(1) / (x.double() * plain).sum(1)
    torch.testing.assert_close(
        scales[0][:, 0].double() / largest[:, 0], ratio, rtol=1e-5, atol=0
    )  # sums of 128 in fp32
    assert ratio.std() > 1e-4
    decoded = decode_blocks(codes, scales, fmt).double()
    torch.testing.assert_close((x * decoded).sum(1), x.double().square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_update_space_errs_by_half_a_step_of_the_update(bits: int) -> None:
    fmt = Format(True, bits, "linear", "update", block_size=256, partner="exp_avg_sq", eps=1e-8)
    x = blocks(fmt, rows=16)
    denominator = torch.cat(context(fmt, x).denominator or [], dim=1).double()
    assert denominator.amax() > 50 * denominator.amin()
    error = (stored(x, fmt).double() - x).abs()
    assert (error <= 0.5001 * step_of(x, fmt) * denominator).all()  # 0.0001 of a step: fp32
    assert (error > 0.49 * step_of(x, fmt) * denominator).any()


def test_update_denominator() -> None:
    v = torch.tensor([[0.0, 4.0, 1e-12]])
    [denominator] = update_denominator([v], 1e-8)
    torch.testing.assert_close(denominator, torch.tensor([[0.0, 2.0, 1.01e-6]]))


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_nothing_is_stored_where_the_second_moment_is_0(eps: float) -> None:
    fmt = Format(True, 8, "linear", "update", block_size=128, partner="exp_avg_sq", eps=eps)
    x = blocks(fmt)
    v = torch.ones_like(x)
    v[:, 20:30] = 0
    c = Context(update_denominator([v], eps))
    decoded = decode_blocks(*encode_blocks(x, fmt, c), fmt, c)
    x[:, 20:30] = 0
    assert torch.equal(decoded, decode_blocks(*encode_blocks(x, fmt, c), fmt, c))
    assert not decoded[:, 20:30].any()


def test_an_update_out_of_all_bounds_leaves_its_block_legible() -> None:
    """A first moment beside a second moment that is far too small for it, as after a reset of one of the two."""
    fmt = Format(True, 8, "linear", "update", block_size=128, partner="exp_avg_sq", eps=1e-8)
    x, v = torch.full((1, 128), 0.5), torch.ones(1, 128)
    x[0, 0], v[0, 0] = 1e30, 1e-30
    c = Context(update_denominator([v], fmt.eps))
    decoded = decode_blocks(*encode_blocks(x, fmt, c), fmt, c)
    assert torch.isfinite(decoded).all()
    assert 0 < decoded[0, 0] <= LARGEST_UPDATE * 1.01 * 1e-8
