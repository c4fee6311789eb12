"""Random bits and rounding.

Random bits are a hash of (seed, store, buffer, element), in 32-bit integer arithmetic alone, so that they are the same in
eager torch, C++ and Triton and for any number of threads. `counter` of a buffer holds (key, store): the key comes from the
seed and the buffer's place in its optimizer, the store counts. An element's place is its row (block) and its column.

The mixing function is the 32-bit finaliser of MurmurHash3 with the constants of C. Wellons' search ("lowbias32").
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_BELOW_ONE = 1 - 2.0**-24


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit flips every output bit about half the time."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def key_of(seed: int, buffer: str) -> int:
    """The int32 key of a buffer: a hash of the seed and the buffer's name."""
    word = zlib.crc32(f"{seed}:{buffer}".encode())
    return word - 2**32 if word >= 2**31 else word


@dataclass(frozen=True, slots=True)
class Draw:
    """Where the random bits of a kernel's rows come from.

    Attributes:
        key, store: 0-d int32, of the buffer.
        first_row: 0-d int32 or int: the row of the buffer that is row 0 here.
        rows, block_size: extents.
    """

    key: Tensor
    store: Tensor
    first_row: Tensor | int
    rows: int
    block_size: int

    def uniform(self, part: int, parts: int, per_block: bool = False) -> Tensor:
        """Uniform in (0, 1), fp32, [rows, block_size / parts], or [rows, 1] for one number per block."""
        device = self.key.device
        row = torch.arange(self.rows, dtype=torch.int32, device=device).unsqueeze(1) + self.first_row
        # the xor stands before the first product: Inductor folds index * constant and overflows (design.md, fact 16)
        bits = mix(row ^ mix(self.store ^ self.key))
        if not per_block:
            width = self.block_size // parts
            column = torch.arange(part * width, (part + 1) * width, dtype=torch.int32, device=device)
            bits = mix(column.unsqueeze(0) ^ bits)
        uniform = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
        return torch.clamp(uniform, max=LARGEST_BELOW_ONE)
