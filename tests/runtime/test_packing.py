"""Codes in bytes: every code survives, in the documented place, and zero bytes are an all-zero state."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qcompile.exc import InvalidFormatError
from qcompile.runtime.codebooks import BITS, FLOATS, TABLES
from qcompile.runtime.codecs import Context, decode_blocks, in_parts
from qcompile.runtime.formats import CHOICES, Format
from qcompile.runtime.packing import pack, unpack
from qcompile.runtime.rounding import Draw

BLOCK = 256


def formats_of(codebook: str, scale_dtype: torch.dtype = torch.float32) -> list[Format]:
    """All that `Format` allows with one codebook and one dtype of scales, but for sizes."""
    found = []
    choices = (BITS[codebook], (True, False), *(CHOICES[field] for field in ("coordinate", "scaling", "rounding")))
    for bits, signed, coordinate, scaling, rounding in itertools.product(*choices):
        partner = "exp_avg_sq" if coordinate == "update" else None
        try:
            found.append(
                Format(signed, bits, codebook, coordinate, scaling, rounding, BLOCK, scale_dtype, partner=partner)
            )
        except InvalidFormatError:
            continue
    return found


def indices_of(fmt: Format) -> tuple[float, ...]:
    """Every index that a format stores: what `codecs` documents, written out."""
    if fmt.codebook in FLOATS:
        values = torch.arange(256).to(torch.uint8).view(FLOATS[fmt.codebook][0]).float()
        return tuple(values[values.isfinite()].tolist())
    if fmt.codebook in TABLES:
        below = sum(level < 0 for level in TABLES[fmt.codebook])
        return tuple(float(i - below) for i in range(len(TABLES[fmt.codebook])))
    if not fmt.signed or (fmt.two_scales and not fmt.logarithmic):
        return tuple(float(i) for i in range(2**fmt.bits))
    top = 2 ** (fmt.bits - 1) - 1
    marked = fmt.dithered and not fmt.logarithmic  # a zero has a code of its own, below the others
    return tuple(float(i) for i in range(-top - marked, top + 1))


def index_blocks(fmt: Format) -> Tensor:
    """[8, BLOCK] indices: random, and all of them in each of the first rows' places."""
    every = torch.tensor(indices_of(fmt))
    chosen = torch.randint(len(every), (8, BLOCK), generator=torch.Generator().manual_seed(0))
    chosen[0] = torch.arange(BLOCK) % len(every)
    chosen[1] = torch.arange(BLOCK).flip(0) % len(every)
    return every[chosen]


# one of those that cannot be told apart by what they pack
ONE_OF_EACH = list(
    {(fmt.codebook, fmt.bits, indices_of(fmt)): fmt for book in BITS for fmt in formats_of(book)}.values()
)


# short scales are refused where a range has two ends, and where a codebook has no 0
WITH_SCALES = [(book, dtype) for book in BITS for dtype in CHOICES["scale_dtype"] if formats_of(book, dtype)]


@pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=str)
def test_every_index_comes_back(fmt: Format) -> None:
    indices = index_blocks(fmt)
    planes = pack(in_parts(indices, fmt.parts), fmt)
    assert sum(plane.shape[1] for plane in planes) == fmt.code_bytes
    assert {plane.dtype for plane in planes} == {fmt.code_dtype}
    assert torch.equal(torch.cat(unpack(planes, fmt, fmt.parts), dim=1), indices)


@pytest.mark.parametrize("more", [2, 4])
@pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=str)
def test_more_parts_make_the_same_bytes_in_the_same_order(fmt: Format, more: int) -> None:
    indices = index_blocks(fmt)
    own = torch.cat(pack(in_parts(indices, fmt.parts), fmt), dim=1)
    parts = more * fmt.parts
    finer = torch.cat(pack(in_parts(indices, parts), fmt), dim=1)
    assert torch.equal(finer.view(torch.uint8), own.view(torch.uint8))
    planes = in_parts(own, parts * fmt.bits // 8)
    assert torch.equal(torch.cat(unpack(planes, fmt, parts), dim=1), indices)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_bits_lie_where_the_module_says(bits: int) -> None:
    """Bit i of code k is bit k * bits + i of the run of planes: against Python's whole numbers, element by element."""
    fmt = Format(False, bits, "linear", block_size=32)
    codes = torch.randint(2**bits, (1, 32), generator=torch.Generator().manual_seed(bits))
    stored = torch.cat(pack(in_parts(codes.float(), fmt.parts), fmt), dim=1)[0].tolist()
    length = 32 // fmt.parts
    expected = [0] * fmt.code_bytes
    for j in range(length):
        run = sum(int(codes[0, k * length + j]) << k * bits for k in range(fmt.parts))
        for plane, byte in enumerate(run.to_bytes(fmt.parts * bits // 8, "little")):
            expected[plane * length + j] = byte
    assert stored == expected


def test_four_bits_are_the_halves_of_a_byte() -> None:
    fmt = Format(False, 4, "dyn4", block_size=32)
    indices = torch.zeros(1, 32)
    indices[0, 3], indices[0, 16 + 3] = 9, 5
    stored = torch.cat(pack(in_parts(indices, 2), fmt), dim=1)
    assert stored.shape == (1, 16)
    assert stored[0, 3] == 9 + 16 * 5
    assert stored.count_nonzero() == 1


@pytest.mark.parametrize("codebook", BITS)
def test_index_0_is_zero_bytes(codebook: str) -> None:
    for fmt in formats_of(codebook):
        planes = pack(in_parts(torch.zeros(2, BLOCK), fmt.parts), fmt)
        assert not any(plane.view(torch.uint8).any() for plane in planes), str(fmt)


@pytest.mark.parametrize(("codebook", "scale_dtype"), WITH_SCALES)
def test_zero_bytes_with_zero_scales_are_exact_zeros(codebook: str, scale_dtype: torch.dtype) -> None:
    """What a new state is made of: no format needs an encoder to hold zeros."""
    draw = Draw(torch.tensor(77, dtype=torch.int32), torch.tensor(3, dtype=torch.int32), 0, 2, BLOCK)
    moved = []
    for fmt in formats_of(codebook, scale_dtype):
        denominator = in_parts(torch.full((2, BLOCK), 0.5), fmt.parts)
        codes = torch.zeros(2, fmt.code_bytes, dtype=torch.uint8).view(fmt.code_dtype)
        scales = [torch.zeros(2, 1, dtype=fmt.scale_dtype)] * fmt.scale_count
        if decode_blocks(codes, scales, fmt, Context(denominator, draw=draw)).count_nonzero():
            moved.append(str(fmt))
    assert not moved
