"""Give an update quantized storage: dequantize at the head, quantize and store at the tail.

Before: a functional `elements` graph over dense values. After: an ATen graph over [n_blocks, block_size] (or [numel] when
nothing is quantized), in which every quantized operand has become codes and scales, and whose last nodes copy each new
value into its input. The number of rows is symbolic. The update in between is the user's, on exact new values.

Where a format packs codes of fewer than 8 bits, every block matrix arrives in parts, equal ranges of its columns, and the
update is written once per part: all loops then have one shape, and all codes that share a byte are in one of them.

Inductor's Triton makes one persistent kernel of it, also with scales copied in place. Its C++ fuses the loops over a block
only when a new scale is a fresh buffer, so there scales are returned and the caller copies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qcompile._compat import SymbolicRows, trace
from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.infer_preconditioner import Preconditioner, storage_pairs
from qcompile.passes.infer_sign import new_values, source_of
from qcompile.runtime.codecs import (
    Context,
    Parts,
    dequantize,
    finish_scales,
    load_scales,
    quantize,
    update_denominator,
)
from qcompile.runtime.formats import Format
from qcompile.runtime.packing import pack, unpack
from qcompile.runtime.rounding import Draw

# Per operand of a program: quantized, dense in another dtype than the program's (the fp32 tail of a quantized state), or
# None, dense as the program has it.
Storage = tuple[Format | torch.dtype | None, ...]


@dataclass(frozen=True, slots=True)
class QuantizedUpdate:
    """The graph of one update kernel and the fake inputs it was traced with.

    Attributes:
        graph: inputs are, per operand, the parts of its codes, its scales and, for a random format, key and store number
            (0-d int32); or the parts of its dense values; then the program's 0-d inputs; then, if a format is random,
            the number of the first row (0-d int32).
        inputs: fake tensors for them.
        world: where the symbolic number of rows lives.
        block_size: elements of a row; 1 where nothing is quantized.
        parts: into how many ranges of columns a block is cut.
        returned_scales: operands of whose scales the outputs are, `quantize`'s reductions, instead of copied in place.
        scales: of each operand in `returned_scales`, its format, and which of the inputs its scales are.
    """

    graph: fx.GraphModule
    inputs: tuple[Tensor, ...]
    world: SymbolicRows
    block_size: int
    parts: int
    returned_scales: tuple[int, ...]
    scales: tuple[tuple[Format, tuple[int, ...]], ...]


@dataclass(slots=True)
class _Cell:
    """The inputs of one operand: parts of its codes or values, then scales, then key and store number."""

    blocks: Parts
    scales: Parts
    counter: list[Tensor]


def quantize_update(
    program: UpdateProgram,
    storage: Storage,
    device: torch.device,
    scales_in_place: bool,
    preconditioners: tuple[Preconditioner, ...] = (),
) -> QuantizedUpdate:
    """Build the kernel graph for one choice of formats, one per operand of `program` (None: dense)."""
    formats = [fmt for fmt in storage if isinstance(fmt, Format)]
    world = SymbolicRows(hint=8192 if formats else 1 << 20)
    parts = max((fmt.parts for fmt in formats), default=1)
    build = _Build(program, storage, preconditioners, parts, formats[0].block_size if formats else 1, scales_in_place)
    inputs = list(_inputs(build, world, device))
    graph = trace(build.kernel, inputs, world.fake_mode, decompose=True)
    returned = () if scales_in_place else tuple(i for i in build.written if isinstance(storage[i], Format))
    scales = tuple(build.scale_inputs(i) for i in returned)
    return QuantizedUpdate(graph, tuple(inputs), world, build.block_size, parts, returned, scales)


def _inputs(build: _Build, world: SymbolicRows, device: torch.device) -> Iterator[Tensor]:
    def number(dtype: torch.dtype) -> Tensor:
        return world.empty((), dtype, device)

    for operand, fmt in zip(build.program.operands, build.storage, strict=True):
        if not isinstance(fmt, Format):
            shape = (world.rows, build.block_size) if build.formats else (world.rows,)
            yield from _parts(world, shape, fmt or operand.dtype, device, build.parts)
            continue
        codes = (world.rows, fmt.code_bytes)
        yield from _parts(world, codes, fmt.code_dtype, device, build.parts * fmt.bits // 8)
        yield from _parts(world, (world.rows, fmt.scale_count), fmt.scale_dtype, device, fmt.scale_count)
        if fmt.random:
            yield from (number(torch.int32), number(torch.int32))
    yield from (number(dtype) for dtype in build.program.scalar_dtypes)
    if any(fmt.random for fmt in build.formats):
        yield number(torch.int32)


def _parts(
    world: SymbolicRows, shape: Sequence[Any], dtype: torch.dtype, device: torch.device, count: int
) -> list[Tensor]:
    """`count` equal ranges of the columns of a tensor, as views that know where they begin."""
    whole = world.empty(shape, dtype, device)
    if count == 1:
        return [whole]
    with world.fake_mode:
        return list(whole.split(shape[1] // count, dim=1))


@dataclass(frozen=True, slots=True)
class _Build:
    """One kernel as a function of its inputs."""

    program: UpdateProgram
    storage: Storage
    preconditioners: tuple[Preconditioner, ...]
    parts: int
    block_size: int
    scales_in_place: bool

    @property
    def formats(self) -> list[Format]:
        return [fmt for fmt in self.storage if isinstance(fmt, Format)]

    @property
    def written(self) -> list[int]:
        return [i for i, operand in enumerate(self.program.operands) if operand.written]

    @property
    def order(self) -> list[int]:
        """Operands in an order in which the second moment comes before the first that is stored relative to it."""
        return sorted(range(len(self.storage)), key=lambda i: i in self.pairs)

    @property
    def pairs(self) -> dict[int, Preconditioner]:
        return storage_pairs(self.preconditioners)

    def scale_inputs(self, i: int) -> tuple[Format, tuple[int, ...]]:
        """The format of a quantized operand, and which of the kernel's inputs its scales are."""
        fmt = self.format_of(i)
        before = (f.inputs(self.parts) if isinstance(f, Format) else self.parts for f in self.storage[:i])
        start = sum(before) + self.parts * fmt.bits // 8
        return fmt, tuple(range(start, start + fmt.scale_count))

    def kernel(self, *args: Tensor) -> tuple[Tensor, ...]:
        left = iter(args)
        cells = [self._cell(fmt, left) for fmt in self.storage]
        numbers = [next(left) for _ in self.program.scalar_dtypes]
        first_row = next(left, None)
        dense = self._read(cells, first_row)
        results = [
            _InFloat32(self.program.elements).run(*(values[k] for values in dense), *numbers) for k in range(self.parts)
        ]
        new = {i: [results[k][at] for k in range(self.parts)] for at, i in enumerate(self.written)}
        return tuple(self._store(cells, new, numbers, first_row))

    def _cell(self, fmt: Format | torch.dtype | None, left: Iterator[Tensor]) -> _Cell:
        if not isinstance(fmt, Format):
            return _Cell([next(left) for _ in range(self.parts)], [], [])
        blocks = [next(left) for _ in range(self.parts * fmt.bits // 8)]
        scales = [next(left) for _ in range(fmt.scale_count)]
        return _Cell(blocks, scales, [next(left), next(left)] if fmt.random else [])

    def _read(self, cells: list[_Cell], first_row: Tensor | None) -> list[Parts]:
        dense: dict[int, Parts] = {}
        for i in self.order:
            cell, fmt = cells[i], self.storage[i]
            values = cell.blocks
            if isinstance(fmt, Format):
                context = self._context(i, fmt, cell, dense, [], first_row, last=1)
                values = dequantize(unpack(cell.blocks, fmt, self.parts), load_scales(cell.scales, fmt), fmt, context)
            dense[i] = [_wide(part) for part in values]
        return [dense[i] for i in range(len(cells))]

    def _store(
        self, cells: list[_Cell], new: dict[int, Parts], numbers: list[Tensor], first_row: Tensor | None
    ) -> list[Tensor]:
        copies: dict[int, list[tuple[Tensor, Tensor]]] = {}
        reduced: dict[int, Parts] = {}
        seconds = {pair.second for first, pair in self.pairs.items() if self._relative(first)}
        decoded: dict[int, Parts] = {}
        for i in (i for i in self.order if i in new):
            cell, fmt = cells[i], self.storage[i]
            stored = [value.expand(cell.blocks[0].shape) for value in new[i]] if isinstance(fmt, Format) else new[i]
            if isinstance(fmt, Format):
                context = self._context(i, fmt, cell, decoded, numbers, first_row, last=0)
                indices, reduced[i] = quantize(stored, fmt, context)
                if i in seconds:
                    decoded[i] = dequantize(indices, load_scales(finish_scales(reduced[i], fmt), fmt), fmt, context)
                stored = pack(indices, fmt)
            copies[i] = list(zip(cell.blocks, stored, strict=True))
        ordered, kept = in_order(list(copies), moves_of(self.program))
        for i in kept:  # no clone, which Inductor takes for nothing
            copies[i] = [(old, torch.maximum(value, value)) for old, value in copies[i]]
        # After all are computed: else Inductor's C++ splits the loop.
        for old, value in (copy for i in ordered for copy in copies[i]):
            old.copy_(value)
        if not self.scales_in_place:
            return [value for i in sorted(reduced) for value in reduced[i]]
        for i in sorted(reduced):
            for old, value in zip(cells[i].scales, finish_scales(reduced[i], self.format_of(i)), strict=True):
                old.copy_(value)
        return []

    def format_of(self, i: int) -> Format:
        fmt = self.storage[i]
        assert isinstance(fmt, Format)
        return fmt

    def _relative(self, i: int) -> bool:
        fmt = self.storage[i]
        return isinstance(fmt, Format) and fmt.coordinate == "update"

    def _context(
        self,
        i: int,
        fmt: Format,
        cell: _Cell,
        decoded: dict[int, Parts],
        numbers: list[Tensor],
        first_row: Tensor | None,
        last: int,
    ) -> Context:
        """What a format needs to read (`last` = 1: the store before this one) or to store (`last` = 0)."""
        draw = denominator = None
        if fmt.random:
            assert first_row is not None
            rows = cell.blocks[0].shape[0]
            draw = Draw(cell.counter[0], cell.counter[1] - last, first_row, rows, self.block_size)
        if fmt.coordinate == "update":
            v = decoded[self.pairs[i].second]
            denominator = update_denominator([part.to(torch.float32) for part in v], fmt.eps)
        if fmt.rounding != "preconditioner":
            return Context(denominator, None, draw)
        pair = next(pair for pair in self.pairs.values() if pair.second == i)
        return Context(denominator, lambda v: pair.preconditioner(v, *numbers), draw)


class _InFloat32(fx.Interpreter):
    """Runs an update on fp32 in place of 16-bit floats, so that decoded state is not rounded to the parameter's dtype.

    Inductor computes in fp32 anyway; where the update itself converts to 16 bits, the value is rounded to them.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _wide(super().call_function(target, args, kwargs))


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.dtype in (torch.bfloat16, torch.float16) else value


def moves_of(program: UpdateProgram) -> dict[int, int]:
    """The operands whose new value is what another one was (`previous.copy_(param)` before the parameter is updated)."""
    operands = {n: i for i, n in enumerate(n for n in program.elements.graph.nodes if n.op == "placeholder")}
    sources = ((i, operands.get(source_of(node))) for i, node in new_values(program).items())
    return {i: j for i, j in sources if j is not None and j != i}


def in_order(written: Sequence[int], moves: Mapping[int, int]) -> tuple[list[int], set[int]]:
    """In which order operands are stored so that each is read before it is written, and which values are computed apart.

    Those that read each other in a circle have no such order, so that one of them must be kept first. Inductor does the
    same for values that are computed; it takes a copy for the thing itself.
    """
    left, ordered, kept = list(written), [], set()
    while left:
        read = {moves.get(i) for i in left if i not in kept}
        i = next((i for i in left if i not in read), None)
        if i is None:
            kept.add(left[0])
        else:
            ordered.append(i)
            left.remove(i)
    return ordered, kept
