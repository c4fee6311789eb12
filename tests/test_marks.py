"""State of a step that has no optimizer object."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import qcompile
from qcompile.exc import MarkedStateError
from qcompile.runtime.marks import marks
from qcompile.runtime.state import QuantizedState

LR = 1e-2


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    return p - LR * m / (v.sqrt() + 1e-8)


def in_place(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.sub_(m, alpha=LR)


def gradients(steps: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 128, generator=generator) for _ in range(steps)]


def test_a_functional_step(params: Callable[..., list[Tensor]]) -> None:
    start = params((64, 128))[0].detach()
    expected, m, v = start, torch.zeros(64, 128), torch.zeros(64, 128)
    for g in gradients():
        expected = adam(expected, g, m, v)
    state = qcompile.state_like(start, name="m"), qcompile.mark_state(torch.zeros(64, 128), start, name="v")
    step = torch.compile(adam, backend="qstate")
    ours = start
    for g in gradients():
        ours = step(ours, g, *state)
    # the update is stored in 255 levels of at most 3.2, half a level off each step, and carried on by 0.9
    assert (ours - expected).abs().max() <= LR * len(gradients()) * 3.2 / 254 * 10 / 2
    assert all(isinstance(s, QuantizedState) for s in state)
    report = qcompile.explain()
    assert {s.key: (s.sign, s.format) for s in report.states} == {
        "m": ("signed", "update-linear8-signed/128"),
        "v": ("non-negative", "pseudo-log-linear8-unsigned-coordinate/128"),
    }
    assert report.state_bytes <= 0.27 * report.dense_state_bytes


def test_a_parameter_that_is_written_in_place(params: Callable[..., list[Tensor]]) -> None:
    ours, theirs = (p.detach() for p in (*params((64, 128)), *params((64, 128))))
    m, dense = qcompile.state_like(ours), torch.zeros(64, 128)
    begin = theirs.clone()
    step = torch.compile(in_place, backend="qstate")
    for g in gradients():
        step(ours, g, m)
        in_place(theirs, g, dense)
    assert (m - dense).abs().max() <= 0.0071 * 5 * dense.abs().max()  # half a cell of the map, each step
    assert (ours - theirs).norm() <= 0.03 * (theirs - begin).norm()


def test_what_is_small_is_plain() -> None:
    assert type(qcompile.state_like(torch.zeros(10))) is Tensor
    small = torch.ones(10)
    assert qcompile.mark_state(small) is small
    assert isinstance(qcompile.state_like(torch.zeros(512), min_numel=512), QuantizedState)


def test_values_are_kept_and_marks_are_weak() -> None:
    gc.collect()
    before = len(list(marks()))
    dense = torch.randn(64, 128)
    state = qcompile.mark_state(dense)
    assert len(list(marks())) == before + 1
    assert (state - dense).abs().max() <= 0.0071 * dense.abs().max()
    del state
    gc.collect()
    assert len(list(marks())) == before


def test_errors_name_what_was_found() -> None:
    with pytest.raises(MarkedStateError, match=r"torch.int64 with shape \(64, 128\).*mark_state"):
        qcompile.mark_state(torch.zeros(64, 128, dtype=torch.int64))
    with pytest.raises(MarkedStateError, match="without gaps"):
        qcompile.mark_state(torch.zeros(64, 256)[:, ::2])

    def add_up(g: Tensor, total: Tensor) -> None:
        total.add_(g)

    total = qcompile.state_like(torch.zeros(64, 128), name="total")
    with pytest.raises(
        Exception, match=r"'total' was marked as state and cannot be quantized: it adds up without decay"
    ):
        torch.compile(add_up, backend="qstate")(torch.ones(64, 128), total)
    assert float(total.abs().max()) == 0.0  # nothing ran
