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


def test_a_number_leaves_a_0d_tensor_its_dtype(analyse, params) -> None:
    """A Python float that changes is a 0-d fp64 tensor in the program; with a 0-d fp32 tensor it must give what the float gives."""
    graphs: list[tuple[fx.GraphModule, list[object]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> object:
        graphs.append((gm, list(example_inputs)))
        return gm.forward

    def update(p, g, m, step):
        m.lerp_(g, 0.1)
        p.sub_(m * ((1 / optimizer.param_groups[0]["lr"]) / step.add_(1)))

    optimizer = Handmade(params((8, 8)), update, "m", "step")
    optimizer.param_groups[0]["params"][0].grad = torch.randn(8, 8)
    compiled = torch.compile(optimizer.step, backend=backend)
    for rate in (0.1, 0.2, 0.3):
        optimizer.param_groups[0]["lr"] = rate
        compiled()
    ((item,),) = (group.regions for group in analyse(*graphs[-1], min_numel=0, block_size=32).classes)
    counts = torch.arange(2.0, 102.0)
    rates = torch.linspace(0.01, 1, 100, dtype=torch.float64)
    is_rate = [item.region.inputs[i] not in item.inputs.numbers for i in item.program.numbers]
    assert sorted(is_rate) == [False, True], item.program.numbers
    found = [
        item.program.scalars(*(rate if own else count for own in is_rate))[0]
        for rate, count in zip(rates, counts, strict=True)
    ]
    expected = [(1 / rate.item()) / (count + 1) for rate, count in zip(rates, counts, strict=True)]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert not torch.equal((1 / rates / (counts + 1)).float(), torch.stack(expected))
