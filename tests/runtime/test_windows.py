"""Slices of a state: what is read through them, what is written through them, and one state copied into another."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qcompile.recipes import RECIPES
from qcompile.runtime.formats import Format
from qcompile.runtime.operators import Window
from qcompile.runtime.state import QuantizedState, same_values

EIGHT = Format(True, 8, "dynamic", block_size=64)
SLICES = {
    "whole blocks": (slice(2, 6),),
    "to the end": (slice(6, None),),
    "cuts blocks": (slice(1, 4),),
    "columns": (slice(None), slice(3, 17)),
    "both": (slice(2, 5), slice(8, 9)),
    "every other row": (slice(0, 8, 2),),
    "nothing": (slice(4, 4),),
    "negative": (slice(-3, -1),),
}


def state_of(fmt: Format, shape: tuple[int, ...] = (9, 32), partner: QuantizedState | None = None) -> QuantizedState:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return QuantizedState.quantize(values if fmt.signed else values.abs(), fmt, key=5, partner=partner)


def pair(shape: tuple[int, ...] = (8, 32)) -> tuple[QuantizedState, QuantizedState]:
    recipe = RECIPES["8bit"]
    assert recipe.first is not None
    assert recipe.second is not None
    first, second = (Format(**{**vars_of(f), "block_size": 32}) for f in (recipe.first, recipe.second))
    held = state_of(second, shape)
    return state_of(first, shape, held), held


def vars_of(fmt: Format) -> dict[str, object]:
    return {name: getattr(fmt, name) for name in fmt.__dataclass_fields__}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_reads_as_that_of_the_values(name: str) -> None:
    state = state_of(EIGHT)
    window = state[SLICES[name]]
    expected = state.dequantize()[SLICES[name]]
    assert torch.equal(window + 0, expected)
    assert window.shape == expected.shape
    assert isinstance(state[2:6], QuantizedState)
    assert isinstance(state[1:4], Window)


@pytest.mark.parametrize("name", [name for name in SLICES if name != "every other row"])
@pytest.mark.parametrize("detached", [False, True])
def test_what_is_written_to_a_slice_is_stored(name: str, detached: bool) -> None:
    state = state_of(EIGHT)
    before = state.dequantize()
    window = state[SLICES[name]].detach() if detached else state[SLICES[name]]
    window.copy_(torch.full(window.shape, 0.25))
    after = state.dequantize()
    assert torch.allclose(after[SLICES[name]], torch.tensor(0.25), rtol=0.05)
    rest = torch.ones(state.shape, dtype=torch.bool)
    rest[SLICES[name]] = False
    assert torch.allclose(after[rest], before[rest], rtol=0.05, atol=0.03)
    touched = ~rest.flatten()[:256].view(-1, 64).all(1)
    own = ~touched.repeat_interleave(64)
    assert torch.equal(after.flatten()[: own.numel()][own], before.flatten()[: own.numel()][own]), (
        "an untouched block changed"
    )


def test_a_slice_of_a_slice() -> None:
    state = state_of(EIGHT)
    assert torch.equal(state[2:8][2:4] + 0, state.dequantize()[4:6])
    assert torch.equal(state[1:8][1:4, 3:9] + 0, state.dequantize()[2:5, 3:9])
    state[2:8][2:3].zero_()
    assert not state.dequantize()[4].any()
    state[1:8][0:1].zero_()
    assert not state.dequantize()[1].any()


def test_a_second_moment_that_is_written_in_part_leaves_the_first_as_it_was() -> None:
    first, second = pair()
    before = first.dequantize()
    second[2:4].mul_(16.0)
    assert (first.dequantize() - before).abs().max() < 0.02 * before.abs().max()


def test_a_copy_takes_codes_and_format() -> None:
    """Bit for bit, with the second moment that they are relative to, whatever the other was stored in before."""
    first, second = pair()
    for model in (first, second):
        other = QuantizedState.zeros_like(torch.empty(8, 32), EIGHT)
        other.copy_(model)
        assert same_values(other, model)
        if model.partner is not None:
            assert same_values(other.partner, model.partner)
            assert other.partner is not model.partner
        assert torch.equal(other.dequantize(), model.dequantize())


@pytest.mark.parametrize("order", list(itertools.permutations(["first", "second"])))
def test_parts_make_up_the_whole(order: tuple[str, str]) -> None:
    """As `torch.distributed.checkpoint` loads: part by part, moment after moment, into state in another format."""
    saved = dict(zip(("first", "second"), pair(), strict=True))
    loaded = {name: QuantizedState.zeros_like(torch.empty(8, 32), EIGHT) for name in saved}
    for name in order:
        for rows in (slice(0, 3), slice(3, 8)):
            loaded[name][rows].detach().copy_(saved[name][rows])
    for name, state in saved.items():
        assert same_values(loaded[name], state), name


def test_parts_that_are_no_whole_blocks() -> None:
    first, second = pair((300,))
    targets = [QuantizedState.zeros_like(torch.empty(300), EIGHT) for _ in range(2)]
    for rows in (slice(0, 77), slice(77, 250), slice(250, 300)):
        for target, state in zip(targets, (first, second), strict=True):
            target[rows].copy_(state[rows])
    for target, state in zip(targets, (first, second), strict=True):
        assert target.format == state.format
        assert torch.allclose(target.dequantize(), state.dequantize(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 8)])
def test_a_state_with_values_keeps_its_format(rows: slice) -> None:
    """Its other rows cannot be stored otherwise without a loss, and a compiled step may know how it is stored."""
    state, other = state_of(EIGHT, (8, 32)), state_of(Format(True, 4, "linear", block_size=32), (8, 32))
    before: Tensor = state.dequantize()
    state[rows].copy_(other[rows])
    assert state.format == EIGHT
    assert torch.equal(state.dequantize()[rows.stop :], before[rows.stop :])
    assert torch.allclose(state.dequantize()[rows], other.dequantize()[rows], rtol=0.05, atol=0.02)
