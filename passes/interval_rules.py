"""What each ATen operator does to intervals, and the intervals of a whole graph.

Before: a functional graph of elementwise operators and an interval for each of its inputs. After: an interval for every
node. An operator that is not in `RULES` may give any value of its dtype. What an interval claims is in `intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from qcompile.passes.intervals import (
    ANY,
    INF,
    NON_NEGATIVE,
    ONE,
    SYMMETRIC,
    UNIT,
    ZERO,
    Call,
    Evaluation,
    Interval,
    dtype_of,
    name_of,
    negative,
)

Rule = Callable[[Call], Interval]


def evaluate(graph: fx.Graph, inputs: Sequence[Interval]) -> dict[fx.Node, Interval]:
    """An interval for every node but the output; `inputs` are those of the placeholders, in order."""
    evaluation, left = Evaluation(), iter(inputs)
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            found = next(left)
        else:
            rule = RULES.get(name_of(node))
            found = rule(Call(node, evaluation)) if rule is not None else ANY
        evaluation.enter(node, found & UNIT if dtype_of(node) is torch.bool else found)
    return evaluation.values


def _add(call: Call) -> Interval:
    x, y = call.raw(0), call.raw(1)
    alpha = call.arg(2, "alpha", ONE)
    found = call.add(call.value(x), call.mul(call.value(y), alpha))
    if alpha == ONE:
        for base, product in ((x, y), (y, x)):
            if isinstance(product, fx.Node) and name_of(product) == "aten.mul":
                first, second = product.args[:2]
                found &= call.between(base, first, second) & call.between(base, second, first)
    return found


def _sub(call: Call) -> Interval:
    return call.sub(call.arg(0), call.mul(call.arg(1), call.arg(2, "alpha", ONE)))


def _rsub(call: Call) -> Interval:
    return call.sub(call.arg(1), call.mul(call.arg(0), call.arg(2, "alpha", ONE)))


def _div(call: Call) -> Interval:
    return ANY if "rounding_mode" in call.node.kwargs else call.quotient(call.raw(0), call.raw(1))


def _addcmul(call: Call) -> Interval:
    product = call.product(call.raw(1), call.raw(2))
    return call.add(call.arg(0), call.mul(call.arg(3, "value", ONE), product))


def _addcdiv(call: Call) -> Interval:
    quotient = call.quotient(call.raw(1), call.raw(2))
    return call.add(call.arg(0), call.mul(call.arg(3, "value", ONE), quotient))


def _fma(call: Call) -> Interval:
    x, y, base = call.raw(0), call.raw(1), call.raw(2)
    found = call.add(call.product(x, y), call.value(base))
    return found & call.between(base, x, y) & call.between(base, y, x)


def _lerp(call: Call) -> Interval:
    """Monotone in both ends for a weight in [0, 1], as torch computes it; else whichever of its two formulas is used."""
    a, b, weight = call.arg(0), call.arg(1), call.arg(2, "weight")
    if weight in UNIT:
        return call.rounded(a | b, a | b)
    change = call.sub(b, a)
    return call.add(a, call.mul(weight, change)) | call.sub(b, call.mul(change, call.sub(ONE, weight)))


def _copy(which: int) -> Rule:
    def rule(call: Call) -> Interval:
        value, dtype = call.arg(which), dtype_of(call.node)
        if dtype is torch.bool:
            return UNIT
        if dtype.is_floating_point:
            return call.rounded(value, value)
        if not dtype.is_signed and value not in NON_NEGATIVE:
            return ANY
        return Interval(_at(math.floor, value.low), _at(math.ceil, value.high))

    return rule


def _constant(value: Interval) -> Rule:
    return lambda call: value


def _within(value: Interval) -> Rule:
    """A function with a known range, whatever it is applied to; it may pass its own ends by its rounding."""
    return lambda call: call.rounded(value, ulps=4)


def _monotone(function: Callable[[float], float], domain: Interval = ANY, into: Interval = ANY, ulps: int = 0) -> Rule:
    """An increasing function; where an argument can be outside of its domain the result would be NaN, outside the claim."""

    def rule(call: Call) -> Interval:
        value = call.arg(0) & domain
        if value not in domain:
            return into
        return call.rounded(Interval(_at(function, value.low), _at(function, value.high)), ulps=ulps) & into

    return rule


def _at(function: Callable[[float], float], x: float) -> float:
    try:
        return float(function(x))
    except OverflowError:  # also floor of an infinity
        return x if math.isinf(x) else INF
    except ValueError:  # the logarithm of its lowest argument
        return -INF


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _sign(x: float) -> float:
    return float((x > 0) - (x < 0))


_sqrt = _monotone(math.sqrt, NON_NEGATIVE, NON_NEGATIVE, ulps=4)


def _rsqrt(call: Call) -> Interval:
    return call.reciprocal(_sqrt(call)) & NON_NEGATIVE


def _absolute(value: Interval) -> Interval:
    if value.low >= 0 or value.high <= 0:
        return value if value.low >= 0 else negative(value)
    return Interval(0.0, max(-value.low, value.high))


def _hypot(call: Call) -> Interval:
    a, b = _absolute(call.arg(0)), _absolute(call.arg(1))
    return call.rounded(Interval(max(a.low, b.low), math.hypot(a.high, b.high)), ulps=4)


def _pow(call: Call) -> Interval:
    base, exponent, number = call.arg(0), call.arg(1), call.raw(1)
    if not isinstance(number, (int, float)):
        return _fractional_power(call, base, exponent) if base in NON_NEGATIVE else ANY
    # A low precision may round a fraction to a whole number, for which a negative base has a power.
    either = [_fixed_power(call, base, power) for power in (exponent.low, exponent.high)]
    return either[0] | either[1]


def _fixed_power(call: Call, base: Interval, exponent: float) -> Interval:
    if not exponent.is_integer():
        # Of a negative number it is NaN.
        base &= NON_NEGATIVE
        return _fractional_power(call, base, Interval(exponent, exponent)) if base in NON_NEGATIVE else NON_NEGATIVE
    found = _integer_power(call, base, abs(int(exponent)))
    if exponent < 0:
        found = call.reciprocal(found)
    return found & NON_NEGATIVE if exponent % 2 == 0 else found


def _fractional_power(call: Call, base: Interval, exponent: Interval) -> Interval:
    corners = [_power(b, e) for b in (base.low, base.high) for e in (exponent.low, exponent.high)]
    return call.rounded(Interval(min(corners), max(corners)), ONE, ulps=4)


def _integer_power(call: Call, base: Interval, exponent: int) -> Interval:
    if exponent % 2 == 0:
        base = _absolute(base)
    ends = Interval(_power(base.low, exponent), _power(base.high, exponent))
    # Some kernels multiply, which rounds each time.
    return call.rounded(ends, base if exponent == 1 else ONE, ulps=4 + exponent)


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except (OverflowError, ValueError):  # too large, or zero to a negative power
        return INF if base >= 0 or exponent % 2 == 0 else -INF


def _square(call: Call) -> Interval:
    return _integer_power(call, call.arg(0), 2)


def _maximum(a: Interval, b: Interval) -> Interval:
    return Interval(max(a.low, b.low), max(a.high, b.high))


def _minimum(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.low, b.low), min(a.high, b.high))


def _clamp(call: Call) -> Interval:
    above, below = call.arg(1, "min", Interval(-INF, -INF)), call.arg(2, "max", Interval(INF, INF))
    return _minimum(_maximum(call.arg(0), above), below)


def _copysign(call: Call) -> Interval:
    magnitude, sign = _absolute(call.arg(0)), call.raw(1)
    if isinstance(sign, (int, float)):
        return magnitude if math.copysign(1, sign) > 0 else negative(magnitude)
    return negative(magnitude) | magnitude


RULES: dict[str, Rule] = {
    "aten.abs": lambda call: _absolute(call.arg(0)),
    "aten.add": _add,
    "aten.addcdiv": _addcdiv,
    "aten.addcmul": _addcmul,
    "aten.alias": _copy(0),
    "aten.atan": _monotone(math.atan, ulps=4),
    "aten.atan2": _within(Interval(-math.pi, math.pi)),
    "aten.ceil": _monotone(math.ceil),
    "aten.clamp": _clamp,
    "aten.clamp_max": lambda call: _minimum(call.arg(0), call.arg(1, "max")),
    "aten.clamp_min": lambda call: _maximum(call.arg(0), call.arg(1, "min")),
    "aten.clone": _copy(0),
    "aten.copy": _copy(1),
    "aten.copysign": _copysign,
    "aten.cos": _within(SYMMETRIC),
    "aten.detach": _copy(0),
    "aten.detach_copy": _copy(0),
    "aten.alias_copy": _copy(0),
    "aten.div": _div,
    "aten.erf": _monotone(math.erf, into=SYMMETRIC, ulps=4),
    "aten.exp": _monotone(math.exp, into=NON_NEGATIVE, ulps=4),
    "aten.exp2": _monotone(lambda x: math.pow(2.0, x), into=NON_NEGATIVE, ulps=4),
    "aten.expm1": _monotone(math.expm1, into=Interval(-1.0, INF), ulps=4),
    "aten.fill": _copy(1),
    "aten.floor": _monotone(math.floor),
    "aten.fmax": lambda call: _maximum(call.arg(0), call.arg(1)),
    "aten.fmin": lambda call: _minimum(call.arg(0), call.arg(1)),
    "aten.full": lambda call: call.arg(1),
    "aten.full_like": lambda call: call.arg(1),
    "aten.hypot": _hypot,
    "aten.lerp": _lerp,
    "aten.lift_fresh_copy": _copy(0),
    "aten.log": _monotone(math.log, NON_NEGATIVE, ulps=4),
    "aten.log10": _monotone(math.log10, NON_NEGATIVE, ulps=4),
    "aten.log1p": _monotone(math.log1p, Interval(-1.0, INF), ulps=4),
    "aten.log2": _monotone(math.log2, NON_NEGATIVE, ulps=4),
    "aten.maximum": lambda call: _maximum(call.arg(0), call.arg(1)),
    "aten.minimum": lambda call: _minimum(call.arg(0), call.arg(1)),
    "aten.mul": lambda call: call.product(call.raw(0), call.raw(1)),
    "aten.neg": lambda call: negative(call.arg(0)),
    "aten.pow": _pow,
    "aten.reciprocal": lambda call: call.quotient(1.0, call.raw(0)),
    "aten.relu": lambda call: _maximum(call.arg(0), ZERO),
    "aten.round": lambda call: ANY if call.node.kwargs else _monotone(round)(call),
    "aten.rsqrt": _rsqrt,
    "aten.rsub": _rsub,
    "aten.scalar_tensor": lambda call: call.arg(0),
    "aten.sgn": _monotone(_sign),
    "aten.sigmoid": _monotone(_sigmoid, into=UNIT, ulps=4),
    "aten.sign": _monotone(_sign),
    "aten.sin": _within(SYMMETRIC),
    "aten.sqrt": _sqrt,
    "aten.square": _square,
    "aten.sub": _sub,
    "aten.tanh": _monotone(math.tanh, into=SYMMETRIC, ulps=4),
    "aten.trunc": _monotone(math.trunc),
    "aten.where": lambda call: call.arg(1) | call.arg(2),
    "aten._to_copy": _copy(0),
    "prims.convert_element_type": _copy(0),
    "prims.fma": _fma,
}
RULES |= {f"aten.{name}": _constant(ONE) for name in ("ones", "ones_like")}
RULES |= {f"aten.{name}": _constant(ZERO) for name in ("zeros", "zeros_like")}
RULES |= {
    f"aten.{name}": _constant(UNIT) for name in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite")
}
RULES |= {f"aten.logical_{name}": _constant(UNIT) for name in ("and", "or", "not", "xor")}
