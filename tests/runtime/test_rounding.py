"""Random bits: a good hash, the same however a buffer is cut. Random rounding: right on average, where it says so.

Nothing here is random itself: keys are literal, so a bound of 4 sigma holds or does not, once and for all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qcompile.exc import InvalidFormatError
from qcompile.runtime.codecs import Context, decode_blocks, encode_blocks, in_parts
from qcompile.runtime.formats import CHOICES, Format
from qcompile.runtime.rounding import Draw, key_of, mix

ROWS, COLUMNS = 512, 256


def draw(
    seed: int = 0, buffer: str = "0.exp_avg", store: int = 0, first_row: Tensor | int = 0, rows: int = ROWS
) -> Draw:
    key = torch.tensor(key_of(seed, buffer), dtype=torch.int32)
    return Draw(key, torch.tensor(store, dtype=torch.int32), first_row, rows, COLUMNS)


def uniform(seed: int = 0, buffer: str = "0.exp_avg", store: int = 0) -> Tensor:
    return draw(seed, buffer, store).uniform(0, 1)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


def lowbias32(x: int) -> int:
    """The published mixing function on a Python int: a twin of `mix`, bits 0 to 31."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


@given(st.integers(-(2**31), 2**31 - 1))
def test_mix_is_the_published_function(x: int) -> None:
    assert int(mix(torch.tensor(x, dtype=torch.int32))) % 2**32 == lowbias32(x % 2**32)


@pytest.mark.parametrize("start", [0, -(2**19), 2**31 - 2**20])
def test_mix_has_no_collisions(start: int) -> None:
    x = torch.arange(start, start + 2**20, dtype=torch.int64).to(torch.int32)
    assert torch.unique(mix(x)).numel() == 2**20


def test_each_input_bit_flips_each_output_bit_half_the_time() -> None:
    n = 2**14
    x = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    outputs = torch.arange(32, dtype=torch.int32)
    bits = [1 << i if i < 31 else -(2**31) for i in range(32)]
    flipped = torch.stack([((mix(x) ^ mix(x ^ bit))[:, None] >> outputs & 1).double().mean(0) for bit in bits])
    assert flipped.shape == (32, 32)
    assert (flipped - 0.5).abs().max() < 4 * 0.5 / math.sqrt(n)  # 4 sigma of n coin tosses


def test_uniform_lies_strictly_between_0_and_1() -> None:
    u = torch.cat([uniform(store=store) for store in range(8)])
    assert u.dtype == torch.float32
    assert 0 < u.min() < 1e-4  # the least of 2^20 numbers is below 1e-4 but for a chance of exp(-100)
    assert 1 - 1e-4 < u.max() < 1


@pytest.mark.parametrize("parts", [2, 8])
def test_columns_may_be_cut_into_parts(parts: int) -> None:
    pieces = [draw(store=5).uniform(part, parts) for part in range(parts)]
    assert torch.equal(torch.cat(pieces, dim=1), uniform(store=5))


@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("cut", [1, 37, 256])
def test_rows_may_be_cut(cut: int, per_block: bool) -> None:
    above = draw(rows=cut).uniform(0, 1, per_block)
    below = draw(first_row=torch.tensor(cut, dtype=torch.int32), rows=ROWS - cut).uniform(0, 1, per_block)
    assert torch.equal(torch.cat([above, below]), draw().uniform(0, 1, per_block))
    assert torch.equal(below, draw(first_row=cut, rows=ROWS - cut).uniform(0, 1, per_block))


@pytest.mark.parametrize("part", [0, 1, 7])
def test_per_block_is_one_number_for_a_row_in_every_part(part: int) -> None:
    whole = draw(store=3).uniform(0, 1, per_block=True)
    assert whole.shape == (ROWS, 1)
    assert torch.equal(draw(store=3).uniform(part, 8, per_block=True), whole)
    assert whole.unique().numel() == ROWS


@pytest.mark.parametrize("per_block", [False, True])
def test_moments_and_frequencies(per_block: bool) -> None:
    """Mean 1/2, variance 1/12 and 64 equally full bins, within 4 sigma."""
    u = torch.cat([draw(store=store).uniform(0, 1, per_block).double() for store in range(6)]).flatten()
    n = u.numel()
    assert abs(float(u.mean()) - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
    assert abs(float(((u - 0.5) ** 2).mean()) - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    counts = torch.histc(u, 64, 0, 1)
    chi_squared = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert abs(chi_squared - 63) < 4 * math.sqrt(2 * 63)  # mean and deviation of 63 degrees of freedom


PAIRS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "neighbouring elements": lambda u: (u[:, 1:], u[:, :-1]),
    "neighbouring rows": lambda u: (u[1:], u[:-1]),
    "rows 256 apart": lambda u: (u[256:], u[:-256]),
    "neighbouring stores": lambda u: (u, uniform(store=8)),
    "another buffer": lambda u: (u, uniform(buffer="1.exp_avg", store=7)),
    "another moment": lambda u: (u, uniform(buffer="0.exp_avg_sq", store=7)),
    "another seed": lambda u: (u, uniform(seed=1, store=7)),
    "another seed and store": lambda u: (u, uniform(seed=1, store=8)),
    "row and column exchanged": lambda u: (u[:128, 128:], u[128:256, :128].T),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_no_correlation(pair: str) -> None:
    a, b = PAIRS[pair](uniform(store=7))
    assert abs(correlation(a, b)) < 4 / math.sqrt(a.numel())  # 4 sigma of independent samples


def test_numbers_per_block_do_not_follow_those_of_elements_or_of_the_next_store() -> None:
    per_block = [draw(store=store).uniform(0, 1, per_block=True)[:, 0] for store in range(257)]
    now, after = torch.stack(per_block[:-1]), torch.stack(per_block[1:])
    elements = torch.stack([draw(store=store).uniform(0, COLUMNS)[:, 0] for store in range(256)])  # of column 0
    for other in (after, elements):
        assert abs(correlation(now, other)) < 4 / math.sqrt(now.numel())


def test_the_key_is_stable_across_versions_and_machines() -> None:
    """Literal: a checkpoint replays its dither with this key."""
    assert key_of(0, "0.exp_avg") == 1226096894
    assert key_of(0, "0.exp_avg") == key_of(0, "0.exp_avg")


def test_keys_differ_per_seed_and_buffer_and_fit_int32() -> None:
    names = [f"{parameter}.{moment}" for parameter in range(50) for moment in ("exp_avg", "exp_avg_sq")]
    keys = [key_of(seed, name) for seed in range(20) for name in names]
    assert len(set(keys)) == len(keys) == 2000
    assert all(-(2**31) <= key < 2**31 for key in keys)
    assert min(keys) < 0 < max(keys)


# -- What random rounding gives on average ---------------------------------------------------------------------------

COPIES, STORES = 64, 64  # rows that hold the same values, and stores of them: 4096 draws
BLOCK = 32


def preconditioner(v: Tensor) -> Tensor:
    """h with a bias correction of 0.3; its eps is about as large as the roots below, so that it matters."""
    return 1 / (torch.sqrt(v / 0.3) + 1e-3)


def context(fmt: Format, store: int) -> Context:
    key = torch.tensor(key_of(0, "0.exp_avg"), dtype=torch.int32)
    denominator = in_parts(second_moment().expand(COPIES, BLOCK), fmt.parts)
    return Context(denominator, preconditioner, Draw(key, torch.tensor(store, dtype=torch.int32), 0, COPIES, BLOCK))


def second_moment() -> Tensor:
    return torch.linspace(0.1, 1, BLOCK)


def block(fmt: Format) -> Tensor:
    """Values over about two decades, some negative where that is possible; no two ends are alike."""
    g = torch.Generator().manual_seed(0)
    x = 1e-6 * 10 ** (2 * torch.rand(BLOCK, generator=g))
    return x * torch.where(torch.rand(BLOCK, generator=g) < 0.4, -1, 1) if fmt.signed else x


def samples(x: Tensor, fmt: Format) -> Tensor:
    """Decoded values of 4096 stores of a block, fp64 [draws, BLOCK]."""
    rows = x.expand(COPIES, BLOCK)
    decoded = []
    for store in range(STORES):
        c = context(fmt, store)
        decoded.append(decode_blocks(*encode_blocks(rows, fmt, c), fmt, c))
    return torch.cat(decoded).double()


def assert_unbiased(values: Tensor, expected: Tensor) -> None:
    """The mean of each column within 4 sigma of what is expected, and 1e-6 of it for arithmetic in fp32."""
    n = len(values)
    sigma = values.std(dim=0) / math.sqrt(n)
    assert (sigma > 0).double().mean() > 0.7  # the ends of a block are exact
    # what never happened in n draws has a probability below 8 / n, but for a chance of exp(-8)
    unseen = torch.where(sigma == 0, 8 / n * (values.amax(dim=0) - values.amin(dim=0)).amax(), 0.0)
    assert ((values.mean(dim=0) - expected).abs() <= 4 * sigma + unseen + 1e-6 * expected.abs()).all()


def bits_of(x: Tensor) -> Tensor:
    """The coordinate of pseudo-log, with the sign of the value."""
    return x.sign().double() * x.float().abs().view(torch.int32).double()


def fmt_of(signed: bool, bits: int, codebook: str, rounding: str, **more: Any) -> Format:
    return Format(signed, bits, codebook, rounding=rounding, block_size=BLOCK, **more)


PSEUDO_LOG: dict[str, Any] = {"coordinate": "pseudo-log", "scaling": "minmax"}
IN_VALUE = [
    fmt_of(True, 8, "affine", "stochastic", scaling="minmax"),
    fmt_of(False, 4, "affine", "stochastic", scaling="minmax"),
    fmt_of(True, 4, "linear", "stochastic", scaling="minmax"),
    fmt_of(True, 4, "linear", "stochastic"),
    fmt_of(True, 4, "linear", "stochastic", coordinate="update", partner="exp_avg_sq"),
    fmt_of(False, 4, "linear", "stochastic", coordinate="sqrt"),
    fmt_of(True, 4, "nf4", "stochastic"),
    fmt_of(False, 4, "dyn4", "stochastic"),
    fmt_of(True, 5, "softsign", "stochastic"),
    fmt_of(True, 8, "dynamic", "stochastic"),
    fmt_of(False, 8, "dynamic", "stochastic"),
    fmt_of(False, 4, "linear", "stochastic", coordinate="log", scaling="minmax"),
    *(fmt_of(signed, bits, "linear", "stochastic", **PSEUDO_LOG) for signed in (True, False) for bits in (4, 8)),
]
IN_COORDINATE: list[tuple[Format, Callable[[Tensor], Tensor]]] = [
    *(
        (fmt_of(signed, bits, "linear", "coordinate", **PSEUDO_LOG), bits_of)
        for signed in (True, False)
        for bits in (4, 8)
    ),
    (fmt_of(False, 4, "linear", "coordinate", coordinate="log", scaling="minmax"), torch.log2),
    (fmt_of(False, 8, "linear", "coordinate", coordinate="log", scaling="minmax"), torch.log2),
    (fmt_of(False, 8, "linear", "coordinate", coordinate="sqrt"), torch.sqrt),
    (fmt_of(False, 4, "affine", "coordinate", coordinate="sqrt", scaling="minmax"), torch.sqrt),
]
IN_PRECONDITIONER = [
    fmt_of(False, 4, "dyn4", "preconditioner"),
    fmt_of(False, 4, "dyn4-nz", "preconditioner"),
    fmt_of(False, 8, "dynamic", "preconditioner"),
    fmt_of(False, 4, "linear", "preconditioner", coordinate="sqrt"),
    fmt_of(False, 4, "linear", "preconditioner", **PSEUDO_LOG),
]


@pytest.mark.parametrize("fmt", IN_VALUE, ids=str)
def test_stochastic_rounding_is_unbiased_in_the_value(fmt: Format) -> None:
    x = block(fmt)
    assert_unbiased(samples(x, fmt), x.double())


@pytest.mark.parametrize(("fmt", "coordinate"), IN_COORDINATE, ids=[str(fmt) for fmt, _ in IN_COORDINATE])
def test_coordinate_rounding_is_unbiased_in_the_coordinate(fmt: Format, coordinate: Callable[[Tensor], Tensor]) -> None:
    x = block(fmt)
    assert_unbiased(coordinate(samples(x, fmt)), coordinate(x.double()))


@pytest.mark.parametrize("fmt", IN_PRECONDITIONER, ids=str)
def test_preconditioner_rounding_is_unbiased_in_the_preconditioner(fmt: Format) -> None:
    """E[h(Q(v))] = h(v): arXiv 2610.12444, definitions 4 and 5."""
    v = block(fmt)
    assert_unbiased(preconditioner(samples(v, fmt)), preconditioner(v.double()))


def test_the_zero_of_preconditioner_rounding_is_as_likely_as_published() -> None:
    """P(0) = eps (1 - sqrt(v / b)) / (sqrt(v / correction) + eps) below the least level b: papers.md section 3.3."""
    fmt = fmt_of(False, 4, "dyn4", "preconditioner")
    least = 0.00325 * 1e-4
    v = least * torch.linspace(0.02, 0.98, BLOCK)
    v[0] = 1e-4
    decoded = samples(v, fmt)[:, 1:]
    v = v[1:].double()
    expected = 1e-3 * (1 - torch.sqrt(v / least)) / (torch.sqrt(v / 0.3) + 1e-3)
    sigma = torch.sqrt(expected * (1 - expected) / len(decoded))
    assert (((decoded == 0).double().mean(dim=0) - expected).abs() <= 4 * sigma).all()
    assert ((decoded == 0) | ((decoded / least - 1).abs() < 1e-5)).all()  # 1e-5: fp32


# those for which 1/2 instead of a random number means the nearest level: no other coordinates may start late
MAY_START_LATE = [f for f in IN_VALUE if f.coordinate in ("identity", "update")]


@pytest.mark.parametrize("fmt", [f for f in MAY_START_LATE if f.codebook in ("nf4", "linear", "affine")], ids=str)
def test_a_late_start(fmt: Format) -> None:
    """Nearest until the store of the number `late`; as with no `late` from then on."""
    x = block(fmt).expand(COPIES, BLOCK)
    late, nearest = replace(fmt, late=3), replace(fmt, rounding="nearest")
    for store in range(5):
        codes, _ = encode_blocks(x, late, context(late, store))
        expected, _ = encode_blocks(x, fmt if store >= 3 else nearest, context(fmt, store))
        assert torch.equal(codes, expected)
    assert not torch.equal(codes, encode_blocks(x, nearest, context(nearest, 4))[0])


# -- Subtractive dither ----------------------------------------------------------------------------------------------


def dithered() -> list[Format]:
    """All formats of 4 bits with a dither."""
    found = []
    choices = ((True, False), CHOICES["coordinate"], ("absmax", "minmax"), ("dither", "block-dither"))
    for signed, coordinate, scaling, rounding in itertools.product(*choices):
        partner = "exp_avg_sq" if coordinate == "update" else None
        try:
            found.append(Format(signed, 4, "linear", coordinate, scaling, rounding, BLOCK, partner=partner))
        except InvalidFormatError:
            continue
    return found


def coordinate_of(x: Tensor, fmt: Format) -> Tensor:
    of = {"pseudo-log": bits_of, "log": torch.log2, "sqrt": torch.sqrt}
    y = of[fmt.coordinate](x) if fmt.coordinate in of else x
    return y / second_moment() if fmt.coordinate == "update" else y


@functools.cache
def errors_in_steps(fmt: Format) -> tuple[Tensor, Tensor]:
    """Errors of 4096 stores in steps of the coordinate, fp64 [draws, BLOCK], and what lies at the ends of the range:
    so near to one that an offset reaches beyond it."""
    x = block(fmt)
    y = coordinate_of(x.double(), fmt)
    magnitude = y.abs() if fmt.logarithmic or not fmt.two_scales else y
    low, high = float(magnitude.min()) if fmt.two_scales else 0.0, float(magnitude.max())
    steps = 2 ** (4 - (fmt.signed and (fmt.logarithmic or not fmt.two_scales))) - (2 if fmt.two_scales else 1)
    step = (high - low) / steps
    ends = (magnitude > high - step / 2) | (magnitude < low + step / 2)
    return (coordinate_of(samples(x, fmt), fmt) - y) / step, ends


@pytest.mark.parametrize("fmt", dithered(), ids=str)
def test_dither_errs_by_half_a_step_and_by_nothing_on_average(fmt: Format) -> None:
    """1e-4: fp32. The variance is that of a uniform number, 1 / 12, and the variance of that 1 / 180."""
    error, ends = errors_in_steps(fmt)
    assert error.abs().max() <= 0.5 + 1e-4
    inside = error[:, ~ends]
    assert inside.shape[1] > 10
    assert (inside.mean(dim=0).abs() <= 4 * math.sqrt(1 / 12 / len(error)) + 1e-4).all()
    assert ((inside.var(dim=0) - 1 / 12).abs() <= 4 * math.sqrt(1 / 180 / len(error)) + 1e-4).all()


@pytest.mark.parametrize("fmt", dithered(), ids=str)
def test_dither_does_not_move_the_ends_of_a_block_on_average(fmt: Format) -> None:
    """Or they would drift with every store."""
    error, ends = errors_in_steps(fmt)
    assert ends.any()
    assert (error.mean(dim=0)[ends].abs() <= 4 * math.sqrt(1 / 12 / len(error)) + 1e-4).all()


@pytest.mark.parametrize("rounding", ["dither", "block-dither"])
def test_the_offset_of_a_block_dither_is_the_same_over_a_block(rounding: str) -> None:
    fmt = fmt_of(True, 4, "linear", rounding)
    x = block(fmt)
    steps = samples(x, fmt) / (float(x.abs().max()) / 7)
    away = torch.exp(2j * math.pi * steps)  # the fraction of a step, on a circle
    spread = (away - away[:, :1]).abs().amax(dim=1)
    if rounding == "block-dither":
        assert spread.max() < 1e-4  # fp32
        assert (away[1:, 0] - away[:-1, 0]).abs().median() > 0.1  # and another one in the next block
    else:
        assert spread.min() > 0.5
        halves = away.tensor_split(2, dim=1)  # the two elements that share a byte
        assert (halves[0] - halves[1]).abs().median() > 0.1


@pytest.mark.parametrize("fmt", dithered(), ids=str)
def test_dither_is_read_with_the_bits_it_was_stored_with(fmt: Format) -> None:
    x = block(fmt).expand(COPIES, BLOCK)
    codes, scales = encode_blocks(x, fmt, context(fmt, 5))
    right, wrong = (decode_blocks(codes, scales, fmt, context(fmt, store)) for store in (5, 6))
    assert (right - x).abs().mean() < 0.9 * (wrong - x).abs().mean()
