"""Bind tensors to update kernels and run them.

An `UpdateClass` is one program with the regions that share it. Running it computes the numbers of all regions at once, on
vectors with one element per region, then launches a kernel per region on views of the region's tensors:

- the blocks of a quantized region, as [n_blocks, block_size] views, go to the quantized kernel;
- its tail, and everything of a region without quantized state, goes to the dense kernel as flat views.

Nothing here depends on how many elements a region has, so a kernel serves every size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from qcompile._compat import copy_all
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import flat, like
from qcompile.runtime.state import QuantizedState

# Elements per launch. On a CPU a launch that stays in the cache bounds whatever the code generator keeps in memory
# between its loops; elsewhere only 32-bit indices set a limit.
CPU_LAUNCH, LAUNCH = 1 << 18, 1 << 30


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled update.

    Attributes:
        call: takes a list of tensors, writes into them, returns the scales named by `returned_scales`.
        name: of the generated functions.
        language: "C++" or "Triton".
        source: the generated module.
        returned_scales: operands whose new scale is returned instead of written in place.
    """

    call: Callable[[list[Any]], Any]
    name: str
    language: str
    source: str = field(repr=False)
    returned_scales: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What all regions of a class share.

    Attributes:
        storage: format per operand; None is dense.
        written: whether the update writes the operand.
        scalars: computes the 0-d inputs of the kernel from the region's numbers, and the new value of written numbers.
        scalar_count: how many 0-d inputs the kernel has.
        written_numbers: which numbers are written.
    """

    storage: tuple[Format | None, ...]
    written: tuple[bool, ...]
    scalars: Callable[..., Any]
    scalar_count: int
    written_numbers: tuple[int, ...]

    @property
    def block_size(self) -> int:
        return next((fmt.block_size for fmt in self.storage if fmt is not None), 1)


# A tensor that keeps its address, the position of an argument, or the positions of a quantized state's codes, scale, tail.
Source = Tensor | int | tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Region:
    """One parameter's update: where its operands and numbers come from, and a flat tensor whose strides they follow."""

    operands: tuple[Source, ...]
    numbers: tuple[Source, ...]
    model: Tensor


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
        self.layout, self.regions, self.device = layout, tuple(regions), device
        self.quantized, self.dense = quantized, dense
        self._static = [_static_views(region, layout) for region in self.regions]
        written = zip(layout.written, layout.storage, strict=True)
        self._written_dense = [i for i, (is_written, fmt) in enumerate(written) if is_written and fmt is None]

    def run(self, args: Sequence[Any]) -> None:
        """Update every region. `args` are the arguments of the compiled graph."""
        for region, static, numbers in zip(self.regions, self._static, self._numbers(args), strict=True):
            self._run_region(region, static, numbers, args)
        increment_version([_tensor(r.operands[i], args) for r in self.regions for i in self._written_dense])

    def _numbers(self, args: Sequence[Any]) -> list[tuple[Tensor, ...]]:
        layout, count = self.layout, len(self.regions)
        sources = zip(*(region.numbers for region in self.regions), strict=True)
        columns = [[_tensor(source, args) for source in column] for column in sources]
        inputs = [c[0] if all(x is c[0] for x in c) else torch.stack(c) for c in columns]
        results = layout.scalars(*inputs)
        for i, new in zip(layout.written_numbers, results[layout.scalar_count :], strict=True):
            copy_all(columns[i], list(new.expand(count).unbind()))
        if not layout.scalar_count:
            return [()] * count
        ready = [r.to(self.device).expand(count).unbind() for r in results[: layout.scalar_count]]
        return list(zip(*ready, strict=True))

    def _run_region(self, region: Region, static: _Views, numbers: tuple[Tensor, ...], args: Sequence[Any]) -> None:
        views, copies = list(static), []
        for i, view in enumerate(static):
            source = region.operands[i]
            if isinstance(source, tuple):
                views[i] = tuple(args[j] for j in source)
            elif view is None:
                tensor = _tensor(source, args)
                fmt = self.layout.storage[i]
                own = tensor if fmt is not None else like(tensor, region.model)
                views[i] = _views(own, fmt, self.layout.block_size)
                if own is not tensor and self.layout.written[i]:
                    copies.append((tensor, own))
        self._run_blocks(views, numbers)
        if self.dense is not None and (tails := [v[-1] for v in views])[0].numel():  # type: ignore[index]
            self.dense.call([*tails, *numbers])
        for tensor, own in copies:
            tensor.copy_(own)

    def _run_blocks(self, views: list[Any], numbers: tuple[Tensor, ...]) -> None:
        if self.quantized is None:
            return
        rows = views[0][0].shape[0]
        step = max(1, (CPU_LAUNCH if self.device.type == "cpu" else LAUNCH) // self.layout.block_size)
        for start in range(0, rows, step):
            whole = rows <= step
            parts = [[t if whole else t[start : start + step] for t in view[:-1]] for view in views]
            scales = self.quantized.call([*(t for part in parts for t in part), *numbers])
            for i, scale in zip(self.quantized.returned_scales, scales, strict=True):
                parts[i][1].copy_(scale)


# Per operand: its blocks (codes and scale, or values) and last the flat rest; None where the tensor is an argument.
_Views = list["tuple[Tensor, ...] | None"]


def _static_views(region: Region, layout: Layout) -> _Views:
    static: _Views = []
    for source, fmt in zip(region.operands, layout.storage, strict=True):
        aligned = isinstance(source, Tensor) and (fmt is not None or like(source, region.model) is source)
        static.append(_views(source, fmt, layout.block_size) if aligned else None)  # type: ignore[arg-type]
    return static


def _views(tensor: Tensor, fmt: Format | None, block_size: int) -> tuple[Tensor, ...]:
    if fmt is not None:
        assert isinstance(tensor, QuantizedState), type(tensor)
        assert tensor.format == fmt, (tensor.format, fmt)
        return tensor.codes, tensor.scale, tensor.tail
    elements = flat(tensor.detach())
    if block_size == 1:
        return (elements,)
    blocked = elements.numel() - elements.numel() % block_size
    return elements[:blocked].view(-1, block_size), elements[blocked:]


def _tensor(source: Any, args: Sequence[Any]) -> Tensor:
    value = args[source] if isinstance(source, int) else source
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
