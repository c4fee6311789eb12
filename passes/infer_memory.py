"""What each written state remembers: how its new value depends on its last one, and on the parameter.

Before: an `UpdateProgram` and what was proved about signs. After: a `Memory` for each state that the program writes, from
a = d(new) / d(last) and b = d(new) / d(parameter), both before and after its update. A moment forgets, so that rounding
errors fade; a sum does not; an average of the parameter is a model that somebody evaluates.

Tolerances: constants are compared as numbers, since 1 - 0.999 is not 0.001 in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from sympy.core.function import AppliedUndef

from qcompile.passes.expressions import Maximum, Minimum, Where, compute, constants_of, derivative, spell
from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.symbolic import Symbolic, read_symbolically

SAME = 1e-6
# How much of an average of the parameter may be missing: decoupled weight decay inside lookahead's step.
DECAY = 0.05


@dataclass(frozen=True, slots=True)
class Memory:
    """What one state remembers.

    Attributes:
        kind: "moment" (it decays), "sum" (it adds up, without decay), "average of the parameter", "copy of the parameter",
            "previous" (a value of the last step, nothing older), "maximum" (of its last value and a new one) or "other".
        decay: what its last value is multiplied by, in t and constants; None where that is not a number, or says nothing.
    """

    kind: str
    decay: sympy.Expr | None = None

    def text(self, hyperparameters: Mapping[str, float]) -> str:
        """E.g. "moment, decay beta2"."""
        return self.kind if self.decay is None else f"{self.kind}, decay {spell(self.decay, hyperparameters)}"


OTHER = Memory("other")


def infer_memory(program: UpdateProgram, signs: tuple[bool, ...]) -> tuple[Memory | None, ...]:
    """For each operand of the program; None where it is not a state that the program writes."""
    update = read_symbolically(program, signs)
    params = [i for i, operand in enumerate(program.operands) if operand.role == "param"]
    found: list[Memory | None] = []
    for i, (operand, value) in enumerate(zip(program.operands, update.values, strict=True)):
        is_state = operand.role == "state" and value is not None
        found.append(_memory(i, _unconditional(value, update.old[i]), params, update) if is_state else None)
    return tuple(found)


def _unconditional(value: sympy.Expr, last: sympy.Symbol) -> sympy.Expr:
    """Without a branch that keeps the last value, and without constant bounds."""
    while isinstance(value, (Where, Maximum, Minimum)):
        if isinstance(value, Where):
            inner = [branch for branch in value.args[1:] if branch != last]
        else:
            inner = [side for side in value.args if side.free_symbols - constants_of(side).keys()]
        if len(inner) != 1:
            break
        (value,) = inner
    return value


def _memory(i: int, value: sympy.Expr, params: list[int], update: Symbolic) -> Memory:
    old = update.old[i]
    if value in [symbol for k in params for symbol in (update.old[k], update.new[k])]:
        return Memory("copy of the parameter")
    if isinstance(value, Maximum):
        return _maximum(value, old, update)
    a = derivative(value, old)
    if a is None:
        return OTHER
    if a == 0:
        return Memory("previous")
    if a.free_symbols & update.of_elements:  # what feeds it depends on it, as in Adadelta
        rest, _ = a.as_independent(*update.of_elements, as_Add=True)
        return Memory("moment", update.in_time(rest)) if 0 < _number(update.in_time(rest)) < 1 else OTHER
    decay = update.in_time(a)
    if _follows_parameter(i, value, decay, params, update):
        return Memory("average of the parameter", decay)
    number = _number(decay)
    if number == 0:
        return Memory("previous")
    if number == 1:
        return Memory("sum")
    return Memory("moment", decay) if math.isnan(number) or 0 < number < 1 else OTHER


def _maximum(value: sympy.Expr, old: sympy.Symbol, update: Symbolic) -> Memory:
    kept = [side for side in value.args if old in side.free_symbols]
    a = derivative(kept[0], old) if len(kept) == 1 else None
    if a is None or a.free_symbols & update.of_elements:
        return OTHER
    return Memory("maximum", None if a == 1 else update.in_time(a))


def _follows_parameter(i: int, value: sympy.Expr, decay: sympy.Expr, params: list[int], update: Symbolic) -> bool:
    """Whether the new value is a weighted mean of the last one and the parameter.

    Momentum with L2 decay, 0.9 * m + g + 0.1 * p, is not: it would be if it moved along with the parameter. So where the
    parameter's update reads the state, both moved by the same distance must move the result by that distance.
    """
    b = _sum_of_derivatives(value, [s for k in params for s in (update.old[k], update.new[k])], update)
    if b is None or b == 0:
        return False
    missing = sympy.expand(1 - decay - b)
    if missing != 0 and not abs(_number(missing)) <= max(SAME, DECAY * _number(sympy.expand(1 - decay))):
        return False
    for k in params:
        new_param = update.values[k]
        own = [s for s in (update.old[i], update.new[i]) if s is not None]
        if new_param is not None and not new_param.free_symbols.isdisjoint(own):
            moved = _sum_of_derivatives(new_param, [update.old[k], *own], update)
            if moved is None or not abs(_number(sympy.expand(1 - moved))) <= SAME:
                return False
    return True


def _sum_of_derivatives(value: sympy.Expr, symbols: list[sympy.Symbol | None], update: Symbolic) -> sympy.Expr | None:
    """In time; None where a derivative is not known or differs from element to element."""
    total = sympy.S.Zero
    for symbol in symbols:
        part = sympy.S.Zero if symbol is None else derivative(value, symbol)
        if part is None or part.free_symbols & update.of_elements:
            return None
        total += update.in_time(part)
    return total


def _number(expr: sympy.Expr) -> float:
    """The value; NaN where it depends on more than constants."""
    if expr.free_symbols - constants_of(expr).keys() or expr.has(AppliedUndef):
        return math.nan
    return float(compute(expr, {}))
