"""How one state buffer is stored.

A `Format` is a frozen record. It decides nothing and holds no tensor; `codecs` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 4096


@dataclass(frozen=True, slots=True)
class Format:
    """Block-wise 8-bit storage with the dynamic map of Dettmers et al., "8-bit Optimizers via Block-wise Quantization".

    Every `block_size` consecutive elements, in storage order, share one fp32 scale: their largest finite magnitude.
    A signed state is stored as int8 (the code's sign is the value's), a non-negative state as uint8.

    Attributes:
        signed: whether the state may be negative.
        block_size: elements that share a scale; a power of two between 32 and 4096.
        codebook: name of the map; only `"dynamic"` so far.
    """

    signed: bool = True
    block_size: int = 256
    codebook: str = "dynamic"

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    def __str__(self) -> str:
        sign = "signed" if self.signed else "unsigned"
        return f"{self.codebook}8-{sign}/{self.block_size}"


def is_block_size(value: object) -> bool:
    """Whether `value` is an int that `Format.block_size` allows."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and MIN_BLOCK_SIZE <= value <= MAX_BLOCK_SIZE and value & (value - 1) == 0  # type: ignore[operator]
