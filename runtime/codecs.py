"""Quantize and dequantize blocks, as traceable tensor functions.

The same few lines are the eager reference, the C++ kernel and the Triton kernel. Everything is elementwise but the
reductions over a block, and works on a block matrix that is given in equal parts: a list of [n_blocks, block_size / parts]
tensors, part k holding columns k * block_size / parts onwards. Codes of fewer than 8 bits are packed from elements of
different parts, so no byte needs a neighbour (design.md, fact 16); 8-bit codes need one part.

What holds for every format but those that are defined otherwise and say so (`positive_to_zero`, `moves_zero`, `dithered`):

- an element that is exactly 0 decodes to exactly 0, and a non-negative state > 0 never decodes to 0;
- encoding what was decoded gives the same codes, whatever the rounding, and decodes to the same values, but for the last
  bit of an fp32 scale; a codebook without the level -1 (sdyn4) cuts a largest value that is negative, as published;
- an Inf or NaN is stored as 0 (the least level where there is no 0) and does not touch the other elements of its block.

Scales are stored as they are reduced and clamped where they are read: a value computed between a reduction and its use
would cost a second pass over memory in Inductor's C++ (design.md, fact 8). The clamp keeps 1 / scale finite, and the
least unsigned value, 3.25e-7 * 2^-104, a normal number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from qcompile.runtime.codebooks import (
    MISSES_ZERO,
    NO_ZERO,
    TABLES,
    bottom_index,
    bracket,
    nearest_index,
    top_index,
    value_of,
)
from qcompile.runtime.formats import Format
from qcompile.runtime.packing import pack, unpack
from qcompile.runtime.ranges import of_range, position_in_range, range_of, resolution
from qcompile.runtime.rounding import Draw

LEAST_SCALE, LARGEST_SCALE = 2.0**-104, 2.0**126
# AdamW's updates are at most (1 - beta1) / sqrt(1 - beta2), 3.2 for the usual betas, or their like with others.
LARGEST_UPDATE = 2.0**15
LARGEST_FLOAT = torch.finfo(torch.float32).max
# How near to a level, relative to it or in steps of an affine range, an element counts as that level: a few rounding
# errors of fp32, far below what an update changes. Without it a decoded value could be rounded away from its level.
SAME_LEVEL, SAME_STEP = 2.0**-20, 2.0**-22

Parts = list[Tensor]


@dataclass(frozen=True, slots=True)
class Context:
    """What some formats need besides values.

    Attributes:
        denominator: for coordinate "update", sqrt(v) + eps of the stored second moment, in the same parts.
        preconditioner: for rounding "preconditioner", h(v).
        draw: random bits.
    """

    denominator: Parts | None = None
    preconditioner: Callable[[Tensor], Tensor] | None = None
    draw: Draw | None = None


NOTHING = Context()


def update_denominator(v: Sequence[Tensor], eps: float) -> Parts:
    """What update space divides the first moment by: sqrt(v) + eps, or 0 where v is 0, which says that nothing is stored.

    A first moment whose second moment is 0 is one whose square underflows, or one of an element that was reset after an Inf.
    """
    return [torch.where(part > 0.0, torch.sqrt(part) + eps, 0.0) for part in v]


def quantize(values: Sequence[Tensor], fmt: Format, context: Context = NOTHING) -> tuple[Parts, Parts]:
    """Indices (whole fp32 numbers, in parts) of a block matrix in parts, and what its blocks reduce to.

    The latter, [n_blocks, 1] fp32 each, become scales by `finish_scales`.
    """
    x = [_finite(part.to(torch.float32)) for part in values]
    if fmt.coordinate == "update":
        assert context.denominator is not None
        x = [_bounded(part / d, d) for part, d in zip(x, context.denominator, strict=True)]
    reduced = range_of(x, fmt) if fmt.two_scales else [_largest(x, fmt)]
    parts = len(x)
    indices = [_index(part, reduced, fmt, context, k, parts) for k, part in enumerate(x)]
    if fmt.scaling == "eden":
        reduced += _products(x, indices, reduced[0], fmt)
    return indices, reduced


def finish_scales(reduced: Sequence[Tensor], fmt: Format) -> Parts:
    """Scales as they are stored, `fmt.scale_count` of [n_blocks, 1] in `fmt.scale_dtype`, from what `quantize` reduced.

    Apart from it because Inductor's C++ keeps one loop over the blocks only where a reduction itself is the output.
    """
    scales = list(reduced)
    if fmt.scaling == "eden":  # absmax * <u, u> / <u, y>: arXiv 2610.12444, section 3.2
        is_large = (reduced[0] >= LEAST_SCALE) & (reduced[2] > 1e-12)
        scales = [reduced[0] * torch.where(is_large, reduced[1] / reduced[2], 1.0)]
    if fmt.scale_dtype == torch.float32:
        return scales
    # a short dtype has no room for squares, so in sqrt space it holds the root
    largest = torch.finfo(fmt.scale_dtype).max
    roots = [torch.sqrt(s) if fmt.coordinate == "sqrt" else s for s in scales]
    return [torch.clamp(s, max=largest).to(fmt.scale_dtype) for s in roots]


def load_scales(scales: Sequence[Tensor], fmt: Format) -> Parts:
    """Stored scales as `dequantize` takes them, fp32."""
    if fmt.scale_dtype == torch.float32:
        return list(scales)
    wide = [scale.to(torch.float32) for scale in scales]
    return [s * s for s in wide] if fmt.coordinate == "sqrt" else wide


def dequantize(indices: Sequence[Tensor], scales: Sequence[Tensor], fmt: Format, context: Context = NOTHING) -> Parts:
    """fp32 values, in parts, of indices and scales. `context.draw.store` is the number of the store that made them."""
    parts = len(indices)
    x = [_value(index, scales, fmt, context, k, parts) for k, index in enumerate(indices)]
    if fmt.coordinate == "update":
        assert context.denominator is not None
        x = [part * d for part, d in zip(x, context.denominator, strict=True)]
    return x


def encode_blocks(x: Tensor, fmt: Format, context: Context = NOTHING) -> tuple[Tensor, Parts]:
    """Codes [n_blocks, code_bytes] in `fmt.code_dtype` and scales, each [n_blocks, 1], of x [n_blocks, block_size]."""
    indices, reduced = quantize(in_parts(x, fmt.parts), fmt, context)
    return torch.cat(pack(indices, fmt), dim=1), finish_scales(reduced, fmt)


def decode_blocks(codes: Tensor, scales: Sequence[Tensor], fmt: Format, context: Context = NOTHING) -> Tensor:
    """Dense fp32 values, shape [n_blocks, block_size]."""
    planes = in_parts(codes, fmt.parts * fmt.bits // 8)
    indices = unpack(planes, fmt, fmt.parts)
    return torch.cat(dequantize(indices, load_scales(scales, fmt), fmt, context), dim=1)


def in_parts(matrix: Tensor, parts: int) -> Parts:
    """Views of equal ranges of columns."""
    return [matrix] if parts == 1 else list(matrix.split(matrix.shape[1] // parts, dim=1))


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.abs(x) <= LARGEST_FLOAT, x, 0.0)


def _bounded(update: Tensor, denominator: Tensor) -> Tensor:
    """An update that a stored scale can hold, so that one wild element does not take its block's levels; see above for 0."""
    return torch.where(denominator > 0.0, torch.clamp(update, min=-LARGEST_UPDATE, max=LARGEST_UPDATE), 0.0)


# -- One scale per block -------------------------------------------------------------------------------------------


def _largest(x: Sequence[Tensor], fmt: Format) -> Tensor:
    magnitude = reduce(torch.maximum, [torch.abs(part) if fmt.signed else part for part in x])
    return torch.amax(magnitude, dim=1, keepdim=True)


def _read(scale: Tensor, fmt: Format) -> Tensor:
    """The scale as the levels are multiplied by it: in sqrt space, of the root."""
    clamped = torch.clamp(scale, min=LEAST_SCALE, max=LARGEST_SCALE)
    return torch.sqrt(clamped) if fmt.coordinate == "sqrt" else clamped


def _products(x: Sequence[Tensor], indices: Sequence[Tensor], scale: Tensor, fmt: Format) -> Parts:
    """<u, u> and <u, y> of each block, u = x / absmax and y its levels."""
    inverse = 1.0 / _read(scale, fmt)
    u = [part * inverse for part in x]
    y = [value_of(index, fmt.codebook, fmt.bits, fmt.signed) for index in indices]
    pairs = ([a * a for a in u], [a * b for a, b in zip(u, y, strict=True)])
    return [torch.sum(reduce(torch.add, pair), dim=1, keepdim=True) for pair in pairs]


# -- From values to indices and back -------------------------------------------------------------------------------


def _value(index: Tensor, scales: Sequence[Tensor], fmt: Format, context: Context, part: int, parts: int) -> Tensor:
    if fmt.dithered:
        offset = _offset(fmt, context, part, parts)
        if fmt.two_scales:
            offset = torch.where(index < 0.0, -offset, offset)
            return torch.where(index == 0.0, 0.0, of_range(index - offset, scales, fmt))
        top = top_index(fmt.codebook, fmt.bits, fmt.signed)
        value = (index - offset) * (1 / top) * _read(scales[0], fmt)
        return torch.where((index == -(top + 1.0)) | (scales[0] == 0.0), 0.0, value)
    return _plain_value(index, scales, fmt)


def _plain_value(index: Tensor, scales: Sequence[Tensor], fmt: Format) -> Tensor:
    if fmt.two_scales:
        return of_range(index, scales, fmt)
    value = value_of(index, fmt.codebook, fmt.bits, fmt.signed) * _read(scales[0], fmt)
    if fmt.codebook in NO_ZERO:
        value = torch.where(scales[0] > 0.0, value, 0.0)
    return value * value if fmt.coordinate == "sqrt" else value


def _index(x: Tensor, scales: Sequence[Tensor], fmt: Format, context: Context, part: int, parts: int) -> Tensor:
    if fmt.logarithmic and fmt.signed:
        index = _magnitude_index(torch.abs(x), scales, fmt, context, part, parts)
        return torch.where(x < 0.0, -index, index)
    return _magnitude_index(x, scales, fmt, context, part, parts)


def _magnitude_index(
    x: Tensor, scales: Sequence[Tensor], fmt: Format, context: Context, part: int, parts: int
) -> Tensor:
    position = _position(x, scales, fmt)
    bottom, top = _ends(fmt)
    if fmt.dithered:
        index = torch.clamp(torch.round(position + _offset(fmt, context, part, parts)), min=bottom, max=top)
        return torch.where(x == 0.0, -(top + 1.0) if bottom < 0 else 0.0, index)
    if fmt.rounding == "nearest":
        index = _nearest(position, fmt)
    elif fmt.equal_steps and (fmt.rounding == "coordinate" or fmt.coordinate in ("identity", "update")):
        index = _up_or_down(position, scales, _uniform(fmt, context, part, parts), fmt)
    else:
        index = _between_levels(x, position, scales, fmt, context, _uniform(fmt, context, part, parts))
    if fmt.zero_code or (not fmt.signed and fmt.codebook not in MISSES_ZERO):
        index = torch.where(x == 0.0, 0.0, index)
    return index


def _ends(fmt: Format) -> tuple[float, float]:
    if fmt.two_scales:
        top = 2.0 ** (fmt.bits - (fmt.signed and fmt.logarithmic)) - 1.0
        return (1.0 if fmt.zero_code else 0.0), top
    bottom, top = (end(fmt.codebook, fmt.bits, fmt.signed) for end in (bottom_index, top_index))
    return float(bottom), float(top)


def _position(x: Tensor, scales: Sequence[Tensor], fmt: Format) -> Tensor:
    """Where x lies: in steps of an affine range or a linear codebook, else relative to the scale."""
    if fmt.two_scales:
        return position_in_range(x, scales, fmt)
    u = (torch.sqrt(x) if fmt.coordinate == "sqrt" else x) * (1.0 / _read(scales[0], fmt))
    return u * top_index(fmt.codebook, fmt.bits, fmt.signed) if fmt.equal_steps else u


def _nearest(position: Tensor, fmt: Format) -> Tensor:
    if not fmt.equal_steps:
        return nearest_index(position, fmt.codebook, fmt.bits, fmt.signed)
    bottom, top = _ends(fmt)
    return torch.clamp(torch.round(position), min=bottom, max=top)


def _up_or_down(position: Tensor, scales: Sequence[Tensor], uniform: Tensor, fmt: Format) -> Tensor:
    """Between two neighbouring steps, the upper one as often as the position is beyond the lower one."""
    bottom, top = _ends(fmt)
    near = torch.round(position)
    index = torch.floor(position + uniform)
    same: float | Tensor = max(top, -bottom) * SAME_STEP
    if fmt.two_scales:
        same = torch.clamp(resolution(scales, fmt), min=same)
    index = torch.where(torch.abs(position - near) <= same, near, index)
    return torch.clamp(index, min=bottom, max=top)


def _between_levels(
    x: Tensor, position: Tensor, scales: Sequence[Tensor], fmt: Format, context: Context, uniform: Tensor
) -> Tensor:
    """Between two neighbouring levels a <= x <= b, in proportion to phi(x), phi the value or the preconditioner.

    The lower one is taken with probability (phi(x) - phi(b)) / (phi(a) - phi(b)) (arXiv 2610.12444, definition 4). Near b
    that is the small one of the two probabilities, and is computed directly: with a = 0, phi(a) = 1 / eps cancels in the other.
    """
    a, b, low = _neighbours(x, position, scales, fmt)
    high = low + 1.0
    if fmt.rounding == "preconditioner":
        assert context.preconditioner is not None
        of_x, of_a, of_b = (context.preconditioner(value) for value in (x, a, b))
        down = (of_x - of_b) / torch.clamp(of_a - of_b, min=1e-30)
        index = torch.where(uniform < down, low, high)
    else:
        up = (x - a) / torch.clamp(b - a, min=1e-38)
        index = torch.where(uniform < up, high, low)
    from_a, from_b = torch.abs(x - a), torch.abs(x - b)
    index = torch.where(from_a <= SAME_LEVEL * torch.abs(a), low, index)
    return torch.where((from_b <= SAME_LEVEL * torch.abs(b)) & (from_b < from_a), high, index)


def _neighbours(x: Tensor, position: Tensor, scales: Sequence[Tensor], fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the levels below and above x, and the index of the lower one."""
    if fmt.codebook in TABLES and fmt.coordinate != "sqrt":
        a, b, low = bracket(position, fmt.codebook, fmt.bits, fmt.signed)
        scale = _read(scales[0], fmt)
        return a * scale, b * scale, low
    bottom, top = _ends(fmt)
    near = _nearest(position, fmt)
    low = torch.clamp(near - (_plain_value(near, scales, fmt) > x).to(torch.float32), min=bottom, max=top - 1.0)
    return _plain_value(low, scales, fmt), _plain_value(low + 1.0, scales, fmt), low


def _uniform(fmt: Format, context: Context, part: int, parts: int) -> Tensor:
    """Random numbers, or 1/2, with which both rules above round to nearest, until a late start."""
    draw = _draw(context)
    uniform = draw.uniform(part, parts, per_block=False)
    return torch.where(draw.store >= fmt.late, uniform, 0.5) if fmt.late else uniform


def _offset(fmt: Format, context: Context, part: int, parts: int) -> Tensor:
    return _draw(context).uniform(part, parts, per_block=fmt.rounding == "block-dither") - 0.5


def _draw(context: Context) -> Draw:
    assert context.draw is not None, "this format needs random bits"
    return context.draw
