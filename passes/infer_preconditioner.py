"""How a second moment enters the update: the function that divides a first moment.

Before: the `elements` graph of an `UpdateProgram` and what was proved about signs. After: a `Preconditioner` for every
quotient m / d(v) in which m is the new value of one signed state, d depends on the new value of one non-negative state
and on numbers alone, and d(v) = a * sqrt(v) + b. Then h = 1 / d is what ZIP-SR rounds in, and what the first moment is
multiplied by when it is stored in update space (papers.md sections 3.3 and 9).

That d is affine in the root is found by evaluating it. Other functions are left to state-space formats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qcompile.passes.functionalize import UpdateProgram

aten = torch.ops.aten
# (operator, position of the numerator, position of the denominator)
QUOTIENTS = {
    aten.div.Tensor: (0, 1),
    aten.addcdiv.default: (1, 2),
}


@dataclass(frozen=True, slots=True)
class Preconditioner:
    """One quotient.

    Attributes:
        first, second: operands of the program: the state that is divided, and the one whose root divides it.
        denominator: d, a graph of the second moment (any shape) and then all 0-d inputs of the program.
    """

    first: int
    second: int
    denominator: fx.GraphModule


def infer_preconditioner(program: UpdateProgram, signs: tuple[bool, ...]) -> tuple[Preconditioner, ...]:
    """At most one record per first moment; a second moment may serve several."""
    nodes = list(program.elements.graph.nodes)
    written = [i for i, operand in enumerate(program.operands) if operand.written]
    new_value = dict(zip(written, nodes[-1].args[0], strict=True))
    states = {new_value[i]: i for i in written if program.operands[i].role == "state"}
    numbers = [n for n in nodes if n.op == "placeholder"][len(program.operands) :]
    found: dict[int, Preconditioner] = {}
    for node in nodes:
        for numerator, denominator in _quotients(node):
            first = next((states[n] for n in _through_factors(numerator) if n in states), None)
            seconds = _leaves(denominator, states, numbers)
            if first is None or first in found or seconds is None or len(seconds) != 1:
                continue
            (second,) = seconds
            if signs[states[second]] and not signs[first]:
                graph = _slice(second, denominator, numbers)
                if _is_affine_in_root(graph, program.scalar_dtypes):
                    found[first] = Preconditioner(first, states[second], graph)
    return tuple(found.values())


def _quotients(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    if node.target in QUOTIENTS:
        numerator, denominator = (node.args[i] for i in QUOTIENTS[node.target])  # type: ignore[index]
        if isinstance(numerator, fx.Node) and isinstance(denominator, fx.Node):
            yield numerator, denominator


def _through_factors(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and what it is a multiple of: m / correction, rate * m, a copy of m."""
    yield node
    factors = (aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.clone.default, aten._to_copy.default)
    if node.target in factors:
        for value in node.all_input_nodes:
            if value.meta["val"].dim() > 0:
                yield from _through_factors(value)


def _leaves(node: fx.Node, states: dict[fx.Node, int], numbers: list[fx.Node]) -> set[fx.Node] | None:
    """The new states that a value is made of, or None where it is made of anything else but numbers."""
    found: set[fx.Node] = set()
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        if current in seen or current in numbers:
            continue
        seen.add(current)
        if current in states and current is not node:
            found.add(current)
        elif current.op == "placeholder":
            return None
        else:
            stack.extend(current.all_input_nodes)
    return found


def _slice(second: fx.Node, denominator: fx.Node, numbers: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in [second, *numbers]}
    for node in second.graph.nodes:
        if node.op == "call_function" and node not in env and all(a in env for a in node.all_input_nodes):
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(env[denominator])
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph)


def _is_affine_in_root(graph: fx.GraphModule, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether d(v) - d(0) is proportional to sqrt(v), by its values for two choices of the numbers."""
    at = (0.0, 1e-6, 1.0, 4.0, 1e4)
    for number in (0.5, 0.875):
        numbers = [torch.full((), number, dtype=dtype) for dtype in dtypes]
        d: Any = graph(torch.tensor(at), *numbers).double().tolist()
        slopes = [(b - d[0]) / math.sqrt(v) for v, b in zip(at[1:], d[1:], strict=True)]
        if not all(math.isfinite(s) and s != 0 for s in slopes):
            return False
        if any(abs(s - t) > 1e-3 * abs(s) for s, t in itertools.pairwise(slopes[1:])):
            return False
    return True
