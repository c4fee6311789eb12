"""Where the update needs what rounding states apart can break: centered RMSprop takes the root of a difference of two.

Before: an `UpdateProgram` and the proofs of its states. After: a `Constraint` for every root, fractional power and
logarithm whose argument is not proved to be where the function is defined, and is made of at least one state. In exact
arithmetic the optimizer may keep it there (square_avg >= grad_avg**2); quantizing each state for itself does not, and
the result is NaN. A clamp, maximum or absolute value before the root is seen by its interval, and is no constraint.

A division is none: its quotient is large, not undefined, and formats keep what is not zero from becoming it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.infer_sign import Proof, ancestors, filled, intervals_of, new_values, number_text, source_of
from qcompile.passes.intervals import INF, NON_NEGATIVE, Interval, name_of

ROOTS = {f"aten.{name}": NON_NEGATIVE for name in ("sqrt", "rsqrt", "log", "log2", "log10")}
ROOTS["aten.log1p"] = Interval(-1.0, INF)
# How deep an expression is printed.
DEPTH = 6
SUM, PRODUCT, POWER, ATOM = range(4)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What must hold, and is not proved.

    Attributes:
        states: operands of the program whose values it depends on.
        needs: the condition, in terms of operands (`{2}` stands for operand 2), old or new.
    """

    states: tuple[int, ...]
    needs: str

    def show(self, names: Sequence[str] = ()) -> str:
        """The condition, with operands called by `names`, or by their number."""
        return filled(self.needs, names)

    def __str__(self) -> str:
        return self.show()


def find_constraints(
    program: UpdateProgram, proofs: Sequence[Proof], number_starts: Sequence[Interval | None] | None = None
) -> tuple[Constraint, ...]:
    """Each condition once, in the order of the program; `number_starts` as they were for the proofs."""
    values = intervals_of(program, proofs, number_starts)
    placeholders = [n for n in program.elements.graph.nodes if n.op == "placeholder"]
    state_of = {n: i for i, (n, o) in enumerate(zip(placeholders, program.operands, strict=False)) if o.role == "state"}
    found: dict[Constraint, None] = {}
    for node in program.elements.graph.nodes:
        domain, argument = _domain(node), node.args[0] if node.args else None
        if domain is None or not isinstance(argument, fx.Node) or values[argument] in domain:
            continue
        if states := tuple(sorted(state_of[n] for n in ancestors(argument) if n in state_of)):
            text = _Text(program).of(argument, SUM)
            found[Constraint(states, f"{text} >= {domain.low:g}")] = None
    return tuple(found)


def _domain(node: fx.Node) -> Interval | None:
    """Where the operator is defined, if not everywhere."""
    if node.op != "call_function":
        return None
    if name_of(node) == "aten.pow" and isinstance(node.args[1], float) and not node.args[1].is_integer():
        return NON_NEGATIVE
    return ROOTS.get(name_of(node))


class _Text:
    """Expressions as one would write them. A value that is stored is called by its state's name."""

    def __init__(self, program: UpdateProgram) -> None:
        placeholders = [n for n in program.elements.graph.nodes if n.op == "placeholder"]
        count = len(program.operands)
        self.names = {n: f"{{{i}}}" if i < count else f"number{i - count}" for i, n in enumerate(placeholders)}
        for i, node in new_values(program).items():
            if node.op == "call_function" and program.operands[i].role == "state":
                self.names[node] = f"{{{i}}}"
                self.names.setdefault(source_of(node), f"{{{i}}}")

    def of(self, arg: Any, level: int, depth: int = 0) -> str:
        """The expression, in parentheses where it binds less than `level`."""
        if not isinstance(arg, fx.Node):
            return number_text(arg)
        node = source_of(arg)
        if name := self.names.get(arg) or self.names.get(node):
            return name
        if depth == DEPTH:
            return "..."
        text, own = self._operation(node, depth + 1)
        return f"({text})" if own < level else text

    def _operation(self, node: fx.Node, depth: int) -> tuple[str, int]:
        name, args = name_of(node), node.args
        scale = node.kwargs.get("alpha", node.kwargs.get("value", 1))
        if name in ("aten.add", "aten.sub"):
            scale = scale if name == "aten.add" else _negated(scale)
            return self._sum(args[0], scale, self.of(args[1], PRODUCT, depth), depth), SUM
        if name == "aten.rsub":
            return self._sum(args[1], _negated(scale), self.of(args[0], PRODUCT, depth), depth), SUM
        if name == "aten.addcmul":
            return self._sum(args[0], scale, self._product(args[1], args[2], depth), depth), SUM
        if name == "prims.fma" and isinstance(args[1], (int, float)):
            return self._sum(args[2], args[1], self.of(args[0], PRODUCT, depth), depth), SUM
        if name == "prims.fma":
            return self._sum(args[2], 1, self._product(args[0], args[1], depth), depth), SUM
        if name == "aten.mul":
            return self._product(args[0], args[1], depth), PRODUCT
        if name == "aten.div" and not node.kwargs:
            return f"{self.of(args[0], PRODUCT, depth)} / {self.of(args[1], POWER, depth)}", PRODUCT
        if name == "aten.neg":
            return f"-{self.of(args[0], PRODUCT, depth)}", SUM
        if name in ("aten.pow", "aten.square"):
            exponent = args[1] if name == "aten.pow" else 2
            return f"{self.of(args[0], ATOM, depth)}**{self.of(exponent, ATOM, depth)}", POWER
        shown = [self.of(a, SUM, depth) for a in (*args, *node.kwargs.values())]
        return f"{name.split('.')[-1]}({', '.join(shown)})", ATOM

    def _sum(self, base: Any, scale: Any, term: str, depth: int) -> str:
        sign, size = ("-", _negated(scale)) if isinstance(scale, (int, float)) and scale < 0 else ("+", scale)
        factor = "" if size == 1 else f"{self.of(size, PRODUCT, depth)} * "
        return f"{self.of(base, SUM, depth)} {sign} {factor}{term}"

    def _product(self, x: Any, y: Any, depth: int) -> str:
        if isinstance(x, fx.Node) and isinstance(y, fx.Node) and source_of(x) is source_of(y):
            return f"{self.of(x, ATOM, depth)}**2"
        return f"{self.of(x, PRODUCT, depth)} * {self.of(y, PRODUCT, depth)}"


def _negated(scale: Any) -> Any:
    return -scale if isinstance(scale, (int, float)) else scale
