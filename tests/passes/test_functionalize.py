"""Programs of real optimizers: snapshots of the two graphs, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from handmade import Handmade, step_once
from torch import fx
from torch.optim import Optimizer

from qcompile._compat import copy_of
from qcompile.passes.find_state import find_state
from qcompile.passes.functionalize import NotElementwise, UpdateProgram, functionalize
from qcompile.passes.outline_updates import outline_updates
from qcompile.passes.thread_writes import thread_writes


def text(gm: fx.GraphModule) -> str:
    lines = []
    for n in gm.graph.nodes:
        if n.op == "call_function":
            lines.append(
                f"{n.name} = {n.target}({', '.join([*map(str, n.args), *(f'{k}={v}' for k, v in n.kwargs.items())])})"
            )
        elif n.op == "output":
            lines.append(f"return {list(n.args[0])}")
    return "\n".join(lines)


def programs(capture, analyse, optimizer: Optimizer) -> list[UpdateProgram]:
    step_once(optimizer)
    compiled = analyse(*capture(optimizer.step), min_numel=0, block_size=32)
    return [item.program for group in compiled.classes for item in group.regions]


def test_momentum(capture, analyse, params) -> None:
    (program,) = programs(capture, analyse, torch.optim.SGD(params((8, 8)), lr=0.1, momentum=0.9, weight_decay=0.01))
    assert_expected_inline(
        text(program.elements),
        """\
add = aten.add.Tensor(arg0_1, arg1_1, alpha=0.01)
mul = aten.mul.Tensor(arg2_1, 0.9)
add_1 = aten.add.Tensor(mul, add)
add_2 = aten.add.Tensor(arg1_1, add_1, alpha=-0.1)
return [add_2, add_1]""",
    )
    assert [(o.role, o.written) for o in program.operands] == [("input", False), ("param", True), ("state", True)]


def test_numbers_are_apart(capture, analyse, params) -> None:
    (program,) = programs(capture, analyse, torch.optim.Adagrad(params((8, 8)), lr=0.1, lr_decay=0.01))
    assert_expected_inline(
        text(program.scalars),
        """\
add = aten.add.Tensor(arg0_1, 1)
sub = aten.sub.Tensor(add, 1)
mul_1 = aten.mul.Tensor(sub, 0.01)
add_2 = aten.add.Tensor(mul_1, 1)
reciprocal = aten.reciprocal.default(add_2)
mul_2 = aten.mul.Tensor(reciprocal, 0.1)
neg = aten.neg.default(mul_2)
_to_copy_default = aten._to_copy.default(neg, dtype=torch.float32)
return [_to_copy_default, add]""",
    )
    assert len(program.scalar_dtypes) == len(program.written_numbers) == 1


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_(g) @ g), "aten.mm.default in its update is not elementwise"),
        (
            lambda p, g, m: p.sub_(m.mul_(0.9).add_(g) / m.norm()),
            "aten.linalg_vector_norm.default in its update is not elementwise",
        ),
        (lambda p, g, m: p.sub_(m.mul_(0.9).add_(g.sum(0))), "aten.sum.dim_IntList in its update is not elementwise"),
        (
            lambda p, g, m: p.sub_(m.mul_(0.9).add_(torch.rand_like(g))),
            "aten.rand_like.default in its update is not elementwise",
        ),
        (
            lambda p, g, m: p.view(-1).sub_(m.mul_(0.9).add_(g).view(-1)),
            "view_copy.default in its update is not elementwise",
        ),
    ],
    ids=["matmul", "norm", "broadcast", "random", "view"],
)
def test_not_elementwise(capture, analyse, params, update, reason: str) -> None:
    """No program of its own, with the reason; the pipeline cuts it, and quantizes its state."""
    optimizer = Handmade(params((8, 8)), update, "m")
    optimizer.param_groups[0]["params"][0].grad = torch.randn(8, 8)
    captured = capture(optimizer.step)
    gm = copy_of(captured[0])
    thread_writes(gm)
    inputs = find_state(gm, captured[1])
    (region,) = outline_updates(gm, inputs).regions
    with pytest.raises(NotElementwise, match=re.escape(reason)):
        functionalize(region, inputs)
    compiled = analyse(*captured, min_numel=0, block_size=32)
    assert not compiled.refused
    assert compiled.in_place
    plans = [plan for group in compiled.classes for item in group.regions for plan in item.plans.values()]
    assert {plan.slot.key for plan in plans} == {"m"}
    assert all(plan.format is not None for plan in plans), [plan.reason for plan in plans]


def test_complex_is_refused(capture, analyse) -> None:
    p = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
    optimizer = torch.optim.AdamW([p])
    step_once(optimizer)
    compiled = analyse(*capture(optimizer.step), min_numel=0, block_size=32)
    assert not compiled.classes
    assert len(compiled.refused) == 2
    assert all(plan.format is None for plan in compiled.refused.values())
