"""Updates as expressions, and expressions as torch operations."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import fx

from qcompile._compat import new_fake_mode, trace
from qcompile.passes.expressions import V, Where, compute, constant, spell, value_of_constant
from qcompile.passes.functionalize import Operand, UpdateProgram
from qcompile.passes.symbolic import LARGEST, read_symbolically

aten = torch.ops.aten


def program_of(build, *roles: str, written: tuple[int, ...]) -> UpdateProgram:
    """Operands of these roles; `build` makes the new values from the graph and the placeholders."""
    g = fx.Graph()
    nodes = [g.placeholder(f"arg{i}") for i in range(len(roles))]
    g.output(build(lambda target, *args, **kw: g.call_function(target, args, kw), *nodes))
    operands = tuple(Operand(i, role, torch.float32, i in written) for i, role in enumerate(roles))
    return UpdateProgram(operands, fx.GraphModule({}, g), (), fx.GraphModule({}, fx.Graph()), (), ())


def momentum(call, p, grad, m) -> list[fx.Node]:
    m2 = call(aten.copy.default, m, call(aten.lerp.Scalar, m, grad, 0.1))
    return [call(aten.add.Tensor, p, m2, alpha=-0.01), m2]


def test_an_update_is_in_the_exact_new_state() -> None:
    update = read_symbolically(program_of(momentum, "param", "input", "state", written=(0, 2)), (False,) * 3)
    assert [str(value) for value in update.values] == ["-0.01*new_2 + old_0", "None", "0.1*(old_1 - old_2) + old_2"]
    assert [str(symbol) for symbol in update.new] == ["new_0", "None", "new_2"]


def test_a_state_that_shares_the_parameters_value_is_its_copy() -> None:
    def build(call, p, grad, copy) -> list[fx.Node]:
        new = call(aten.sub.Tensor, p, grad)
        return [new, call(aten.copy.default, copy, new)]

    update = read_symbolically(program_of(build, "param", "input", "state", written=(0, 2)), (False,) * 3)
    assert [str(value) for value in update.values] == ["old_0 - old_1", "None", "new_0"]


def test_what_is_not_known_is_a_function_of_what_it_reads() -> None:
    def build(call, p, grad) -> list[fx.Node]:
        return [call(aten.mul.Tensor, p, call(aten.erfinv.default, call(aten.mul.Tensor, grad, p)))]

    update = read_symbolically(program_of(build, "param", "input", written=(0,)), (False, False))
    assert update.values[0].has(sympy.core.function.AppliedUndef)
    assert {str(s) for s in update.values[0].free_symbols} == {"old_0", "old_1"}


def test_a_large_expression_is_cut_short() -> None:
    def build(call, p, grad) -> list[fx.Node]:
        for _ in range(40):  # a tree of 2**40 leaves
            p = call(aten.add.Tensor, call(aten.mul.Tensor, p, p), call(aten.mul.Tensor, grad, p))
        return [p]

    update = read_symbolically(program_of(build, "param", "input", written=(0,)), (False, False))
    assert {str(s) for s in update.values[0].free_symbols} == {"old_0", "old_1"}
    assert sum(1 for _ in sympy.preorder_traversal(update.values[0])) < 2 * LARGEST


def test_a_division_by_zero_is_not_known() -> None:
    def build(call, p, grad) -> list[fx.Node]:
        return [call(aten.addcdiv.default, p, grad, call(aten.mul.Tensor, grad, 0))]

    update = read_symbolically(program_of(build, "param", "input", written=(0,)), (False, False))
    assert {str(s) for s in update.values[0].free_symbols} == {"old_0", "old_1"}


@pytest.mark.parametrize("value", [0.999, -1e-8, 3.0, 1e30])
def test_a_constant_remembers_its_value(value: float) -> None:
    (symbol,) = constant(value).free_symbols
    assert value_of_constant(symbol) == abs(value)
    assert compute(constant(value), {}) == value


def test_plain_numbers_cancel() -> None:
    assert constant(1.0) - constant(1) == 0
    assert value_of_constant(sympy.Symbol("number_0")) is None


def test_names_only_where_they_are_certain() -> None:
    h = 1 / (sympy.sqrt(V) + constant(1e-8) + constant(0.5) + constant(1 - 0.999))
    given = {"eps": 1e-8, "lr": 0.5, "momentum": 0.5, "beta2": 0.999}
    assert spell(h, {}) == "1/(sqrt(v) + 0.0010000000000000009 + 0.5 + 1e-08)"
    assert spell(h, given) == "1/(sqrt(v) + 0.5 - beta2 + eps + 1)"


def test_computed_without_powers() -> None:
    n = sympy.Symbol("number_0", real=True)
    h = Where(n, constant(3) * V**2 / ((sympy.sqrt(V) + n) * sympy.sqrt(V + 1)), V)
    mode = new_fake_mode()
    with mode:
        inputs = [torch.empty(4), torch.empty(())]
    gm = trace(lambda v, number: [compute(h, {V: v, n: number})], inputs, mode, decompose=False)
    assert not [node for node in gm.graph.nodes if "pow" in str(node.target)]
    v, number = torch.tensor([0.0, 1e-4, 1.0, 9.0]), torch.tensor(0.5)
    torch.testing.assert_close(gm(v, number)[0], 3 * v**2 / ((v.sqrt() + 0.5) * (v + 1).sqrt()))
