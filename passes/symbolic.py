"""An update as expressions: what each written tensor becomes, in terms of what it is made of.

Before: an `UpdateProgram`. After: a `Symbolic`: per written operand the expression of its new value, and per 0-d input of
`elements` the expression that `scalars` computes for it. Both are sympy's, over real symbols:

    old_i      value of operand i before the step
    new_i      value after it, for a parameter or a state: where another expression reads it, it is cut there
    number_j   the j-th 0-d input of `elements`
    t          a step counter after the step: a number that the update increases by 1
    input_k    another number that `scalars` reads
    0.999      a number of the user's, by its value

So an update is expressed in the exact new state, as it is computed. An operator that is not known is an undefined
function of its arguments: what depends on what stays visible, and no more. An expression that grows too large becomes one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.symbol import Str
from torch import fx

from qcompile.passes.expressions import Maximum, Minimum, Step, Where, constant
from qcompile.passes.functionalize import UpdateProgram

# Nodes of an expression, shared parts counted each time: far more than updates have, and quick to differentiate.
LARGEST = 1000
# What a division by a learning rate of 0, or the root of a negative constant, makes.
UNDEFINED = (sympy.zoo, sympy.nan, sympy.oo, sympy.I)
TIME = sympy.Symbol("t", positive=True)


@dataclass(frozen=True, slots=True)
class Symbolic:
    """The expressions of one program.

    Attributes:
        old, new: symbols per operand; None in `new` where no expression can read the new value.
        values: per operand, its new value; None where it is not written.
        numbers: symbols of the 0-d inputs of `elements`, in order.
        scalars: what they are, in t and the inputs of the `scalars` graph.
    """

    old: tuple[sympy.Symbol, ...]
    new: tuple[sympy.Symbol | None, ...]
    values: tuple[sympy.Expr | None, ...]
    numbers: tuple[sympy.Symbol, ...]
    scalars: tuple[sympy.Expr, ...]

    @property
    def of_elements(self) -> frozenset[sympy.Symbol]:
        """The symbols that differ from element to element."""
        return frozenset(self.old) | frozenset(s for s in self.new if s is not None)

    def in_time(self, expr: sympy.Expr) -> sympy.Expr:
        """`expr` with numbers written as the optimizer computes them."""
        return expr.xreplace(dict(zip(self.numbers, self.scalars, strict=True)))


def read_symbolically(program: UpdateProgram, signs: tuple[bool, ...]) -> Symbolic:
    """Evaluate both graphs; `signs` says which operands are never negative."""
    nodes = list(program.elements.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    results = dict(zip((i for i, o in enumerate(program.operands) if o.written), nodes[-1].args[0], strict=True))

    def symbol(name: str, i: int) -> sympy.Symbol:
        return sympy.Symbol(f"{name}_{i}", nonnegative=True) if signs[i] else sympy.Symbol(f"{name}_{i}", real=True)

    old = tuple(symbol("old", i) for i in range(len(program.operands)))
    cut = {i: symbol("new", i) for i in results if program.operands[i].role in ("param", "state")}
    numbers = tuple(sympy.Symbol(f"number_{j}", real=True) for j in range(len(placeholders) - len(old)))
    owners = _owners(program, results)
    given = dict(zip(placeholders, (*old, *numbers), strict=True))
    exact = _evaluate(program.elements.graph, given, {node: cut[i] for node, i in owners.items()})
    values: list[sympy.Expr | None] = [None] * len(old)
    for i, node in results.items():
        *_, source = (n for n in _copied(node) if owners.get(n, i) == owners.get(node, i))
        owner = owners.get(node, i)
        values[i] = exact(source) if owner == i else cut[owner]
    return Symbolic(old, tuple(cut.get(i) for i in range(len(old))), tuple(values), numbers, _scalars(program, numbers))


def _owners(program: UpdateProgram, results: dict[int, fx.Node]) -> dict[fx.Node, int]:
    """The nodes that are some operand's new value, before it is copied into its place or after.

    The parameter comes first: what shares its new value is a copy of it.
    """
    kept = [i for i in results if program.operands[i].role in ("param", "state")]
    owners: dict[fx.Node, int] = {}
    ends: dict[fx.Node, int] = {}
    for i in sorted(kept, key=lambda i: program.operands[i].role != "param"):
        ends.setdefault(results[i], i)
    for end, i in ends.items():
        for node in _copied(end):
            if node.op == "placeholder" or ends.get(node, i) != i:
                break
            owners.setdefault(node, i)
    return owners


def _copied(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and what it is a copy of."""
    yield node
    while (name := _name(node)) in ("copy", *SAME):
        node = node.args[1 if name == "copy" else 0]  # type: ignore[assignment]
        if not isinstance(node, fx.Node):
            return
        yield node


def _scalars(program: UpdateProgram, numbers: tuple[sympy.Symbol, ...]) -> tuple[sympy.Expr, ...]:
    nodes = list(program.scalars.graph.nodes)
    if not nodes:  # a program without them: numbers come as they are
        return numbers
    inputs = [n for n in nodes if n.op == "placeholder"]
    symbols = [sympy.Symbol(f"input_{k}", real=True) for k in range(len(inputs))]
    exact = _evaluate(program.scalars.graph, dict(zip(inputs, symbols, strict=True)), {})
    results = [exact(value) for value in nodes[-1].args[0]]
    after = dict(zip(program.written_numbers, results[len(numbers) :], strict=True))
    counters = [symbols[k] for k, value in after.items() if value == symbols[k] + 1]
    times = [TIME, *(sympy.Symbol(f"t_{k}", positive=True) for k in range(1, len(counters)))]
    before = {counter: time - 1 for counter, time in zip(counters, times[: len(counters)], strict=True)}
    spelled = (value.subs(before) for value in results[: len(numbers)])
    # what no rule is known for stays a number that is not known
    return tuple(n if value.has(AppliedUndef) else value for n, value in zip(numbers, spelled, strict=True))


def _evaluate(
    graph: fx.Graph, given: dict[fx.Node, sympy.Symbol], cut: dict[fx.Node, sympy.Symbol]
) -> Callable[[Any], sympy.Expr]:
    """A function from a node, or a Python number, to its expression."""
    exact: dict[fx.Node, sympy.Expr] = dict(given)
    seen = dict(given)
    sizes = dict.fromkeys(given, 1)

    def read(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return seen[value]
        return constant(value) if isinstance(value, (int, float)) else value

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        size = 1 + sum(sizes[a] for a in node.all_input_nodes)
        arguments = [read(a) for a in node.args]
        if size > LARGEST:
            exact[node], size = _unknown(node, arguments), 1
        else:
            value = _apply(node, arguments, {k: read(v) for k, v in node.kwargs.items()})
            exact[node] = _unknown(node, arguments) if value.has(*UNDEFINED) else value
        seen[node] = cut.get(node, exact[node])
        sizes[node] = 1 if node in cut else size
    return lambda value: exact[value] if isinstance(value, fx.Node) else constant(value)


def _apply(node: fx.Node, arguments: list[Any], keywords: dict[str, Any]) -> sympy.Expr:
    name = _name(node)
    value = node.meta.get("val")
    if name in STEPS or (name in SAME and value is not None and not value.is_floating_point()):
        return Step(Str(STEPS.get(name, "trunc")), *(a for a in arguments if isinstance(a, sympy.Expr)))
    if name in SAME:
        return arguments[0]
    known = OPERATORS.get(name)
    if known is not None and keywords.get("rounding_mode") is None:
        wanted = {k: v for k, v in keywords.items() if k in ("alpha", "value", "min", "max")}
        return known(*arguments, **wanted)
    return _unknown(node, arguments)


def _unknown(node: fx.Node, arguments: list[Any]) -> sympy.Expr:
    """An undefined function, of the symbols that its arguments are made of."""
    symbols = {s for a in arguments if isinstance(a, sympy.Expr) for s in a.free_symbols}
    return sympy.Function(node.name, real=True)(*sorted(symbols, key=str))


def _name(node: fx.Node) -> str:
    """ "add" of aten.add.Tensor: overloads differ in what is a tensor, which makes no difference here."""
    parts = str(node.target).split(".")
    return parts[1] if node.op == "call_function" and len(parts) > 1 else ""


def _exponent(value: sympy.Expr) -> sympy.Expr:
    """0.5 as 1/2: a root is to be seen as one."""
    sign, symbol = (-1, -value) if value.could_extract_minus_sign() else (1, value)
    if not isinstance(symbol, sympy.Symbol) or not symbol.name[0].isdigit():
        return value
    exact = sympy.Rational(symbol.name).limit_denominator(64)
    return sign * exact if float(exact) == float(symbol.name) else value


def _clamp(x: sympy.Expr, min: Any = None, max: Any = None) -> sympy.Expr:
    x = x if min is None else Maximum(x, min)
    return x if max is None else Minimum(x, max)


SAME = frozenset({"clone", "_to_copy", "alias", "detach", "detach_copy", "contiguous", "lift_fresh_copy"})
# By the operator's name in torch's Python interface.
STEPS = {
    **{name: name for name in ("gt", "ge", "lt", "le", "eq", "ne", "sign", "isnan", "isinf", "isfinite", "signbit")},
    **{name: name for name in ("logical_and", "logical_or", "logical_not", "logical_xor", "floor", "ceil", "round")},
    **{name: name for name in ("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "trunc", "sgn")},
}
OPERATORS: dict[str, Callable[..., sympy.Expr]] = {
    "add": lambda a, b, alpha=1: a + alpha * b,
    "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "reciprocal": lambda a: 1 / a,
    "sqrt": lambda a: sympy.sqrt(a),
    "rsqrt": lambda a: 1 / sympy.sqrt(a),
    "square": lambda a: a**2,
    "pow": lambda a, b: a ** _exponent(b),
    "abs": lambda a: sympy.Abs(a) if a.is_real else Maximum(a, -a),
    "exp": lambda a: sympy.exp(a),
    "log": lambda a: sympy.log(a),
    "addcmul": lambda a, b, c, value=1: a + value * b * c,
    "addcdiv": lambda a, b, c, value=1: a + value * b / c,
    "fma": lambda a, b, c: a * b + c,
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "maximum": lambda a, b: Maximum(a, b),
    "minimum": lambda a, b: Minimum(a, b),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda a, max: _clamp(a, None, max),
    "relu": lambda a: Maximum(a, sympy.S.Zero),
    "where": lambda condition, a, b: Where(condition, a, b),
    "copy": lambda a, b, *_: b,
    "fill": lambda a, b: b,
    "full_like": lambda a, b: b,
    "full": lambda a, b: b,
    "scalar_tensor": lambda a: a,
    "zeros_like": lambda a: sympy.S.Zero,
    "ones_like": lambda a: sympy.S.One,
}
