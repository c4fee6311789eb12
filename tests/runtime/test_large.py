"""More than 2**31 elements: every row is visited once, with indices that fit. Nothing of that size is in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qcompile.recipes import RECIPES
from qcompile.runtime import launch
from qcompile.runtime.launch import LAUNCH, Kernel, Layout, Region, UpdateClass
from qcompile.runtime.layout import row_order
from qcompile.runtime.state import QuantizedState

META = torch.device("meta")
NUMEL = 2**31 + 2**20 + 17


@pytest.mark.parametrize("shape", [(NUMEL,), (2**11, 2**20 + 513)], ids=["flat", "matrix"])
def test_launches_cover_every_row_once(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device with 32-bit indices gets: pieces of at most 2**30 elements, and the tail by itself."""
    first, second = RECIPES["dettmers-8bit"].first, RECIPES["dettmers-8bit"].second
    p = torch.empty(shape, device=META)
    states = [QuantizedState.zeros_like(p, fmt) for fmt in (first, second)]
    size, numel = first.block_size, p.numel()
    assert states[0].codes.shape == (numel // size, size)
    assert states[0].scale.shape == (numel // size, 1)
    assert states[0].tail.shape == (numel % size,)
    assert states[0].stored_bytes == numel - numel % size + numel // size * first.scale_dtype.itemsize + 4 * (
        numel % size
    )
    seen: list[tuple[int, int]] = []  # storage offset and rows of the parameter in each launch
    tails: list[int] = []

    def blocks(inputs: list[Any]) -> list[Tensor]:
        rows = inputs[0].shape[0]
        assert {t.shape[0] for t in inputs if isinstance(t, Tensor) and t.dim() == 2} == {rows}
        assert rows * size <= LAUNCH
        seen.append((inputs[0].storage_offset(), rows))
        return [torch.empty(rows, 1, device=META) for _ in range(2)]

    def tail(inputs: list[Any]) -> None:
        tails.append(inputs[0].numel())

    made = [Kernel(call, "none", "C++", "", 1, returned, size) for call, returned in ((blocks, (2, 3)), (tail, ()))]
    layout = Layout((None, None, first, second), (True, False, True, True), lambda: (), 0, ())
    update = UpdateClass(layout, [Region((p, 0, *states), (), row_order(p))], made[0], made[1], META)
    monkeypatch.setattr(launch, "increment_version", lambda tensors: None)
    update.run([torch.empty(shape, device=META)])
    ends = [offset + rows * size for offset, rows in seen]
    assert [offset for offset, _ in seen] == [0, *ends[:-1]], "no gap, no row twice"
    assert ends[-1] == numel // size * size
    assert tails == [numel % size] * (numel % size > 0)
    assert len(seen) == -(-numel // LAUNCH)
