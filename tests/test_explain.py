"""The report: complete, and equal to what is stored."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import pickle
from typing import Any

import pytest
import torch
from conftest import set_grads
from torch import nn

import qcompile
from qcompile.runtime.state import QuantizedState


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.wide = nn.Linear(64, 103)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.wide(x)


def trained(layers: int, **options):
    torch.manual_seed(0)
    model = Model(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @qcompile.train_step(**options)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(2):
        step(torch.randn(8, 64))
    return model, optimizer, step


def test_every_tensor_of_the_state_is_in_the_report() -> None:
    model, optimizer, _step = trained(2)
    report = qcompile.explain(optimizer)
    found = {(s.param, s.key) for s in report.states}
    assert found == {(n, k) for n, _ in model.named_parameters() for k in ("step", "exp_avg", "exp_avg_sq")}
    for s in report.states:
        value = optimizer.state[model.get_parameter(s.param)][s.key]
        assert s.shape == tuple(value.shape)
        assert (s.reason is None) == isinstance(value, QuantizedState)
        stored = value.stored_bytes if isinstance(value, QuantizedState) else value.nbytes
        assert (s.dense_bytes, s.stored_bytes) == (value.nbytes, stored)
    assert report.state_bytes == sum(s.stored_bytes for s in report.states)
    assert report.dense_state_bytes == sum(s.dense_bytes for s in report.states)
    assert report.state_bytes < 0.3 * report.dense_state_bytes
    signs = {s.key: s.sign for s in report.states if s.shape}
    assert signs == {"exp_avg": "signed", "exp_avg_sq": "non-negative"}
    assert {s.reason for s in report.states if s.shape and s.reason} == {
        "64 elements, fewer than min_numel=4096",
        "103 elements, fewer than min_numel=4096",
    }


def test_number_of_kernels_does_not_grow_with_depth() -> None:
    reports = [trained(layers)[2].explain() for layers in (1, 4)]
    assert [len(r.kernels) for r in reports] == [2, 2]
    assert [sum(c.regions for c in r.classes) for r in reports] == [4, 10]
    classes = {s.update_class for s in reports[1].states if s.reason is None}
    assert len(classes) <= 2


def test_kernels_have_source_and_language() -> None:
    report = trained(1)[2].explain()
    for kernel in report.kernels:
        assert kernel.language == "C++"
        assert kernel.name in kernel.source
        assert "pragma omp" in kernel.source


def test_print_is_a_table() -> None:
    report = trained(1)[2].explain()
    text = str(report)
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["parameter", "state", "shape"]
    row = next(line for line in lines if line.startswith("wide.weight") and "exp_avg_sq" in line)
    assert "103x64" in row
    assert "pseudo-log-linear8-unsigned-coordinate/64" in row
    assert "26,368" in row
    assert any(line.startswith("class 0:") and "cpp_fused" in line for line in lines)
    assert "step: 4 buffer(s), dense: a number" in lines
    assert f"state: {report.state_bytes:,} bytes" in lines[-1]


H = "h(v) = 1/(sqrt(v/(1 - beta2**t)) + eps)"


def test_facts_are_what_was_proved() -> None:
    """The sign with its proof, what the state remembers, and how the second moment divides."""
    for s in trained(1)[2].explain().states:
        if not s.shape:
            assert s.facts == ()
        elif s.key == "exp_avg":
            assert s.facts[0].startswith("exp_avg in (-inf, inf) is all that is known")
            assert s.facts[1:] == ("moment, decay beta1",)
        else:
            assert s.facts[0].startswith("exp_avg_sq in [0, inf) is kept:\n")
            assert "mul(exp_avg_sq, 0.999) in [0, inf)" in s.facts[0]
            assert s.facts[1:] == ("moment, decay beta2", H)


def test_print_has_facts_once_per_kind() -> None:
    """However many parameters, and update classes, have them."""
    report = trained(3)[2].explain()
    assert sum(H in s.facts for s in report.states) == 8
    lines = str(report).splitlines()
    assert lines.count(f"  exp_avg_sq: {H}") == 1
    assert lines.count("exp_avg_sq in [0, inf) is kept:") == 1
    assert lines.count("  exp_avg: moment, decay beta1") == 1
    assert lines.index("exp_avg_sq in [0, inf) is kept:") > lines.index("step: 8 buffer(s), dense: a number")


def test_facts_of_dense_state_are_in_the_report(params) -> None:
    """What is refused has been looked at too."""
    optimizer = torch.optim.RMSprop(params((64, 64)), centered=True)
    optimizer.param_groups[0]["params"][0].grad = torch.randn(64, 64)
    torch.compile(optimizer.step, backend="qstate", options={"recipe": "dense"})()
    facts = {s.key: s.facts for s in qcompile.explain(optimizer).states if s.shape}
    assert facts["square_avg"][0].startswith("square_avg in [0, inf) is kept")
    assert facts["grad_avg"][1] == "moment, decay alpha"


class BreaksInItsLoop(torch.optim.Optimizer):
    """Its loop holds what Dynamo does not trace, so the step runs eagerly; what it calls is compiled."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(self.projected(p.grad))
            p.sub_(momentum, alpha=0.1)

    def projected(self, gradient: torch.Tensor) -> torch.Tensor:
        centered = gradient - gradient.mean()
        return gradient if gradient.norm() > 1e9 else centered


def test_a_step_of_which_only_called_functions_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(64, 64)
    optimizer = BreaksInItsLoop(layer.parameters())
    step = torch.compile(optimizer.step, backend="qstate")
    with caplog.at_level(logging.WARNING, "qcompile"):
        for _ in range(3):
            layer(torch.randn(4, 64)).square().mean().backward()
            step()
    (state,) = (s for s in qcompile.explain(optimizer).states if s.shape == (64, 64))
    assert state.reason is not None
    assert state.reason.startswith("torch ran the step as eager Python")
    assert len([r for r in caplog.records if "runs dense" in r.message]) == 1, "warned not exactly once"


def test_state_of_a_step_that_is_not_compiled_does_not_stay_quantized() -> None:
    """As a checkpoint, or the first step, left it: eager Python would round it in every step."""
    layer = nn.Linear(64, 64)
    optimizer = BreaksInItsLoop(layer.parameters())
    state = QuantizedState.quantize(torch.randn(64, 64), qcompile.RECIPES["8bit"].signed)
    optimizer.state[layer.weight]["momentum"] = state
    step = torch.compile(optimizer.step, backend="qstate")
    for _ in range(2):
        layer(torch.randn(4, 64)).square().mean().backward()
        step()
    momentum = optimizer.state[layer.weight]["momentum"]
    assert type(momentum) is torch.Tensor
    before = momentum.clone()
    layer.weight.grad.fill_(1e-6)  # type: ignore[union-attr]
    optimizer.step()
    assert torch.allclose(momentum, 0.9 * before, atol=1e-7)  # centered: the gradient counts for nothing
    assert qcompile.explain(optimizer).states[0].reason.startswith("torch ran the step as eager Python")  # type: ignore[union-attr]


class MakesStateInAGraph(torch.optim.Optimizer):
    """Its parameters read each other's gradients, so the first step is no step per parameter: a graph makes the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        total = sum(p.grad.square().sum() for p in params)
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            self.state[p]["momentum"].mul_(0.9).add_(p.grad / total.sqrt())
            p.sub_(self.state[p]["momentum"], alpha=0.1)


def test_a_step_that_makes_its_state_in_a_graph_is_not_called_dense(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(64, 64)
    optimizer = MakesStateInAGraph(layer.parameters())
    step = torch.compile(optimizer.step, backend="qstate", options={"strict": True})
    with caplog.at_level(logging.WARNING, "qcompile"):
        for _ in range(2):
            layer(torch.randn(4, 64)).square().mean().backward()
            step()
    assert not [r for r in caplog.records if "runs dense" in r.message]
    (state,) = (s for s in qcompile.explain(optimizer).states if s.shape == (64, 64))
    assert state.reason is None


def test_before_any_step_and_after_clearing() -> None:
    _, optimizer, step = trained(1)
    fresh = torch.optim.AdamW([nn.Parameter(torch.randn(64, 64))])
    assert qcompile.explain(fresh).states == ()
    fresh.param_groups[0]["params"][0].grad = torch.randn(64, 64)
    fresh.step()
    assert "no step of this optimizer was compiled" in str(qcompile.explain(fresh))
    optimizer.state.clear()
    assert step.explain().states == ()


def test_several_optimizers_in_one_step() -> None:
    a, b = nn.Linear(64, 64), nn.Linear(64, 64)
    first = torch.optim.AdamW(a.parameters(), lr=1e-3)
    second = torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)

    @qcompile.train_step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = b(a(x)).square().mean()
        loss.backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        return loss.detach()

    losses = [float(step(torch.ones(4, 64))) for _ in range(4)]
    assert losses[-1] < losses[0]
    quantized = {s.key for s in step.explain().states if s.reason is None}
    assert quantized == {"exp_avg", "exp_avg_sq", "momentum_buffer"}


def test_the_update_of_a_class_runs_as_python(params, train) -> None:
    """What is printed computes what eager AdamW does: every line is executed."""
    p = params((64, 128))
    optimizer = torch.optim.AdamW(p, lr=1e-2)
    train(p, torch.compile(optimizer.step, backend="qstate", options={"recipe": "dense"}), steps=1)
    (group,) = qcompile.explain(optimizer).classes
    assert group.launches == 1
    body = group.program.splitlines()
    assert body[0] == "def update(param, exp_avg, input, exp_avg_sq, step):"
    names = {
        name: getattr(torch.ops.aten, name)
        for name in ("add", "rsub", "sqrt", "reciprocal", "mul", "neg", "lerp", "div", "addcdiv")
    }
    names |= {"pow": torch.pow, "to_copy": torch.ops.aten._to_copy, "float32": torch.float32}
    names |= {"fma": lambda a, b, c: a * b + c, "copy": lambda old, new: new}
    source = "\n".join([*body, "    return param, exp_avg, exp_avg_sq, step"])
    exec(source, names)
    (dense,) = params((64, 128))
    reference = torch.optim.AdamW([dense], lr=1e-2, foreach=False)
    step = torch.tensor(0.0)
    mine = [dense.detach().clone(), torch.zeros(64, 128), torch.zeros(64, 128)]
    for i in range(3):
        set_grads([dense], i)
        *mine, step = names["update"](mine[0], mine[1], dense.grad, mine[2], step)
        reference.step()
    assert torch.allclose(mine[0], dense.detach(), rtol=1e-5, atol=1e-6)


def test_graph_breaks_have_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = dict(qcompile.explain(optimizer).breaks)

    @functools.partial(torch.compile, backend="qstate")
    def step(x: torch.Tensor) -> None:
        y = model(x)
        print("in the middle")
        y.square().mean().backward()
        optimizer.step()

    step(torch.randn(8, 64))
    report = qcompile.explain(optimizer)
    new = {reason: count for reason, count in report.breaks if before.get(reason) != count}
    line = inspect.getsourcelines(test_graph_breaks_have_their_place)[1]
    (printed,) = [reason for reason in new if "print" in reason]
    assert f"{__file__}:{line + 8}" in printed
    assert any("backward" in reason and f"{__file__}:{line + 9}" in reason for reason in new)
    assert f"graph break, in 1 graph(s): {printed}" in str(report)
    assert capsys.readouterr().out == "in the middle\n"


def test_the_report_as_json(params, train) -> None:
    p = params((64, 128), (8, 8))
    optimizer = torch.optim.AdamW(p, lr=1e-2)
    train(p, torch.compile(optimizer.step, backend="qstate"), steps=1)
    report = qcompile.explain(optimizer)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["version"] == 1
    assert set(found) == {
        "version",
        "states",
        "classes",
        "kernels",
        "graphs",
        "not_one_graph",
        "non_finite",
        "figures",
        "breaks",
        "error_edges",
        "state_bytes",
        "dense_state_bytes",
    }
    assert found["state_bytes"] == report.state_bytes == sum(state["stored_bytes"] for state in found["states"])
    (quantized,) = [k for k in found["kernels"] if k["role"] == "quantized blocks"]
    # fp32 parameter and gradient, one byte for each moment, scales of 2 and 8 bytes per block of 128
    assert quantized["loaded"] == pytest.approx(4 + 4 + 1 + 1 + 10 / 128, abs=0.05)
    assert quantized["stored"] == pytest.approx(4 + 1 + 1 + 10 / 128, abs=0.05)
    assert {state["dtype"] for state in found["states"]} == {"float32"}


def test_a_report_is_sent_to_another_process(params, train, tmp_path) -> None:
    p = params((64, 128), (8, 8))
    optimizer = torch.optim.AdamW(p, lr=1e-2)
    train(p, torch.compile(optimizer.step, backend="qstate"), steps=1)
    report = qcompile.explain(optimizer)
    copy = pickle.loads(pickle.dumps(report))
    assert str(copy) == str(report)
    assert copy.to_dict() == report.to_dict()
    texts = [[path.read_text() for path in r.save_kernels(tmp_path / name)] for name, r in (("a", report), ("b", copy))]
    assert texts[0] == texts[1]
    with pytest.raises(RuntimeError, match="another process"):
        copy.kernels[0].kernel.call([])
