"""Which state is provably never negative.

Before: the `elements` graph of an `UpdateProgram`. After: for each state operand, whether its stored value is
non-negative whenever it was before: the induction step. The induction's start, the value it has now, is checked where
the state is converted.

The rules prove what can be read off an expression: a square, a product, sum, quotient or maximum of non-negatives with
positive constants, an absolute value, a root, an interpolation between non-negatives. Anything else is unknown, and
unknown is stored with a sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from qcompile.passes.functionalize import UpdateProgram

Known = Callable[[Any], bool]


def infer_sign(program: UpdateProgram) -> tuple[bool, ...]:
    """For each operand of the program: True where it is a state that stays non-negative.

    States are assumed non-negative together, and those for which that cannot be kept are dropped until all can.
    """
    candidates = {i for i, operand in enumerate(program.operands) if operand.role == "state" and operand.written}
    while True:
        kept = _kept(program, candidates)
        if kept == candidates:
            return tuple(i in kept for i in range(len(program.operands)))
        candidates = kept


def _kept(program: UpdateProgram, assumed: set[int]) -> set[int]:
    nodes = list(program.elements.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    proved = {n for i, n in enumerate(placeholders) if i in assumed}

    def known(value: Any) -> bool:
        if isinstance(value, fx.Node):
            return value in proved
        return isinstance(value, (int, float)) and value >= 0

    for node in nodes:
        if node.op == "call_function" and _is_non_negative(node, known):
            proved.add(node)
    new_values = nodes[-1].args[0]
    written = [i for i, operand in enumerate(program.operands) if operand.written]
    return {i for i, value in zip(written, new_values, strict=True) if i in assumed and known(value)}


def _is_non_negative(node: fx.Node, known: Known) -> bool:
    rule = RULES.get(str(node.target))
    return rule is not None and rule(node.args, dict(node.kwargs), known)


def _all(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return all(known(a) for a in args) and known(kwargs.get("alpha", 1)) and known(kwargs.get("value", 1))


def _product(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return args[0] is args[1] or (known(args[0]) and known(args[1]))


def _plus_product(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return known(args[0]) and known(kwargs.get("value", 1)) and _product(args[1:], {}, known)


def _fused_multiply_add(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return known(args[2]) and _product(args[:2], {}, known)


def _even_power(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return known(args[0]) or (isinstance(args[1], (int, float)) and args[1] % 2 == 0)


def _any(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return any(known(a) for a in args)


def _first(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return known(args[0])


def _second(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return known(args[1])


def _interpolation(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    weight = args[2]
    return known(args[0]) and known(args[1]) and isinstance(weight, (int, float)) and 0 <= weight <= 1


def _branches(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return known(args[1]) and known(args[2])


def _lower_bound(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    bound = args[1] if len(args) > 1 else kwargs.get("min")
    upper = args[2] if len(args) > 2 else kwargs.get("max")
    return (known(args[0]) or (bound is not None and known(bound))) and (upper is None or known(upper))


def _always(args: Any, kwargs: dict[str, Any], known: Known) -> bool:
    return True


# By the operator's name, so that one which a torch does not have yet needs no special case.
RULES: dict[str, Callable[[Any, dict[str, Any], Known], bool]] = {
    "aten.abs.default": _always,
    "aten.add.Scalar": _all,
    "aten.add.Tensor": _all,
    "aten.addcdiv.default": _all,
    "aten.addcmul.default": _plus_product,
    "aten.clamp.Tensor": _lower_bound,
    "aten.clamp.default": _lower_bound,
    "aten.clamp_min.Tensor": _any,
    "aten.clamp_min.default": _any,
    "aten.clone.default": _first,
    "aten._to_copy.default": _first,
    "aten.copy.default": _second,
    "aten.div.Scalar": _all,
    "aten.div.Tensor": _all,
    "aten.exp.default": _always,
    "aten.full_like.default": _second,
    "aten.lerp.Scalar": _interpolation,
    "aten.maximum.default": _any,
    "aten.minimum.default": _all,
    "aten.mul.Scalar": _product,
    "aten.mul.Tensor": _product,
    "aten.ones_like.default": _always,
    "aten.pow.Tensor_Scalar": _even_power,
    "aten.reciprocal.default": _first,
    "aten.relu.default": _always,
    "aten.rsqrt.default": _first,
    "aten.sqrt.default": _first,
    "aten.square.default": _always,
    "aten.where.self": _branches,
    "aten.zeros_like.default": _always,
    "prims.fma.default": _fused_multiply_add,
}
