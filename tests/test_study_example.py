"""The optimizer study: networks in 4 bits against hand-made ones, its statistics on known numbers, and a small study, run."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_values_are_rounded_by_row() -> None:
    x = torch.tensor([[7.0, 0.4, -0.6, -3.4], [0.0, 0.0, 0.0, 0.0], [-70.0, 14.9, 15.1, 5.1]], requires_grad=True)
    found = example("quantized_network").rounded(x)
    assert found.tolist() == [[7.0, 0.0, -1.0, -3.0], [0.0, 0.0, 0.0, 0.0], [-70.0, 10.0, 20.0, 10.0]]
    found.backward(torch.ones_like(x))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("size", [64, 96, 1])
def test_a_rotation_keeps_products(size: int) -> None:
    h = example("quantized_network").hadamard(size)
    assert torch.allclose(h @ h.T, torch.eye(size), atol=1e-6)
    if size == 64:
        spread = torch.eye(64)[3] @ h
        assert torch.allclose(spread.abs(), torch.full((64,), 1 / 8))


def test_a_copy_has_rounded_weights_and_inputs() -> None:
    network = example("quantized_network")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False))
    before = [p.clone() for p in model.parameters()]
    x = torch.randn(5, 8)
    copied = network.quantized_copy(model)
    first = model[1](linear(network.rounded(x), network.rounded(model[0].weight), model[0].bias))
    assert torch.equal(copied(x), linear(network.rounded(first), network.rounded(model[2].weight)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert [type(m).__name__ for m in model] == ["Linear", "LayerNorm", "Linear"]
    rotated = network.quantized_copy(model, rotate=True)
    h = network.hadamard(8)
    expected = linear(network.rounded(x @ h), network.rounded(model[0].weight @ h), model[0].bias)
    assert torch.equal(rotated[0](x), expected)


def test_modules_are_measured_where_they_are() -> None:
    network = example("quantized_network")
    torch.manual_seed(0)
    model = example("train_gpt").GPT(2, 32, 16)
    other = network.quantized_copy(model)
    tokens = torch.randint(256, (2, 16))
    found = {
        m.name: m for m in network.measure(model, other, tokens, lambda m: isinstance(m, (nn.Linear, nn.LayerNorm)))
    }
    assert len(found) == 2 * (2 + 4) + 2
    last = found["head"]
    with torch.no_grad():
        exact, moved = model(tokens), other(tokens)
    r = ((moved - exact).square().sum() / exact.square().sum()).item()
    assert last.parts.total == pytest.approx(r, rel=1e-4) == network.output_error(model, other, tokens)
    for m in found.values():
        p = m.parts
        assert p.propagated + p.local + p.cross == pytest.approx(p.total, rel=1e-6)
        assert m.mmr > 1.0
    assert math.isnan(found["blocks.0.norm1"].parts.gain)  # embeddings are exact
    assert found["blocks.0.norm1"].parts.total == 0.0
    assert found["blocks.0.qkv"].gains is None
    assert found["blocks.1.qkv"].gains is not None
    assert not any(module._forward_pre_hooks for net in (model, other) for module in net.modules())


def run_of(losses: list[float], parameters: int = 100, **values: list[float]) -> dict[str, Any]:
    points = [
        {"step": i, "loss": loss, "kinds": {}, **{k: v[i] for k, v in values.items()}} for i, loss in enumerate(losses)
    ]
    return {"points": points, "parameters": parameters, "diverged": False, "quantized_share": 0.0}


def spec(optimizer: str, size: str = "small", forward: str = "exact", state: str = "dense", seed: int = 0) -> Any:
    return example("optimizer_study").Spec(optimizer, size, state, forward, 1e-3, seed, 100)


def test_models_are_compared_at_one_loss() -> None:
    report = example("study_report")
    runs = {
        spec("AdamW"): run_of([5.0, 3.0, 1.0], mmr=[1.0, 2.0, 4.0]),
        spec("Muon"): run_of([4.0, 2.0, 2.5], mmr=[10.0, 20.0, 30.0]),
        spec("Muon", seed=1): run_of([4.0, 3.5, 3.0], mmr=[1.0, 1.0, 1.0]),
    }
    found = {(m.spec.optimizer, m.spec.seed): m.values["mmr"] for m in report.at_common_loss(runs, "small")}
    assert found == {("AdamW", 0): 3.0, ("Muon", 0): 20.0, ("Muon", 1): 1.0}


def test_rank_correlation_of_known_ranks() -> None:
    correlation = example("study_report").rank_correlation
    assert correlation([1, 2, 3, 4], [10, 100, 1000, 1e9]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # ranks 1 2 3 4 5 against 1 3 2 5 4: 1 - 6 * 4 / (5 * 24)
    assert correlation([1, 2, 3, 4, 5], [1, 7, 4, 9, 8]) == pytest.approx(0.8)
    assert correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)  # ties share a rank
    assert math.isnan(correlation([1, 1], [1, 2]))


def test_rho_is_the_shift_of_the_line() -> None:
    report = example("study_report")
    rho, sizes = 0.8, {"small": 100, "medium": 400, "large": 900}

    def loss(n: float) -> float:
        return 5.0 - 0.4 * math.log(n)

    runs = {spec("AdamW", size): run_of([loss(n)] * 3, n) for size, n in sizes.items()}
    runs |= {spec("AdamW", size, "4 bit"): run_of([loss(rho * n)] * 3, n) for size, n in sizes.items()}
    text = "\n".join(report.efficiency(runs, list(sizes)))
    assert "| AdamW | 3 | 0.80 | .863 |" in text
    trained = "\n".join(report.trained_in_4_bits(runs, ["small"]))
    assert f"| AdamW | {loss(100):.3f} | {-0.4 * math.log(rho):.3f} |" in trained


def test_a_model_that_ignores_its_input_is_measured() -> None:
    """No layer's input has an error then, of which a gain could be; Shampoo's runs came to that. Here the layer norms are 0."""
    study = example("optimizer_study")
    model = study.GPT(1, 64, study.CONTEXT)
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)):
            norm.weight.zero_()
    found = study.evaluate(model, is_exact=True)
    assert math.isnan(found["gain_1"])
    assert math.isfinite(found["loss"])


def test_the_quick_study_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorch_optimizer")
    study = example("optimizer_study")
    out = tmp_path / "study.jsonl"
    study.main(["--quick", "--out", str(out)])
    runs = example("grid").finished(out, study.Spec)
    assert {(s.optimizer, s.state, s.forward) for s in runs} == {
        (name, *variant)
        for name in ("AdamW", "Muon")
        for variant in (("dense", "exact"), ("8bit", "exact"), ("dense", "4 bit"))
    }
    for found, run in runs.items():
        assert not run["diverged"]
        assert run["points"][-1]["loss"] < run["points"][0]["loss"] < 5.6
        assert (run["quantized_share"] > 0.9) == (found.state == "8bit")
        if found.forward == "exact":
            point = run["points"][-1]
            assert point["output_error"] > 0
            total = point["kinds"]["LayerNorm"]
            assert total["local"] == 0.0 < total["propagated"]  # a norm rounds nothing itself
    text = capsys.readouterr().out
    for title in (
        "at equal loss",
        "rank correlation",
        "Where the error comes from",
        "quantized optimizer state",
        "straight-through",
    ):
        assert title in text
    assert out.with_suffix(".md").read_text().strip() in text
