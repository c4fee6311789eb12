"""Work that Inductor repeats while it generates one of our kernels, done once. What it generates is the same.

All of torch 2.11 to 2.14. What is patched here is patched while a kernel of ours is compiled: see `_compat`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock


@contextlib.contextmanager
def less_repeated_work() -> Iterator[None]:
    """Generate code with everything below; an update kernel takes a third of the time."""
    with _loaded_once(), _light_interpreter(), _one_dtype_handler(), _cheap_bounds():
        yield


@contextlib.contextmanager
def _loaded_once() -> Iterator[None]:
    """Evaluate an operation that several others read once.

    The functions of Inductor's loops call those of their inputs, so that a graph is evaluated as the tree it unfolds to, by
    every pass that asks for anything, and the copies are removed at the end. Here a handler remembers what it was told.
    """
    from torch._inductor.ir import Pointwise
    from torch._inductor.virtualized import V

    make_loader = Pointwise.make_loader

    def remembering(self: Any) -> Callable[[Sequence[Any]], Any]:
        load = make_loader(self)

        def loader(index: Sequence[Any]) -> Any:
            seen = V.get_ops_handler().__dict__.setdefault("_qcompile_loaded", {})
            key = id(self), tuple(index)
            if key not in seen:
                seen[key] = self, load(index)  # with what the address belongs to, so that it stays its own
            return seen[key][1]

        return loader

    with mock.patch.object(Pointwise, "make_loader", remembering):
        yield


@contextlib.contextmanager
def _light_interpreter() -> Iterator[None]:
    """Run the graph of a loop without what `fx.Interpreter` does for tracebacks, at every node of every run."""
    from torch._inductor.loop_body import InterpreterShim
    from torch.fx.node import map_arg

    def run_node(self: Any, node: Any) -> Any:
        self.current_node = node
        value = self.env.__getitem__
        return getattr(self, node.op)(node.target, map_arg(node.args, value), map_arg(node.kwargs, value))

    with mock.patch.object(InterpreterShim, "run_node", run_node):
        yield


@contextlib.contextmanager
def _one_dtype_handler() -> Iterator[None]:
    """`DtypePropagationOpsHandler` is a singleton whose `__init__` fills in 200 attributes at each use."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    def init(self: Any) -> None:
        pass

    DtypePropagationOpsHandler()  # the one there is, filled in
    with mock.patch.object(DtypePropagationOpsHandler, "__init__", init):
        yield


@contextlib.contextmanager
def _cheap_bounds() -> Iterator[None]:
    """Bounds that are the same need no intersection, which goes through sympy."""
    from torch.utils._sympy.value_ranges import ValueRanges

    def tighten(self: Any, other: Any) -> Any:
        return self if self is other or self == other else self & other

    with mock.patch.object(ValueRanges, "tighten", tighten):
        yield
