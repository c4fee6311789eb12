"""Intervals of floating-point values: the arithmetic that the rules of operators are written in.

Before: a call of an operator in a functional graph, and the intervals of what it reads. After: an interval that holds its
value, whatever the inputs are within theirs. Which operator computes what is in `interval_rules`.

The claim is about floating point, not about reals: a bound is moved outward by the rounding that its operator may do in
its dtype. A bound of zero stays zero, because rounding never changes a sign; nothing is proved about a sign from a bound
that holds up to rounding only. Left out are elements for which Inf or NaN arises on the way, and integers that overflow.

Equal values are recognised by value numbering, so that g * g, g * copy(g) and (c * g) * g are known to be squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

INF = math.inf


@dataclass(frozen=True, slots=True)
class Interval:
    """All numbers from `low` to `high`, both included; infinite where there is no bound."""

    low: float
    high: float

    def __contains__(self, other: Interval | float) -> bool:
        low, high = (other.low, other.high) if isinstance(other, Interval) else (other, other)
        return self.low <= low and high <= self.high

    def __or__(self, other: Interval) -> Interval:
        """The smallest interval that holds both."""
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def __and__(self, other: Interval) -> Interval:
        """What both allow; self where that is nothing, which a value that exists cannot come to."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Interval(low, high) if low <= high else self

    def __str__(self) -> str:
        low = "(-inf" if self.low == -INF else f"[{self.low + 0.0:.4g}"
        return f"{low}, inf)" if self.high == INF else f"{low}, {self.high + 0.0:.4g}]"


ANY = Interval(-INF, INF)
NON_NEGATIVE = Interval(0.0, INF)
NON_POSITIVE = Interval(-INF, 0.0)
ZERO = Interval(0.0, 0.0)
ONE = Interval(1.0, 1.0)
UNIT = Interval(0.0, 1.0)
SYMMETRIC = Interval(-1.0, 1.0)

# They give back the value of one argument; the number says which.
COPIES = {"aten.clone": 0, "aten.alias": 0, "aten.detach": 0, "aten._to_copy": 0, "aten.copy": 1}
COPIES |= {"aten.detach_copy": 0, "aten.alias_copy": 0}
COPIES |= {"aten.lift_fresh_copy": 0, "prims.convert_element_type": 0}


def name_of(node: fx.Node) -> str:
    """The operator without its overload; by name, so that one which a torch does not have yet needs no special case."""
    return str(node.target).rsplit(".", 1)[0]


def dtype_of(node: fx.Node) -> torch.dtype:
    """Of the node's value; fp32 where a graph does not say."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32


class Evaluation:
    """The intervals found so far, and which nodes have equal values.

    Attributes:
        values: the interval of each node.
        same: for each node, the first one that has its value.
        factors: for each node, what its sign is the product of: nodes and numbers, without those that occur in pairs.
    """

    def __init__(self) -> None:
        self.values: dict[fx.Node, Interval] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self.factors: dict[fx.Node, frozenset[fx.Node | float]] = {}
        self._first: dict[object, fx.Node] = {}

    def enter(self, node: fx.Node, value: Interval) -> None:
        self.values[node] = value
        self.same[node] = self._same(node)
        self.factors[node] = self._factors(node)

    def factors_of(self, arg: Any) -> frozenset[fx.Node | float]:
        if isinstance(arg, fx.Node):
            return self.factors[arg]
        return frozenset({float(arg) if isinstance(arg, (int, float)) else math.nan})

    def sign(self, factors: frozenset[fx.Node | float]) -> Interval:
        """What the sign of a product can be, by the signs of its factors."""
        flips = 0
        for factor in factors:
            value = self.values[factor] if isinstance(factor, fx.Node) else Interval(factor, factor)
            if value not in NON_NEGATIVE and value not in NON_POSITIVE:
                return ANY
            flips += value not in NON_NEGATIVE
        return NON_POSITIVE if flips % 2 else NON_NEGATIVE

    def _same(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return node
        source = node.args[COPIES[name_of(node)]] if name_of(node) in COPIES else None
        if isinstance(source, fx.Node) and dtype_of(source) == dtype_of(node):
            return self.same[source]
        args = tuple(self.same[a] if isinstance(a, fx.Node) else repr(a) for a in node.args)
        kwargs = tuple((k, self.same[v] if isinstance(v, fx.Node) else repr(v)) for k, v in node.kwargs.items())
        return self._first.setdefault((str(node.target), args, kwargs), node)

    def _factors(self, node: fx.Node) -> frozenset[fx.Node | float]:
        """Rounding and conversion keep a sign or make it zero, so factors are seen through both."""
        name = name_of(node) if node.op == "call_function" else ""
        if name in COPIES and isinstance(source := node.args[COPIES[name]], fx.Node):
            signed = dtype_of(node).is_signed and dtype_of(source).is_signed
            return self.factors[source] if signed else frozenset({self.same[node]})
        if name in ("aten.mul", "aten.div") and "rounding_mode" not in node.kwargs:
            return self.factors_of(node.args[0]) ^ self.factors_of(node.args[1])
        if name == "aten.neg":
            return self.factors_of(node.args[0]) ^ {-1.0}
        if name in ("aten.sign", "aten.reciprocal"):
            return self.factors_of(node.args[0])
        return frozenset({self.same[node]})


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call while it is evaluated: its arguments as intervals, and arithmetic that rounds as it does."""

    node: fx.Node
    of: Evaluation

    def raw(self, i: int, name: str = "") -> Any:
        return self.node.args[i] if i < len(self.node.args) else self.node.kwargs.get(name)

    def arg(self, i: int, name: str = "", default: Interval = ANY) -> Interval:
        return self.value(self.raw(i, name), default)

    def value(self, arg: Any, default: Interval = ANY) -> Interval:
        if isinstance(arg, fx.Node):
            return self.of.values[arg]
        return self.constant(float(arg)) if isinstance(arg, (int, float)) else default

    def constant(self, number: float) -> Interval:
        """The number and what the operator's dtype makes of it, whichever the kernel uses."""
        if math.isnan(number):
            return ANY
        dtype = dtype_of(self.node)
        rounded = torch.tensor(number, dtype=dtype).item() if dtype.is_floating_point else number
        return Interval(min(number, rounded), max(number, rounded))

    def rounded(self, value: Interval, *exact: Interval, ulps: int = 1) -> Interval:
        """Outward by some ulps, but for zero and for a bound that is also one of `exact` on the same side.

        An operand's own bound is exact: where x + y >= x, it is so rounded, too.
        """
        dtype = dtype_of(self.node)
        if not dtype.is_floating_point or ulps == 0:
            return value
        kept = exact if all(dtype_of(n) == dtype for n in self.node.all_input_nodes) else ()
        info = torch.finfo(dtype)

        def moved(bound: float, direction: int) -> float:
            # The least normal number on top, for what underflows or is flushed to zero.
            wide = bound + direction * (ulps * info.eps * abs(bound) + info.tiny)
            return 0.0 if wide * bound < 0 else wide

        low = value.low if value.low == 0 or any(value.low == e.low for e in kept) else moved(value.low, -1)
        high = value.high if value.high == 0 or any(value.high == e.high for e in kept) else moved(value.high, 1)
        return Interval(low, high)

    def add(self, a: Interval, b: Interval) -> Interval:
        low, high = a.low + b.low, a.high + b.high
        return self.rounded(Interval(-INF if math.isnan(low) else low, INF if math.isnan(high) else high), a, b)

    def sub(self, a: Interval, b: Interval) -> Interval:
        return self.add(a, negative(b))

    def mul(self, a: Interval, b: Interval) -> Interval:
        corners = [(_times(x, y), 1 in (abs(x), abs(y))) for x in (a.low, a.high) for y in (b.low, b.high)]
        exact = [Interval(corner, corner) for corner, is_exact in corners if is_exact]
        return self.rounded(Interval(min(corners)[0], max(corners)[0]), *exact)

    def reciprocal(self, a: Interval) -> Interval:
        if a.low < 0 < a.high or a == ZERO:
            return ANY
        low, high = (-INF if a.high == 0 else 1 / a.high), (INF if a.low == 0 else 1 / a.low)
        return self.rounded(Interval(low, high), ONE, negative(ONE), ulps=4)

    def product(self, x: Any, y: Any) -> Interval:
        """Of two arguments, which may have factors in common."""
        return self.mul(self.value(x), self.value(y)) & self.of.sign(self.of.factors_of(x) ^ self.of.factors_of(y))

    def quotient(self, x: Any, y: Any) -> Interval:
        found = self.mul(self.value(x), self.reciprocal(self.value(y)))
        return found & self.of.sign(self.of.factors_of(x) ^ self.of.factors_of(y))

    def between(self, a: Any, change: Any, weight: Any) -> Interval:
        """a + (b - a) * weight, where `change` is that difference and the weight in [0, 1]; anything where it is not."""
        if not (isinstance(a, fx.Node) and isinstance(change, fx.Node) and name_of(change) == "aten.sub"):
            return ANY
        b, subtrahend = change.args[0], change.args[1]
        is_same = isinstance(subtrahend, fx.Node) and self.of.same[subtrahend] is self.of.same[a]
        if not is_same or change.kwargs or self.value(weight) not in UNIT:
            return ANY
        hull = self.value(a) | self.value(b)
        # The difference is rounded in proportion to itself, not to the result; towards zero it cannot pass zero.
        slack = 4 * torch.finfo(dtype_of(self.node)).eps * max(abs(hull.low), abs(hull.high))
        return Interval(hull.low and hull.low - slack, hull.high and hull.high + slack)


def negative(a: Interval) -> Interval:
    return Interval(-a.high, -a.low)


def _times(x: float, y: float) -> float:
    """A bound that is never reached times zero is zero: elements are finite."""
    return 0.0 if x == 0 or y == 0 else x * y
