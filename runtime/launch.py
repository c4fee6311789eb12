"""Bind tensors to update kernels and run them.

An `UpdateClass` is one program with the regions that share it. Running it computes the numbers of all regions at once, on
vectors with one element per region, then runs its kernels on views of the regions' tensors, once for all regions where the
kernel takes a table of addresses (`runtime.table`), else once per region:

- the blocks of a quantized region, as [n_blocks, block_size] views, go to the quantized kernel;
- its tail, and everything of a region without quantized state, goes to the dense kernel as flat views.

Nothing here depends on how many elements a region has, so a kernel serves every size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from qcompile._compat import add_all, copy_all
from qcompile.exc import ChangedTensorError
from qcompile.runtime.codecs import finish_scales
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import like
from qcompile.runtime.state import QuantizedState
from qcompile.runtime.table import Tables
from qcompile.runtime.views import (
    Source,
    Views,
    dense_of,
    dense_views,
    held,
    quantized_views,
    stored_of,
    tensor_of,
    weakly,
)

# Elements per launch. On a CPU a launch that stays in the cache bounds whatever the code generator keeps in memory
# between its loops; elsewhere only 32-bit indices set a limit.
CPU_LAUNCH, LAUNCH = 1 << 18, 1 << 30


@dataclass(slots=True)
class Launches:
    """How many update kernels this process has launched."""

    count: int = 0


launches = Launches()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled update.

    Attributes:
        call: takes a list of tensors, writes into them, returns what the operands in `returned_scales` reduced to.
        name: of the generated functions.
        language: "C++" or "Triton".
        source: what runs: the generated module, or the function for a class that was made of it.
        parts: into how many ranges of columns it takes a block.
        returned_scales: operands whose blocks' reductions are returned, to become scales outside.
        module: the generated module, where `source` was made of it.
        reference: of Triton, the graph it was generated from, as Python (`passes.show_program.show_kernel`).
        call_table: updates all regions of a class (see `runtime.table`); None where there is no such function.
        columns: which inputs the table's rows are the addresses of.
        unit: rows per unit of work; of Triton, per program, which has `warps`.
        wide: columns whose addresses should be multiples of 16.
        block_size: elements of a parameter in one row of its tensors; 1 where nothing is quantized.
    """

    call: Callable[[list[Any]], Any]
    name: str
    language: str
    source: str = field(repr=False)
    parts: int
    returned_scales: tuple[int, ...]
    block_size: int = 1
    module: str = field(default="", repr=False)
    reference: str = field(default="", repr=False)
    call_table: Callable[..., Any] | None = None
    columns: tuple[int, ...] = ()
    unit: int = 1
    warps: int = 1
    wide: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """A report is sent to other processes; what was loaded into this one stays behind."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("call", "call_table"):
            if values[name] is not None:
                values[name] = functools.partial(_stayed_behind, self.name)
        return Kernel, tuple(values.values())


def _stayed_behind(name: str, *args: object) -> NoReturn:
    raise RuntimeError(f"kernel {name} was loaded in another process: a copy of it is text")


@dataclass(frozen=True, slots=True)
class Layout:
    """What all regions of a class share.

    Attributes:
        storage: format per operand; None is dense.
        written: whether the update writes the operand.
        scalars: computes the 0-d inputs of the kernel from the region's numbers, and the new value of written numbers.
        scalar_count: how many 0-d inputs the kernel has.
        written_numbers: which numbers are written.
        elements: the exact update of values, whatever they are stored in: takes the operands, each [n], and the 0-d inputs,
            and gives the new values of those that are written. For `observers`.
    """

    storage: tuple[Format | None, ...]
    written: tuple[bool, ...]
    scalars: Callable[..., Any]
    scalar_count: int
    written_numbers: tuple[int, ...]
    elements: Callable[..., Any] | None = None

    @property
    def block_size(self) -> int:
        return next((fmt.block_size for fmt in self.storage if fmt is not None), 1)


@dataclass(frozen=True, slots=True)
class Region:
    """One parameter's update: where its operands and numbers come from, and a flat tensor whose strides they follow."""

    operands: tuple[Source, ...]
    numbers: tuple[Source, ...]
    model: Tensor


# Called with a class and the arguments before it runs; each may give a function to call when it has run.
observers: list[Callable[[UpdateClass, Sequence[Any]], Callable[[], None] | None]] = []


class UpdateClass:
    """All regions of one program with the same storage."""

    def __init__(
        self,
        layout: Layout,
        regions: Sequence[Region],
        quantized: Kernel | None,
        dense: Kernel | None,
        device: torch.device,
    ) -> None:
        self.layout, self.device = layout, device
        self.regions = tuple(replace(r, operands=tuple(weakly(source) for source in r.operands)) for r in regions)
        self.quantized, self.dense = quantized, dense
        self.parts = 1 if quantized is None else quantized.parts
        written = [i for i, is_written in enumerate(layout.written) if is_written]
        random = {i for i, fmt in enumerate(layout.storage) if fmt is not None and fmt.random}
        self._written_dense = [i for i in written if layout.storage[i] is None]
        self._random, self._counted = bool(random), [i for i in written if i in random]
        self._bind()

    def _bind(self) -> None:
        """Look up where everything is that keeps its address, and enter it in the tables."""
        static = [self._static(region) for region in self.regions]
        self._places = [
            (source, place_of(tensor))
            for region, views in zip(self.regions, static, strict=True)
            for source, view in zip(region.operands, views, strict=True)
            if view is not None and (tensor := held(source)) is not None
        ]
        self._kinds = [kind_of(held(source)) for source, _ in self._places]
        kernels = [kernel for kernel in (self.quantized, self.dense) if kernel is not None]
        by_table = all(kernel.call_table is not None for kernel in kernels)
        if self.device.type != "cpu":  # with 32-bit indices
            by_table &= all(region.model.numel() <= LAUNCH for region in self.regions)
        bound = (self.layout, self.regions, static, self.quantized, self.dense, self.device)
        self._tables = Tables(*bound) if by_table else None

    def _static(self, region: Region) -> list[Views | None]:
        """Per operand what a kernel sees of it; None where the tensor is an argument."""
        static: list[Views | None] = []
        for source, fmt in zip(region.operands, self.layout.storage, strict=True):
            tensor = held(source)
            if fmt is not None and isinstance(tensor, QuantizedState):
                assert tensor.format == fmt, (tensor.format, fmt)
                static.append(quantized_views(tensor.stored, fmt, self.parts))
            elif tensor is not None and not isinstance(tensor, QuantizedState) and like(tensor, region.model) is tensor:
                static.append(dense_views(tensor, self.layout.block_size, self.parts))
            else:
                static.append(None)
        return static

    def run(self, args: Sequence[Any]) -> None:
        """Update every region. `args` are the arguments of the compiled graph."""
        after = [then for observe in observers if (then := observe(self, args)) is not None]
        self._run(args)
        for then in after:
            then()

    def follow(self) -> None:
        """Look up again what lies somewhere else now: no guard sees `param.data = ...`.

        Raises:
            ChangedTensorError: the new memory is of another kind.
        """
        if all(place_of(held(source)) == place for source, place in self._places):
            return
        kinds = [kind_of(held(source)) for source, _ in self._places]
        for (source, _), before, now in zip(self._places, self._kinds, kinds, strict=True):
            if now != before:
                raise ChangedTensorError(before, now, isinstance(held(source), torch.nn.Parameter))
        self._bind()

    def _run(self, args: Sequence[Any]) -> None:
        if self._tables is not None:
            stores = self._tables.run(self._results(args), args)
            launches.count += self._tables.launches
        else:
            stores = []
            for region, numbers in zip(self.regions, self._numbers(args), strict=True):
                stores += self._run_region(region, numbers, args)
        if stores:
            add_all(stores, 1)
        increment_version([tensor_of(r.operands[i], args) for r in self.regions for i in self._written_dense])

    def _results(self, args: Sequence[Any]) -> list[Tensor]:
        """The 0-d inputs of the kernels, for all regions: [regions] each, or [] where they share it."""
        layout, count = self.layout, len(self.regions)
        sources = zip(*(region.numbers for region in self.regions), strict=True)
        columns = [[tensor_of(source, args) for source in column] for column in sources]
        inputs = [c[0] if all(x is c[0] for x in c) else torch.stack(c) for c in columns]
        results = layout.scalars(*inputs)
        for i, new in zip(layout.written_numbers, results[layout.scalar_count :], strict=True):
            copy_all(columns[i], list(new.expand(count).unbind()))
        return [r.to(self.device) for r in results[: layout.scalar_count]]

    def _numbers(self, args: Sequence[Any]) -> list[tuple[Tensor, ...]]:
        count = len(self.regions)
        results = self._results(args)
        return list(zip(*(r.expand(count).unbind() for r in results), strict=True)) if results else [()] * count

    def _run_region(self, region: Region, numbers: tuple[Tensor, ...], args: Sequence[Any]) -> list[Tensor]:
        """Update one region; gives what counts its stores, to be advanced."""
        views, copies = [], []
        for i, (view, source) in enumerate(zip(self._static(region), region.operands, strict=True)):
            fmt = self.layout.storage[i]
            if view is not None:
                views.append(view)
            elif fmt is not None:
                views.append(quantized_views(stored_of(source, args), fmt, self.parts))
            else:
                tensor, own = dense_of(source, args, region.model)
                views.append(dense_views(own, self.layout.block_size, self.parts))
                if own is not tensor and self.layout.written[i]:
                    copies.append((tensor, own))
        self._run_blocks(views, numbers)
        if self.dense is not None and views[0].tail.numel():
            launches.count += 1
            self.dense.call([*(view.tail for view in views), *numbers])
        for tensor, own in copies:
            tensor.copy_(own)
        return [views[i].numbers[1] for i in self._counted]

    def _run_blocks(self, views: list[Views], numbers: tuple[Tensor, ...]) -> None:
        if self.quantized is None:
            return
        rows = views[0].blocks[0].shape[0]
        step = max(1, (CPU_LAUNCH if self.device.type == "cpu" else LAUNCH) // self.layout.block_size)
        for start in range(0, rows, step):
            chunk = slice(None) if rows <= step else slice(start, start + step)
            inputs = [t for view in views for t in (*view.rows(chunk), *view.numbers)]
            first = [_first_row(start, self.device)] if self._random else []
            launches.count += 1
            reduced = list(self.quantized.call([*inputs, *numbers, *first]))
            for i in self.quantized.returned_scales:
                fmt = self.layout.storage[i]
                assert fmt is not None
                mine = [reduced.pop(0) for _ in range(fmt.reductions)]
                for old, new in zip(views[i].scales, finish_scales(mine, fmt), strict=True):
                    old[chunk].copy_(new)


def place_of(tensor: Tensor | None) -> int:
    """Where a tensor's values are, or the codes of a quantized state, which moves all of its parts at once."""
    assert tensor is not None
    return (tensor.codes if isinstance(tensor, QuantizedState) else tensor).data_ptr()


def kind_of(tensor: Tensor | None) -> tuple[torch.dtype, torch.Size, torch.device]:
    """What a kernel that is compiled takes for granted of a tensor."""
    assert tensor is not None
    return tensor.dtype, tensor.shape, tensor.device


@functools.lru_cache(maxsize=1024)
def _first_row(start: int, device: torch.device) -> Tensor:
    return torch.tensor(start, dtype=torch.int32, device=device)
