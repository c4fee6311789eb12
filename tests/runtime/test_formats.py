"""What a `Format` refuses, what it derives, and whether what it says of zeros is what the codec does."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qcompile.exc import InvalidFormatError, QCompileError
from qcompile.runtime.codebooks import BITS
from qcompile.runtime.codecs import Context, decode_blocks, encode_blocks, in_parts
from qcompile.runtime.formats import CHOICES, RULES, Format, is_block_size, row_block_size
from qcompile.runtime.rounding import Draw, key_of

NF4 = {"bits": 4, "codebook": "nf4"}
DYN4 = {"bits": 4, "codebook": "dyn4", "signed": False}
LINEAR = {"codebook": "linear"}
UPDATE = {"codebook": "linear", "coordinate": "update", "partner": "exp_avg_sq"}
MINMAX = {"codebook": "linear", "scaling": "minmax"}
STOCHASTIC = {"codebook": "linear", "signed": False, "rounding": "stochastic"}
NOT_LATE = [
    {"coordinate": "sqrt"},
    {"coordinate": "log", "scaling": "minmax"},
    {"coordinate": "pseudo-log", "scaling": "minmax"},
]

# choices, the field that is at fault, words of the rule
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"codebook": "nf3"}, "codebook", "one of linear, "),
    ({"coordinate": "cube"}, "coordinate", "one of identity, sqrt, log, pseudo-log, update"),
    ({"scaling": "rms"}, "scaling", "one of absmax, minmax, eden"),
    ({"rounding": "up"}, "rounding", "one of nearest, stochastic, coordinate, preconditioner, dither, block-dither"),
    ({"scale_dtype": torch.float64}, "scale_dtype", "one of torch.float32, torch.float16, torch.bfloat16"),
    ({"bits": 4}, "bits", "codebook 'dynamic' has 8"),
    ({"bits": 7, **LINEAR}, "bits", "codebook 'linear' has 2, 3, 4, 5, 6, 8"),
    ({**NF4, "bits": 8}, "bits", "codebook 'nf4' has 4"),
    ({"block_size": 48}, "block_size", "a power of two from 32 to 4096"),
    ({"block_size": 16}, "block_size", "a power of two from 32 to 4096"),
    ({"block_size": 8192}, "block_size", "a power of two from 32 to 4096"),
    ({**UPDATE, "eps": -1e-8}, "eps", "a finite number, 0 or more"),
    ({**UPDATE, "eps": float("inf")}, "eps", "a finite number, 0 or more"),
    ({**UPDATE, "eps": float("nan")}, "eps", "a finite number, 0 or more"),
    ({**NF4, "signed": False}, "signed", "for signed state"),
    ({"codebook": "softsign", "signed": False}, "signed", "for signed state"),
    ({**DYN4, "signed": True}, "signed", "no negative values"),
    ({**LINEAR, "coordinate": "sqrt"}, "coordinate", "for non-negative state"),
    ({**MINMAX, "coordinate": "log"}, "coordinate", "for non-negative state"),
    ({**UPDATE, "signed": False}, "coordinate", "first moment, which has a sign"),
    ({**UPDATE, "partner": None}, "partner", "the key of the second moment"),
    ({**LINEAR, "partner": "exp_avg_sq"}, "partner", "the key of the second moment"),
    ({"scaling": "minmax"}, "scaling", "'minmax' needs codebook 'linear'"),
    ({**LINEAR, "coordinate": "pseudo-log"}, "scaling", "needs 'minmax'"),
    ({**UPDATE, "scaling": "minmax"}, "scaling", "symmetric about 0"),
    ({**LINEAR, "scaling": "eden"}, "scaling", "'eden' calibrates a table"),
    ({**DYN4, "scaling": "eden", "coordinate": "sqrt"}, "scaling", "'eden' calibrates values, not their roots"),
    ({**MINMAX, "coordinate": "pseudo-log", "bits": 2}, "bits", "a signed logarithm needs 3 bits"),
    ({"codebook": "affine"}, "codebook", "'affine' needs scaling 'minmax'"),
    ({**MINMAX, "codebook": "affine", "coordinate": "pseudo-log"}, "codebook", "no logarithm"),
    ({"codebook": "e4m3", "rounding": "stochastic"}, "rounding", "8-bit floats are rounded to nearest"),
    ({**NF4, "scaling": "eden", "rounding": "stochastic"}, "rounding", "'eden' calibrates nearest rounding"),
    ({**LINEAR, "rounding": "preconditioner"}, "rounding", "second moment, which is not negative"),
    ({**NF4, "rounding": "dither"}, "rounding", "a dither needs equal steps"),
    ({**NF4, "rounding": "coordinate"}, "rounding", "'coordinate' needs equal steps"),
    ({**DYN4, "rounding": "coordinate"}, "rounding", "'coordinate' needs equal steps"),
    ({**LINEAR, "signed": False, "rounding": "dither"}, "rounding", "a dither of non-negative state needs a logarithm"),
    ({**MINMAX, "signed": False, "rounding": "block-dither"}, "rounding", "of non-negative state needs a logarithm"),
    ({"late": 1}, "late", "a number of stores, for rounding 'stochastic'"),
    ({"late": -1, "rounding": "stochastic"}, "late", "a number of stores, for rounding 'stochastic'"),
    *(
        ({**STOCHASTIC, **choices, "late": 1}, "late", "for coordinates 'identity' and 'update'")
        for choices in NOT_LATE
    ),
    ({**DYN4, "codebook": "dyn4-nz", "scale_dtype": torch.float16}, "scale_dtype", "without 0 needs float32"),
    ({**DYN4, "codebook": "lin4-nz", "scale_dtype": torch.bfloat16}, "scale_dtype", "without 0 needs float32"),
    ({**MINMAX, "scale_dtype": torch.float16}, "scale_dtype", "'minmax'"),
]


def refusal(choices: dict[str, Any]) -> str:
    with pytest.raises(InvalidFormatError) as caught:
        Format(**choices)
    assert isinstance(caught.value, QCompileError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(("choices", "field", "rule"), REFUSED)
def test_what_has_no_meaning_is_refused(choices: dict[str, Any], field: str, rule: str) -> None:
    message = refusal(choices)
    value = choices.get(field, Format.__dataclass_fields__[field].default)
    assert message.startswith(f"Format({field}={value!r}): ")
    assert rule in message


def test_every_rule_has_a_case_above() -> None:
    messages = [refusal(choices) for choices, _, _ in REFUSED]
    missing = [rule for _, _, rule in RULES if not any(message.endswith(rule) for message in messages)]
    assert not missing


def test_a_change_is_checked_too() -> None:
    with pytest.raises(InvalidFormatError, match="bits=3"):
        replace(Format(**NF4), bits=3)


@pytest.mark.parametrize(
    ("choices", "dtype"),
    [
        ({}, torch.int8),
        ({"signed": False}, torch.uint8),
        ({"codebook": "softsign"}, torch.int8),
        (UPDATE, torch.int8),
        ({"codebook": "e4m3"}, torch.float8_e4m3fn),
        ({"codebook": "e5m2", "signed": False}, torch.float8_e5m2),
        (NF4, torch.uint8),
        (MINMAX, torch.uint8),
        ({**MINMAX, "coordinate": "pseudo-log", "signed": False}, torch.uint8),
    ],
)
def test_code_dtype(choices: dict[str, Any], dtype: torch.dtype) -> None:
    assert Format(**choices).code_dtype == dtype


@pytest.mark.parametrize(
    ("bits", "parts", "code_bytes"), [(2, 4, 64), (3, 8, 96), (4, 2, 128), (5, 8, 160), (6, 4, 192), (8, 1, 256)]
)
def test_sizes(bits: int, parts: int, code_bytes: int) -> None:
    """For blocks of 256; papers.md section 1 for two fp32 numbers per block, 4B / (B + 8)."""
    fmt = Format(True, bits, "linear", block_size=256)
    assert (fmt.parts, fmt.code_bytes) == (parts, code_bytes)
    assert fmt.bytes_per_element == bits / 8 + 4 / 256
    assert replace(fmt, scale_dtype=torch.bfloat16).bytes_per_element == bits / 8 + 2 / 256
    assert replace(fmt, scaling="minmax").bytes_per_element == bits / 8 + 8 / 256
    codes, scales = encode_blocks(torch.ones(3, 256), fmt)
    assert codes.nbytes == 3 * code_bytes
    assert codes.nbytes + sum(scale.nbytes for scale in scales) == fmt.bytes_per_element * 3 * 256


def test_seed_000_compresses_by_the_published_ratio() -> None:
    fmt = Format(True, 8, "linear", scaling="minmax", rounding="stochastic", block_size=2048)
    assert 4 / fmt.bytes_per_element == pytest.approx(3.9844, abs=5e-5)  # printed with four decimals


@pytest.mark.parametrize("value", [31, 48, 8192, 0, -256, 256.0, True, "256"])
def test_block_sizes_that_are_not(value: object) -> None:
    assert not is_block_size(value)


def test_block_sizes_that_are() -> None:
    assert [n for n in range(5000) if is_block_size(n)] == [2**i for i in range(5, 13)]


@pytest.mark.parametrize(
    ("row", "block_size", "expected"),
    [
        (96, 256, 32),
        (768, 256, 256),
        (768, 128, 128),
        (1600, 256, 64),
        (100, 256, 256),
        (48, 128, 128),
        (4096, 256, 256),
    ],
)
def test_blocks_fit_rows(row: int, block_size: int, expected: int) -> None:
    assert row_block_size(row, block_size) == expected


@given(st.integers(1, 100_000), st.sampled_from([2**i for i in range(5, 13)]))
def test_a_block_in_rows_is_the_largest_that_divides_them(row: int, block_size: int) -> None:
    candidates = [n for n in range(32, block_size + 1) if is_block_size(n) and row % n == 0]
    assert row_block_size(row, block_size) == max(candidates, default=block_size)


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({}, "dynamic8-signed/256"),
        ({"signed": False, "block_size": 2048}, "dynamic8-unsigned/2048"),
        ({**NF4, "block_size": 128}, "nf4-signed/128"),
        ({**NF4, "rounding": "stochastic", "late": 900}, "nf4-signed-stochastic-from-900/256"),
        ({"bits": 4, "codebook": "dyn4-nz", "signed": False, "scaling": "eden"}, "dyn4-nz-unsigned-eden/256"),
        (UPDATE, "update-linear8-signed/256"),
        ({**MINMAX, "rounding": "stochastic"}, "linear8-signed-minmax-stochastic/256"),
        ({**MINMAX, "bits": 4, "coordinate": "pseudo-log", "signed": False}, "pseudo-log-linear4-unsigned/256"),
        ({"codebook": "softsign", "block_size": 32, "scale_dtype": torch.float16}, "softsign8-signed/32"),
        ({"codebook": "e4m3"}, "e4m3-signed/256"),
        ({"codebook": "e5m2", "signed": False}, "e5m2-unsigned/256"),
    ],
)
def test_names(choices: dict[str, Any], name: str) -> None:
    assert str(Format(**choices)) == name


# -- Zeros: measured, not restated ---------------------------------------------------------------------------------

BLOCK = 64


def families() -> dict[tuple[str, str, bool], list[Format]]:
    """All formats that are allowed, but for sizes and dtypes, by codebook, coordinate and sign."""
    found: dict[tuple[str, str, bool], list[Format]] = {}
    choices = (CHOICES[field] for field in ("codebook", "coordinate", "scaling", "rounding"))
    for codebook, coordinate, scaling, rounding, signed in itertools.product(*choices, (True, False)):
        for bits in BITS[codebook]:
            partner = "exp_avg_sq" if coordinate == "update" else None
            try:
                fmt = Format(signed, bits, codebook, coordinate, scaling, rounding, BLOCK, partner=partner)
            except InvalidFormatError:
                continue
            found.setdefault((codebook, coordinate, signed), []).append(fmt)
    return found


FAMILIES = families()


def awkward_blocks(signed: bool) -> Tensor:
    """[12, BLOCK]: magnitudes over 24 decades below the largest, equal values, and a lone value; a third is zeros."""
    g = torch.Generator().manual_seed(0)
    x = torch.cat([10 ** (-24 * torch.rand(8, BLOCK, generator=g)), torch.ones(2, BLOCK), torch.zeros(2, BLOCK)])
    x = torch.where(torch.rand(x.shape, generator=g) < 1 / 3, 0.0, x)
    x[:, 5] = 1.0
    return x * torch.where(torch.rand(x.shape, generator=g) < 0.5, -1, 1) if signed else x


@functools.cache
def round_trips(fmt: Format) -> tuple[Tensor, Tensor]:
    """Awkward blocks, and what three stores with other random bits decode to: [3, *x.shape]."""
    x = awkward_blocks(fmt.signed)
    key = torch.tensor(key_of(0, "buffer"), dtype=torch.int32)
    decoded = []
    for store in range(3):
        draw = Draw(key, torch.tensor(store, dtype=torch.int32), 0, *x.shape)
        denominator = in_parts(torch.full_like(x, 0.25), fmt.parts)
        # an eps as large as the values, so that a zero is likely where one is possible
        context = Context(denominator, lambda v: 1 / (torch.sqrt(v) + 1.0), draw)
        decoded.append(decode_blocks(*encode_blocks(x, fmt, context), fmt, context))
    return x, torch.stack(decoded)


@pytest.mark.parametrize(("codebook", "coordinate", "signed"), FAMILIES)
def test_moves_zero_says_what_happens(codebook: str, coordinate: str, signed: bool) -> None:
    wrong = []
    for fmt in FAMILIES[codebook, coordinate, signed]:
        x, decoded = round_trips(fmt)
        moved = bool((decoded[:, x == 0] != 0).any())
        if moved != fmt.moves_zero:
            wrong.append(f"{fmt}: {moved}, not {fmt.moves_zero}")
    assert not wrong


@pytest.mark.parametrize(("codebook", "coordinate"), [(book, coord) for book, coord, signed in FAMILIES if not signed])
def test_positive_to_zero_says_what_happens(codebook: str, coordinate: str) -> None:
    wrong = []
    for fmt in FAMILIES[codebook, coordinate, False]:
        x, decoded = round_trips(fmt)
        became_zero = bool((decoded[:, x > 0] == 0).any())
        if became_zero != fmt.positive_to_zero:
            wrong.append(f"{fmt}: {became_zero}, not {fmt.positive_to_zero}")
        if (decoded < 0).any():
            wrong.append(f"{fmt}: a non-negative state becomes negative")
    assert not wrong


@pytest.mark.parametrize("field", ["codebook", "coordinate", "scaling", "rounding"])
def test_every_choice_appears_in_some_format(field: str) -> None:
    formats = itertools.chain.from_iterable(FAMILIES.values())
    assert {getattr(fmt, field) for fmt in formats} == set(CHOICES[field])
