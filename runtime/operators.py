"""What operators do to a `QuantizedState`.

Most run on its dense values, and what they write is stored. A few keep it quantized: copies, moves to another device, slices
along whole blocks, and copying one state into another. The last two are how `torch.distributed.checkpoint` loads a part that
another number of ranks saved: codes move, nothing is decoded that need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qcompile._compat import is_fake, tree_flatten, tree_unflatten
from qcompile.runtime.layout import same_order
from qcompile.runtime.state import QuantizedState, same_bits

aten = torch.ops.aten


class Window(torch.Tensor):
    """A slice of a state that cuts blocks: reads as the dense values, and what is written to it is stored in the state."""

    state: QuantizedState
    cut: tuple[slice, ...]

    @staticmethod
    def __new__(cls, state: QuantizedState, cut: tuple[slice, ...]) -> Window:
        shape = torch.empty(state.shape, device="meta")[cut].shape
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=state.dtype, device=state.device)  # type: ignore[attr-defined]
        made.state, made.cut = state, cut
        return made

    def values(self) -> Tensor:
        return self.state.dequantize()[self.cut].contiguous()

    def store_(self, dense: Tensor) -> None:
        self.state[self.cut] = dense

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Window({self.state!r}, {self.cut})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            return Window(args[0].state, args[0].cut)
        if func is aten.copy_.default and isinstance(args[0], Window):
            return _copy_to_window(*args[:2])
        if func is aten.slice.Tensor:
            window = args[0]
            dim, cut = _cut(window.shape, *args[1:], **(kwargs or {}))
            index = list(window.cut)
            start = index[dim].start or 0
            index[dim] = slice(
                start + cut.start * (index[dim].step or 1), start + cut.stop * (index[dim].step or 1), index[dim].step
            )
            return (
                Window(window.state, tuple(index)) if cut.step == 1 else window.values()[(slice(None),) * dim + (cut,)]
            )
        return _run_dense(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that has a `QuantizedState` among its arguments."""
    own = OPERATORS.get(func)
    return _run_dense(func, args, kwargs) if own is None else own(*args, **kwargs)


def _run_dense(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the dequantized values, and store what it wrote."""
    leaves, spec = tree_flatten((args, kwargs))
    dense = {id(leaf): _values(leaf) for leaf in leaves if isinstance(leaf, (QuantizedState, Window))}
    dense_args, dense_kwargs = tree_unflatten([dense.get(id(leaf), leaf) for leaf in leaves], spec)
    out = func(*dense_args, **dense_kwargs)
    owner = {}
    for argument, value in _bound(func, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_flatten(value)[0]:
                if isinstance(leaf, (QuantizedState, Window)):
                    leaf.store_(dense[id(leaf)])
                    owner[id(dense[id(leaf)])] = leaf
    outs, out_spec = tree_flatten(out)
    return tree_unflatten([owner.get(id(leaf), leaf) for leaf in outs], out_spec)


def _values(tensor: QuantizedState | Window) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedState) else tensor.values()


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


# -- copies -----------------------------------------------------------------------------------------------------------


def _detach(state: QuantizedState) -> QuantizedState:
    return _window(state, state.carry_over(lambda t: t, state.partner))


def _view(state: QuantizedState, size: Sequence[int]) -> Tensor:
    return _detach(state) if tuple(size) == tuple(state.shape) else state.dequantize().view(size)


def _clone(state: QuantizedState, memory_format: torch.memory_format | None = None) -> Tensor:
    if memory_format not in (None, torch.preserve_format):
        return state.dequantize().clone(memory_format=memory_format)
    # what it is relative to goes on changing, so a copy needs its own
    return state.carry_over(torch.clone, None if state.partner is None else _own(state.partner, torch.clone))


def _new_empty(state: QuantizedState, size: Sequence[int], **kwargs: Any) -> Tensor:
    """One of the same size is a state: whoever copies tensor subclasses by their attributes makes it so."""
    if tuple(size) != tuple(state.shape) or is_fake(state.codes) or kwargs.get("dtype") not in (None, state.dtype):
        return cast(Tensor, aten.new_empty.default(state.dequantize(), size, **kwargs))
    model = torch.empty_strided(
        state.shape, state.stride(), dtype=state.dtype, device=kwargs.get("device") or state.device
    )
    return QuantizedState.zeros_like(model, state.format)


def _to_copy(state: QuantizedState, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or state.dtype
    if not dtype.is_floating_point or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return cast(Tensor, aten._to_copy.default(state.dequantize(), **kwargs))

    def move(t: Tensor) -> Tensor:
        device = kwargs.get("device") or state.device
        return t.to(device, non_blocking=bool(kwargs.get("non_blocking")), copy=True)

    return state.carry_over(move, None if state.partner is None else _own(state.partner, move), dtype)


def _own(partner: QuantizedState, change: Callable[[Tensor], Tensor]) -> QuantizedState:
    return partner.carry_over(change, None)


# -- slices -----------------------------------------------------------------------------------------------------------


def _window(state: QuantizedState, part: QuantizedState, start: int = 0) -> QuantizedState:
    part.base, part.start = state.origin, state.start + start
    return part


def _cut(
    shape: Sequence[int], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, slice]:
    """The dimension that `aten.slice` cuts, and its bounds without None or negative numbers."""
    dim %= len(shape)
    first, last, step = slice(start, end, step).indices(shape[dim])
    return dim, slice(first, max(first, last), step)


def _slice(state: QuantizedState, *args: Any, **kwargs: Any) -> Tensor:
    dim, cut = _cut(state.shape, *args, **kwargs)
    index = (slice(None),) * dim + (cut,)
    if is_fake(state.codes):
        return state.dequantize()[index]
    if cut == slice(0, state.shape[dim], 1):
        return _detach(state)
    rows = _whole_blocks(state, dim, cut)
    if rows is not None:
        return rows
    index = (*index, *(slice(None),) * (state.dim() - dim - 1))
    first = (
        slice(state.start, state.start + state.shape[0])
        if dim
        else slice(state.start + cut.start, state.start + cut.stop, cut.step)
    )
    return Window(state.origin, (first, *index[1:]))


def _whole_blocks(state: QuantizedState, dim: int, cut: slice) -> QuantizedState | None:
    """Rows of a state as a state that shares its memory; None where they are not whole blocks, or depend on where they lie."""
    size, fmt = state.format.block_size, state.format
    if dim or cut.step != 1 or not state.is_contiguous() or fmt.dithered or not state.numel():
        return None
    row = state.numel() // state.shape[0]
    first, last = cut.start * row, cut.stop * row
    at_end = cut.stop == state.shape[0]
    if first % size or (last % size and not at_end):
        return None
    partner = None
    if state.partner is not None:
        partner = _whole_blocks(state.partner, dim, cut)
        if partner is None:
            return None
    blocks = slice(first // size, state.codes.shape[0] if at_end else last // size)
    tail = state.tail if at_end else state.tail[:0]
    shape = (cut.stop - cut.start, *state.shape[1:])
    about = (shape, state.stride(), state.dtype, fmt)
    part = QuantizedState(state.codes[blocks], state.scale[blocks], tail, state.counter, about, partner)
    part.is_apart = state.is_apart
    return _window(state, part, cut.start)


# -- one state into another -------------------------------------------------------------------------------------------


def _copy_(state: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    given = source.state if isinstance(source, Window) else source
    if (
        not isinstance(state, QuantizedState)
        or not isinstance(given, QuantizedState)
        or is_fake(state.codes)
        or state.shape != source.shape
    ):
        return cast(Tensor, _run_dense(aten.copy_.default, (state, source, non_blocking), {}))
    target: QuantizedState | None = state
    rows = slice(state.start, state.start + state.shape[0], 1)
    if not _stored_alike(state, given) and _take_format(state.origin, given):
        target = state.origin if state.shape == state.origin.shape else _whole_blocks(state.origin, 0, rows)
    if target is not None and source is given and _stored_alike(target, given) and same_order(target, given):
        _copy_codes(target, given)
    else:
        _copy_to_window(Window(state.origin, (rows,)), source)
    return state


def _copy_to_window(window: Window, source: Tensor) -> Window:
    given, index = (source.state, source.cut) if isinstance(source, Window) else (source, (slice(None),))
    if isinstance(given, QuantizedState):
        if not _stored_alike(window.state, given):
            _take_format(window.state, given)
        if window.state.partner is not None and given.partner is not None:  # first, or nothing would be relative to it
            Window(window.state.partner, window.cut).store_(given.partner.dequantize()[index])
        source = given.dequantize()[index]
    window.store_(source)
    return window


def _stored_alike(state: QuantizedState, source: QuantizedState) -> bool:
    """Whether codes of one mean the same in the other, if they are relative to the same second moment."""
    if state.format != source.format or (state.partner is None) != (source.partner is None):
        return False
    return state.partner is None or _stored_alike(state.partner, cast(QuantizedState, source.partner))


def _take_format(base: QuantizedState, source: QuantizedState) -> bool:
    """Store `base` as `source` is stored, if it was made to be loaded into. One that has values may be that of a compiled
    step, which knows how it is stored."""
    if base.dependents() or not base.is_fresh:
        return False
    model = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device)
    partner = None
    if source.partner is not None:
        partner = base.partner
        if partner is None or partner.format != source.partner.format:
            partner = QuantizedState.zeros_like(model, source.partner.format)
    counter = source.counter if base.counter is None else base.counter
    base.take_(QuantizedState.zeros_like(model, source.format, 0 if counter is None else int(counter[0])), partner)
    return True


def _copy_codes(state: QuantizedState, source: QuantizedState) -> None:
    if source.partner is not None:
        _copy_codes(cast(QuantizedState, state.partner), source.partner)
    parts = [(a, b) for a, b in zip(state.stored[:3], source.stored[:3], strict=True)]
    others = [] if all(same_bits(a, b) for a, b in parts) else state.dependents()
    dependents = [(other, other.dequantize()) for other in others]
    for own, new in parts:
        own.copy_(new)
    if state.counter is not None and source.counter is not None:
        whole = state.base is None or state.base.shape == state.shape
        state.counter.copy_(source.counter) if whole else state.counter[1:].copy_(source.counter[1:])
    state.is_apart = source.is_apart
    for other, values in dependents:
        other.store_(values)


OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.view.default: _view,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.new_empty.default: _new_empty,
    aten.slice.Tensor: _slice,
    aten.copy_.default: _copy_,
}
