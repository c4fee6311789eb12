"""The shadow runs at three sizes: their tables on numbers that are known, and two runs, made and gone on with."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("shadow_sizes")


def test_errors_are_held_against_the_least(sizes: ModuleType) -> None:
    errors = {
        "8bit": {"body": 0.02, "head": 0.03, "embeddings": 0.01},
        "torchao-8bit": {"body": 0.04, "head": 0.05, "embeddings": 0.02},
        "4bit": {"body": 0.2, "head": 0.3, "embeddings": 0.1},
        "zip-sr": {"body": 0.4, "head": 0.6, "embeddings": 0.2},
        "ze-eden": {"body": 0.25, "head": 0.9, "embeddings": 0.3},
        "torchao-4bit": {"body": 0.5, "head": 0.5, "embeddings": 0.4},
    }
    tied = {name: {part: e for part, e in own.items() if part != "head"} for name, own in errors.items()}
    runs = {
        sizes.Spec("0.14 M", False, 0.95, 0, 250): {"errors": errors},
        sizes.Spec("0.39 M", True, 0.999, 1, 250): {"errors": tied},
    }
    lines = sizes.report(runs)
    assert "| 0.14 M | apart | 0.95 | 0 | 0.0200, 0.50 | 0.0300, 0.60 | 0.0100, 0.50 | yes |" in lines
    assert "| 0.14 M | apart | 0.95 | 0 | 0.2000, 0.80 | 0.3000, 0.60 | 0.1000, 0.50 | yes |" in lines
    assert "| 0.39 M | tied | 0.999 | 1 | 0.2000, 0.80 | tied | 0.1000, 0.50 | yes |" in lines
    errors["8bit"]["head"] = 0.031
    assert "| 0.14 M | apart | 0.95 | 0 | 0.0200, 0.50 | 0.0310, 0.62 | 0.0100, 0.50 | no |" in sizes.report(runs)


def test_a_run_is_a_line_and_is_not_made_twice(
    sizes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shadow.jsonl"
    arguments = ["--sizes", "0.14 M", "--steps", "3", "--out", str(out)]
    sizes.main(arguments)
    kept = out.read_text().splitlines()
    runs = [json.loads(line) for line in kept]
    assert [(r["tied"], r["beta2"]) for r in runs] == [(False, 0.95), (False, 0.999), (True, 0.95), (True, 0.999)]
    for run in runs:
        parts = {"body", "embeddings"} | (set() if run["tied"] else {"head"})
        assert run["errors"].keys() == {"8bit", "4bit", "torchao-8bit", "zip-sr", "ze-eden", "torchao-4bit"}
        assert all(own.keys() == parts for own in run["errors"].values())
        assert 0 < run["errors"]["8bit"]["body"] < run["errors"]["4bit"]["body"] < 1
    sizes.main(arguments)
    assert out.read_text().splitlines() == kept
    text = out.with_suffix(".md").read_text()
    assert "from 4 runs of 3 steps in `shadow.jsonl`" in text
    assert text.strip() in capsys.readouterr().out
