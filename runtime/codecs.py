"""Encode and decode blocks, as traceable tensor functions.

The same few lines are the eager reference, the C++ kernel and the Triton kernel. Everything is elementwise but one
maximum per block, and works on [n_blocks, block_size].

What holds for every format (the contract of the project):

- an element that is exactly 0 decodes to exactly 0, and a non-negative state > 0 never decodes to 0;
- encoding what was decoded gives the same codes and the same scale;
- an Inf or NaN is stored as 0 and does not touch the other elements of its block.

The scale is stored as it is, the largest finite magnitude, and clamped where it is read: a value computed between the
maximum and its use would cost a second pass over memory in Inductor's C++ (design.md, fact 8). The clamp keeps
1 / scale finite, and the least unsigned value, 3.25e-7 * 2^-104, a normal number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.runtime.codebooks import dynamic_code, dynamic_value, top_decade
from qcompile.runtime.formats import Format

LEAST_SCALE, LARGEST_SCALE = 2.0**-104, 2.0**126
LARGEST_FLOAT = torch.finfo(torch.float32).max


def _read(scale: Tensor) -> Tensor:
    return torch.clamp(scale, min=LEAST_SCALE, max=LARGEST_SCALE)


def decode_blocks(codes: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Dense fp32 values, shape [n_blocks, block_size], of codes [n_blocks, block_size] and scale [n_blocks, 1]."""
    top = top_decade(fmt.signed)
    code = codes.to(torch.float32)
    if not fmt.signed:
        return dynamic_value(code, top) * _read(scale)
    magnitude = dynamic_value(torch.abs(code), top)
    return torch.where(code < 0.0, -magnitude, magnitude) * _read(scale)


def encode_blocks(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Codes [n_blocks, block_size] in `fmt.code_dtype` and fp32 scale [n_blocks, 1] of x, floating, [n_blocks, block_size].

    Nearest code for every element, except that a positive element of a non-negative state gets at least code 1.
    """
    top = top_decade(fmt.signed)
    x = x.to(torch.float32)
    x = torch.where(torch.abs(x) <= LARGEST_FLOAT, x, 0.0)
    magnitude = torch.abs(x) if fmt.signed else x
    scale = torch.amax(magnitude, dim=1, keepdim=True)
    relative = magnitude * (1.0 / _read(scale))
    code = dynamic_code(relative, top)
    if not fmt.signed:
        return torch.where(x > 0.0, code, 0.0).to(fmt.code_dtype), scale
    half_of_least = 0.1625 * 10.0 ** (1 - top)
    code = torch.where(relative >= half_of_least, code, 0.0)
    return torch.where(x < 0.0, -code, code).to(fmt.code_dtype), scale
