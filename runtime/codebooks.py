"""Codebooks: which levels a scaled value can take, as arithmetic on tensors.

A level has an index, a whole number held in fp32: 0..L for levels in [0, 1], -L..L for symmetric levels in [-1, 1], and
relative to the level 0 for the asymmetric tables. Index 0 is the value 0 in every codebook that has it.

    value(index)  -> the level, fp32
    nearest(u)    -> the index of the nearest level, fp32; ties, and inputs within a few ulp of one, may go either way

Small tables are evaluated as chains of comparisons with constants: there is no gather, which does not vectorise on a CPU.

Sources of the levels: papers.md section 3.2. "linear" has equal steps, and between two ends
(scaling "minmax") keeps code 0 for the value 0; "affine" is seed 000's, all of whose codes are steps between two ends. NF4 is QLoRA's (arXiv 2305.14314, appendix E); `dyn4` and `sdyn4` are the
4-bit dynamic maps of bitsandbytes and TorchAO; `dyn4-nz` (arXiv 2309.01507, "DE-0"; ZE-EDEN of arXiv 2610.12444) and
`lin4-nz` (TorchAO) have no zero; `fp4` is bitsandbytes'; `softsign` is FlashOptim's companding 2u / (1 + |u|) (arXiv
2602.23349). `fitted` is the same companding, milder: its constant is the best for a first moment in update space, found on
real gradients (`examples/quantization_error.py --fit`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from qcompile.runtime.dynamic_map import SIGNED_TOP, UNSIGNED_TOP, dynamic_code, dynamic_map, dynamic_value

_DYN4 = (
    0.0, 0.00325, 0.00775, 0.02125, 0.04375, 0.06625, 0.08875, 0.15625,
    0.26875, 0.38125, 0.49375, 0.60625, 0.71875, 0.83125, 0.94375, 1.0,
)  # fmt: skip
_SDYN4 = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)
_FP4 = (1 / 48, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)


def _mirrored(positive: tuple[float, ...]) -> tuple[float, ...]:
    return (*(-x for x in reversed(positive)), 0.0, *positive)


TABLES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
    ),
    "dyn4": _DYN4,
    "dyn4-nz": _DYN4,
    "lin4-nz": tuple(i / 16 for i in range(1, 17)),
    "sdyn4": (*_mirrored(_SDYN4), 1.0),
    "fp4": _mirrored(_FP4),
}  # fmt: skip
# Levels z / (c - (c - 1) |z|) of equally spaced z: c is how much denser they are at 0 than equal steps, and at 1 sparser.
COMPANDED = {"softsign": 2.0, "fitted": 1.5}
# 8-bit floats: dtype and largest value
FLOATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
# bits of fp32 that the mantissa drops, and the least normal number
FLOAT_SHAPE = {"e4m3": (20, 2.0**-6), "e5m2": (21, 2.0**-14)}

BITS: Mapping[str, tuple[int, ...]] = {
    "linear": (2, 3, 4, 5, 6, 8),
    "affine": (2, 3, 4, 5, 6, 8),
    **dict.fromkeys(COMPANDED, (3, 4, 5, 6, 8)),
    "dynamic": (8,),
    **dict.fromkeys(FLOATS, (8,)),
    **dict.fromkeys(TABLES, (4,)),
}
BOTH_SIGNS = frozenset({"linear", "affine", *COMPANDED, "dynamic", *FLOATS, "nf4", "sdyn4", "fp4"})
NON_NEGATIVE = frozenset({"linear", "affine", "dynamic", *FLOATS, "dyn4", "dyn4-nz", "lin4-nz"})
# In a non-negative state: positive values that round to 0; values that are 0 and round to a positive level.
TO_ZERO = frozenset({"dyn4", "affine", *FLOATS})
MISSES_ZERO = frozenset({"lin4-nz", "affine"})
# The least level of these is above 0; 0 itself keeps a code of its own in dyn4-nz, whose code 0 is not used otherwise.
NO_ZERO = frozenset({"dyn4-nz", "lin4-nz"})


def top_index(codebook: str, bits: int, signed: bool) -> int:
    """The index of the level 1."""
    if codebook in TABLES:
        return len(TABLES[codebook]) - 1 - zero_index(codebook)
    return 2 ** (bits - 1) - 1 if signed else 2**bits - 1


def bottom_index(codebook: str, bits: int, signed: bool) -> int:
    """The index of the least level that a value can be rounded to."""
    if codebook in TABLES:
        return 1 if codebook == "dyn4-nz" else -zero_index(codebook)
    if codebook == "dynamic" and not signed:
        return 1
    return -top_index(codebook, bits, signed) if signed else 0


def zero_index(codebook: str) -> int:
    """The place of the level 0 in a table; 0 where it has none."""
    return TABLES[codebook].index(0.0) if 0.0 in TABLES[codebook] else 0


def levels(codebook: str, bits: int, signed: bool) -> Tensor:
    """The levels a value can be rounded to, in ascending order: the readable form, fp64, for tests and analysis."""
    if codebook in TABLES:
        table = TABLES[codebook]
        return torch.tensor(table[1:] if codebook == "dyn4-nz" else table, dtype=torch.float64)
    if codebook in FLOATS:
        dtype, largest = FLOATS[codebook]
        values = torch.arange(256).to(torch.uint8).view(dtype).double() / largest
        values = values[values.isfinite()].unique()
        return values if signed else values[values >= 0]
    if codebook == "dynamic":
        return dynamic_map(signed)
    top = top_index(codebook, bits, signed)
    u = torch.arange(-top if signed else 0, top + 1, dtype=torch.float64) / top
    c = COMPANDED.get(codebook, 1.0)
    return u / (c - (c - 1) * u.abs())


def value_of(index: Tensor, codebook: str, bits: int, signed: bool) -> Tensor:
    """Levels of whole-number fp32 indices."""
    if codebook in TABLES:
        return _table_value(index, TABLES[codebook], zero_index(codebook))
    if codebook in FLOATS:
        return index * (1 / FLOATS[codebook][1])
    if codebook == "dynamic":
        if not signed:
            return dynamic_value(index, UNSIGNED_TOP)
        return _signed(dynamic_value(torch.abs(index), SIGNED_TOP), index)
    top = top_index(codebook, bits, signed)
    if codebook in COMPANDED:
        c = COMPANDED[codebook]
        return index / (top * c - (c - 1.0) * torch.abs(index))
    return index * (1 / top)


def nearest_index(u: Tensor, codebook: str, bits: int, signed: bool) -> Tensor:
    """Indices of the levels nearest to fp32 u in [-1, 1] or [0, 1]; for an 8-bit float the value itself, as its cast rounds it.

    The least index of the unsigned dynamic map is 1: what is exactly 0 is the caller's to know.
    """
    if codebook in TABLES:
        return _table_nearest(u, TABLES[codebook], zero_index(codebook), bottom_index(codebook, bits, signed))
    if codebook in FLOATS:
        return _rounded_float(u * FLOATS[codebook][1], *FLOAT_SHAPE[codebook])
    if codebook == "dynamic":
        return _dynamic_nearest(u, signed)
    top = top_index(codebook, bits, signed)
    if codebook in COMPANDED:  # nearest in z, where steps are equal
        c = COMPANDED[codebook]
        return torch.clamp(torch.round(u * (top * c) / (1.0 + (c - 1.0) * torch.abs(u))), min=-top, max=top)
    return torch.clamp(torch.round(u * top), min=-top if signed else 0, max=top)


def bracket(u: Tensor, codebook: str, bits: int, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The levels of a table below and above u, and the index of the lower one; at the ends the outermost pair."""
    table, zero = TABLES[codebook], zero_index(codebook)
    first = bottom_index(codebook, bits, signed) + zero
    low, high = torch.full_like(u, table[first]), torch.full_like(u, table[first + 1])
    index = torch.full_like(u, float(first - zero))
    for i in range(first + 1, len(table) - 1):
        is_above = u >= table[i]
        low, high = torch.where(is_above, table[i], low), torch.where(is_above, table[i + 1], high)
        index = torch.where(is_above, float(i - zero), index)
    return low, high, index


def _table_value(index: Tensor, table: tuple[float, ...], zero: int) -> Tensor:
    out = torch.where(index >= 1.0 - zero, table[1], table[0])
    for i, level in enumerate(table[2:], start=2):
        out = torch.where(index >= float(i - zero), level, out)
    return out


def _table_nearest(u: Tensor, table: tuple[float, ...], zero: int, bottom: int) -> Tensor:
    borders = [(a + b) / 2 for a, b in itertools.pairwise(table)][bottom + zero :]
    out = torch.where(u >= borders[0], bottom + 1.0, float(bottom))
    for i, border in enumerate(borders[1:], start=bottom + 2):
        out = torch.where(u >= border, float(i), out)
    return out


def _dynamic_nearest(u: Tensor, signed: bool) -> Tensor:
    if not signed:
        return dynamic_code(u, UNSIGNED_TOP)
    magnitude = torch.abs(u)
    half_of_least = 0.1625 * 10.0 ** (1 - SIGNED_TOP)
    code = torch.where(magnitude >= half_of_least, dynamic_code(magnitude, SIGNED_TOP), 0.0)
    return _signed(code, u)


def _rounded_float(x: Tensor, dropped: int, least_normal: float) -> Tensor:
    """The nearest 8-bit float, ties to even, as fp32: casts of it are exact, and so the same in every back end."""
    bits = x.view(torch.int32)
    half = 2 ** (dropped - 1) - 1
    normal = ((bits + half + ((bits >> dropped) & 1)) & -(2**dropped)).view(torch.float32)
    step = least_normal * 2.0 ** (dropped - 23)
    return torch.where(torch.abs(x) < least_normal, torch.round(x * (1 / step)) * step, normal)


def _signed(magnitude: Tensor, like: Tensor) -> Tensor:
    return torch.where(like < 0.0, -magnitude, magnitude)
