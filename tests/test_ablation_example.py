"""The ablation of the stable embedding: its optimizer against torch's, its quantization against a search, and its table."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from qcompile.nn import StableEmbedding

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("stable_embedding")


@pytest.mark.parametrize("name", ["linear", "dynamic"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block", [None, 64])
def test_values_go_to_the_nearest_level(ablation: ModuleType, name: str, signed: bool, block: int | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 70) if signed else torch.rand(3, 70) ** 4
    levels = ablation.levels_of(name, signed)
    assert len(levels) == (255 if signed else 256)
    found = ablation.stored(x, levels, block).flatten()
    for start in range(0, 210, block or 210):
        own = x.flatten()[start : start + (block or 210)]
        scale = own.abs().max()
        distances = (own[:, None] / scale - levels).abs()
        nearest = levels[distances.argmin(1)] * scale
        assert torch.allclose(found[start : start + len(own)], nearest, atol=1e-6)
    assert not ablation.stored(torch.zeros(2, 3), levels, block).any()


def test_without_quantization_it_is_adamw(ablation: ModuleType) -> None:
    torch.manual_seed(0)
    ours, torchs = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    spec = ablation.Spec("32-bit", "", False, 1e-2, 1e-8, 0.95, 0, 5)
    optimizers = [
        ablation.LiteralAdamW([ours], spec),
        torch.optim.AdamW([torchs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    for _ in range(5):
        ours.grad = torchs.grad = torch.randn(64, 64)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(ours, torchs, atol=1e-6)


def test_a_stable_embedding_keeps_its_state(ablation: ModuleType) -> None:
    torch.manual_seed(0)
    layers = StableEmbedding(128, 64), nn.Embedding(128, 64)
    optimizer = ablation.LiteralAdamW(
        [layer.weight for layer in layers], ablation.Spec("linear", "tensor", True, 1e-2, 1e-8, 0.95, 0, 5)
    )
    for layer in layers:
        layer.weight.grad = torch.randn(128, 64)
    optimizer.step()
    kept, quantized = (len(optimizer.state[layer.weight]["v"].unique()) for layer in layers)
    assert kept > 4000
    assert quantized <= 256


def test_every_cell_has_the_same_settings(ablation: ModuleType) -> None:
    grid = ablation.grid_of(1, 300)
    by_cell = {
        cell: [(s.rate, s.eps, s.beta2, s.seed) for s in grid if s.cell == cell] for cell in {s.cell for s in grid}
    }
    assert len(by_cell) == 10
    assert len({tuple(settings) for settings in by_cell.values()}) == 1
    assert len(set(grid)) == len(grid) == 120


def test_a_diverged_run_counts(ablation: ModuleType) -> None:
    specs = [ablation.Spec("linear", "tensor", False, 1e-2, eps, 0.95, 0, 5) for eps in (1e-8, 1e-7, 1e-6)]
    losses = (2.0, None, None)
    text = ablation.report({s: {"loss": loss} for s, loss in zip(specs, losses, strict=True)})
    assert "| linear | tensor | plain | 67 % of 3 | inf | 90, 253 |" in text


def test_a_run(ablation: ModuleType) -> None:
    run = ablation.train(ablation.Spec("dynamic", "block", True, 3e-3, 1e-8, 0.95, 0, 4))
    assert run["steps_done"] == 4
    assert 4.0 < run["loss"] < math.log(256)
