"""Expressions of an update: what sympy needs to know of torch, how they are computed, and how they are spelled.

Before: nothing; no graph is read here. After: `compute` turns an expression into torch operations that trace and lower like
any others, and `spell` turns it into text in the optimizer's own names.

A number of the user's is a symbol named by its value ("0.999"), so that expressions keep their shape and the number can be
named later; `value_of_constant` reads it back. Maxima and branches are functions of our own: sympy's compare their
arguments symbolically, which takes seconds for what is a few lines here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.core.symbol import Str
from sympy.printing.str import StrPrinter
from torch import Tensor

V = sympy.Symbol("v", nonnegative=True)
SHOWN = sympy.Symbol("v")  # in text: sympy takes the root of a quotient apart where it knows a sign
# They stay numbers, for sympy to cancel; every other number is a symbol.
PLAIN = (0, 1, -1, 2, -2)


class Step(sympy.Function):  # type: ignore[misc]
    """A comparison, a sign, a rounding: its name, then its arguments. Constant but for jumps, so its derivative is 0."""

    is_real = True

    def _eval_derivative(self, s: sympy.Symbol) -> sympy.Expr:
        return sympy.S.Zero


class Where(sympy.Function):  # type: ignore[misc]
    """The second argument where the first is not 0, else the third."""

    is_real = True

    @classmethod
    def eval(cls, condition: sympy.Expr, yes: sympy.Expr, no: sympy.Expr) -> sympy.Expr | None:
        return yes if yes == no else None

    def _eval_derivative(self, s: sympy.Symbol) -> sympy.Expr:
        condition, yes, no = self.args
        return Where(condition, yes.diff(s), no.diff(s))


class Maximum(sympy.Function):  # type: ignore[misc]
    """The larger of two."""

    is_real = True

    def _eval_derivative(self, s: sympy.Symbol) -> sympy.Expr:
        a, b = self.args
        return Where(Step(Str("ge"), a, b), a.diff(s), b.diff(s))


class Minimum(sympy.Function):  # type: ignore[misc]
    """The smaller of two."""

    is_real = True

    def _eval_derivative(self, s: sympy.Symbol) -> sympy.Expr:
        a, b = self.args
        return Where(Step(Str("le"), a, b), a.diff(s), b.diff(s))


def constant(value: float) -> sympy.Expr:
    """A Python number of the graph: a few stay numbers, the others become a symbol that is named by the value.

    So does 0.0, a learning rate before its warm-up: what it multiplies is to be found as after it.
    """
    if value in PLAIN and (value != 0 or isinstance(value, int)):
        return sympy.Integer(int(value))
    symbol = sympy.Symbol(repr(abs(float(value))), positive=True)
    return -symbol if value < 0 else symbol


def value_of_constant(symbol: sympy.Symbol) -> float | None:
    """The number that a symbol stands for; None where it stands for something else."""
    return float(symbol.name) if symbol.name[0].isdigit() or symbol.name in ("inf", "nan") else None


def constants_of(expr: sympy.Expr) -> dict[sympy.Symbol, float]:
    values = {symbol: value_of_constant(symbol) for symbol in expr.free_symbols}
    return {symbol: value for symbol, value in values.items() if value is not None}


def derivative(expr: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    """d expr / d symbol, up to jumps; None where the symbol is in a function about which nothing is known."""
    if symbol not in expr.free_symbols:
        return sympy.S.Zero
    if any(symbol in f.free_symbols for f in expr.atoms(AppliedUndef)):
        return None
    return expr.diff(symbol)


# -- Computed ------------------------------------------------------------------------------------------------------

Number = Tensor | float


def compute(expr: sympy.Expr, values: Mapping[sympy.Symbol, Number]) -> Number:
    """`expr` with tensors or numbers for its symbols; constants need none. Without a tensor the result is a float."""
    if isinstance(expr, sympy.Symbol):
        return values[expr] if expr in values else float(expr.name)
    if expr.is_number:
        return float(expr)
    if isinstance(expr, sympy.Mul):
        return _quotient(expr, values)
    if isinstance(expr, sympy.Pow):
        base, exponent = expr.args
        if exponent.is_number and exponent < 0:
            return _quotient(expr, values)
        return _power(compute(base, values), exponent, values)
    if isinstance(expr, Step):
        name, *arguments = expr.args
        return getattr(torch, name.name)(*(torch.as_tensor(compute(a, values)) for a in arguments))
    arguments = [compute(a, values) for a in expr.args]
    if isinstance(expr, sympy.Add):
        return reduce(lambda a, b: a + b, arguments)
    return FUNCTIONS[type(expr)](*arguments)


def _quotient(expr: sympy.Expr, values: Mapping[sympy.Symbol, Number]) -> Number:
    """A product, with one division instead of a reciprocal for each factor below the line."""
    above: list[sympy.Expr] = []
    below: list[sympy.Expr] = []
    for factor in sympy.Mul.make_args(expr):
        base, exponent = factor.as_base_exp()
        is_below = isinstance(factor, sympy.Pow) and exponent.is_number and exponent < 0
        (below if is_below else above).append(base**-exponent if is_below else factor)
    numerator = _product(above, values)
    if not below:
        return numerator
    denominator = _product(below, values)
    if isinstance(denominator, float) and denominator == 0.0:
        denominator = torch.zeros((), dtype=torch.float64)  # a division by it is infinite, not an error
    if not above and isinstance(denominator, Tensor):
        return torch.reciprocal(denominator)
    return numerator / denominator


def _product(factors: list[sympy.Expr], values: Mapping[sympy.Symbol, Number]) -> Number:
    return reduce(lambda a, b: a * b, [compute(f, values) for f in factors]) if factors else 1.0


def _power(base: Number, exponent: sympy.Expr, values: Mapping[sympy.Symbol, Number]) -> Number:
    if exponent == sympy.Rational(1, 2):
        return torch.sqrt(base) if isinstance(base, Tensor) else base**0.5
    if exponent == 2:
        return base * base
    to = compute(exponent, values)
    if isinstance(base, Tensor) or isinstance(to, Tensor):
        return torch.pow(torch.as_tensor(base), to)
    return float(base**to)


def _tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Takes numbers too, in the dtype and on the device of the tensor among the arguments."""

    def call(*arguments: Number) -> Tensor:
        like = next((a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()), None)
        if like is None:
            return function(*(torch.as_tensor(a) for a in arguments))
        return function(*(a if isinstance(a, Tensor) else torch.full_like(like, a) for a in arguments))

    return call


FUNCTIONS: dict[Any, Callable[..., Number]] = {
    Where: lambda c, a, b: torch.where(torch.as_tensor(c) != 0, torch.as_tensor(a), torch.as_tensor(b)),
    Maximum: _tensors(torch.maximum),
    Minimum: _tensors(torch.minimum),
    sympy.Abs: _tensors(torch.abs),
    sympy.exp: _tensors(torch.exp),
    sympy.log: _tensors(torch.log),
    sympy.sign: _tensors(torch.sign),
}


# -- Spelled -------------------------------------------------------------------------------------------------------


class _Printer(StrPrinter):  # type: ignore[misc]
    """The state first in a sum, and functions by the names that people use for them."""

    def _as_ordered_terms(self, expr: sympy.Expr, order: Any = None) -> list[sympy.Expr]:
        terms: list[sympy.Expr] = super()._as_ordered_terms(expr, order=order)
        return sorted(terms, key=lambda term: SHOWN not in term.free_symbols)

    def _print_Maximum(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"max({self.stringify(expr.args, ', ')})"

    def _print_Minimum(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"min({self.stringify(expr.args, ', ')})"

    def _print_Where(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"where({self.stringify(expr.args, ', ')})"

    def _print_Step(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"{expr.args[0].name}({self.stringify(expr.args[1:], ', ')})"


# Nobody subtracts these from 1.
RATES = frozenset({"lr", "eps", "weight_decay"})


def spell(expr: sympy.Expr, hyperparameters: Mapping[str, float]) -> str:
    """Text, with a constant that equals a hyper-parameter, or 1 minus one, called by its name.

    A number that could be several hyper-parameters stays a number.
    """
    names = {symbol: _named(value, hyperparameters) for symbol, value in constants_of(expr).items()}
    known = {symbol: name for symbol, name in names.items() if name is not None}
    return str(_Printer().doprint(expr.xreplace({V: SHOWN, **known})))


def _named(value: float, hyperparameters: Mapping[str, float]) -> sympy.Expr | None:
    equal = [name for name, given in hyperparameters.items() if given == value]
    rest = [n for n, given in hyperparameters.items() if 0 < given < 1 and 1 - given == value and n not in RATES]
    if len(equal) == 1:
        return sympy.Symbol(equal[0], positive=True)
    return 1 - sympy.Symbol(rest[0], positive=True) if not equal and len(rest) == 1 else None
