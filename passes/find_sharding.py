"""Whether an update of DTensors is, on every rank, the same update of what that rank holds.

Before: a region, and the tensors that arrive. After: None, or the reason why it is not. An elementwise update of DTensors
that are spread alike is one, so its kernel takes the local tensors and nothing is communicated; the rest of the analysis
sees local shapes only. Everything else stays with DTensor itself, which moves what has to be moved.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from qcompile._compat_distributed import is_dtensor, is_partial, spread
from qcompile.passes.find_state import Inputs
from qcompile.passes.outline_updates import Region


def is_sharded(region: Region, inputs: Inputs) -> bool:
    """Whether any of its tensors is a DTensor."""
    return any(is_dtensor(value) for _, value in _values(region, inputs))


def sharding_conflict(region: Region, inputs: Inputs) -> str | None:
    """Why ranks cannot update what they hold independently of each other."""
    if not is_sharded(region, inputs):
        return None
    large = [(name, value) for name, value in _values(region, inputs) if value.dim() > 0]
    for name, value in _values(region, inputs):
        if is_partial(value):
            return f"{name} is still to be reduced over ranks: its placements are {spread(value)[1]}"
    expected = next(spread(value) for _, value in large if is_dtensor(value))
    for name, value in large:
        if spread(value) != expected:
            found = f"has placements {spread(value)[1]}" if is_dtensor(value) else "is no DTensor"
            return f"{name} {found}, and what it is used with {expected[1]}"
    return None


def _values(region: Region, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a region reads and makes, as they are spread."""
    for node in (*region.inputs, *region.nodes):
        value = inputs.given.get(node, node.meta.get("example_value"))
        if isinstance(value, Tensor):
            yield _name(node, inputs), value


def _name(node: fx.Node, inputs: Inputs) -> str:
    if node in inputs.state:
        return inputs.state[node].key
    return "the parameter" if node in inputs.params else node.name
