"""How second moments enter real updates: the function as text, what is known of it, and its values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.infer_preconditioner import Preconditioner, infer_preconditioner, storage_pairs
from qcompile.passes.infer_sign import infer_sign
from qcompile.passes.pipeline import PlannedRegion


class HandWritten(Optimizer):
    """An optimizer with a signed state m and a non-negative one, v."""

    def __init__(self, params, update: Callable[[Tensor, Tensor, Tensor, Tensor], object], **defaults: float) -> None:
        super().__init__(params, defaults)
        self.update = update
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, *self.state[p].values())


def moments(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return m.lerp_(g, 0.1), v.mul_(0.99).addcmul_(g, g, value=0.01)


def quarter_root(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    moments(g, m, v)
    p.sub_(0.01 * m / (v**0.25 + 1e-3))


def eps_inside(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    moments(g, m, v)
    p.sub_(0.01 * m * torch.rsqrt(v + 1e-6))


def adabelief(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.99).add_((g - m) ** 2 * 0.01).add_(1e-16)
    p.sub_(0.01 * m / (v.sqrt() + 1e-8))


def cautious(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    moments(g, m, v)
    p.sub_(0.01 * m / v.sqrt().clamp(min=1e-6) * (m * g > 0))


def lion(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    p.sub_(0.01 * (0.9 * m + 0.1 * g).sign())
    m.lerp_(g, 0.01)


def hump(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    moments(g, m, v)
    p.sub_(m * v / (v * v + 1.0))


def one_minus(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.9).add_(0.1 * (g * g).clamp(max=0.99))
    p.sub_(m / (1 - v))


def unknown(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    moments(g, m, v)
    p.sub_(m * torch.special.i0e(v))


def falls_off(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    moments(g, m, v)
    p.sub_(m * (1.0 - v).sqrt())


MAKE: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, eps=1e-6),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "RMSprop": torch.optim.RMSprop,
    "RMSprop momentum": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
    "quarter root": lambda p: HandWritten(p, quarter_root),
    "eps inside": lambda p: HandWritten(p, eps_inside, eps=1e-6),
    "AdaBelief": lambda p: HandWritten(p, adabelief, eps=1e-8),
    "cautious": lambda p: HandWritten(p, cautious),
    "Lion": lambda p: HandWritten(p, lion),
    "hump": lambda p: HandWritten(p, hump),
    "unknown": lambda p: HandWritten(p, unknown),
    "1 / (1 - v)": lambda p: HandWritten(p, one_minus),
    "falls off": lambda p: HandWritten(p, falls_off),
    "lr of 0": lambda p: torch.optim.Adam(p, lr=0.0),
    "RAdam, lr of 0": lambda p: torch.optim.RAdam(p, lr=0.0),
}


WITHOUT_VALUES = ("1 / (1 - v)", "SGD", "Lion", "RMSprop centered", "unknown", "falls off", "lr of 0", "RAdam, lr of 0")


def hyperparameters(optimizer: Optimizer) -> dict[str, float]:
    group = optimizer.param_groups[0]
    named = {k: v for k, v in group.items() if isinstance(v, float)}
    return named | {f"beta{i}": beta for i, beta in enumerate(group.get("betas", ()), 1)}


def records_of(program: UpdateProgram) -> tuple[Preconditioner, ...]:
    return infer_preconditioner(program, tuple(proof.non_negative for proof in infer_sign(program)))


def keys_of(item: PlannedRegion) -> dict[int, str]:
    """What the state operands of a program are called."""
    nodes = {i: item.region.inputs[operand.index] for i, operand in enumerate(item.program.operands)}
    return {i: item.plans[node].slot.key for i, node in nodes.items() if node in item.plans}


@pytest.fixture
def region(capture, analyse, params) -> Callable[[Optimizer], PlannedRegion]:
    def run(optimizer: Optimizer) -> PlannedRegion:
        torch._dynamo.reset()
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        optimizer.step()
        classes = analyse(*capture(optimizer.step), min_numel=0, block_size=32).classes
        return classes[0].regions[0]

    return run


@pytest.fixture
def found(region, params) -> Callable[[str], tuple[UpdateProgram, tuple[Preconditioner, ...], str]]:
    """The program of one optimizer, its records, and their text: multiplier -> function."""

    def run(name: str) -> tuple[UpdateProgram, tuple[Preconditioner, ...], str]:
        optimizer = MAKE[name](params((8, 8)))
        item = region(optimizer)
        keys = keys_of(item)
        records = records_of(item.program)
        lines = [
            f"{'input' if r.first is None else keys[r.first]}, {keys[r.second]}: {r.text(hyperparameters(optimizer))}"
            for r in records
        ]
        return item.program, records, "; ".join(lines) or "none"

    return run


def test_text(found) -> None:
    assert_expected_inline(
        "\n".join(f"{name} | {found(name)[2]}" for name in MAKE),
        """\
AdamW | exp_avg, exp_avg_sq: 1/(sqrt(v/(1 - beta2**t)) + eps)
tensor lr | exp_avg, exp_avg_sq: 1/(sqrt(v/(1 - beta2**t)) + eps)
amsgrad | exp_avg, max_exp_avg_sq: 1/(sqrt(v/(1 - beta2**t)) + eps)
NAdam | exp_avg, exp_avg_sq: 1/(sqrt(v/(1 - beta2**t)) + eps); input, exp_avg_sq: 1/(sqrt(v/(1 - beta2**t)) + eps)
RAdam | exp_avg, exp_avg_sq: 1/(sqrt(v) + eps)
Adamax | exp_avg, exp_inf: 1/v
Adagrad | input, sum: 1/(sqrt(v) + eps)
RMSprop | input, square_avg: 1/(sqrt(v) + eps)
RMSprop momentum | input, square_avg: 1/(sqrt(v) + eps)
RMSprop centered | none
Adadelta | input, square_avg: 1/sqrt(v + eps); input, acc_delta: sqrt(v + eps)
SGD | none
quarter root | m, v: 1/(v**(1/4) + 0.001)
eps inside | m, v: 1/sqrt(v + eps)
AdaBelief | m, v: 1/(sqrt(v) + eps)
cautious | m, v: 1/max(sqrt(v), 1e-06)
Lion | none
hump | m, v: v/(v**2 + 1)
unknown | none
1 / (1 - v) | m, v: -1/(v - 1)
falls off | m, v: sqrt(-v + 1)
lr of 0 | exp_avg, exp_avg_sq: 1/(sqrt(v/(1 - beta2**t)) + eps)
RAdam, lr of 0 | exp_avg, exp_avg_sq: 1/(sqrt(v) + eps)""",
    )


def properties(record: Preconditioner) -> tuple[float | bool | None, ...]:
    return record.at_zero, record.decreasing, record.bound, record.power, record.eps


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdamW", [(1e8, True, 1e8, 0.5, 1e-8)]),
        ("tensor lr", [(1e8, True, 1e8, 0.5, 1e-8)]),
        ("amsgrad", [(1e6, True, 1e6, 0.5, 1e-6)]),
        ("lr of 0", [(1e8, True, 1e8, 0.5, 1e-8)]),
        ("RAdam, lr of 0", [(1e8, True, 1e8, 0.5, 1e-8)]),
        ("RAdam", [(1e8, True, 1e8, 0.5, 1e-8)]),
        ("Adamax", [(math.inf, True, math.inf, 1.0, 0.0)]),
        ("Adadelta", [(1e3, True, 1e3, 0.5, 1e-3), (1e-3, False, math.inf, None, None)]),
        ("quarter root", [(1e3, True, 1e3, None, None)]),
        ("eps inside", [(1e3, True, 1e3, 0.5, 1e-3)]),
        ("cautious", [(1e6, True, 1e6, 0.5, 1e-6)]),
        ("hump", [(0.0, None, 0.5, None, None)]),
        ("falls off", [(1.0, None, None, None, None)]),
    ],
)
def test_properties(found, name: str, expected) -> None:
    for record, values in zip(found(name)[1], expected, strict=True):
        known = [(have, want) for have, want in zip(properties(record), values, strict=True) if want is not None]
        assert all(have == pytest.approx(want, rel=1e-6) for have, want in known), properties(record)
        assert [have is None for have in properties(record)] == [want is None for want in values]


def test_how_much_an_error_of_v_is_magnified(found) -> None:
    """|v h'(v) / h(v)|: a half for roots, one for quotients, v / (1 - v) for 1 / (1 - v)."""
    for name, high, times in (
        ("AdamW", math.inf, 0.5),
        ("quarter root", math.inf, 0.25),
        ("eps inside", 1e-6, 0.25),  # v / (2 (v + eps))
        ("Adamax", math.inf, 1.0),
        ("hump", math.inf, 1.0),
        ("unknown", math.inf, 0.0),
    ):
        for record in found(name)[1]:
            assert record.magnifies(high) == pytest.approx(times, abs=1e-3), name
    (record,) = (r for r in found("1 / (1 - v)")[1] if r.first is not None)
    assert record.magnifies(0.5) == pytest.approx(1.0, rel=1e-3)
    assert record.magnifies(0.99) == pytest.approx(99.0, rel=1e-3)
    assert record.magnifies(1.0) > 1e5


def test_a_number_that_is_not_known_leaves_its_consequences_open(capture, analyse, params) -> None:
    """A bias correction that comes as a number, as in an optimizer that counts steps in Python."""
    correction = torch.tensor(0.7)

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        moments(g, m, v)
        p.sub_(m / ((v / correction).sqrt() + 1e-8))

    optimizer = HandWritten(params((8, 8)), update)
    optimizer.param_groups[0]["params"][0].grad = torch.randn(8, 8)
    (group,) = analyse(*capture(optimizer.step), min_numel=0, block_size=32).classes
    program = group.regions[0].program
    (record,) = records_of(program)
    assert properties(record) == (None, True, None, 0.5, None)
    assert record.text({"eps": 1e-8}) == "1/(sqrt(v/input_0) + eps)"


def with_new_values_as_inputs(program: UpdateProgram, operands: list[int]) -> fx.GraphModule:
    """The program's graph, where what reads the new value of some operands reads an input at the end instead."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.elements.graph, {}))
    *nodes, output = graph.nodes
    written = [i for i, operand in enumerate(program.operands) if operand.written]
    last = [n for n in nodes if n.op == "placeholder"][-1]
    for i in operands:
        with graph.inserting_after(last):
            last = graph.placeholder(f"given_{i}")
        node = output.args[0][written.index(i)]
        while node.op != "placeholder":
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user is not output)
            if "copy" not in str(node.target):
                break
            node = node.args[-1]
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("name", [name for name in MAKE if name not in WITHOUT_VALUES])
def test_values_are_those_of_the_update(found, name: str) -> None:
    """Slopes of the real program along the multiplier, relative to each other, at many second moments."""
    program, records, _ = found(name)
    roles = [operand.role for operand in program.operands]
    parameter = [i for i, operand in enumerate(program.operands) if operand.written].index(roles.index("param"))
    at_step_10 = program.scalars(*(torch.tensor(10.0, dtype=torch.float64) for _ in program.numbers))
    numbers = [n.double() if n.is_floating_point() else n for n in at_step_10[: len(program.scalar_dtypes)]]
    v = torch.logspace(-6, 4, 32, dtype=torch.float64)
    assert records
    for record in records:
        cut = [record.second] if record.first is None else [record.second, record.first]
        program_of_x = with_new_values_as_inputs(program, cut)
        values = [torch.full_like(v, 0.3) for _ in roles]
        values[record.second] = v

        def new_parameter(x: float, record=record, values=values, run=program_of_x) -> Tensor:
            given = [v] if record.first is None else [v, torch.full_like(v, x)]
            values = list(values)
            if record.first is None:
                values[roles.index("input")] = torch.full_like(v, x)
            return fx.Interpreter(run).run(*values, *numbers, *given)[parameter]

        # the parameter moves against h or along it: AdamW's graph has -lr below the line
        slope = new_parameter(0.4) - new_parameter(0.3)
        h = record.preconditioner(v, *numbers)
        torch.testing.assert_close(h / h[-1], slope / slope[-1], rtol=1e-6, atol=0)
        assert (h > 0).all()


def test_one_pair_for_each_first_moment(found) -> None:
    _, records, _ = found("NAdam")
    assert [record.first is None for record in records] == [False, True]
    assert list(storage_pairs(records)) == [records[0].first]
    assert not storage_pairs(found("Adamax")[1]), "update space is for roots"


def test_storage_takes_eps_from_the_update(region, params) -> None:
    """The root of an eps that is inside the root; the group's own is something else here."""
    item = region(HandWritten(params((8, 8)), eps_inside, eps=0.5))
    formats = {plan.slot.key: plan.format for plan in item.plans.values()}
    assert (formats["m"].coordinate, formats["m"].partner) == ("update", "v")
    assert formats["m"].eps == pytest.approx(1e-3)
