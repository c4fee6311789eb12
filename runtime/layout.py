"""Flat views in storage order.

An elementwise update does not care in which order it visits elements, as long as parameter, gradient and state agree.
So every tensor is seen as the flat run of its storage; a channels_last or transposed parameter costs no copy.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_flat(tensor: Tensor) -> bool:
    """Whether the elements fill one run of storage, each exactly once."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def may_overlap(tensor: Tensor) -> bool:
    """Whether two elements may lie in one place in memory, as in an expanded view or a sliding window."""
    reach = -1  # the last place that the dimensions so far get to
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= max(reach, 0):
                return tensor.numel() > 0
            reach = max(reach, 0) + stride * (size - 1)
    return False


def flat(tensor: Tensor) -> Tensor:
    """A 1-D view of a tensor for which `is_flat` holds, shape (numel,), in storage order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def row_order(model: Tensor) -> Tensor:
    """A tensor without memory that lies as a launch visits `model`'s elements: as it does, or row-major if it has gaps."""
    shadow = torch.empty_strided(model.shape, model.stride(), dtype=model.dtype, device="meta")
    return shadow if is_flat(model) else torch.empty_like(shadow, memory_format=torch.contiguous_format)


def order_of(state: Tensor, param: Tensor | None) -> Tensor:
    """`row_order` of what a state is updated with: its parameter, or the state itself where that has another shape."""
    return row_order(param if param is not None and param.shape == state.shape else state)


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape visit their elements in the same storage order."""
    return all(s == t or n == 1 for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True))


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` if it lies in storage as `model` does, else a copy that does. `model` must be flat."""
    if tensor.stride() == model.stride() or (is_flat(tensor) and same_order(tensor, model)):
        return tensor
    copy = torch.empty_strided(model.shape, model.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
