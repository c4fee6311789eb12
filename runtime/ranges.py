"""Affine quantization between the least and the largest value of a block, in a coordinate.

Seed 000 of the project, codebook "affine": code = round((x - lo) / s), s = (hi - lo) / L. Codebook "linear" is ours: code 0
is exactly 0, and codes 1..L run from the least to the largest value that is not 0. In a logarithmic coordinate the same
serves non-negative values, and magnitudes of signed ones (papers.md sections 0 and 8). Both ends are stored as they are, and
decode exactly.

"pseudo-log" reads the bits of an fp32 as an integer, a piecewise linear log2 with an error below 0.0861 octaves, so it
needs no logarithm and no exponential.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from qcompile.runtime.formats import Format

LARGEST = torch.finfo(torch.float32).max
# Least difference of two ends: keeps a step above 0 where all values are equal.
LEAST_SPAN = 2.0**-120
OCTAVE = 2**23  # of fp32 bits
LARGEST_BITS = 0x7F7FFFFF


def octaves(fmt: Format) -> int:
    """The widest range a block may have; what is smaller is stored as its lower end."""
    return 5 * fmt.bits


def range_of(x: Sequence[Tensor], fmt: Format) -> list[Tensor]:
    """[lo, hi], each [n_blocks, 1]: of all values, or of those that are not 0 (of their magnitudes, in a logarithmic
    coordinate). Where there are none lo is the largest float, and hi 0 or its opposite."""
    low = high = [torch.abs(part) for part in x] if fmt.signed and fmt.logarithmic else list(x)
    if fmt.zero_code:
        low = [torch.where(part == 0.0, LARGEST, part) for part in low]
        if fmt.signed and not fmt.logarithmic:
            high = [torch.where(part == 0.0, -LARGEST, part) for part in high]
    return [
        torch.amin(reduce(torch.minimum, low), dim=1, keepdim=True),
        torch.amax(reduce(torch.maximum, high), dim=1, keepdim=True),
    ]


def position_in_range(x: Tensor, scales: Sequence[Tensor], fmt: Format) -> Tensor:
    """Where magnitudes x lie, fp32, in steps: 0 to L from the lower end, or 1 to L beside a code for 0."""
    low, span = _ends(scales, fmt)
    steps = _steps(fmt)
    distance = _difference(_forward(x, fmt), low)
    position = distance * (steps / torch.clamp(span, min=LEAST_SPAN))
    return position + 1.0 if fmt.zero_code else position


def of_range(index: Tensor, scales: Sequence[Tensor], fmt: Format) -> Tensor:
    """The values of indices, which may be fractions."""
    steps = _steps(fmt)
    low, span = _ends(scales, fmt)
    step = span * (1 / steps)
    if not fmt.zero_code:
        return torch.where(index >= steps, scales[1], _backward(low, index * step, fmt))  # never dithered
    mirrored = fmt.signed and fmt.logarithmic
    magnitude = torch.abs(index) if mirrored else index
    value = _backward(low, (magnitude - 1.0) * step, fmt)
    if not fmt.dithered:  # an offset may reach beyond the end
        value = torch.where(magnitude >= steps + 1.0, scales[1], value)
    value = torch.where(magnitude > 0.0, value, 0.0)
    return torch.where(index < 0.0, -value, value) if mirrored else value


def resolution(scales: Sequence[Tensor], fmt: Format) -> Tensor:
    """How many steps the rounding errors of `position_in_range` amount to, [n_blocks, 1]: much in a block of near equals."""
    low, span = _ends(scales, fmt)
    step = torch.clamp(span, min=LEAST_SPAN) * (1 / _steps(fmt))
    if fmt.coordinate == "pseudo-log":
        return 1.0 / step  # one bit
    largest = torch.maximum(torch.abs(low), torch.abs(low + span))
    if fmt.coordinate == "log":  # a logarithm and an exponential lose more, and near 1 the value itself is rounded
        return torch.clamp(largest, min=1.0) * 2.0**-20 / step
    return largest * 2.0**-22 / step


def _steps(fmt: Format) -> float:
    """How many steps lie between the ends."""
    if not fmt.zero_code:
        return 2.0**fmt.bits - 1.0
    return 2.0 ** (fmt.bits - (fmt.signed and fmt.logarithmic)) - 2.0


def _ends(scales: Sequence[Tensor], fmt: Format) -> tuple[Tensor, Tensor]:
    """The lower end in the coordinate, and the distance of the upper end from it, fp32."""
    low, high = (_forward(scale, fmt) for scale in scales)
    if not fmt.logarithmic:  # keep the distance finite
        low, high = torch.clamp(low, min=-LARGEST / 2), torch.clamp(high, max=LARGEST / 2)
    elif fmt.coordinate == "pseudo-log":
        low = torch.minimum(torch.maximum(low, high - octaves(fmt) * OCTAVE), high)
    else:
        low = torch.minimum(torch.maximum(low, high - float(octaves(fmt))), high)
    return low, _difference(high, low)


def _forward(x: Tensor, fmt: Format) -> Tensor:
    if fmt.coordinate == "pseudo-log":
        return x.view(torch.int32)
    if fmt.coordinate == "log":
        return torch.log2(torch.clamp(x, min=2.0**-126))
    return torch.sqrt(x) if fmt.coordinate == "sqrt" else x


def _backward(low: Tensor, distance: Tensor, fmt: Format) -> Tensor:
    if fmt.coordinate == "pseudo-log":
        bits = low + torch.round(distance).to(torch.int32)
        return (torch.clamp(bits, min=1, max=LARGEST_BITS) if fmt.dithered else bits).view(torch.float32)
    if fmt.coordinate == "log":
        return torch.clamp(torch.exp2(low + distance), max=LARGEST)
    value = low + distance
    return value * value if fmt.coordinate == "sqrt" else value


def _difference(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).to(torch.float32)
