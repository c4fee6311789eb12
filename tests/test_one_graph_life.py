"""The one-graph step beyond its numbers: falling back, errors, the user's optimizer, memory and the operator."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import constant
from whole_steps import Case, adamw, data, loss_of, network, plain, run, scheduled, weights

import qcompile
from qcompile.runtime.region_op import _updates, update
from qcompile.runtime.state import QuantizedState


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.tanh()


def broken_model() -> Case:
    return plain(nn.Sequential(nn.Linear(64, 128), Breaks(), nn.Linear(128, 64)))


def hooked_step() -> Case:
    case = plain()
    calls: list[int] = []
    case.optimizers[0].register_step_post_hook(lambda *_: calls.append(1))
    case.keep = calls
    return case


def lbfgs() -> Case:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Case(step, [model], [optimizer])


FALLBACKS = {
    "graph break in the model": (broken_model, "graph_break"),
    "step hook": (hooked_step, "step hooks"),
    "LBFGS": (lbfgs, "torch does not compile LBFGS.step"),
}


@pytest.mark.parametrize("name", list(FALLBACKS))
def test_falls_back_with_one_line_and_the_same_numbers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = FALLBACKS[name]
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    theirs = make()
    with caplog.at_level(logging.INFO, "qcompile"):
        losses, step = run(ours, qcompile.train_step(recipe="dense"), 4)
    expected, _ = run(theirs, lambda f: f, 4)
    for a, b in zip(losses, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    lines = [r.getMessage() for r in caplog.records if "several graphs" in r.getMessage()]
    assert len(lines) == 1
    assert reason in lines[0]
    assert reason in (step.explain().not_one_graph or "")
    if name == "step hook":
        assert len(ours.keep) == 4


@pytest.mark.parametrize("name", list(FALLBACKS))
def test_fullgraph_raises_instead(name: str) -> None:
    make, reason = FALLBACKS[name]
    case = make()
    before = [w.clone() for w in weights(case)]
    with pytest.raises(Exception, match=reason):
        qcompile.train_step(fullgraph=True)(case.step)(data(0))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(case), strict=True))
    assert not case.optimizers[0].state
    assert isinstance(case.optimizers[0], torch.optim.Optimizer)


def test_the_optimizer_stays_the_users() -> None:
    case, reference = scheduled(), scheduled()
    optimizer = case.optimizers[0]
    kind = type(optimizer)
    run(case, qcompile.train_step, 3)
    run(reference, lambda f: f, 3)
    assert type(optimizer) is kind
    assert set(vars(optimizer)) == set(vars(reference.optimizers[0]))
    got, expected = optimizer.state_dict(), reference.optimizers[0].state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert {k: set(v) for k, v in got["state"].items()} == {k: set(v) for k, v in expected["state"].items()}
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is kind
    optimizer.zero_grad()
    loss_of(case.models[0], data(0)).backward()
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(64, 64))]})


@pytest.mark.parametrize("after", [False, True], ids=["scheduler first", "decorator first"])
def test_scheduler_made_before_or_after(after: bool, recwarn: pytest.WarningsRecorder) -> None:
    case = plain()
    step = qcompile.train_step(case.step) if after else None
    schedule = torch.optim.lr_scheduler.StepLR(case.optimizers[0], 1, gamma=0.5)
    step = step or qcompile.train_step(case.step)
    for i in range(3):
        step(data(i))
        schedule.step()
    assert case.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 / 8)
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_an_error_in_the_step_leaves_everything_as_it_was() -> None:
    case = plain()
    optimizer = case.optimizers[0]

    @qcompile.train_step
    def step(x: Tensor) -> Tensor:
        if x.shape[1] != 64:
            raise ValueError("wrong width")
        return case.step(x)

    step(data(0))
    for _ in range(2):
        with contextlib.suppress(Exception):
            step(torch.randn(4, 3))
        assert isinstance(optimizer, torch.optim.AdamW)
        assert optimizer.param_groups[0]["foreach"] is None
    assert torch.isfinite(step(data(1)))


def test_state_of_parameters_outside_the_step_is_not_made() -> None:
    model, unused = network(), nn.Linear(64, 64)
    optimizer = torch.optim.AdamW([*model.parameters(), *unused.parameters()])

    @qcompile.train_step
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(data(0))
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}


def test_state_is_made_quantized_before_the_first_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile import backend

    seen = []
    original = backend.compile_updates

    def look(gm: Any, example_inputs: list[Any], *rest: Any) -> Any:
        seen.append(sum(isinstance(v, QuantizedState) for v in example_inputs))
        return original(gm, example_inputs, *rest)

    monkeypatch.setattr(backend, "compile_updates", look)
    run(plain(), qcompile.train_step, 1)
    assert seen == [4, 4], "once more as soon as the graph has told which state is which, and it is stored accordingly"


def test_gradients_die_as_soon_as_they_are_used() -> None:
    """In the generated program no two weight gradients are alive at once."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(128, 128, bias=False), nn.Tanh())])
    optimizer = adamw(model)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    _, sources = run_and_get_code(qcompile.train_step(step), torch.randn(16, 128))
    (source,) = (s for s in sources if "qcompile.update" in s)
    body = source[source.index("def call(") :]
    events = [
        line.strip() for line in body.splitlines() if "qcompile.update.default(" in line or "extern_kernels.mm(" in line
    ]
    updates = [i for i, line in enumerate(events) if "qcompile.update" in line]
    assert len(updates) == 4
    backward = events[updates[0] - 1 :]
    assert [("update" if "qcompile.update" in e else "mm") for e in backward].count("update") == 4
    longest = max(b - a for a, b in itertools.pairwise(updates))
    assert longest <= 3, "more than one gradient is made between two updates"


def test_the_operator_is_well_formed() -> None:
    case, before = plain(), set(_updates)
    run(case, qcompile.train_step, 1)
    registered = [_updates[number] for number in _updates.keys() - before]
    formats = {fmt for update_class in registered for fmt in update_class.layout.storage if fmt is not None}
    assert {fmt.block_size for fmt in formats} == {64, 128}, "rows of the two layers"
    schema = str(update._opoverload._schema)
    assert schema == "qcompile::update(SymInt number, Tensor(a1!)[] written, Tensor[] read) -> ()"


def test_opcheck() -> None:
    from qcompile.runtime.launch import Kernel, Layout, Region, UpdateClass
    from qcompile.runtime.region_op import forget, register

    def call(args: list[Any]) -> tuple[()]:
        p, g = args
        p.sub_(g, alpha=0.1)
        return ()

    kernel = Kernel(call, "test", "C++", "", 1, ())
    layout = Layout((None, None), (True, False), list, 0, ())
    region = Region((0, 1), (), torch.empty(8, 8, device="meta"))
    number = register(UpdateClass(layout, [region], None, kernel, torch.device("cpu")))
    p, g = torch.randn(8, 8), torch.randn(8, 8)
    expected = p - 0.1 * g
    torch.library.opcheck(update, (number, [p.clone()], [g]))
    update(number, [p], [g])
    torch.testing.assert_close(p, expected)
    forget([number])
    with pytest.raises(KeyError):
        update(number, [p], [g])


def test_parameters_that_torch_marked_static_still_get_gradients() -> None:
    """A step compiled before marks its parameters; `backward()` in one graph must not miss them."""
    results = []
    for wrap in (qcompile.train_step, lambda f: f):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 64))
        optimizer = torch.optim.AdamW([p], lr=1e-2)
        p.grad = torch.ones_like(p)
        update_alone = (
            torch.compile(optimizer.step, backend="qstate") if wrap is qcompile.train_step else optimizer.step
        )
        update_alone()
        optimizer.zero_grad()
        holder = [p]

        def step(x: Tensor, holder: Any = holder, optimizer: Any = optimizer) -> Tensor:
            loss = (holder[0] @ x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run_step = wrap(step)
        x = torch.ones(64, 4)
        results.append([float(run_step(x)) for _ in range(5)])
    assert results[0] == pytest.approx(results[1], rel=1e-3)
    assert results[1][-1] < 0.9 * results[1][0]


def test_what_is_compiled_after_a_whole_step_still_compiles() -> None:
    """torch 2.13 leaves a place in the first function in its None, which the next one returns."""
    whole, alone = plain(), plain()

    @qcompile.train_step(min_numel=0)
    def step(x: Tensor) -> None:
        whole.optimizers[0].zero_grad()
        loss_of(whole.models[0], x).backward()
        whole.optimizers[0].step()

    for i in range(2):
        step(data(i))
    assert step.explain().not_one_graph is None
    assert getattr(constant, "CONSTANT_VARIABLE_NONE", constant).__dict__.get("source") is None
    run = torch.compile(alone.optimizers[0].step, backend="qstate", options={"min_numel": 0})
    loss_of(alone.models[0], data(0)).backward()
    assert run() is None
    seen = torch.compile(lambda x: (x.add_(1), None)[1], backend="eager")(torch.ones(2))
    assert seen is None
