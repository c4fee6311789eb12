"""Update all regions of a class with one call per kernel, which finds their tensors through a table of addresses.

The table has a row per region: the address of each tensor the kernel reads or writes, how many rows of the kernel (blocks, or
elements of a tail) the region has, and how many units of work it and the regions before it are. What keeps its place in memory is
entered once, and not kept alive; of what arrives with each step, gradients above all, only the address of the tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qcompile.runtime.views import Views, dense_of, quantized_views, stored_of

if TYPE_CHECKING:
    from qcompile.runtime.launch import Kernel, Layout, Region

Addresses = npt.NDArray[np.int64]
Static = Sequence[Sequence["Views | None"]]


class Tables:
    """The tables of a class: one for the kernel of blocks, one for that of tails; and what is entered in each step."""

    def __init__(
        self,
        layout: Layout,
        regions: Sequence[Region],
        static: Static,
        quantized: Kernel | None,
        dense: Kernel | None,
        device: torch.device,
    ) -> None:
        self._layout, self._regions = layout, regions
        self._parts = 1 if quantized is None else quantized.parts
        size, parts = layout.block_size, self._parts
        widths = [parts if fmt is None else fmt.inputs(parts) for fmt in layout.storage]
        numels = np.array([region.model.numel() for region in regions], np.int64)
        blocks = numels // size if quantized is not None else np.zeros_like(numels)
        self._blocked = blocks * size
        count = layout.scalar_count
        is_random = any(fmt is not None and fmt.random for fmt in layout.storage)
        self._zero = torch.zeros((), dtype=torch.int32, device=device)  # the number of the first row
        self._blocks = (
            None if quantized is None else _Table(quantized, blocks, widths, count, [self._zero] * is_random, device)
        )
        self._tails = (
            None if dense is None else _Table(dense, numels - self._blocked, [1] * len(widths), count, [], device)
        )
        both = (self._blocks, self._tails)
        self._used = [table for table in both if table is not None and len(table.regions)]
        for r, views in enumerate(static):
            for i, view in enumerate(views):
                if view is not None:
                    self._enter(r, i, view)
        self._arriving = [[r for r, views in enumerate(static) if views[i] is None] for i in range(len(layout.storage))]
        self._counted = [
            i for i, fmt in enumerate(layout.storage) if fmt is not None and fmt.random and layout.written[i]
        ]
        counted = [(r, i, views[i]) for r, views in enumerate(static) for i in self._counted]
        self._counters = {(r, i): view.numbers[1] for r, i, view in counted if view is not None}

    def run(self, results: Sequence[Tensor], args: Sequence[Any]) -> list[Tensor]:
        """Update every region with `results` for the 0-d inputs; gives what counts the stores, to be advanced."""
        kept: list[Any] = [results]
        copies: list[tuple[Tensor, Tensor]] = []
        counters = dict(self._counters)
        for i, fmt in enumerate(self._layout.storage):
            if fmt is None:
                kept.append(list(self._enter_dense(i, args, copies)))
                continue
            for r in self._arriving[i]:
                view = quantized_views(stored_of(self._regions[r].operands[i], args), fmt, self._parts)
                self._enter(r, i, view)
                kept.append(view)
                if i in self._counted:
                    counters[r, i] = view.numbers[1]
        for table in self._used:
            table.enter_numbers(results)
            table.call()
        for tensor, own in copies:
            tensor.copy_(own)
        return list(counters.values())

    @property
    def launches(self) -> int:
        """How many kernels a step launches."""
        return len(self._used)

    def _enter(self, r: int, i: int, view: Views) -> None:
        if self._blocks is not None:
            self._blocks.enter(i, r, [t.data_ptr() for t in (*view.blocks, *view.scales, *view.numbers)])
        if self._tails is not None:
            self._tails.enter(i, r, [view.tail.data_ptr()])

    def _enter_dense(self, i: int, args: Sequence[Any], copies: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Enter an operand of every region that arrives with the step; gives the tensors, which have to stay for its time."""
        which = self._arriving[i]
        if not which:
            return
        bases = np.empty(len(which), np.int64)
        for at, r in enumerate(which):
            region = self._regions[r]
            tensor, own = dense_of(region.operands[i], args, region.model)
            if own is not tensor and self._layout.written[i]:
                copies.append((tensor, own))
            bases[at] = own.data_ptr()
            yield own
        size = own.element_size()
        part = self._layout.block_size // self._parts * size
        if self._blocks is not None:
            self._blocks.enter(i, which, bases[:, None] + part * np.arange(self._parts))
        if self._tails is not None:
            self._tails.enter(i, which, (bases + size * self._blocked[which])[:, None])


class _Table:
    """The table of one kernel. `widths`: how many inputs each operand is; then come `numbers` 0-d inputs, then `last`.

    A C++ kernel takes the table and how many regions it has. A Triton kernel takes the table, for each of its programs which
    region that works on, and of what all wide addresses are multiples.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: Addresses,
        widths: Sequence[int],
        numbers: int,
        last: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        assert kernel.call_table is not None
        self._call: Callable[..., Any] = kernel.call_table
        self.regions = np.flatnonzero(rows)
        self._starts = np.cumsum([0, *widths])
        self._numbers = slice(int(self._starts[-1]), int(self._starts[-1]) + numbers)
        self._inputs = np.zeros((len(rows), self._numbers.stop + len(last)), np.int64)
        self._inputs[:, self._numbers.stop :] = [t.data_ptr() for t in last]
        self._columns, self._wide = list(kernel.columns), list(kernel.wide)
        own = rows[self.regions]
        units = (own + kernel.unit - 1) // kernel.unit
        self._table = torch.zeros(len(own), len(self._columns) + 2, dtype=torch.int64)
        self._on_device = self._table.to(device)
        self._sent = self._table
        self._filled = self._table.numpy()
        self._filled[:, -2], self._filled[:, -1] = own, np.cumsum(units)
        self._programs: Tensor | None = None
        if kernel.language == "Triton":
            programs = np.repeat(np.arange(len(own), dtype=np.int32), units)
            self._programs = torch.from_numpy(programs).to(device)

    def enter(self, operand: int, regions: Any, addresses: Any) -> None:
        """Addresses of an operand of one region, or of several."""
        self._inputs[regions, self._starts[operand] : self._starts[operand + 1]] = addresses

    def enter_numbers(self, results: Sequence[Tensor]) -> None:
        """0-d inputs: of all regions one, or one each."""
        for column, result in zip(range(self._numbers.start, self._numbers.stop), results, strict=True):
            step = result.element_size() * result.stride(0) if result.dim() else 0
            self._inputs[:, column] = result.data_ptr() + step * np.arange(len(self._inputs))

    def call(self) -> None:
        """Run the kernel on the tensors that were entered."""
        addresses = self._inputs[self.regions][:, self._columns]
        is_new = not np.array_equal(addresses, self._filled[:, :-2])
        if is_new:
            self._filled[:, :-2] = addresses
        if self._programs is None:
            self._call(self._table, len(self.regions))
            return
        if is_new and self._on_device is not self._table:  # else nothing is copied, also while a CUDA graph is recorded
            self._sent = self._table.pin_memory()  # another each time: the copy may be under way for long
            self._on_device.copy_(self._sent, non_blocking=True)
        align = 1 if (addresses[:, self._wide] % 16).any() else 16
        self._call(self._on_device, self._programs, align)
