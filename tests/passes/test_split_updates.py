"""Updates that mix elements: the regions that are cut out of them, and that they train like the uncut ones.

The optimizers are in `cut_updates`. In a snapshot `|` stands before the operations around the regions, in order, with the
regions in them by number; a state that is read but not written in a region is decoded there for others to read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import set_grads
from cut_updates import CASES, RATE, SHAPE, Case, EachItsOwn
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile.passes.pipeline import CompiledGraph, PlannedRegion
from qcompile.passes.split_updates import INVERTED


@pytest.fixture
def cut(capture, analyse, params) -> Callable[..., CompiledGraph]:
    """All passes but code generation on one optimizer, or on one of the updates."""

    def run(what: Optimizer | str | Case) -> CompiledGraph:
        if not isinstance(what, Optimizer):
            what = EachItsOwn(params(SHAPE), [CASES[what] if isinstance(what, str) else what])
        for group in what.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        if not any(what.state.values()):
            what.step()
        return analyse(*capture(what.step), min_numel=0, block_size=32)

    return run


def regions_of(compiled: CompiledGraph) -> list[PlannedRegion]:
    """All regions, in the order in which the graph runs them."""
    order = {n: i for i, n in enumerate(compiled.gm.graph.nodes)}
    found = [item for group in compiled.classes for item in group.regions]
    return sorted(found, key=lambda item: max(order[n] for n in item.region.nodes))


def text(compiled: CompiledGraph) -> str:
    """The regions with their programs, and the operations around them."""
    items = regions_of(compiled)
    lines = []
    for i, item in enumerate(items):
        lines.append(f"{i}: {head(item)}")
        lines += [f"   {line}" for line in program(item)]
    return "\n".join([*lines, f"| {around(compiled, items)}"])


def head(item: PlannedRegion) -> str:
    """What a region reads, and after the arrow what it writes; `8bit` where that is stored in 8 bits."""
    named = [(operand, name(item, i)) for i, operand in enumerate(item.program.operands)]
    kinds = [f"{n} 8bit" if fmt is not None else n for (_, n), fmt in zip(named, item.storage, strict=True)]
    read = [kind for (operand, _), kind in zip(named, kinds, strict=True) if operand.role != "result"]
    written = [n for operand, n in named if operand.written]
    return f"{', '.join(read)} -> {', '.join(written) or 'nothing'}"


def name(item: PlannedRegion, i: int) -> str:
    operand, inputs = item.program.operands[i], item.region.inputs
    if operand.role == "result":
        return f"result{operand.index - len(inputs)}"
    node = inputs[operand.index]
    return item.plans[node].slot.key if node in item.plans else operand.role


def program(item: PlannedRegion) -> list[str]:
    graph = item.program.elements.graph
    shown: dict[fx.Node, str] = {}
    lines = []
    for i, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            count = len(item.program.operands)
            shown[node] = name(item, i) if i < count else f"n{i - count}"
        elif str(node.target) == "aten.copy.default":
            shown[node] = shown[node.args[1]]
        elif node.op == "call_function":
            shown[node] = f"x{len(lines)}"
            given = [*map(str, fx.node.map_arg(node.args, shown.__getitem__))]
            given += [f"{k}={v}" for k, v in node.kwargs.items() if k in ("alpha", "value")]
            lines.append(f"x{len(lines)} = {str(node.target).split('.')[1]}({', '.join(given)})")
        else:
            lines.append(f"return {', '.join(shown[n] for n in node.args[0])}")
    return lines


def around(compiled: CompiledGraph, items: list[PlannedRegion]) -> str:
    region_of = {n: i for i, item in enumerate(items) for n in item.region.nodes}
    last = {max(item.region.nodes, key=list(compiled.gm.graph.nodes).index): i for i, item in enumerate(items)}
    words = []
    for node in compiled.gm.graph.nodes:
        if node in last:
            words.append(str(last[node]))
        elif node not in region_of and node.op.startswith("call") and "_set_grad_enabled" not in node.name:
            word = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else node.name
            words.append(word.removesuffix("_copy"))
    return " ".join(words)


def plans_of(compiled: CompiledGraph) -> dict[str, Any]:
    return {plan.slot.key: plan for item in regions_of(compiled) for plan in item.plans.values()}


def test_muon(cut, params) -> None:
    """A result of the only region goes into Newton-Schulz, and one class serves two shapes."""
    compiled = cut(torch.optim.Muon(params((64, 64), (128, 64)), lr=RATE, ns_steps=1))
    assert [len(group.regions) for group in compiled.classes] == [2]
    compiled = cut(torch.optim.Muon(params((64, 64)), lr=RATE, ns_steps=1))
    assert_expected_inline(
        text(compiled),
        """\
0: momentum_buffer 8bit, input -> momentum_buffer, result0
   x0 = lerp(momentum_buffer, input, 0.050000000000000044)
   x1 = lerp(input, x0, 0.95)
   x2 = _to_copy(x1)
   return x0, x2
| 0 linalg_vector_norm clamp div permute mm addmm addmm mul mul add copy_""",
    )


def test_lamb(cut) -> None:
    """Both moments and their ratio are one region; the norms, and the parameter, wait for it."""
    assert_expected_inline(
        text(cut("lamb")),
        """\
0: m 8bit, input, v 8bit -> m, v, result0
   x0 = lerp(m, input, 0.1)
   x1 = mul(v, 0.99)
   x2 = mul(input, input)
   x3 = fma(x2, 0.01, x1)
   x4 = div(x0, n0)
   x5 = div(x3, n1)
   x6 = sqrt(x5)
   x7 = add(x6, 1e-06)
   x8 = div(x4, x7)
   return x0, x3, x8
| norm mul 0 linalg_vector_norm clamp div mul sub copy_""",
    )


def test_lamb_keeps_its_second_moment_non_negative(cut) -> None:
    """The counter is written in the update, so that its bias correction is known to be positive."""
    plan = plans_of(cut("lamb"))["v"]
    assert plan.proved == "non-negative"
    assert plan.format is not None, plan.reason


def test_soap(cut) -> None:
    compiled = cut("soap")
    assert_expected_inline(
        text(compiled),
        """\
0: q 8bit -> result0
   x0 = clone(q)
   return x0
1: exp_avg 8bit, input -> exp_avg, result0
   x0 = lerp(exp_avg, input, 0.1)
   return x0, x0
2: exp_avg_sq 8bit, input, input -> exp_avg_sq, result0
   x0 = mul(exp_avg_sq, 0.95)
   x1 = mul(input, input)
   x2 = fma(x1, 0.05, x0)
   x3 = sqrt(x2)
   x4 = add(x3, 1e-08)
   x5 = div(input, x4)
   return x2, x5
3: stat, input -> stat, result0
   x0 = lerp(stat, input, 0.001)
   return x0, x0
4: input, input, q 8bit -> q
   return input
| 0 1 mm mm permute permute mm 2 3 mm mm linalg_qr getitem_1 4 sub copy_""",
    )
    plans = plans_of(compiled)
    assert plans["stat"].reason == INVERTED
    assert all(plans[key].format is not None for key in ("exp_avg", "exp_avg_sq", "q"))


def test_soap_keeps_its_second_moment_non_negative(cut) -> None:
    """It is read and written after the projection: nothing of it is needed before."""
    assert plans_of(cut("soap"))["exp_avg_sq"].proved == "non-negative"


def test_shampoo(cut) -> None:
    """Statistics that are factorized stay dense, whatever their values."""
    compiled = cut("shampoo")
    assert_expected_inline(
        text(compiled),
        """\
0: stat, input -> stat, result0
   x0 = lerp(stat, input, 0.1)
   return x0, x0
| permute mm 0 _linalg_eigh getitem getitem_1 permute clamp pow mul mm mm sub copy_""",
    )
    (plan,) = plans_of(compiled).values()
    assert (plan.format, plan.reason, plan.by_choice) == (None, INVERTED, False)


def test_two_levels(cut) -> None:
    """The norm needs all of the state before its new value can be made: it is decoded, and written later."""
    assert_expected_inline(
        text(cut("two_levels")),
        """\
0: m 8bit -> result0
   x0 = mul(m, 0.9)
   return x0
1: input, input, param, m 8bit -> param, m
   x0 = div(input, n0)
   x1 = add(input, x0)
   x2 = sub(param, x1, alpha=0.01)
   return x2, x1
| 0 linalg_vector_norm 1""",
    )


def test_previous(cut) -> None:
    """What is stored has nothing of the state in it."""
    assert_expected_inline(
        text(cut("previous")),
        """\
0: last 8bit, input -> last, result0, result1
   x0 = clone(last)
   x1 = mul(input, x0)
   return input, x0, x1
| norm 0 sum linalg_vector_norm mul add div add mul mul sub copy_""",
    )


def test_parameter_is_written_when_all_have_read_it(cut) -> None:
    compiled = cut("read_before")
    assert_expected_inline(
        text(compiled),
        """\
0: m 8bit, input -> m, result0
   x0 = lerp(m, input, 0.1)
   return x0, x0
1: w, input -> w, result0
   x0 = lerp(w, input, 0.1)
   x1 = mul(x0, 1e-06)
   return x0, x1
| 0 permute mm permute mm 1 sub mm sub copy_""",
    )
    assert not any(operand.role == "param" and operand.written for operand in regions_of(compiled)[0].program.operands)


def test_counted(cut) -> None:
    assert_expected_inline(
        text(cut("counted")),
        """\
0: m 8bit, input -> m, result0
   x0 = mul(m, n0)
   x1 = add(x0, input)
   return x1, x1
| add pow mul 0 linalg_vector_norm div mul sub copy_ copy_""",
    )


def test_drawn(cut) -> None:
    """Random numbers are drawn outside, by torch's generator."""
    assert_expected_inline(
        text(cut("drawn")),
        """\
0: m 8bit, input, input, param -> m, param
   x0 = mul(m, 0.9)
   x1 = lt(input, 0.5)
   x2 = mul(input, x1)
   x3 = add(x0, x2)
   x4 = sub(param, x3, alpha=0.01)
   return x3, x4
| rand_like 0""",
    )


def test_constants(cut) -> None:
    assert_expected_inline(
        text(cut("constants")),
        """\
0: m 8bit, input -> m, result0
   x0 = mul(m, n0)
   x1 = add(x0, input)
   return x1, x1
| weights sum_1 mul scalar_tensor lift_fresh detach 0 linalg_vector_norm div mul mul sub copy_""",
    )


def test_two_results(cut) -> None:
    """Both are read by products, and by what the step returns."""
    compiled = cut("two_results")
    assert_expected_inline(
        text(compiled),
        """\
0: m 8bit, input -> m, result0, result1
   x0 = mul(m, 0.9)
   x1 = add(x0, input)
   x2 = mul(x1, 0.9)
   x3 = add(x2, input)
   return x1, x1, x3
| 0 permute mm mm mean sum sub copy_""",
    )
    assert compiled.in_place


@pytest.mark.parametrize("recipe", ["8bit", "4bit"])
def test_matrices_that_are_inverted_stay_dense(capture, analyse, params, recipe: str) -> None:
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda s, g: torch.linalg.inv(s) @ g,
        lambda s, g: torch.linalg.solve(s + 0, g),
        lambda s, g: torch.cholesky_solve(g, torch.linalg.cholesky(s)),
        lambda s, g: torch.linalg.svd(s.T)[0] @ g,
    ]

    def update(p: Tensor, g: Tensor, stat: Tensor, *, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
        stat.lerp_((g * g).sum() * torch.eye(32), 0.1)
        p.sub_(apply(stat, g), alpha=RATE)

    cases = [Case(functools.partial(update, apply=f), (("stat", (32, 32)),)) for f in functions]
    optimizer = EachItsOwn(params(*[(32, 32)] * len(cases)), cases)
    set_grads(optimizer.param_groups[0]["params"], 1)
    compiled = analyse(*capture(optimizer.step), min_numel=0, block_size=32, recipe=recipe)
    found = [plan for item in regions_of(compiled) for plan in item.plans.values()]
    assert len(found) == len(cases)
    assert all((plan.format, plan.reason) == (None, INVERTED) for plan in found)


def test_a_square_product_that_is_not_collected_is_quantized(cut) -> None:
    """A projection that is replaced by a product, of a square shape by chance."""

    def update(p: Tensor, g: Tensor, low: Tensor) -> None:
        p.sub_(g @ low, alpha=RATE)
        low.copy_(g.T @ g)

    plan = plans_of(cut(Case(update, (("low", (64, 64)),))))["low"]
    assert plan.format is not None, plan.reason


class Estimating(Optimizer):
    """Makes a Python number of the state before the parameters move, as D-Adaptation does."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"d": 1.0})
        for p in params:
            self.state[p] = {"s": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group, size = self.param_groups[0], torch.zeros(())
        for p in group["params"]:
            s = self.state[p]["s"].add_(p.grad, alpha=0.1)
            size = size + torch.dot(s.flatten(), p.grad.flatten())
        group["d"] = max(group["d"], size.item())
        for p in group["params"]:
            p.lerp_(p - self.state[p]["s"], 0.1)


def test_a_number_that_is_made_of_state_comes_behind_it(cut, params) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # as it is while a step of ours is traced
        compiled = cut(Estimating(params(SHAPE)))
    assert set(plans_of(compiled)) == {"s"}
    nodes = [n.name for n in compiled.gm.graph.nodes]
    assert nodes.index("item") > max(i for i, name in enumerate(nodes) if name.startswith("dot"))
