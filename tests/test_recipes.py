"""Recipes: what they cost, what they promise, the switch to stochastic rounding, and overrides by parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcompile
from qcompile.__main__ import main
from qcompile.analysis import Moments
from qcompile.exc import FormatMismatchError, UnmatchedOverrideError
from qcompile.overrides import Override
from qcompile.recipes import RECIPES
from qcompile.runtime.state import QuantizedState

# bytes per parameter for AdamW: the limits
MOST_BYTES = {"8bit": 2.07, "5bit": 1.35, "4bit": 1.10, "zip-sr": 1.0626, "ze-eden": 1.0625, "dettmers-8bit": 2.004}
SAFE = ("8bit", "5bit", "4bit", "ze-eden", "dettmers-8bit", "unbiased-8bit")


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.quantized])
def test_bytes_are_those_of_the_storage(name: str) -> None:
    recipe, dense = RECIPES[name], torch.empty(1024, 1024)
    v = QuantizedState.zeros_like(dense, recipe.second)
    m = QuantizedState.zeros_like(dense, recipe.first, partner=v if recipe.first.partner else None)
    counters = sum(s.counter.nbytes for s in (m, v) if s.counter is not None)
    stored = m.stored_bytes + v.stored_bytes
    assert stored - counters == recipe.bytes_per_parameter() * dense.numel()
    assert stored <= MOST_BYTES.get(name, 2.2) * dense.numel()


def test_the_command_prints_every_recipe_and_its_marks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes"])
    out = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert f"{recipe.bytes_per_parameter():.4f}" in line
        assert recipe.source in line
    assert "zip-sr: second moment: a positive value can become 0" in out
    assert "\n4bit: " not in out
    with pytest.raises(SystemExit):
        main(["no-such-command"])


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("small", [1e-2, 3e-4, 1e-6])
def test_no_step_explodes_where_small_gradients_stand_among_large_ones(name: str, small: float) -> None:
    """4,096 values, every 128th gradient 1, the others small and at last 0 (field.md, finding 1): at most 3 lr a step."""
    first, second = RECIPES[name].first, RECIPES[name].second
    gradient = torch.full((4096,), small)
    gradient[::128] = 1.0
    gradient = gradient.view(-1, first.block_size)
    is_small = gradient != 1.0
    moments = Moments(gradient, first, second, 0.9, 0.999, 1e-8)
    largest = 0.0
    for step in range(300):
        if step == 200:
            gradient = torch.where(is_small, 0.0, gradient)
        largest = max(largest, float(moments.update(gradient)[is_small].abs().max()))
    assert largest <= 3.0


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128, bias=False), nn.LayerNorm(128), nn.Linear(128, 64, bias=False))


def run(model: nn.Module, steps: int, **options: Any) -> tuple[torch.optim.Optimizer, list[list[Tensor]]]:
    """Steps on fixed gradients; codes of the two first moments after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(optimizer.step, backend="qstate", options=options)
    seen = []
    weights = [m.weight for m in model if isinstance(m, nn.Linear)]
    for i in range(steps):
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        step()
        seen.append([optimizer.state[w]["exp_avg"].codes.clone() for w in weights])
    return optimizer, seen


def test_the_last_linear_layer_is_rounded_stochastically_at_the_end() -> None:
    """From store round(0.9 * 5) = 4 on, so the fifth; without a recompilation."""
    _, plain = run(two_layers(), 5, recipe="ze-eden")
    torch._dynamo.reset()
    optimizer, late = run(two_layers(), 5, recipe="ze-eden", train_steps=5)
    assert qcompile.explain(optimizer).graphs == 1
    for i in range(4):
        assert torch.equal(late[i][1], plain[i][1]), f"step {i} is nearest"
    assert not torch.equal(late[4][1], plain[4][1])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(late, plain, strict=True)), "other layers stay nearest"
    torch._dynamo.reset()
    _, again = run(two_layers(), 5, recipe="ze-eden", train_steps=5)
    assert torch.equal(again[4][1], late[4][1]), "same seed, same bits"
    torch._dynamo.reset()
    _, other = run(two_layers(), 5, recipe="ze-eden", train_steps=5, seed=1)
    assert not torch.equal(other[4][1], late[4][1])


@pytest.fixture
def formats(capture: Any, analyse: Any) -> Callable[..., dict[tuple[int, str], Any]]:
    """Formats by (place of the parameter, key) that a model's AdamW would get; None is dense."""

    def find(model: nn.Module, **options: Any) -> dict[tuple[int, str], Any]:
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        compiled = analyse(*capture(optimizer.step), min_numel=64, block_size=32, **options)
        plans = [plan for group in compiled.classes for item in group.regions for plan in item.plans.values()]
        where = {id(p): i for i, p in enumerate(params)}
        return {(where[id(plan.slot.param)], plan.slot.key): plan.format for plan in plans}

    return find


@pytest.mark.parametrize(
    "params",
    ["2.*", re.compile(r"^2\."), lambda name, p: name.startswith("2") and p.dim() == 2],
    ids=["glob", "regex", "predicate"],
)
def test_overrides_by_name(formats: Any, params: Any) -> None:
    found = formats(two_layers(), overrides={params: "dense"})
    assert found[3, "exp_avg"] is None
    assert found[0, "exp_avg"].coordinate == "update"


def test_overrides_by_module_type_and_key(formats: Any) -> None:
    plain = replace(RECIPES["torchao-8bit"].first, block_size=64)
    overrides = [Override(nn.LayerNorm, "dense"), Override(nn.Linear, plain, state="exp_avg")]
    found = formats(two_layers(), overrides=overrides)
    assert found[1, "exp_avg"] is found[2, "exp_avg_sq"] is None
    assert found[0, "exp_avg"].codebook == "dynamic"
    assert found[0, "exp_avg_sq"].coordinate == "pseudo-log"


def test_of_several_overrides_the_last_one_counts(formats: Any) -> None:
    found = formats(two_layers(), overrides={"*": "dense", "0.weight": "4bit"})
    assert found[0, "exp_avg"].bits == 4
    assert found[3, "exp_avg"] is None


def test_a_first_moment_whose_partner_is_dense_is_stored_by_itself(formats: Any) -> None:
    found = formats(two_layers(), overrides=[Override("*", "dense", state="exp_avg_sq")])
    assert found[0, "exp_avg"] == replace(RECIPES["8bit"].signed, block_size=32)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (Override("2.wieght", "dense"), r"override 2\.wieght .* matches no parameter; there are '2\.weight'"),
        (Override(nn.Conv2d, "dense"), r"override Conv2d .* matches no parameter; there are 'LayerNorm', 'Linear'"),
        (Override("*", "dense", state="exp_avgs"), r"matches no state; there are 'exp_avg', 'exp_avg_sq', 'step'"),
    ],
)
def test_an_override_that_matches_nothing(formats: Any, override: Override, message: str) -> None:
    with pytest.raises(UnmatchedOverrideError, match=message):
        formats(two_layers(), overrides=[override])


def test_a_format_that_the_state_cannot_take(formats: Any) -> None:
    with pytest.raises(
        FormatMismatchError, match=r"state 'exp_avg' of a parameter of shape \(128, 64\) .* may be negative"
    ):
        formats(two_layers(), overrides=[Override("0.*", RECIPES["4bit"].second, state="exp_avg")])
    alone = [Override("0.*", RECIPES["8bit"].first, state="exp_avg"), Override("0.*", "dense", state="exp_avg_sq")]
    with pytest.raises(FormatMismatchError, match="no quantized second moment divides it"):
        formats(two_layers(), overrides=alone)


def test_the_order_of_options_model_and_optimizer_does_not_matter() -> None:
    """Options and step function first, then model and optimizer, seen through a wrapper; the dense state is exact from the start."""
    held: list[Any] = []

    @qcompile.train_step(recipe="torchao-8bit", min_numel=64, overrides={"2.*": "dense"}, one_graph=False)
    def step(x: Tensor) -> Tensor:
        model, optimizer = held
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    inner = two_layers()
    model = torch.compile(inner, backend="eager")
    held += [model, torch.optim.AdamW(model.parameters(), lr=1e-3)]
    for i in range(2):
        step(torch.randn(8, 64, generator=torch.Generator().manual_seed(i)))
    state = held[1].state
    assert isinstance(state[inner[0].weight]["exp_avg"], QuantizedState)
    assert type(state[inner[2].weight]["exp_avg"]) is Tensor


def test_what_a_format_does_not_promise_is_in_the_report() -> None:
    model = two_layers()
    optimizer, _ = run(model, 1, recipe="fp8")
    report = qcompile.explain(optimizer)
    assert any(s.note is not None and "can become 0" in s.note for s in report.states if s.key == "exp_avg_sq")
    assert "note on e4m3-unsigned/256: a positive value can become 0" in str(report)
