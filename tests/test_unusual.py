"""What cannot or should not be quantized, bad numbers, unusual tensors, and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcompile
from qcompile.runtime.state import QuantizedState


def compiled(optimizer: torch.optim.Optimizer, **options: Any) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend="qstate", options=options or None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "16bit"}, "unknown recipe '16bit'; recipes are '8bit', '5bit', '4bit'"),
        ({"bits": 8}, "unknown option 'bits'; options are block_size, inductor, late_params, min_numel, overrides"),
        ({"train_steps": 0}, "option train_steps=0: train_steps must be a whole number of steps, 1 or more"),
        ({"seed": 1.5}, "option seed=1.5: seed must be a whole number"),
        ({"late_params": 3}, "option late_params=3: late_params must be a glob"),
        ({"overrides": "dense"}, "option overrides='dense': overrides must be a dict from parameters to formats"),
        ({"overrides": {"*": "7bit"}}, "option overrides='7bit': overrides must be a Format or one of '8bit'"),
        ({"block_size": 100}, "option block_size=100: block_size must be a power of two from 32 to 4096"),
        ({"block_size": 16}, "a power of two from 32 to 4096"),
        ({"block_size": 8192}, "a power of two from 32 to 4096"),
        ({"min_numel": -1}, "option min_numel=-1"),
        ({"strict": "yes"}, "option strict='yes': strict must be True or False"),
        ({"inductor": 3}, "option inductor=3"),
    ],
)
def test_wrong_options(params, options: dict[str, Any], message: str) -> None:
    with pytest.raises(qcompile.QCompileError) as error:
        qcompile.train_step(**options)(lambda: None)
    assert message in str(error.value)
    optimizer = torch.optim.AdamW(params((64, 64)))
    optimizer.param_groups[0]["params"][0].grad = torch.randn(64, 64)
    with pytest.raises(Exception, match=r"option|recipe") as error:
        compiled(optimizer, **options)()
    assert message in str(error.value)
    assert not optimizer.state[optimizer.param_groups[0]["params"][0]], "a wrong option touched the state"


Made = tuple[list[nn.Parameter], torch.optim.Optimizer, Callable[[], Any], Callable[[], Any]]


def run_both(make: Callable[[], Made], reference: str | None = None, steps: int = 3):
    """The same steps without us and compiled; gives both parameter lists and the compiled run's optimizer.

    `make` gives parameters, their optimizer, what makes gradients eagerly, and the step.
    """
    results = []
    for backend in (reference, "qstate"):
        torch._dynamo.reset()
        params, optimizer, gradients, step = make()
        run = step if backend is None else torch.compile(step, backend=backend)
        torch.manual_seed(3)
        for _ in range(steps):
            gradients()
            run()
        results.append(params)
    return results[0], results[1], optimizer


def test_sparse_gradient_runs_dense_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Made:
        torch.manual_seed(0)
        embedding = nn.Embedding(100, 64, sparse=True)
        optimizer = torch.optim.Adagrad(embedding.parameters())

        def gradients() -> None:
            optimizer.zero_grad()
            embedding(torch.randint(0, 100, (32,))).square().mean().backward()

        return list(embedding.parameters()), optimizer, gradients, optimizer.step

    with caplog.at_level(logging.WARNING, "qcompile"):
        eager, ours, optimizer = run_both(make)
    torch.testing.assert_close(ours, eager)
    (state,) = (s for s in qcompile.explain(optimizer).states if s.key == "sum")
    assert state.reason == "a gradient is sparse, and torch does not compile sparse updates"
    assert len([r for r in caplog.records if "runs dense" in r.message]) == 1, "warned not exactly once"


def test_lbfgs_runs_dense_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Made:
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=3)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (layer(x) - x).square().mean()
            loss.backward()
            return loss

        return list(layer.parameters()), optimizer, closure, lambda: optimizer.step(closure)

    with caplog.at_level(logging.WARNING, "qcompile"):
        eager, ours, optimizer = run_both(make)
    torch.testing.assert_close(ours, eager)
    reasons = {s.reason for s in qcompile.explain(optimizer).states if s.shape}
    assert reasons == {"torch does not compile LBFGS.step"}
    assert len([r for r in caplog.records if "LBFGS.step was compiled" in r.message]) == 1


STAYS_DENSE = {
    "complex": (torch.complex64, lambda p: torch.optim.AdamW(p), "it is complex"),
    "centered": (torch.float32, lambda p: torch.optim.RMSprop(p, centered=True), "square_avg - grad_avg**2 >= 0"),
}


@pytest.mark.parametrize("kind", list(STAYS_DENSE))
def test_what_stays_dense_is_inductors_and_has_its_reason(kind: str) -> None:
    dtype, new, reason = STAYS_DENSE[kind]

    def make() -> Made:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 64, dtype=dtype))
        optimizer = new([p])

        def gradients() -> None:
            p.grad = torch.randn_like(p)

        return [p], optimizer, gradients, optimizer.step

    theirs, ours, optimizer = run_both(make, "inductor")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    states = [s for s in qcompile.explain(optimizer).states if s.shape]
    assert states
    assert all(s.format == "dense" and reason in s.reason for s in states), states


def test_strict_refuses_before_anything_is_converted() -> None:
    """Both buffers whose difference has a root taken; the momentum beside them could be quantized, and is not."""
    p = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.RMSprop([p], lr=0.01, centered=True, momentum=0.9)
    p.grad = torch.randn_like(p)
    before = p.detach().clone()
    with pytest.raises(Exception, match=r"strict=True, and 2 state buffer\(s\) would stay dense") as error:
        compiled(optimizer, strict=True)()
    for found in ("square_avg", "grad_avg", "the update needs square_avg - grad_avg**2 >= 0, which rounding can break"):
        assert found in str(error.value)
    assert torch.equal(p, before)
    assert not optimizer.state[p]["momentum_buffer"].any()


def test_strict_accepts_an_update_that_mixes_elements() -> None:
    p = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.Muon([p], lr=0.01, ns_steps=1)
    p.grad = torch.randn_like(p)
    compiled(optimizer, strict=True)()
    assert isinstance(optimizer.state[p]["momentum_buffer"], QuantizedState)


def test_the_first_update_counts_where_each_parameter_is_a_frame_of_its_own() -> None:
    """The frame's own variable is the dense state, which has just been replaced in the optimizer.

    Dynamo compiles such frames where it skips the step itself, because it breaks in a loop.
    """

    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.mul_(0.9).add_(g)
        p.sub_(m, alpha=0.01)

    class Skipped(torch.optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params, {})
            for p in self.param_groups[0]["params"]:
                self.state[p]["m"] = torch.zeros_like(p)

        @torch.no_grad()
        def step(self) -> None:
            for p in self.param_groups[0]["params"]:
                torch._dynamo.graph_break()
                update(p, p.grad, self.state[p]["m"])

    p = nn.Parameter(torch.randn(64, 64))
    optimizer = Skipped([p])
    step = compiled(optimizer)
    p.grad = torch.randn_like(p)
    step()
    first = optimizer.state[p]["m"]
    assert isinstance(first, QuantizedState)
    assert (first - p.grad).abs().max() <= 0.0071 * p.grad.abs().max()
    step()
    assert (optimizer.state[p]["m"] - 1.9 * p.grad).abs().max() <= 2 * 0.0071 * 1.9 * p.grad.abs().max()


def test_strict_accepts_what_is_small_by_choice(params) -> None:
    p = params((64, 64), (10,))
    optimizer = torch.optim.AdamW(p)
    for q in p:
        q.grad = torch.randn_like(q)
    compiled(optimizer, strict=True)()
    assert isinstance(optimizer.state[p[0]]["exp_avg"], QuantizedState)


def test_strict_refuses_a_step_that_runs_dense() -> None:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.LBFGS(layer.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 64)).square().mean()
        loss.backward()
        return loss

    @qcompile.train_step(strict=True)
    def step() -> Tensor:
        closure()
        return optimizer.step(closure)

    with pytest.raises(qcompile.NotQuantizedError, match="torch does not compile LBFGS"):
        step()


def test_a_graph_without_state_is_inductors(params, train, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile import backend

    def forbidden(*args: Any) -> Any:
        raise AssertionError("the passes ran on a graph without state")

    monkeypatch.setattr(backend, "compile_updates", forbidden)
    ours, theirs = params((64, 64)), params((64, 64))
    a = train(ours, torch.compile(torch.optim.SGD(ours, lr=0.1).step, backend="qstate"), 2)
    torch._dynamo.reset()
    b = train(theirs, torch.compile(torch.optim.SGD(theirs, lr=0.1).step, backend="inductor"), 2)
    assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_bad_gradient_element_harms_itself_alone(params, train, bad: float) -> None:
    """As in fp32: the other elements of the block go on as if it were not there."""
    ours, clean = params((64, 64)), params((64, 64))
    for i, p in enumerate((ours[0], clean[0])):
        optimizer = torch.optim.AdamW([p], lr=1e-3)
        step = compiled(optimizer)
        for t in range(4):
            p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(t))
            p.grad[0, 0] = bad if i == 0 and t == 1 else 0.0
            step()
    others = torch.ones(64, 64, dtype=torch.bool)
    others[0, 0] = False
    assert torch.equal(ours[0][others], clean[0][others])
    assert not torch.isfinite(ours[0][0, 0])


def test_zero_gradients_never_drift(params) -> None:
    (p,) = params((64, 64))
    before = p.detach().clone()
    optimizer = torch.optim.AdamW([p], lr=1e-2, weight_decay=0.0)
    step = compiled(optimizer)
    for t in range(50):
        p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(t))
        p.grad[:, ::2] = 0
        step()
    assert torch.equal(p[:, ::2], before[:, ::2])
    assert (p[:, 1::2] != before[:, 1::2]).all()


@pytest.mark.parametrize("ratio", [1e-2, 3e-4, 1e-5, 1e-6])
def test_small_second_moments_do_not_explode(ratio: float) -> None:
    """Every 128th gradient is 1, the others `ratio`, then 0: no element moves by more than 3 lr in a step."""
    lr = 1e-3
    p = nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.AdamW([p], lr=lr, weight_decay=0.0)
    step = compiled(optimizer)
    gradient = torch.full((4096,), ratio)
    gradient[::128] = 1.0
    largest = 0.0
    for t in range(300):
        p.grad = gradient if t < 200 else torch.where(gradient == 1, gradient, 0.0)
        before = p.detach().clone()
        step()
        largest = max(largest, float((p - before).abs().max()))
    assert largest <= 3 * lr


LAYOUTS = {
    "transposed parameter": lambda: (torch.randn(64, 72).t(), lambda g: g),
    "channels_last": lambda: (torch.randn(16, 16, 4, 4).to(memory_format=torch.channels_last), lambda g: g),
    "transposed gradient": lambda: (torch.randn(64, 72), lambda g: g.t().contiguous().t()),
    "strided gradient": lambda: (torch.randn(64, 72), lambda g: torch.cat([g, g], 1)[:, :72]),
    "parameter with gaps": lambda: (torch.randn(64, 100)[:, :72], lambda g: g),
    "expanded gradient": lambda: (torch.randn(64, 72), lambda g: g[:1].expand(64, 72)),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts_change_nothing_by_value(name: str) -> None:
    """Against the same numbers in row-major tensors; element order inside blocks may differ, so to the format's error."""
    torch.manual_seed(0)
    values, lay = LAYOUTS[name]()
    strange = nn.Parameter(values)
    assert strange.stride() == values.stride()
    plain = nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
    for p, layout in ((strange, lay), (plain, lambda g: g)):
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        step = compiled(optimizer)
        for t in range(3):
            gradient = torch.randn(values.shape, generator=torch.Generator().manual_seed(t))
            if name == "expanded gradient":
                gradient = gradient[:1].expand(64, 72).clone()
            p.grad = layout(gradient)
            step()
        assert isinstance(optimizer.state[p]["momentum_buffer"], QuantizedState)
    assert strange.stride() == values.stride()
    # Each run stores twice before the last use: lr * (0.9 + 0.9**2 + 0.9) times half a cell of the largest momentum, 8.
    assert (strange - plain).abs().max() <= 2 * 0.1 * 2.61 * (0.9 / 128) * 8


def test_empty_and_scalar_parameters_beside_normal_ones(params, train) -> None:
    shapes = ((0,), (0, 128), (), (1,), (64, 64))
    ours, theirs = params(*shapes), params(*shapes)
    a = train(ours, compiled(torch.optim.AdamW(ours, lr=1e-3)), 3)
    b = train(theirs, torch.optim.AdamW(theirs, lr=1e-3).step, 3)
    for x, y in zip(a[:4], b[:4], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert (a[4] - b[4]).abs().max() < 1e-3


def test_all_gradients_missing_then_present(params, train) -> None:
    ours = params((64, 64))
    optimizer = torch.optim.AdamW(ours)
    step = compiled(optimizer)
    before = ours[0].detach().clone()
    step()
    assert torch.equal(ours[0], before)
    train(ours, step, 1)
    assert isinstance(optimizer.state[ours[0]]["exp_avg"], QuantizedState)


def test_state_dict_keys_and_hyperparameters_are_the_users(params, train) -> None:
    ours, theirs = params((64, 64)), params((64, 64))
    optimizer, reference = torch.optim.AdamW(ours, foreach=True), torch.optim.AdamW(theirs, foreach=True)
    train(ours, compiled(optimizer), 2)
    train(theirs, reference.step, 2)
    got, expected = optimizer.state_dict(), reference.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert {k: set(v) for k, v in got["state"].items()} == {k: set(v) for k, v in expected["state"].items()}
    assert set(vars(optimizer)) == set(vars(reference)), "an attribute was left on the user's optimizer"


def test_reload_of_a_state_dict_resumes(params, train) -> None:
    import copy

    ours, theirs = params((64, 64)), params((64, 64))
    optimizer = torch.optim.AdamW(ours, lr=1e-3)
    train(ours, compiled(optimizer), 2)
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        theirs[0].copy_(ours[0])
    other = torch.optim.AdamW(theirs, lr=1e-3)
    other.load_state_dict(saved)
    assert torch.equal(other.state[theirs[0]]["exp_avg"].codes, optimizer.state[ours[0]]["exp_avg"].codes)
    a, b = train(ours, compiled(optimizer), 2), train(theirs, compiled(other), 2)
    assert torch.equal(a[0], b[0])


def test_a_failing_compiler_leaves_the_optimizer_usable(params, train, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile.passes import pipeline

    def broken(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    ours = params((64, 64))
    optimizer = torch.optim.AdamW(ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "lower", broken)
        patch.setattr(pipeline, "_KERNELS", {})
        with pytest.raises(Exception, match="no compiler"):
            train(ours, compiled(optimizer), 1)
    torch._dynamo.reset()
    train(ours, compiled(optimizer), 2)
    assert float(optimizer.state[ours[0]]["step"]) == 2
    assert optimizer.param_groups[0]["foreach"] is None
