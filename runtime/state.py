"""`QuantizedState`: the tensor that stands in `optimizer.state`.

Outside it is a dense tensor: it has the shape, stride and dtype of what it replaces, every operator reads its dequantized
values, and an in-place operator dequantizes, computes and stores again. So eager code, hooks and `state_dict` keep their
meaning. Inside are codes and scales, and a short dense tail of the elements that do not fill a block.

The compiled step never comes through here: it reads and writes `codes`, `scale` and `tail` directly.

A view of a `QuantizedState` (an index, a slice, a transpose) is a dense copy of the values: writing to it changes nothing.
Write to the state itself: `state.copy_(...)`, `state[rows] = 0`, `state.mul_(0.5)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qcompile._compat import is_fake, tree_flatten, tree_unflatten
from qcompile.runtime.codecs import decode_blocks, encode_blocks
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import flat, like

# Eager encoding makes temporaries of several times its input: this many elements at a time keeps them small.
CHUNK = 1 << 20

Metadata = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Format]


class QuantizedState(torch.Tensor):
    """Quantized optimizer state that reads as the dense tensor.

    Attributes:
        codes: [n_blocks, block_size], int8 or uint8; the first n_blocks * block_size elements in storage order.
        scale: [n_blocks, 1] fp32, the largest finite magnitude of each block.
        tail: [numel % block_size] fp32, the rest of the elements.
        format: how they are stored.
    """

    codes: Tensor
    scale: Tensor
    tail: Tensor
    format: Format

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, tail: Tensor, metadata: Metadata) -> QuantizedState:
        shape, stride, dtype, _ = metadata
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, shape, strides=stride, dtype=dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scale: Tensor, tail: Tensor, metadata: Metadata) -> None:
        self.codes, self.scale, self.tail, self.format = codes, scale, tail, metadata[3]

    @classmethod
    def zeros_like(cls, dense: Tensor, fmt: Format) -> QuantizedState:
        """A state that decodes to zero, laid out as `dense`."""
        blocks, rest = divmod(dense.numel(), fmt.block_size)
        codes = torch.zeros(blocks, fmt.block_size, dtype=fmt.code_dtype, device=dense.device)
        scale = torch.zeros(blocks, 1, device=dense.device)
        tail = torch.zeros(rest, device=dense.device)
        return cls(codes, scale, tail, (tuple(dense.shape), dense.stride(), dense.dtype, fmt))

    @classmethod
    def quantize(cls, dense: Tensor, fmt: Format) -> QuantizedState:
        """Store the values of `dense`: any floating dtype, any strides for which `layout.is_flat` holds."""
        state = cls.zeros_like(dense, fmt)
        state.store_(dense)
        return state

    def dequantize(self) -> Tensor:
        """The dense values, in the shape, stride and dtype that the state shows."""
        if is_fake(self.codes):  # while tracing, only shapes matter
            return self.codes.new_empty_strided(self.shape, self.stride(), dtype=self.dtype)
        dense = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        main, tail = self._split(flat(dense))
        for rows in self._chunks():
            main[rows] = decode_blocks(self.codes[rows], self.scale[rows], self.format).to(self.dtype)
        tail.copy_(self.tail)
        return dense

    def store_(self, dense: Tensor) -> None:
        """Encode `dense` (the state's shape, any dtype and strides) into this state."""
        if is_fake(self.codes):
            return
        main, tail = self._split(flat(like(dense, self)))
        for rows in self._chunks():
            self.codes[rows], self.scale[rows] = encode_blocks(main[rows], self.format)
        self.tail.copy_(tail)

    def __setitem__(self, index: Any, value: Any) -> None:
        dense = self.dequantize()
        dense[index] = value.dequantize() if isinstance(value, QuantizedState) else value
        self.store_(dense)

    def requantize_(self, fmt: Format) -> None:
        """Change the format in place. Values that are 0 stay 0; others are encoded again."""
        is_zero = not self.codes.any() and not self.tail.any()
        dense = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        other = QuantizedState.zeros_like(dense, fmt) if is_zero else QuantizedState.quantize(self.dequantize(), fmt)
        self.codes, self.scale, self.tail, self.format = other.codes, other.scale, other.tail, fmt

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes, scales and tail."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.tail))

    def _split(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        blocked = self.codes.numel()
        return elements[:blocked].view(-1, self.format.block_size), elements[blocked:]

    def _chunks(self) -> Iterator[slice]:
        step = max(1, CHUNK // self.format.block_size)
        return (slice(start, start + step) for start in range(0, self.codes.shape[0], step))

    def _metadata(self) -> Metadata:
        return tuple(self.shape), self.stride(), self.dtype, self.format

    def _carry(self, codes: Tensor, scale: Tensor, tail: Tensor, dtype: torch.dtype | None = None) -> QuantizedState:
        shape, stride, own, fmt = self._metadata()
        return QuantizedState(codes, scale, tail, (shape, stride, dtype or own, fmt))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedState({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        return ["codes", "scale", "tail"], self._metadata()

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: Metadata, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> QuantizedState:
        return QuantizedState(inner["codes"], inner["scale"], inner["tail"], metadata)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _CARRIED:
            return _CARRIED[func](*args, **kwargs)
        return _run_dense(func, args, kwargs)


def _run_dense(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the dequantized values, and store what it wrote."""
    leaves, spec = tree_flatten((args, kwargs))
    dense = {id(leaf): leaf.dequantize() for leaf in leaves if isinstance(leaf, QuantizedState)}
    dense_args, dense_kwargs = tree_unflatten([dense.get(id(leaf), leaf) for leaf in leaves], spec)
    out = func(*dense_args, **dense_kwargs)
    owner = {}
    for argument, value in _bound(func, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_flatten(value)[0]:
                if isinstance(leaf, QuantizedState):
                    leaf.store_(dense[id(leaf)])
                    owner[id(dense[id(leaf)])] = leaf
    outs, out_spec = tree_flatten(out)
    return tree_unflatten([owner.get(id(leaf), leaf) for leaf in outs], out_spec)


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _detach(state: QuantizedState) -> QuantizedState:
    return state._carry(state.codes, state.scale, state.tail)


def _clone(state: QuantizedState, memory_format: torch.memory_format | None = None) -> Tensor:
    if memory_format not in (None, torch.preserve_format):
        return state.dequantize().clone(memory_format=memory_format)
    return state._carry(state.codes.clone(), state.scale.clone(), state.tail.clone())


def _to_copy(state: QuantizedState, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or state.dtype
    if not dtype.is_floating_point or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return cast(Tensor, torch.ops.aten._to_copy.default(state.dequantize(), **kwargs))
    move = {"device": kwargs.get("device") or state.device, "non_blocking": kwargs.get("non_blocking", False)}
    codes, scale, tail = (t.to(**move, copy=True) for t in (state.codes, state.scale, state.tail))
    return state._carry(codes, scale, tail, dtype)


_CARRIED: dict[Any, Any] = {
    torch.ops.aten.detach.default: _detach,
    torch.ops.aten.alias.default: _detach,
    torch.ops.aten.clone.default: _clone,
    torch.ops.aten._to_copy.default: _to_copy,
}
