"""State that belongs to no optimizer object: the user says which tensors it is.

A marked tensor is a `QuantizedState` already, so that it is the object that the user holds which is re-encoded once the
compiler knows more, not another one that would have to take its place.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qcompile.runtime.state import QuantizedState


class Marks:
    """Stands where other state has its optimizer."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class Mark:
    """One marked tensor: the tensor, the parameter that it is state of (None: not said), and its name."""

    state: weakref.ref[Tensor]
    owner: weakref.ref[Tensor] | None
    name: str


MARKS = Marks()
_marks: dict[int, Mark] = {}
_count = itertools.count()


def mark(state: QuantizedState, param: Tensor | None, name: str | None) -> None:
    """Remember a tensor as state, for as long as it lives."""
    number = next(_count)
    key = id(state)
    reference: weakref.ref[Tensor] = weakref.ref(state, lambda _: _marks.pop(key, None))
    owner = None if param is None else weakref.ref(param)
    _marks[key] = Mark(reference, owner, f"state_{number}" if name is None else name)


def marks() -> Iterator[Mark]:
    """Those of tensors that are alive."""
    return (found for found in list(_marks.values()) if found.state() is not None)
