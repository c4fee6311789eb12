"""How a non-negative state enters an update: the function of it that multiplies something else.

Before: an `UpdateProgram` and what was proved about signs. After: a `Preconditioner` for every pair of a multiplier x (the
new value of a signed state, or an input, such as the gradient) and a non-negative state v, where the derivative of a
parameter or a state with respect to x does not depend on x, and has a factor that depends on v and on numbers alone. That
factor is h(v). Other non-negative states may be in other factors, as in Adadelta's sqrt(u + eps) / sqrt(v + eps).

h is what ZIP-SR rounds in, and what a first moment is multiplied by when it is stored in update space (papers.md sections
3.3 and 9). Factors that do not depend on v are left out, and the sign with them: h is positive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import Tensor

from qcompile.passes.expressions import SHOWN, Maximum, Step, V, Where, compute, constants_of, derivative, spell
from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.symbolic import TIME, Symbolic, read_symbolically

# Where h is looked at to learn its course: 0, and every half decade of fp32, and far beyond.
COURSE = torch.tensor([0.0, *(10.0 ** (k / 2) for k in range(-90, 77)), 1e150, 1e300], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Preconditioner:
    """One function h.

    Attributes:
        first: operand that h(v) multiplies: a signed state, by its new value. None where it is an input.
        second: operand that v is.
        h: the function, of `expressions.V`, of `numbers` and of constants.
        numbers, scalars: symbols of the program's 0-d inputs, and how the optimizer computes each.
        at_zero: h(0), which may be infinite. This and what follows are for converged bias corrections, beta**t = 0;
            None where they depend on numbers that are not known.
        decreasing: True where h falls, or is level, all the way; False where it rises; None where it does both.
        bound: the supremum of h over v >= 0.
        power, eps: where h is 1 / (v**power + eps) up to a factor, with power 0.5 or 1, and where it is one that differs
            from it by a factor of 2 at most: 1 / sqrt(v + e), with eps = sqrt(e), or 1 / max(sqrt(v), eps). None otherwise.
        converged: h with beta**t = 0.
    """

    first: int | None
    second: int
    h: sympy.Expr
    numbers: tuple[sympy.Symbol, ...]
    scalars: tuple[sympy.Expr, ...]
    at_zero: float | None
    decreasing: bool | None
    bound: float | None
    power: float | None
    eps: float | None
    converged: sympy.Expr

    def magnifies(self, high: float) -> float:
        """How many times the relative error of v in (0, high] the relative error of h(v) is, at most: |v h'(v) / h(v)|.

        0 where h depends on numbers that are not known. Roots of v halve an error; 1 / (1 - v) near 1 has no limit. By differences.
        """
        if self.converged.free_symbols - {V} - constants_of(self.converged).keys():
            return 0.0
        end = [] if high == math.inf else [high * (1 - 10.0**-k) for k in range(1, 7)] + [high]
        v = torch.cat([COURSE[COURSE.gt(0) & COURSE.lt(high)], COURSE.new_tensor(end)])
        moved, h = (torch.as_tensor(compute(self.converged, {V: x, TIME: 1000.0})) for x in (v * (1 - 1e-6), v))
        found = ((h / moved).log() / 1e-6).abs()
        return float(found[found.isfinite()].max()) if found.isfinite().any() else 0.0

    def preconditioner(self, v: Tensor, *numbers: Tensor) -> Tensor:
        """h(v), same shape and dtype; `numbers` are all 0-d inputs of the program."""
        # In v's shape before anything is computed: Inductor's C++ gives an operation on 0-d tensors a loop of its own.
        wide = [n.expand(v.shape).to(v.dtype) if n.is_floating_point() else n.expand(v.shape) for n in numbers]
        return torch.as_tensor(compute(self.h, {V: v, **dict(zip(self.numbers, wide, strict=True))}))

    def text(self, hyperparameters: Mapping[str, float]) -> str:
        """h with the optimizer's own scalars, e.g. 1/(sqrt(v/(1 - beta2**t)) + eps)."""
        h = self.h.xreplace(dict(zip(self.numbers, self.scalars, strict=True)))
        return spell(_with_corrections(h), hyperparameters)


def infer_preconditioner(program: UpdateProgram, signs: tuple[bool, ...]) -> tuple[Preconditioner, ...]:
    """At most one record for a multiplier and a non-negative state; those of signed states come first."""
    update = read_symbolically(program, signs)
    found: dict[tuple[int | None, int, sympy.Expr | None], Preconditioner] = {}
    for factor, first in _factors(program, signs, update):
        for second, v in _second_moments(signs, update):
            h = _alone(factor, v, update)
            if h is None:
                continue
            record = _record(first, second, h.xreplace({v: V}), update)
            found.setdefault((first, second, record.h if first is None else None), record)
    return tuple(sorted(found.values(), key=lambda record: record.first is None))


def storage_pairs(preconditioners: tuple[Preconditioner, ...]) -> dict[int, Preconditioner]:
    """The first moments that can be stored in update space, and what they are multiplied by: about 1 / (sqrt(v) + eps)."""
    pairs: dict[int, Preconditioner] = {}
    for record in preconditioners:
        if record.first is not None and record.power == 0.5:
            pairs.setdefault(record.first, record)
    return pairs


def _factors(
    program: UpdateProgram, signs: tuple[bool, ...], update: Symbolic
) -> Iterator[tuple[sympy.Expr, int | None]]:
    """What multiplies something in a new value, and the signed state that it multiplies, if it is one."""
    multipliers: list[tuple[sympy.Symbol, int | None]] = []
    for i, operand in enumerate(program.operands):
        new = update.new[i]
        if operand.role == "state" and new is not None and not signs[i]:
            multipliers.append((new, i))
        elif operand.role == "input":
            multipliers.append((update.old[i], None))
    roles = {"param": 0, "result": 1, "state": 2}
    written = [i for i, o in enumerate(program.operands) if o.written and o.role in roles]
    for i in sorted(written, key=lambda i: roles[program.operands[i].role]):
        value = update.values[i]
        assert value is not None
        for x, first in multipliers:
            factor = derivative(value, x)
            if factor is None or factor == 0:
                continue
            steps = {step: sympy.Dummy(real=True) for step in factor.atoms(Step)}
            if x not in factor.xreplace(steps).free_symbols:
                yield factor, first


def _second_moments(signs: tuple[bool, ...], update: Symbolic) -> Iterator[tuple[int, sympy.Symbol]]:
    for i, non_negative in enumerate(signs):
        if non_negative:
            yield from ((i, symbol) for symbol in (update.new[i], update.old[i]) if symbol is not None)


def _alone(factor: sympy.Expr, v: sympy.Symbol, update: Symbolic) -> sympy.Expr | None:
    """The factor of `factor` that depends on v, where nothing else in it differs from element to element."""
    if v not in factor.free_symbols:
        return None
    _, dependent = factor.as_independent(v, as_Add=False)
    if isinstance(dependent, Where):
        # While bias corrections have not settled, RAdam does without its second moment.
        condition, *branches = dependent.args
        with_v = [branch for branch in branches if v in branch.free_symbols]
        if len(with_v) == 1 and not condition.free_symbols & update.of_elements:
            return _alone(with_v[0], v, update)
    is_alone = not dependent.free_symbols & (update.of_elements - {v}) and not dependent.has(AppliedUndef)
    return dependent if is_alone else None


# -- One record ----------------------------------------------------------------------------------------------------


def _record(first: int | None, second: int, h: sympy.Expr, update: Symbolic) -> Preconditioner:
    h = _normalised(h)
    converged = _converged(update.in_time(h))
    is_known = not converged.free_symbols - {V} - constants_of(converged).keys()
    course = _course(converged, 0.875)
    if course[len(COURSE) // 2] < 0:
        h, converged, course = -h, -converged, -course
    at_zero = course[0].item() if is_known and not course[0].isnan() else None
    bound = _bound(course) if is_known else None
    decreasing = _direction(course)
    if not is_known and _direction(_course(converged, 0.5).abs()) != decreasing:
        decreasing = None
    power, eps = _power_and_eps(converged)
    return Preconditioner(
        first, second, h, update.numbers, update.scalars, at_zero, decreasing, bound, power, eps, converged
    )


def _normalised(h: sympy.Expr) -> sympy.Expr:
    """Without constant factors, also those that can be taken out of the power of a sum: then what is left is positive."""
    factors = []
    for factor in sympy.Mul.make_args(h.as_independent(V, as_Add=False)[1]):
        base, exponent = factor.as_base_exp()
        if isinstance(base, sympy.Add):
            rest, dependent = base.as_independent(V, as_Add=True)
            scale, root = dependent.as_independent(V, as_Add=False)
            if not isinstance(root, sympy.Add) and (exponent.is_integer or not scale.could_extract_minus_sign()):
                factor = (root + rest / scale) ** exponent
        factors.append(factor)
    return sympy.Mul(*factors)


def _converged(expr: sympy.Expr) -> sympy.Expr:
    """With beta**t = 0, for every constant beta below 1."""
    vanishing = {
        power: sympy.S.Zero
        for power in expr.atoms(sympy.Pow)
        if power.base in (values := constants_of(power.base))
        and values[power.base] < 1
        and TIME in power.exp.free_symbols
    }
    return expr.xreplace(vanishing)


def _course(h: sympy.Expr, unknown: float) -> Tensor:
    """h at the points of `COURSE`, with one value for all numbers that are not known."""
    others: dict[sympy.Symbol, Tensor | float] = dict.fromkeys(h.free_symbols - constants_of(h).keys(), unknown)
    course = compute(h, {**others, TIME: 1000.0, V: COURSE})
    return torch.as_tensor(course, dtype=torch.float64).expand(COURSE.shape)


def _direction(course: Tensor) -> bool | None:
    if course.isnan().any():
        return None
    steps = torch.where(course[1:] == course[:-1], 0.0, course[1:] - course[:-1])
    if (steps <= 0).all():
        return True
    return False if (steps >= 0).all() else None


def _bound(course: Tensor) -> float | None:
    if course.isnan().any():
        return None
    size = course.abs()
    is_growing = bool(size[-1] > 2 * size[-2])
    return math.inf if is_growing else float(size.max())


def _power_and_eps(h: sympy.Expr) -> tuple[float | None, float | None]:
    """power and eps of a converged h; see `Preconditioner`."""
    found = _root(1 / h)
    if found is None or found[1] not in (sympy.Rational(1, 2), sympy.S.One) or found[2].has(sympy.I):
        return None, None
    _, power, offset = found
    is_known = not offset.free_symbols - constants_of(offset).keys()
    eps = float(compute(offset, {})) if is_known else None
    if eps is not None and not 0 <= eps < math.inf:
        return None, None
    return float(power), eps


def _root(d: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr] | None:
    """(c, q, b) where d is about c * (v**q + b): a root of a sum counts as the sum of roots, a maximum as a sum."""
    if d == V:
        return sympy.S.One, sympy.S.One, sympy.S.Zero
    c, rest = d.as_independent(V, as_Add=False)
    if c != 1 and rest != 1:
        inner = _root(rest)
        return None if inner is None else (c * inner[0], *inner[1:])
    if isinstance(d, sympy.Pow) and d.exp.is_number and d.exp > 0 and (inner := _root(d.base)):
        c, q, b = inner
        return c**d.exp, q * d.exp, b**d.exp
    if isinstance(d, (sympy.Add, Maximum)):
        dependent = [term for term in d.args if V in term.free_symbols]
        others = [term for term in d.args if V not in term.free_symbols]
        if len(dependent) == 1 and (inner := _root(dependent[0])):
            c, q, b = inner
            return c, q, b + sympy.Add(*others) / c
    return None


def _with_corrections(h: sympy.Expr) -> sympy.Expr:
    """sqrt(v) + eps * sqrt(c) as sqrt(v / c) + eps, for what c depends on the step: how optimizers write it."""
    factors = []
    for factor in sympy.Mul.make_args(h):
        base, exponent = factor.as_base_exp()
        if isinstance(base, sympy.Add):
            rest, root = base.as_independent(V, as_Add=True)
            rest = sympy.powdenest(rest, force=True)
            eps, correction = rest.as_independent(*(rest.free_symbols - constants_of(rest).keys()), as_Add=False)
            c, power = correction.as_base_exp()
            if root == V**power and correction != 1 and eps != 1:
                factor = ((SHOWN / c) ** power + eps) ** exponent
        factors.append(factor)
    return sympy.Mul(*factors)
