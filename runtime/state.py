"""`QuantizedState`: the tensor that stands in `optimizer.state`.

Outside it is a dense tensor: it has the shape, stride and dtype of what it replaces, every operator reads its dequantized
values, and an in-place operator dequantizes, computes and stores again. So eager code, hooks and `state_dict` keep their
meaning. Inside are codes and scales, and a short dense tail of the elements that do not fill a block.

The compiled step never comes through here: it reads and writes `codes`, `scale` and `tail` directly.

A slice of a `QuantizedState` is a window: what is written to it is stored. Any other view (an index, a transpose) is a dense
copy of the values, and writing to that changes nothing. Write to the state itself: `state.copy_(...)`, `state[rows] = 0`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qcompile._compat import is_fake
from qcompile.exc import CheckpointError, LostPartnerError
from qcompile.runtime.codecs import Context, decode_blocks, encode_blocks, in_parts, update_denominator
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import flat, like
from qcompile.runtime.rounding import Draw

# Eager encoding makes temporaries of several times its input: this many elements at a time keeps them small.
CHUNK = 1 << 20
# Version of what a saved state consists of, see `rebuild`.
LAYOUT = 1


def parts_of(fmt: Format) -> tuple[str, ...]:
    """Names of the tensors that a state of this format holds."""
    return ("codes", "scale", "tail", "counter") if fmt.random else ("codes", "scale", "tail")


Metadata = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Format]


class QuantizedState(torch.Tensor):
    """Quantized optimizer state that reads as the dense tensor.

    Attributes:
        codes: [n_blocks, code_bytes], of the first n_blocks * block_size elements in storage order.
        scale: [n_blocks, 1] in the format's scale dtype, or [n_blocks, 2]: least and largest value.
        tail: [numel % block_size] fp32, the rest of the elements.
        counter: [2] int32, the key of the buffer's random bits and how often it was stored; None where none are drawn.
        format: how they are stored.
        partner: for a first moment in update space, the second moment that it is stored relative to.
        is_apart: whether a step was seen that writes the second moment and not this one: it is never relative to it.
        base, start: the state that this one is a window of, whose memory it shares, and the row where it begins; or None, 0.
    """

    codes: Tensor
    scale: Tensor
    tail: Tensor
    counter: Tensor | None
    format: Format
    partner: QuantizedState | None
    is_apart: bool
    base: QuantizedState | None
    start: int
    _dependents: list[weakref.ref[QuantizedState]]

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        tail: Tensor,
        counter: Tensor | None,
        metadata: Metadata,
        partner: QuantizedState | None = None,
    ) -> QuantizedState:
        shape, stride, dtype, _ = metadata
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, shape, strides=stride, dtype=dtype, device=codes.device
        )

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        tail: Tensor,
        counter: Tensor | None,
        metadata: Metadata,
        partner: QuantizedState | None = None,
    ) -> None:
        self.codes, self.scale, self.tail, self.counter, self.format = codes, scale, tail, counter, metadata[3]
        self.partner, self.is_apart, self.base, self.start, self._dependents = partner, False, None, 0, []
        if partner is not None:
            partner._dependents.append(weakref.ref(self))

    @classmethod
    def zeros_like(
        cls, dense: Tensor, fmt: Format, key: int = 0, stores: int = 0, partner: QuantizedState | None = None
    ) -> QuantizedState:
        """A state that decodes to zero, laid out as `dense`.

        Args:
            dense: gives shape, strides, dtype and device.
            fmt: how to store.
            key: int32 key of the buffer's random bits, see `rounding.key_of`.
            stores: how often it counts as stored already.
            partner: the second moment, for a format in update space.
        """
        blocks, rest = divmod(dense.numel(), fmt.block_size)
        codes = torch.zeros(blocks, fmt.code_bytes, dtype=torch.uint8, device=dense.device).view(fmt.code_dtype)
        scale = torch.zeros(blocks, fmt.scale_count, dtype=fmt.scale_dtype, device=dense.device)
        tail = torch.zeros(rest, device=dense.device)
        counter = torch.tensor([key, stores], dtype=torch.int32, device=dense.device) if fmt.random else None
        return cls(codes, scale, tail, counter, (tuple(dense.shape), dense.stride(), dense.dtype, fmt), partner)

    @classmethod
    def quantize(
        cls, dense: Tensor, fmt: Format, key: int = 0, stores: int = 0, partner: QuantizedState | None = None
    ) -> QuantizedState:
        """Store the values of `dense`: any floating dtype, any strides for which `layout.is_flat` holds."""
        state = cls.zeros_like(dense, fmt, key, stores, partner)
        state.store_(dense)
        return state

    def dequantize(self) -> Tensor:
        """The dense values, in the shape, stride and dtype that the state shows."""
        if is_fake(self.codes):  # while tracing, only shapes matter
            return self.codes.new_empty_strided(self.shape, self.stride(), dtype=self.dtype)
        dense = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        main, tail = self._split(flat(dense))
        for rows in self._chunks():
            main[rows] = self._decoded(rows).to(self.dtype)
        tail.copy_(self.tail)
        return dense

    def store_(self, dense: Tensor) -> None:
        """Encode `dense` (the state's shape, any dtype and strides) into this state.

        A first moment that is stored relative to this state keeps its values.
        """
        if is_fake(self.codes):
            return
        dependents = [(state, state.dequantize()) for state in self.dependents()]
        main, tail = self._split(flat(like(dense, self)))
        for rows in self._chunks():
            self.codes[rows], scales = encode_blocks(main[rows], self.format, self._context(rows, last=0))
            self.scale[rows] = torch.cat(scales, dim=1)
        self.tail.copy_(tail)
        if self.counter is not None:
            self.counter[1] += 1
        for state, values in dependents:
            state.store_(values)

    def _decoded(self, rows: slice) -> Tensor:
        scales = in_parts(self.scale[rows], self.format.scale_count)
        return decode_blocks(self.codes[rows], scales, self.format, self._context(rows, last=1))

    def _context(self, rows: slice, last: int) -> Context:
        """What the format needs to read (`last` = 1: the store before now) or to store these rows."""
        fmt, draw, denominator, preconditioner = self.format, None, None, None
        if self.counter is not None:
            key, store = self.counter.unbind()
            draw = Draw(key, store - last, rows.start, rows.stop - rows.start, fmt.block_size)
        if fmt.coordinate == "update":
            if self.partner is None:
                raise LostPartnerError(str(fmt.partner))
            denominator = in_parts(
                update_denominator([self.partner._rows(rows, fmt.block_size)], fmt.eps)[0], fmt.parts
            )
        if fmt.rounding == "preconditioner":  # outside of a step there is no bias correction

            def preconditioner(v: Tensor) -> Tensor:
                return 1.0 / (torch.sqrt(v) + max(fmt.eps, 1e-30))

        return Context(denominator, preconditioner, draw)

    def _rows(self, rows: slice, block_size: int) -> Tensor:
        """Values of the elements that rows of blocks of `block_size` hold, in that shape; fp32."""
        own = self.format.block_size
        first, last = rows.start * block_size, min(rows.stop * block_size, self.codes.shape[0] * own)
        blocks = slice(first // own, -(-last // own))
        values = self._decoded(blocks).flatten()[first - blocks.start * own :]
        missing = (rows.stop - rows.start) * block_size
        return torch.cat([values, self.tail])[:missing].view(-1, block_size)

    @property
    def origin(self) -> QuantizedState:
        """The state that this one is a window of, or itself."""
        return self if self.base is None else self.base

    def head(self, count: int) -> Tensor:
        """The first `count` values in storage order, fp32, 1-D; `count` is a multiple of the block size."""
        blocks = count // self.format.block_size
        parts = [
            self._decoded(slice(i, min(i + step, blocks)))
            for step in [max(1, CHUNK // self.format.block_size)]
            for i in range(0, blocks, step)
        ]
        return torch.cat(parts).flatten() if parts else self.scale.new_empty(0, dtype=torch.float32)

    @property
    def is_fresh(self) -> bool:
        """Whether it is as `zeros_like` made it."""
        return not any(bool(t.view(torch.uint8).any()) for t in self.stored[:3])

    def dependents(self) -> list[QuantizedState]:
        """The states that are stored relative to this one."""
        if self.base is not None:
            return self.base.dependents()
        found = {id(state): state for ref in self._dependents if (state := ref()) is not None and state.partner is self}
        self._dependents = [weakref.ref(state) for state in found.values()]
        return list(found.values())

    def __setitem__(self, index: Any, value: Any) -> None:
        dense = self.dequantize()
        dense[index] = value.dequantize() if isinstance(value, QuantizedState) else value
        self.store_(dense)

    def requantize_(self, fmt: Format, key: int = 0, stores: int = 0, partner: QuantizedState | None = None) -> None:
        """Change the format in place. Values that are 0 stay 0; others are encoded again."""
        dependents = [(state, state.dequantize()) for state in self.dependents()]
        is_fresh = self.is_fresh
        dense = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        make = QuantizedState.zeros_like if is_fresh else QuantizedState.quantize
        other = make(dense if is_fresh else self.dequantize(), fmt, key, stores, partner)
        self.take_(other, partner)
        for state, values in dependents:
            state.store_(values)

    def take_(self, other: QuantizedState, partner: QuantizedState | None) -> None:
        """Hold what `other`, of the same shape and strides, holds: its memory, not a copy of it."""
        self.codes, self.scale, self.tail, self.counter = other.codes, other.scale, other.tail, other.counter
        self.format = other.format
        self.attach_(partner)

    def attach_(self, partner: QuantizedState | None) -> None:
        """Say which second moment this state is stored relative to. The codes are not changed."""
        self.partner = partner
        if partner is not None:
            partner._dependents.append(weakref.ref(self))

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes, scales, counter and tail."""
        return sum(t.numel() * t.element_size() for t in self.stored)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that hold the state, in the order of `parts_of(self.format)`."""
        return tuple(getattr(self, name) for name in parts_of(self.format))

    def _split(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        blocked = self.codes.shape[0] * self.format.block_size
        return elements[:blocked].view(-1, self.format.block_size), elements[blocked:]

    def _chunks(self) -> Iterator[slice]:
        step = max(1, CHUNK // self.format.block_size)
        blocks = self.codes.shape[0]
        return (slice(start, min(start + step, blocks)) for start in range(0, blocks, step))

    def _metadata(self) -> Metadata:
        return tuple(self.shape), self.stride(), self.dtype, self.format

    def carry_over(
        self, change: Callable[[Tensor], Tensor], partner: QuantizedState | None, dtype: torch.dtype | None = None
    ) -> QuantizedState:
        """A state that holds what `change` makes of each tensor of this one."""
        shape, stride, own, fmt = self._metadata()
        counter = None if self.counter is None else change(self.counter)
        parts = (change(self.codes), change(self.scale), change(self.tail), counter)
        other = QuantizedState(*parts, (shape, stride, dtype or own, fmt), partner)
        other.is_apart = self.is_apart
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedState:
        if id(self) not in memo:  # a partner that is copied in the same call is shared, as it is here
            memo[id(self)] = self.carry_over(torch.clone, copy.deepcopy(self.partner, memo))
        return cast(QuantizedState, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        shape, stride, dtype, fmt = self._metadata()
        record = (LAYOUT, shape, stride, dtype, dataclasses.asdict(fmt), self.is_apart)
        return rebuild, (record, self.codes, self.scale, self.tail, self.counter, self.partner)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedState({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        return list(parts_of(self.format)), self._metadata()

    def _stable_hash_for_caching(self) -> str:
        """For AOTAutograd's cache of compiled graphs."""
        return repr(self._metadata())

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: Metadata, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> QuantizedState:
        return QuantizedState(inner["codes"], inner["scale"], inner["tail"], inner.get("counter"), metadata)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @torch.compiler.disable  # where a step runs as Python, Dynamo would compile the functions in here one by one
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from qcompile.runtime.operators import run

        return run(func, args, kwargs or {})


def same_values(a: QuantizedState | None, b: QuantizedState | None) -> bool:
    """Whether two states hold the same codes, or are the same or None."""
    if a is b or a is None or b is None:
        return a is b
    parts = zip(a.stored[:3], b.stored[:3], strict=True)  # the counter says nothing of the values
    return a.format == b.format and not a.format.dithered and all(same_bits(x, y) for x, y in parts)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, where a NaN equals itself."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.to(a.device).contiguous().view(torch.uint8)
    )


def rebuild(
    record: Sequence[Any],
    codes: Tensor,
    scale: Tensor,
    tail: Tensor,
    counter: Tensor | None,
    partner: QuantizedState | None = None,
) -> QuantizedState:
    """A state from what was saved of it: (layout, shape, stride, dtype, fields of the format, is_apart), and its tensors.

    Raises:
        CheckpointError: it was saved in a layout or a format that this version does not know, or tensors do not fit.
    """
    if not record or record[0] != LAYOUT or len(record) != 6:
        raise CheckpointError(f"quantized state has layout {record[0] if record else None!r}", f"layout {LAYOUT}")
    _, shape, stride, dtype, fields, is_apart = record
    known = {field.name for field in dataclasses.fields(Format)}
    if unknown := sorted(fields.keys() - known):
        raise CheckpointError(f"a format has fields {', '.join(unknown)}", f"fields {', '.join(sorted(known))}")
    fmt = Format(**fields)
    blocks, rest = divmod(math.prod(shape), fmt.block_size)
    expected = {
        "codes": ((blocks, fmt.code_bytes), fmt.code_dtype),
        "scale": ((blocks, fmt.scale_count), fmt.scale_dtype),
        "tail": ((rest,), torch.float32),
    } | ({"counter": ((2,), torch.int32)} if fmt.random else {})
    for (name, (size, kind)), tensor in zip(expected.items(), (codes, scale, tail, counter), strict=False):
        if tensor is None or tuple(tensor.shape) != size or tensor.dtype != kind:
            found = None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise CheckpointError(f"{name} of a state of shape {tuple(shape)} in {fmt} is {found}", f"{size} {kind}")
    state = QuantizedState(codes, scale, tail, counter, (tuple(shape), tuple(stride), dtype, fmt), partner)
    state.is_apart = bool(is_apart)
    return state


torch.serialization.add_safe_globals([rebuild])  # for torch.load(weights_only=True), its default
