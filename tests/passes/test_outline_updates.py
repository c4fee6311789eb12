"""Regions: one per parameter, equal programs with equal keys, and refusal wherever the order could matter."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.optim import Optimizer

from qcompile._compat import copy_of
from qcompile.passes.find_state import find_state
from qcompile.passes.flatten_foreach import flatten_foreach
from qcompile.passes.outline_updates import Outline, outline_updates
from qcompile.passes.thread_writes import thread_writes


class Written(Optimizer):
    """Momentum whose update is given as a function of (parameter, gradient, state)."""

    def __init__(self, params, update) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = update
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self):
        return [self.update(p, p.grad, self.state[p]) for p in self.param_groups[0]["params"]]


def outline(capture, optimizer: Optimizer) -> Outline:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    gm, example_inputs = capture(optimizer.step)
    gm = copy_of(gm)
    flatten_foreach(gm)
    thread_writes(gm)
    return outline_updates(gm, find_state(gm, example_inputs))


def plain(p, g, s) -> None:
    s["m"].mul_(0.9).add_(g)
    p.sub_(s["m"], alpha=0.1)


def test_one_region_per_parameter_and_one_key(capture, params) -> None:
    found = outline(capture, torch.optim.AdamW(params((8, 8), (16, 8), (4,), (2, 3, 4))))
    assert len(found.regions) == 4
    assert len({region.key for region in found.regions}) == 1
    assert not found.refused


def test_key_is_the_readable_program(capture, params) -> None:
    (region,) = outline(capture, Written(params((8, 8)), plain)).regions
    assert_expected_inline(
        region.key,
        """\
%0: state torch.float32 cpu =
%1: input torch.float32 cpu =
%2: param torch.float32 cpu =
%3 = mul_ (('%0', 0.9), {})
%4 = add_ (('%3', '%1'), {})
%5 = sub_ (('%2', '%4'), {'alpha': 0.1})""",
    )


def test_foreach_gives_the_same_regions(capture, params) -> None:
    loop, foreach = (torch.optim.Adagrad(params((8, 8), (16, 8)), foreach=f) for f in (False, True))
    assert len(outline(capture, loop).regions) == len(outline(capture, foreach).regions) == 2


def test_two_constants_two_keys(capture, params) -> None:
    a, b, c = params((8, 8), (16, 8), (4, 4))
    groups = [{"params": [a, b], "weight_decay": 0.1}, {"params": [c], "weight_decay": 0.0}]
    found = outline(capture, torch.optim.AdamW(groups))
    assert len(found.regions) == 3
    assert len({region.key for region in found.regions}) == 2


def test_dtype_is_part_of_the_key(capture, params) -> None:
    mixed = [*params((8, 8)), *params((8, 8), dtype=torch.bfloat16)]
    assert len({region.key for region in outline(capture, torch.optim.AdamW(mixed)).regions}) == 2


def test_what_only_the_update_uses_moves_in(capture, params) -> None:
    def update(p, g, s) -> None:
        g = -g
        g = g.add(p, alpha=0.01)
        plain(p, g, s)

    found = outline(capture, Written(params((8, 8), (4, 4)), update))
    assert len(found.regions) == 2
    for region in found.regions:
        assert [getattr(n.target, "__name__", n.target) for n in region.nodes] == ["neg", "add", "mul_", "add_", "sub_"]


def result_leaves(p, g, s):
    plain(p, g, s)
    return s["m"] + 1


def norm_of_the_new_parameter(p, g, s):
    plain(p, g, s)
    return p.norm()


@pytest.mark.parametrize(
    ("update", "outputs"),
    [(result_leaves, ["add"]), (norm_of_the_new_parameter, ["norm"]), (plain, [])],
)
def test_what_is_read_outside_is_an_output(capture, params, update, outputs: list[str]) -> None:
    """The region then runs in its place: at the end of the graph its result would come too late."""
    found = outline(capture, Written(params((8, 8)), update))
    (region,) = found.regions
    assert not {n.name for n in found.refused} - {"v"}
    assert [getattr(n.target, "__name__", n.target) for n in region.outputs] == outputs
    assert found.in_place == bool(outputs)
    assert region.key.count("return") == len(outputs)


def test_outputs_are_part_of_the_key(capture, params) -> None:
    def one_of_two(p, g, s):
        plain(p, g, s)
        more = s["m"] + 1
        return more if p.shape[0] == 8 else None

    found = outline(capture, Written(params((8, 8), (16, 8)), one_of_two))
    first, second = (region.key for region in found.regions)
    assert first.startswith(second)
    assert first != second


def written_after_it_was_read(p, g, s) -> None:
    plain(p, g, s)
    p.grad.add_(1)


def test_refused_where_order_matters(capture, params) -> None:
    found = outline(capture, Written(params((8, 8)), written_after_it_was_read))
    assert found.regions == ()
    assert any("after its update" in text for text in found.refused.values()), found.refused


def test_shared_state_joins_parameters(capture, params) -> None:
    a, b = params((8, 8), (8, 8))
    optimizer = Written([a, b], plain)
    optimizer.state[b]["m"] = optimizer.state[a]["m"]
    assert len(outline(capture, optimizer).regions) == 1


def test_tied_parameters_are_one_region(capture) -> None:
    shared = nn.Parameter(torch.randn(8, 8))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = Written([shared, shared], plain)
    assert len(outline(capture, optimizer).regions) == 1
