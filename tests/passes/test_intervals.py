"""Intervals are true: random programs run on random values, each operator's rounding included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from qcompile.passes.functionalize import Operand, UpdateProgram
from qcompile.passes.infer_sign import Proof, infer_sign, intervals_of
from qcompile.passes.interval_rules import RULES
from qcompile.passes.intervals import Interval

aten = torch.ops.aten

# One entry per operator: a call that a random program makes, of tensors and of a number.
CALLS: list[tuple[Any, Callable[[Any, Any, Any, float], tuple[Any, ...]], dict[str, str]]] = [
    *((getattr(aten, name).default, lambda x, y, z, c: (x,), {}) for name in (
        "abs", "alias", "atan", "ceil", "clone", "cos", "detach", "erf", "exp", "exp2", "expm1", "floor", "lift_fresh_copy",
        "log", "log10", "log1p", "log2", "neg", "ones_like", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid",
        "sign", "sin", "sqrt", "square", "tanh", "trunc", "zeros_like", "_to_copy",
    )),
    *((getattr(aten, name).default, lambda x, y, z, c: (x, y), {}) for name in (
        "atan2", "copy", "fmax", "fmin", "hypot", "maximum", "minimum",
    )),
    *((getattr(aten, name).Tensor, lambda x, y, z, c: (x, y), {}) for name in ("add", "copysign", "div", "mul", "sub")),
    *((getattr(aten, name).Scalar, lambda x, y, z, c: (x, c), {}) for name in ("mul", "div", "add", "rsub", "fill")),
    (aten.add.Tensor, lambda x, y, z, c: (x, y), {"alpha": "c"}),
    (aten.sub.Tensor, lambda x, y, z, c: (x, y), {"alpha": "c"}),
    (aten.addcmul.default, lambda x, y, z, c: (x, y, z), {"value": "c"}),
    (aten.addcmul.default, lambda x, y, z, c: (x, y, y), {"value": "c"}),
    (aten.addcdiv.default, lambda x, y, z, c: (x, y, z), {"value": "c"}),
    (aten.clamp.default, lambda x, y, z, c: (x, c), {}),
    (aten.clamp.default, lambda x, y, z, c: (x, None, c), {}),
    (aten.clamp.default, lambda x, y, z, c: (x, -abs(c), abs(c)), {}),
    (aten.clamp.Tensor, lambda x, y, z, c: (x, y, z), {}),
    (aten.clamp_min.default, lambda x, y, z, c: (x, c), {}),
    (aten.clamp_max.default, lambda x, y, z, c: (x, c), {}),
    (aten.full_like.default, lambda x, y, z, c: (x, c), {}),
    (aten.lerp.Scalar, lambda x, y, z, c: (x, y, c), {}),
    (aten.lerp.Tensor, lambda x, y, z, c: (x, y, z), {}),
    (aten.pow.Tensor_Scalar, lambda x, y, z, c: (x, c), {}),
    (aten.pow.Tensor_Scalar, lambda x, y, z, c: (x, round(c)), {}),
    (aten.pow.Scalar, lambda x, y, z, c: (c, x), {}),
    (aten.pow.Tensor_Tensor, lambda x, y, z, c: (x, y), {}),
]  # fmt: skip
NOT_CALLED = {"alias_copy", "detach_copy", "full", "ones", "zeros", "scalar_tensor", "convert_element_type", "fma", "where"} | {
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_not", "logical_xor",
}  # fmt: skip
CONSTANTS = [0.0, 1.0, -1.0, 0.1, 0.5, 0.9, 0.999, -0.3, 2.0, 3.0, 1.5, 1e-8, 50.0]
VALUES = [0.0, -0.0, 1.0, -1.0, 0.1, 0.7, -0.3, 1e-3, 3.0, -7.5, 1e6, -1e6, 1e-12, 1e-30, 1e30, 2.0**-24, 1 + 2.0**-23]


def test_every_rule_is_tried() -> None:
    called = {str(target).split(".")[1] for target, _, _ in CALLS}
    assert called | NOT_CALLED == {name.split(".")[1] for name in RULES}


@st.composite
def programs(draw) -> UpdateProgram:
    """A state, its gradient, and up to eight calls; the state is an average, or what the last call gives."""
    graph = fx.Graph()
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    nodes = [graph.placeholder("state"), graph.placeholder("grad")]
    for _ in range(draw(st.integers(1, 8))):
        target, args, kwargs = draw(st.sampled_from(CALLS))
        x, y, z = (draw(st.sampled_from(nodes)) for _ in range(3))
        c = draw(st.sampled_from(CONSTANTS))
        nodes.append(graph.call_function(target, args(x, y, z, c), dict.fromkeys(kwargs, c)))
    if draw(st.booleans()):
        kept = graph.call_function(aten.mul.Tensor, (nodes[0], draw(st.sampled_from([0.9, 0.999, 1.0, -0.5]))))
        nodes += [kept, graph.call_function(aten.add.Tensor, (kept, nodes[-1]))]
    graph.output([nodes[-1]])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, dtype=dtype, device="meta")
    scalars = fx.Graph()
    scalars.output([])
    operands = (Operand(0, "state", dtype, True), Operand(1, "input", dtype, False))
    return UpdateProgram(operands, fx.GraphModule({}, graph), (), fx.GraphModule({}, scalars), (), ())


class Watched(fx.Interpreter):
    """Runs a graph and asserts that every element, while it is finite, is where its interval says."""

    def __init__(self, program: UpdateProgram, proofs: tuple[Proof, ...]) -> None:
        super().__init__(program.elements)
        # The graph module has a copy of the graph, so nodes are the same by their names.
        self.intervals = {node.name: value for node, value in intervals_of(program, proofs).items()}
        self.finite: Tensor = torch.tensor(True)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            self.finite = self.finite & value.isfinite()
            low, high = self.intervals[n.name].low, self.intervals[n.name].high
            inside = (value.double() >= low) & (value.double() <= high)
            assert (inside | ~self.finite).all(), f"{n.format_node()}: {value[~inside]} not in {self.intervals[n.name]}"
        return value


@settings(max_examples=400, deadline=None)
@given(programs(), st.integers(0, 1000))
def test_random_programs_stay_within(program: UpdateProgram, seed: int) -> None:
    proofs = infer_sign(program)
    dtype, interval = program.operands[0].dtype, proofs[0].interval
    generator = torch.Generator().manual_seed(seed)

    def some(*values: float) -> Tensor:
        pool = torch.cat([torch.tensor([*VALUES, *values]), torch.randn(len(VALUES), generator=generator)])
        return pool[torch.randint(len(pool), (64,), generator=generator)].to(dtype)

    state = torch.zeros(64, dtype=dtype)
    for step in range(6):
        if step == 3:  # the induction holds from any state in the interval, not only from one that is reached
            state = some(*(b for b in (interval.low, interval.high) if math.isfinite(b)))
            state = torch.where((state.double() >= interval.low) & (state.double() <= interval.high), state, 0)
        watched = Watched(program, proofs)
        (new,) = watched.run(state, some())
        state = torch.where(watched.finite, new, state)


def test_printed_intervals() -> None:
    shown = [
        str(Interval(*ends)) for ends in ((0, math.inf), (-math.inf, 0), (1e-6, 50), (-math.inf, math.inf), (-0.0, 1))
    ]
    assert shown == ["[0, inf)", "(-inf, 0]", "[1e-06, 50]", "(-inf, inf)", "[0, 1]"]
    assert Interval(0, 1) in Interval(0, 1)
    assert Interval(-1, 1) not in Interval(0, 1)
    assert 0.5 in Interval(0, 1)
