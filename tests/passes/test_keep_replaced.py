"""State that is replaced stays the object it is, and is quantized; what cannot be kept is left as Python has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from conftest import set_grads
from torch import Tensor, nn
from torch.optim import Optimizer

import qcompile
from qcompile._compat import trace_again
from qcompile.runtime.state import QuantizedState

STEPS = 5
RATE = 0.01


class Replacing(Optimizer):
    """`update(param, gradient, state)` puts new tensors into the dict `state`, which begins with zeros under `keys`."""

    def __init__(self, params: list[nn.Parameter], update: Callable[..., None], *keys: str) -> None:
        super().__init__(params, {"lr": RATE})
        self.update = update
        for p in self.param_groups[0]["params"]:
            self.state[p] = {key: torch.zeros_like(p.detach()) for key in keys}

    def step(self) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                self.update(p, p.grad, self.state[p])


def averaged(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    s["m"] = 0.9 * s["m"] + 0.1 * g
    p.sub_(s["m"], alpha=RATE)


def kept_too(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    """The old tensor is still wanted, under another name."""
    s["last"] = s["m"]
    s["m"] = 0.9 * s["m"] + 0.1 * g
    p.sub_(s["m"] + 0.5 * s["last"], alpha=RATE)


def kept_too_afterwards(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    old = s["m"]
    s["m"] = 0.9 * old + 0.1 * g
    s["last"] = old
    p.sub_(s["m"] + 0.5 * s["last"], alpha=RATE)


def two_places(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    """One new tensor under two names, one of which is then changed in place: they are one tensor."""
    new = 0.9 * s["m"] + 0.1 * g
    s["m"] = new
    s["last"] = new
    s["m"].mul_(0.5)
    p.sub_(s["m"] + s["last"], alpha=RATE)


def swapped(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    """Two names change their tensors."""
    s["m"], s["last"] = 0.5 * s["last"] + 0.1 * g, s["m"]
    p.sub_(s["m"] + 0.5 * s["last"], alpha=RATE)


def other_dtype(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    s["m"] = (0.9 * s["m"] + 0.1 * g).double()
    p.sub_(s["m"].float(), alpha=RATE)


def other_shape(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    s["m"] = (0.9 * s["m"].reshape(g.shape) + 0.1 * g).reshape(-1)
    p.sub_(s["m"].reshape(g.shape), alpha=RATE)


def the_gradient_itself(p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
    """What is stored is no new tensor but the gradient, which is another one in the next step."""
    p.sub_(g - 0.5 * s["m"], alpha=RATE)
    s["m"] = g


def compiled(optimizer: Optimizer, **options: Any) -> Callable[[], Any]:
    chosen = {"min_numel": 0, "block_size": 64, **options}
    return torch.compile(optimizer.step, backend="qstate", options=chosen)


def dense(value: Tensor) -> Tensor:
    return value.dequantize() if isinstance(value, QuantizedState) else value


def test_the_object_stays(params) -> None:
    """The same `QuantizedState` after every step, eager's numbers, and nothing compiled after the third step."""
    ours, theirs = params((64, 64), (32, 64)), params((64, 64), (32, 64))
    optimizer, reference = Replacing(ours, averaged, "m"), Replacing(theirs, averaged, "m")
    step = compiled(optimizer)
    objects, graphs = [], []
    for i in range(STEPS):
        set_grads(ours, i)
        set_grads(theirs, i)
        step()
        reference.step()
        objects.append([optimizer.state[p]["m"] for p in ours])
        graphs.append(qcompile.explain(optimizer).graphs)
    assert all(isinstance(state, QuantizedState) for state in objects[0])
    assert all(now is first for later in objects[1:] for now, first in zip(later, objects[0], strict=True))
    assert graphs[2:] == [graphs[2]] * (STEPS - 2), graphs
    for p, q in zip(ours, theirs, strict=True):
        expected = reference.state[q]["m"]
        # What 4 stores that are read again have put in, 0.9 + 0.9**2 + ..., and the last one, at half a cell each.
        cell = 0.0071 * float(expected.abs().max()) * 1.5  # the largest was larger in some steps
        assert (dense(optimizer.state[p]["m"]) - expected).abs().max() <= 4.1 * cell
        assert (p - q).abs().max() <= RATE * (4 + 3 + 2 + 1) * cell


def test_what_the_codes_hold_follows_the_update(params) -> None:
    """The object is kept, not its values."""
    (p,) = params((64, 64))
    optimizer = Replacing([p], averaged, "m")
    step = compiled(optimizer)
    values = []
    for i in range(3):
        set_grads([p], i)
        step()
        values.append(optimizer.state[p]["m"].dequantize())
    assert values[0].abs().max() > 0
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[1], values[2])


def test_dense_recipe_gives_what_eager_gives(params) -> None:
    ours, theirs = params((64, 64)), params((64, 64))
    optimizer, reference = Replacing(ours, averaged, "m"), Replacing(theirs, averaged, "m")
    step = compiled(optimizer, recipe="dense")
    for i in range(STEPS):
        set_grads(ours, i)
        set_grads(theirs, i)
        step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.state[ours[0]], reference.state[theirs[0]], rtol=1e-6, atol=1e-6)


NOT_KEPT: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "kept too": (kept_too, ("m", "last")),
    "kept too, afterwards": (kept_too_afterwards, ("m", "last")),
    "two places": (two_places, ("m", "last")),
    "swapped": (swapped, ("m", "last")),
    "other dtype": (other_dtype, ("m",)),
    "other shape": (other_shape, ("m",)),
    "the gradient itself": (the_gradient_itself, ("m",)),
}


def test_a_changed_shape_is_traced_few_times(params, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more for the shape, once more for the conversion."""
    reasons = []

    def counted(reason: str) -> None:
        reasons.append(reason)
        trace_again(reason)

    monkeypatch.setattr("qcompile.backend.trace_again", counted)
    ours = params((64, 64))
    step = compiled(Replacing(ours, other_shape, "m"), recipe="dense")
    for i in range(3):
        set_grads(ours, i)
        step()
    assert len(reasons) <= 3, f"{len(reasons)} times, first {reasons[0]!r}"


@pytest.mark.parametrize("name", list(NOT_KEPT))
def test_what_cannot_be_kept_is_as_in_eager(params, name: str) -> None:
    """Quantized or not, the parameter goes where eager's goes, to the error of 8 bits, and state has eager's type."""
    update, keys = NOT_KEPT[name]
    ours, theirs = params((64, 64)), params((64, 64))
    optimizer, reference = Replacing(ours, update, *keys), Replacing(theirs, update, *keys)
    step = compiled(optimizer)
    begin = theirs[0].detach().clone()
    graphs = []
    for i in range(STEPS):
        set_grads(ours, i)
        set_grads(theirs, i)
        step()
        reference.step()
        graphs.append(qcompile.explain(optimizer).graphs)
        for key in keys:
            got, expected = optimizer.state[ours[0]][key], reference.state[theirs[0]][key]
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert (dense(got) - expected).abs().max() <= 0.05 * expected.abs().max()
    moved = (theirs[0] - begin).abs().max()
    # Half a cell of each of the (at most two) states per step, in parts of the largest.
    assert (ours[0] - theirs[0]).abs().max() <= 4 * 0.0071 * 2 * moved
    assert graphs[-1] == graphs[-2], graphs
    if name in ("two places", "the gradient itself"):
        same = {
            key: any(optimizer.state[ours[0]][key] is t for t in (ours[0].grad, *without(key, optimizer, ours[0])))
            for key in keys
        }
        eager = {
            key: any(
                reference.state[theirs[0]][key] is t for t in (theirs[0].grad, *without(key, reference, theirs[0]))
            )
            for key in keys
        }
        assert same == eager


def without(key: str, optimizer: Optimizer, p: Tensor) -> list[Tensor]:
    return [value for other, value in optimizer.state[p].items() if other != key]


class Flat(Optimizer):
    """All momentum in one buffer, which is replaced: state that belongs to no parameter."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": RATE})
        self.flat = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))

    def step(self) -> None:
        with torch.no_grad():
            params = self.param_groups[0]["params"]
            self.flat = 0.9 * self.flat + 0.1 * torch.cat([p.grad.reshape(-1) for p in params])
            start = 0
            for p in params:
                p.sub_(self.flat[start : start + p.numel()].view(p.shape), alpha=RATE)
                start += p.numel()


@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "optimizer.step"])
def test_an_attribute_of_the_optimizer_is_kept(whole: bool) -> None:
    """Under `torch.compile(optimizer.step)` Dynamo itself loses what is assigned to an optimizer, with other backends."""
    options = {"min_numel": 0, "block_size": 64}
    runs = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = Flat(model.parameters())

        update = optimizer.step
        if ours and not whole:
            update = torch.compile(optimizer.step, backend="qstate", options=options)

        def step(
            x: Tensor, model: nn.Module = model, optimizer: Flat = optimizer, update: Callable[[], None] = update
        ) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss.detach()

        run = qcompile.train_step(step, **options) if ours and whole else step
        values = []
        for i in range(4):
            run(torch.randn(16, 64, generator=torch.Generator().manual_seed(i)))
            values.append((optimizer.flat, dense(optimizer.flat).clone()))
        runs.append(values)
    assert isinstance(runs[0][-1][0], QuantizedState)
    assert runs[0][1][0] is runs[0][3][0]
    largest = max(value.abs().max() for _, value in runs[1])
    for (_, got), (_, expected) in zip(*runs, strict=True):
        assert (got - expected).abs().max() <= 3.5 * 0.0071 * largest
