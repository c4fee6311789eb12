"""Give an update quantized storage: dequantize at the head, quantize and store at the tail.

Before: a functional `elements` graph over dense values. After: an ATen graph over [n_blocks, block_size] (or [numel] when
nothing is quantized), in which every quantized operand has become its codes and scale, and whose last nodes copy each
new value into its input. The number of rows is symbolic. The update in between is the user's, on exact new values.

Inductor's Triton makes one persistent kernel of it, also with scales copied in place. Its C++ fuses the loops over a block
only when a new scale is a fresh buffer, so there scales are returned and the caller copies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qcompile._compat import SymbolicRows, trace
from qcompile.passes.functionalize import UpdateProgram
from qcompile.runtime.codecs import decode_blocks, encode_blocks
from qcompile.runtime.formats import Format

# Per operand of a program: quantized, dense in another dtype than the program's (the fp32 tail of a quantized state), or
# None, dense as the program has it.
Storage = tuple[Format | torch.dtype | None, ...]


@dataclass(frozen=True, slots=True)
class QuantizedUpdate:
    """The graph of one update kernel and the fake inputs it was traced with.

    Attributes:
        graph: inputs are, per operand, codes and scale, or the dense values; then the program's 0-d inputs.
        inputs: fake tensors for them.
        world: where the symbolic number of rows lives.
        returned_scales: operands whose new scale is an output instead of being copied in place.
    """

    graph: fx.GraphModule
    inputs: tuple[Tensor, ...]
    world: SymbolicRows
    returned_scales: tuple[int, ...]


def quantize_update(
    program: UpdateProgram, storage: Storage, device: torch.device, scales_in_place: bool
) -> QuantizedUpdate:
    """Build the kernel graph for one choice of formats, one per operand of `program` (None: dense)."""
    formats = [fmt for fmt in storage if isinstance(fmt, Format)]
    world = SymbolicRows(hint=8192 if formats else 1 << 20)
    shape = (world.rows, formats[0].block_size) if formats else (world.rows,)
    inputs: list[Tensor] = []
    for operand, fmt in zip(program.operands, storage, strict=True):
        if not isinstance(fmt, Format):
            inputs.append(world.empty(shape, fmt or operand.dtype, device))
        else:
            inputs.append(world.empty(shape, fmt.code_dtype, device))
            inputs.append(world.empty((world.rows, 1), torch.float32, device))
    inputs += [world.empty((), dtype, device) for dtype in program.scalar_dtypes]
    written = [i for i, operand in enumerate(program.operands) if operand.written]

    def kernel(*args: Tensor) -> tuple[Tensor, ...]:
        cells, dense = _read(args, program, storage)
        results: Any = fx.Interpreter(program.elements).run(*dense)
        return tuple(_store(cells, results, written, storage, scales_in_place))

    graph = trace(kernel, inputs, world.fake_mode, decompose=True)
    returned = () if scales_in_place else tuple(i for i in written if isinstance(storage[i], Format))
    return QuantizedUpdate(graph, tuple(inputs), world, returned)


def _read(
    args: tuple[Tensor, ...], program: UpdateProgram, storage: Storage
) -> tuple[list[list[Tensor]], list[Tensor]]:
    left = list(args)
    cells: list[list[Tensor]] = []
    dense = []
    for operand, fmt in zip(program.operands, storage, strict=True):
        cell = [left.pop(0), left.pop(0)] if isinstance(fmt, Format) else [left.pop(0)]
        cells.append(cell)
        values = decode_blocks(cell[0], cell[1], fmt) if isinstance(fmt, Format) else cell[0]
        dense.append(values.to(operand.dtype))
    return cells, [*dense, *left]


def _store(
    cells: list[list[Tensor]], results: Any, written: list[int], storage: Storage, scales_in_place: bool
) -> list[Tensor]:
    formats = [storage[i] for i in written]
    stored = [
        encode_blocks(value.expand(cells[i][0].shape), fmt) if isinstance(fmt, Format) else (value,)
        for i, value, fmt in zip(written, results, formats, strict=True)
    ]
    for i, values in zip(written, stored, strict=True):  # after all are computed: else Inductor's C++ splits the loop
        cells[i][0].copy_(values[0])
    scales = [(cells[i][1], values[1]) for i, values in zip(written, stored, strict=True) if len(values) == 2]
    if not scales_in_place:
        return [new for _, new in scales]
    for cell, new in scales:
        cell.copy_(new)
    return []
