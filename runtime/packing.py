"""Codes of 2 to 8 bits in bytes.

With b bits, s = 8 / gcd(8, b) elements fill b * s / 8 bytes. A block of n elements is cut into s equal parts, and elements
j of all parts make byte j of all planes: bit i of code k is bit k * b + i of the run of planes. So with 4 bits, element j
is in the low half and element j + n/2 in the high half of byte j, and packing is elementwise on parts of a row.

More parts than s are allowed, m times as many: then part q * m + r of the elements goes with sub-part r of each plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from qcompile.runtime.codebooks import TABLES, zero_index
from qcompile.runtime.formats import Format


def pack(indices: Sequence[Tensor], fmt: Format) -> list[Tensor]:
    """Planes of bytes from index parts: len(indices) * bits / 8 tensors of the parts' shape, in column order."""
    if fmt.bits == 8:
        return [index.to(fmt.code_dtype) for index in indices]
    own, sub = fmt.parts, len(indices) // fmt.parts
    words = [index.to(torch.int32) & (2**fmt.bits - 1) for index in indices]
    planes = []
    for plane in range(own * fmt.bits // 8):
        for r in range(sub):
            pieces = [_shifted(words[q * sub + r], q * fmt.bits - 8 * plane, fmt.bits) for q in range(own)]
            byte = reduce(torch.bitwise_or, [piece for piece in pieces if piece is not None])
            planes.append((byte & 0xFF).to(torch.uint8))
    return planes


def unpack(planes: Sequence[Tensor], fmt: Format, parts: int) -> list[Tensor]:
    """Index parts, fp32, from planes."""
    if fmt.bits == 8:
        return [plane.to(torch.float32) for plane in planes]
    own, sub = fmt.parts, parts // fmt.parts
    wide = [plane.to(torch.int32) for plane in planes]
    mask, zero = 2**fmt.bits - 1, _zero(fmt)
    indices = []
    for q in range(own):
        for r in range(sub):
            pieces = [
                _shifted(wide[plane * sub + r], 8 * plane - q * fmt.bits, 8) for plane in range(own * fmt.bits // 8)
            ]
            touching = [
                piece
                for plane, piece in enumerate(pieces)
                if piece is not None and 8 * plane < (q + 1) * fmt.bits and 8 * (plane + 1) > q * fmt.bits
            ]
            word = reduce(torch.bitwise_or, touching) & mask
            if zero:
                word = ((word + zero) & mask) - zero
            indices.append(word.to(torch.float32))
    return indices


def _shifted(word: Tensor, left: int, width: int) -> Tensor | None:
    """`word` of `width` bits, moved left (or right); None where nothing of it lands in bits 0 to 7 or more."""
    if left >= 8 or left <= -width:
        return None
    return word << left if left > 0 else word >> -left if left < 0 else word


def _zero(fmt: Format) -> int:
    """How far below 0 indices go: codes are stored modulo 2^bits, so that the code of index 0 is 0."""
    if fmt.codebook in TABLES:
        return zero_index(fmt.codebook)
    return int(2 ** (fmt.bits - 1)) if fmt.mirrored else 0
