"""An update region as one operator, for graphs in which gradients are made.

Inductor sees an operator that mutates some tensors and reads others, so it runs it as soon as the gradient it reads
exists, and frees that gradient behind it. The operator finds its update by number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from qcompile.runtime.launch import UpdateClass

_updates: dict[int, UpdateClass] = {}
_numbers = itertools.count()


def register(update: UpdateClass) -> int:
    """Give an update a number. Its sources are positions in the list of written tensors followed by that of read ones."""
    number = next(_numbers)
    _updates[number] = update
    return number


def forget(numbers: Iterable[int]) -> None:
    """Drop updates whose graph is gone."""
    for number in numbers:
        _updates.pop(number, None)


@torch.library.custom_op("qcompile::update", mutates_args={"written"})
def update(number: int, written: list[Tensor], read: list[Tensor]) -> None:
    """Run update `number` on the tensors it writes and the tensors it only reads."""
    with torch.no_grad():
        _updates[number].run([*written, *read])


@update.register_fake
def _(number: int, written: list[Tensor], read: list[Tensor]) -> None:
    return None
