"""The 8-bit dynamic map, as a table and in closed form.

The published map (Dettmers et al. 2021, section 2; the exact values are those of bitsandbytes' `create_dynamic_map`)
cuts [0.1, 1] into 2^e equal cells, takes their centres, and scales them by a power of ten: decade e = 1..top holds
2^e values below 10^(e - top). Index k = 2^e + j, j = 0..2^e-1, is cell j of decade e, so with u = (k + 1/2) / 2^e in [1, 2)

    value(k) = 10^(e - top) * (0.9 u - 0.8),      and value(2^(top+1)) = 1, value(1) = 0.

The index is thus a float whose exponent is the decade, and everything below is arithmetic: three comparisons find the
decade. There is no table look-up because a 256-entry gather does not vectorise on a CPU.

`top` is 7 for the unsigned map: 254 cells, 1 and 0, the published 256 values. It is 6 for the signed map, in which each
sign has 126 cells, 1 and 0. The published signed map has one cell more (5.5e-7) on each side and no -1; ours is
symmetric and represents both extremes exactly, so that storing unchanged values changes no code.

Codes are k - 1: 0 is exact zero, the largest code is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNSIGNED_TOP, SIGNED_TOP = 7, 6


def top_decade(signed: bool) -> int:
    return SIGNED_TOP if signed else UNSIGNED_TOP


def dynamic_map(signed: bool) -> Tensor:
    """The values of all codes: fp64, shape (256,) for unsigned codes 0..255, (255,) for signed codes -127..127.

    The readable form, for tests and analysis. Source: papers.md section 2, from the published construction.
    """
    top = top_decade(signed)
    cells = [torch.linspace(0.1, 1, 2**e + 1, dtype=torch.float64) for e in range(1, top + 1)]
    decades = [(edges[1:] + edges[:-1]) / 2 * 10.0 ** (e - top) for e, edges in enumerate(cells, start=1)]
    magnitudes = torch.cat([*decades, torch.ones(1, dtype=torch.float64)])
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([-magnitudes.flip(0), zero, magnitudes] if signed else [zero, magnitudes])


def dynamic_value(code: Tensor, top: int) -> Tensor:
    """Values in [0, 1] of the codes 0..2^(top+1)-1, given as fp32 of any shape. Relative error at most 1e-6."""
    where = torch.where
    u = code + 1.5
    high = u >= 16.0
    u, power = where(high, u * (1 / 16), u), where(high, 10.0 ** (4 - top), 10.0**-top)
    high = u >= 4.0
    u, power = where(high, u * (1 / 4), u), where(high, power * 100.0, power)
    high = u >= 2.0
    u, power = where(high, u * (1 / 2), u), where(high, power * 10.0, power)
    value = where(code >= 2.0 ** (top + 1) - 1, 1.0, (u * 0.9 - 0.8) * power)
    return where(code > 0.0, value, 0.0)


def dynamic_code(x: Tensor, top: int) -> Tensor:
    """Nearest codes, as fp32 whole numbers, of x in [0, 1] (fp32, any shape), for x that is not below half the least value.

    Below that the result is 1; the caller decides what small values become. Ties, and inputs within a few ulp of one,
    may go either way. The border between two decades is the midpoint of the neighbouring values, one cell above the
    power of ten: 10^(e - top) * (1 + 0.9 / 2^e).
    """
    where = torch.where
    low = x < 1e-4 * (1 + 0.9 * 2.0 ** (4 - top))
    y, cells, width = (
        where(low, x * 1e4, x),
        where(low, 2.0 ** (top - 4), 2.0**top),
        where(low, 2.0 ** (4 - top), 2.0**-top),
    )
    low = y < width * 0.036 + 0.01
    y, cells, width = where(low, y * 1e2, y), where(low, cells * 0.25, cells), where(low, width * 4.0, width)
    low = y < width * 0.18 + 0.1
    y, cells = where(low, y * 10.0, y), where(low, cells * 0.5, cells)
    cell = torch.floor((y * (1 / 0.9) + 8 / 9) * cells)
    code = torch.minimum(cell, cells * 2.0 - 1.0) - 1.0
    code = where(x >= 1 - 0.225 * 2.0**-top, 2.0 ** (top + 1) - 1.0, code)
    return torch.clamp(code, min=1.0)
