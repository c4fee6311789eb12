"""How the tensors of a region are bound: what an operand is at the moment, and the views of it that a kernel takes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile._compat_distributed import local_of
from qcompile.runtime.codecs import in_parts
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import flat, like
from qcompile.runtime.state import QuantizedState

# A tensor that keeps its address, the position of an argument, or the positions of the parts of a quantized state.
Source = Tensor | weakref.ref[Tensor] | int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Views:
    """How a kernel sees an operand: parts of its codes or values and its scales, [rows, width] each, 0-d numbers, and the
    flat rest that fills no block."""

    blocks: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]
    tail: Tensor

    def rows(self, chunk: slice) -> tuple[Tensor, ...]:
        whole = (*self.blocks, *self.scales)
        return whole if chunk.start is None else tuple(t[chunk] for t in whole)


def quantized_views(stored: Sequence[Tensor], fmt: Format, parts: int) -> Views:
    codes, scale, tail, *counter = stored
    numbers = tuple(counter[0].unbind()) if counter else ()
    planes = in_parts(codes, parts * fmt.bits // 8)
    return Views(tuple(planes), tuple(in_parts(scale, fmt.scale_count)), numbers, tail)


def dense_views(tensor: Tensor, block_size: int, parts: int) -> Views:
    elements = flat(tensor.detach())
    if block_size == 1:
        return Views((), (), (), elements)
    blocked = elements.numel() - elements.numel() % block_size
    return Views(tuple(in_parts(elements[:blocked].view(-1, block_size), parts)), (), (), elements[blocked:])


def stored_of(source: Any, args: Sequence[Any]) -> Sequence[Tensor]:
    """The tensors that hold a quantized state, which arrive by themselves or as the state."""
    if isinstance(source, tuple):
        return [args[j] for j in source]
    state = tensor_of(source, args)
    assert isinstance(state, QuantizedState)
    return state.stored


def dense_of(source: Any, args: Sequence[Any], model: Tensor) -> tuple[Tensor, Tensor]:
    """An argument, and itself or a copy that lies in memory as `model` does."""
    tensor = tensor_of(source, args)
    if isinstance(tensor, QuantizedState):  # which another graph writes
        tensor = tensor.dequantize()
    return tensor, like(tensor, model)


def weakly(source: Source) -> Source:
    """A source that does not keep its tensor alive: a compiled update must not, once the user has put another in its place."""
    return weakref.ref(source) if isinstance(source, Tensor) else source


def held(source: Source) -> Tensor | None:
    """The tensor of a source that keeps its address; None of an argument."""
    if isinstance(source, weakref.ref):
        tensor = source()
        assert tensor is not None, "the guards of a step let it run although a tensor that it updates is gone"
        return local_of(tensor)
    return local_of(source) if isinstance(source, Tensor) else None


def given_of(source: Any, args: Sequence[Any]) -> Any:
    """What a source is, as it is: a DTensor too."""
    return args[source] if isinstance(source, int) else source() if isinstance(source, weakref.ref) else source


def tensor_of(source: Any, args: Sequence[Any]) -> Tensor:
    value = local_of(args[source]) if isinstance(source, int) else held(source)
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
