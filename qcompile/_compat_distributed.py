"""Private names of `torch.distributed.tensor`: what a rank holds of a tensor that is spread over a mesh of processes.

A DTensor is looked into and made again with other contents, so that its `_local_tensor` can be a quantized state. Nothing
here imports torch.distributed: where nobody has, no tensor is a DTensor.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
# As `_compat.NEEDED`, of a torch that has torch.distributed.
NEEDED = (
    ("torch.distributed.tensor", "DTensor._local_tensor DTensor._spec"),
    ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"),
)


def is_dtensor(value: object) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_of(value: T) -> T:
    """The part of a DTensor that this rank holds, without a copy and without history; anything else as it is."""
    if not is_dtensor(value):
        return value
    held: Any = value
    local = held._local_tensor
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[no-any-return]


def with_local(like: Any, local: Tensor) -> Tensor:
    """A DTensor of the mesh, placements, shape and strides of `like` with another part of this rank; `local` if `like` is none."""
    return type(like)(local, like._spec, requires_grad=False) if is_dtensor(like) else local


def spread(value: object) -> tuple[Any, tuple[Any, ...]]:
    """How a DTensor is spread: its mesh and placements; (None, ()) of anything else."""
    held: Any = value
    return (held.device_mesh, tuple(held.placements)) if is_dtensor(value) else (None, ())


def is_partial(value: object) -> bool:
    """Whether the values are still to be reduced over ranks."""
    held: Any = value
    return is_dtensor(value) and any(placement.is_partial() for placement in held.placements)


def offset_of(value: object) -> tuple[int, ...]:
    """Where in a DTensor the part of this rank begins, per dimension; () of anything else."""
    if not is_dtensor(value):
        return ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held: Any = value
    _, offsets = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
    return tuple(map(int, offsets))
