"""Metrics of tensors and the split of errors, on cases whose values are known."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

from qcompile.analysis import error_parts, gain_parts, kurtosis, max_to_median, shadow, update_error
from qcompile.recipes import RECIPES


def test_update_error_is_relative_to_the_exact_update() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert update_error(exact, exact) == 0.0
    assert update_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert update_error(torch.zeros(2), exact) == 1.0


def test_max_to_median_is_by_row() -> None:
    odd = torch.tensor([[1.0, -8.0, 2.0], [1.0, 1.0, 1.0]])
    assert max_to_median(odd).tolist() == [4.0, 1.0]
    even = torch.tensor([1.0, 2.0, -4.0, 12.0])
    assert float(max_to_median(even)) == 4.0
    assert float(max_to_median(torch.tensor([0.0, 0.0, 1.0]))) == math.inf
    assert max_to_median(torch.ones(2, 3, 5)).shape == (2, 3)


def test_kurtosis_of_known_distributions() -> None:
    assert kurtosis(torch.tensor([1.0, -1.0])) == 1.0
    assert kurtosis(5 + 3 * torch.tensor([1.0, -1.0])) == pytest.approx(1.0)
    torch.manual_seed(0)
    size = 1 << 20
    assert kurtosis(torch.rand(size)) == pytest.approx(1.8, abs=0.01)
    assert kurtosis(torch.randn(size)) == pytest.approx(3.0, abs=0.02)
    assert kurtosis(torch.distributions.Laplace(0.0, 1.0).sample((size,))) == pytest.approx(6.0, abs=0.15)


def rounded(x: Tensor, bits: int = 4) -> Tensor:
    """Symmetric, nearest, one scale per row."""
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (x / scale).round() * scale


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["linear", "norm", "gelu"]), st.floats(1e-4, 1.0))
def test_the_parts_add_up(seed: int, kind: str, size: float) -> None:
    torch.manual_seed(seed)
    h = torch.randn(8, 32)
    h_q = h + size * torch.randn(8, 32)
    weight = torch.randn(16, 32)
    layer, quantized = {
        "linear": (lambda x: linear(x, weight), lambda x: linear(rounded(x), rounded(weight))),
        "norm": (nn.LayerNorm(32), lambda x: nn.LayerNorm(32)(rounded(x))),
        "gelu": (nn.GELU(), lambda x: nn.GELU()(rounded(x))),
    }[kind]
    with torch.no_grad():
        parts = error_parts(layer, quantized, h, h_q)
        direct = ((quantized(h_q) - layer(h)).square().sum() / layer(h).square().sum()).item()
    assert parts.total == pytest.approx(direct, rel=1e-5)
    assert parts.propagated + parts.local + parts.cross == pytest.approx(parts.total, rel=1e-6, abs=1e-12)
    before = ((h_q - h).square().sum() / h.square().sum()).item()
    assert parts.gain * before == pytest.approx(parts.propagated, rel=1e-5)


def test_an_exact_input_propagates_nothing() -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(8, 32), torch.randn(16, 32)
    parts = error_parts(lambda x: linear(x, weight), lambda x: linear(x, rounded(weight)), h, h)
    assert parts.propagated == parts.cross == 0.0
    assert parts.local == parts.total > 0.0
    assert math.isnan(parts.gain)


def test_an_exact_layer_adds_nothing() -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(8, 32), torch.randn(16, 32)
    parts = error_parts(*[lambda x: linear(x, weight)] * 2, h, h + 0.1 * torch.randn(8, 32))
    assert parts.local == parts.cross == 0.0
    assert parts.propagated == parts.total > 0.0


def test_the_gain_of_a_linear_layer_is_a_product() -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(8, 32), torch.randn(16, 32)
    h_q, error = h + 0.1 * torch.randn(8, 32), rounded(weight) - weight
    parts = error_parts(lambda x: linear(x, weight), lambda x: linear(x, weight + error), h, h_q)
    norm, alignment = gain_parts(weight, error, h, h_q)
    assert norm == pytest.approx(1.0, abs=0.05)
    assert norm * alignment == pytest.approx(parts.gain, rel=1e-5)
    # an error along the strongest direction of the weight meets all of its norm
    strongest = torch.linalg.svd(weight).Vh[0]
    _, aligned = gain_parts(weight, torch.zeros_like(weight), h, h + 0.1 * strongest)
    psi = linear(h, weight).norm() / (torch.linalg.matrix_norm(weight, 2) * h.norm())
    assert aligned == pytest.approx(1 / float(psi) ** 2, rel=1e-4)


def test_the_format_search_changes_one_choice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "examples"))
    search = importlib.import_module("format_search")
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for name, variants in search.VARIANTS.items():
        base, recipes = RECIPES[name], [search.variant(name, *v) for v in variants]
        for (what, which, _), found in zip(variants, recipes, strict=True):
            assert (found.first != base.first) == (which in ("first", "rows")) or found.rows != base.rows, what
            assert (found.second != base.second) == (which in ("second", "rows")) or found.rows != base.rows, what
            assert found.rows == (which != "rows")
        copies = shadow(model, optimizer, recipes)
        for _ in range(2):
            model.weight.grad = torch.randn(128, 64)
            copies.observe()
        errors = [parts["all"] for parts in copies.errors(lambda _: "all").values()]
        assert all(0 < error < 1 for error in errors)
