"""`flatten_foreach` and `thread_writes`: snapshots of the smallest graphs, and that the meaning stays."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from qcompile.passes.flatten_foreach import flatten_foreach
from qcompile.passes.thread_writes import thread_writes, written_by


def text(graph: fx.Graph) -> str:
    """One line per operation."""
    lines = []
    for n in graph.nodes:
        if n.op in ("call_function", "call_method"):
            name = n.target if isinstance(n.target, str) else n.target.__name__
            args = ", ".join([*map(str, n.args), *(f"{k}={v}" for k, v in n.kwargs.items())])
            lines.append(f"{n.name} = {name}({args})")
        elif n.op == "output":
            lines.append(f"return {n.args[0]}")
    return "\n".join(lines)


def module(build) -> fx.GraphModule:
    graph = fx.Graph()
    build(graph)
    return fx.GraphModule({}, graph)


def foreach_graph() -> fx.GraphModule:
    def build(g: fx.Graph) -> None:
        p, q, a, b = (g.placeholder(n) for n in "pqab")
        g.call_function(torch._foreach_mul_, ([p, q], 0.5))
        products = g.call_function(torch._foreach_mul, ([p, q], [a, b]))
        first = g.call_function(operator.getitem, (products, 0))
        second = g.call_function(operator.getitem, (products, 1))
        g.call_function(torch._foreach_add_, ([p, q], [first, second]), {"alpha": 2})
        norms = g.call_function(torch._foreach_norm, ([p, q],), {"ord": 1})
        g.call_function(torch._foreach_maximum_, ([p, q], 0.1))
        g.output(tuple(g.call_function(operator.getitem, (norms, i)) for i in range(2)))

    return module(build)


def test_flatten_foreach() -> None:
    gm = foreach_graph()
    flatten_foreach(gm)
    assert_expected_inline(
        text(gm.graph),
        """\
mul_ = mul_(p, 0.5)
mul__1 = mul_(q, 0.5)
mul = mul(p, a)
mul_1 = mul(q, b)
add_ = add_(p, mul, alpha=2)
add__1 = add_(q, mul_1, alpha=2)
linalg_vector_norm = linalg_vector_norm(p, ord=1)
linalg_vector_norm_1 = linalg_vector_norm(q, ord=1)
clamp_ = clamp_(p, min=0.1)
clamp__1 = clamp_(q, min=0.1)
return (linalg_vector_norm, linalg_vector_norm_1)""",
    )


def test_flatten_foreach_keeps_the_meaning() -> None:
    before, after = foreach_graph(), foreach_graph()
    flatten_foreach(after)
    after.recompile()
    args = [torch.randn(4) for _ in range(4)]
    copies = [a.clone() for a in args]
    for x, y in zip([*before(*args), *args], [*after(*copies), *copies], strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_foreach_sub_", ("lists",)),
        ("_foreach_lerp_", ("lists", 0.3)),
        ("_foreach_addcdiv_", ("lists", "lists", 0.3)),
        ("_foreach_pow", (2,)),
        ("_foreach_sqrt", ()),
        ("_foreach_copy_", ("lists",)),
        ("_foreach_zero_", ()),
        ("_foreach_clamp_min_", (0.2,)),
        ("_foreach_minimum", ("lists",)),
        ("_foreach_sign_", ()),
        ("_foreach_reciprocal", ()),
    ],
)
def test_functions_the_optimizers_use(name: str, arguments: tuple) -> None:
    others = len([a for a in arguments if a == "lists"])

    def build(g: fx.Graph) -> None:
        nodes = [g.placeholder(f"x{i}") for i in range(2 + 2 * others)]
        pairs = iter([nodes[2 + 2 * i : 4 + 2 * i] for i in range(others)])
        call = g.call_function(
            getattr(torch, name), (nodes[:2], *(next(pairs) if a == "lists" else a for a in arguments))
        )
        if name.endswith("_"):
            g.output(tuple(nodes[:2]))
        else:
            g.output(tuple(g.call_function(operator.getitem, (call, i)) for i in range(2)))

    before, after = module(build), module(build)
    flatten_foreach(after)
    assert name not in text(after.graph)
    after.recompile()
    args = [torch.rand(4) + 0.1 for _ in range(2 + 2 * others)]
    for x, y in zip(before(*[a.clone() for a in args]), after(*[a.clone() for a in args]), strict=True):
        torch.testing.assert_close(x, y)


def test_thread_writes() -> None:
    def build(g: fx.Graph) -> None:
        p, a = g.placeholder("p"), g.placeholder("a")
        before = g.call_function(torch.sum, (p,))
        g.call_method("mul_", (p, 2))
        t = g.call_function(operator.sub, (a, 1))
        g.call_method("div_", (t, 3))
        g.call_function(torch.maximum, (t, a), {"out": p})
        g.output((before, g.call_function(operator.add, (p, t))))

    gm = module(build)
    thread_writes(gm)
    assert_expected_inline(
        text(gm.graph),
        """\
sum_1 = sum(p)
mul_ = mul_(p, 2)
sub = sub(a, 1)
div_ = div_(sub, 3)
maximum = maximum(div_, a, out=mul_)
add = add(maximum, div_)
return (sum_1, add)""",
    )
    untouched = module(build)
    p = torch.randn(4)
    q, a = p.clone(), torch.randn(4)
    gm.recompile()
    for x, y in zip(untouched(p, a), gm(q, a), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(p, q)


def test_written_by() -> None:
    g = fx.Graph()
    x, y = g.placeholder("x"), g.placeholder("y")
    assert written_by(g.call_method("add_", (x, y))) == [x]
    assert written_by(g.call_function(operator.iadd, (x, 1))) == [x]
    assert written_by(g.call_function(operator.setitem, (x, 0, y))) == [x]
    assert written_by(g.call_function(torch.add, (x, y), {"out": y})) == [y]
    assert written_by(g.call_function(torch.ops.aten.copy_.default, (y, x))) == [y]
    assert written_by(g.call_function(torch._foreach_add_, ([x, y], 1))) == [x, y]
    assert written_by(g.call_method("__getitem__", (x, 0))) == []
    assert written_by(g.call_function(torch.add, (x, y))) == []
