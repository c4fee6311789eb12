"""The accuracy lab: its statistics on numbers that are known, what it does with a file, and a small grid, run."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("accuracy")


def run(name: str, seed: int, validation: float | None, size: str = "small") -> dict[str, Any]:
    """What a line of the file has of a run, as far as the report reads it."""
    return {"size": size, "name": name, "seed": seed, "validation": validation, "bytes_per_parameter": 1.5}


def grid(gaps: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    count = max(map(len, gaps.values()))
    runs = [run("dense", seed, 2.0 + seed) for seed in range(count)]
    return runs + [
        run(name, seed, None if gap is None else 2.0 + seed + gap)
        for name, own in gaps.items()
        for seed, gap in enumerate(own)
    ]


def by_spec(accuracy: ModuleType, runs: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {accuracy.Spec(r["size"], r["name"], r["seed"]): r for r in runs}


def test_gaps_are_of_pairs(accuracy: ModuleType) -> None:
    runs = [
        *grid({"8bit": [0.01, 0.03, -0.01], "fp8": [0.5, None, 0.7]}),
        run("4bit", 9, 1.0),
        run("8bit", 0, 9.0, "large"),
    ]
    found = {gap.name: gap for gap in accuracy.gaps_of(by_spec(accuracy, runs), "small")}
    assert set(found) == {"8bit", "fp8"}  # 4bit has no dense run of its seed
    assert found["8bit"].mean == pytest.approx(0.01)
    assert found["8bit"].spread == pytest.approx(statistics.stdev([0.01, 0.03, -0.01]))
    assert found["8bit"].error == pytest.approx(0.02 / 3**0.5)
    assert found["8bit"].pairs_for(0.01) == 16  # (2 * 0.02 / 0.01)^2
    assert (found["fp8"].diverged, len(found["fp8"].gaps)) == (1, 2)
    assert found["fp8"].mean == pytest.approx(0.6)


def test_one_pair_has_no_error(accuracy: ModuleType) -> None:
    (gap,) = accuracy.gaps_of(by_spec(accuracy, grid({"8bit": [0.01]})), "small")
    assert math.isnan(gap.error)
    assert gap.pairs_for(0.005) is None


def test_claims_are_judged_by_two_errors(accuracy: ModuleType) -> None:
    runs = grid(
        {
            "8bit": [0.01, -0.01],
            "4bit": [0.10, 0.11],
            "zip-sr": [0.0, 0.01],
            "ze-eden": [0.09, 0.13],
            "torchao-4bit": [0.4, 0.41],
        }
    )
    text = "\n".join(accuracy.table(by_spec(accuracy, runs), "small"))
    assert "`8bit` within two standard errors of zero: yes (+0.0000 ± 0.0100)" in text
    assert "`4bit` against `zip-sr`: worse (+0.1000 ± 0.0071)" in text
    assert "`4bit` against `ze-eden`: not told apart" in text
    assert "`4bit` against `torchao-4bit`: better" in text
    assert "| 4bit | 1.500 | 2 | 0 | +0.1050 | 0.0050 | 0.26 |" in text
    unclear = grid({"8bit": [0.10, 0.11], "torchao-4bit": [0.4, -0.3]})
    text = "\n".join(accuracy.table(by_spec(accuracy, unclear), "small"))
    assert "two standard errors of zero: no" in text
    assert "not told apart from 0" in text
    assert accuracy.table(by_spec(accuracy, unclear), "large") == []


def test_a_diverged_recipe_is_a_row(accuracy: ModuleType) -> None:
    text = "\n".join(accuracy.table(by_spec(accuracy, grid({"unbiased-8bit-literal": [None, None]})), "small"))
    assert "| unbiased-8bit-literal | 1.500 | 0 | 2 | +nan | nan |" in text


def test_a_line_that_was_cut_off_is_run_again(
    accuracy: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    lines = [json.dumps(r) for r in grid({"8bit": [0.0, 0.1]})]
    path.write_text("\n".join(lines)[:-20])
    found = accuracy.finished(path, accuracy.Spec)
    assert len(found) == 3
    assert accuracy.Spec("small", "8bit", 1) not in found
    assert "a line that is not whole" in capsys.readouterr().err
    assert accuracy.finished(tmp_path / "none.jsonl", accuracy.Spec) == {}


def test_the_schedule(accuracy: ModuleType) -> None:
    rate = importlib.import_module("accuracy_runs").learning_rate
    found = [rate(t, 100) for t in range(100)]
    assert found[0] == pytest.approx(0.1)
    assert found[9:91] == [1.0] * 82
    assert found[95] == pytest.approx(1 - 0.5**0.5)
    assert found[99] == pytest.approx(1 - 0.9**0.5)
    assert found[90:] == sorted(found[90:], reverse=True)


def test_the_quick_grid_runs_and_goes_on(
    accuracy: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "quick.jsonl"
    accuracy.main(["--quick", "--out", str(out)])
    runs = accuracy.finished(out, accuracy.Spec)
    assert {(s.name, s.seed) for s in runs} == {(name, seed) for name in ("dense", "8bit", "4bit") for seed in (0, 1)}
    for spec, found in runs.items():
        assert found["diverged_at"] is None
        assert 2.0 < found["validation"] < 4.0 < found["curve"][0]  # guessing is 5.55
        assert found["bytes_per_parameter"] == pytest.approx(
            {"dense": 8.0, "8bit": 2.2, "4bit": 1.22}[spec.name], abs=0.02
        )
        assert abs(found["validation"] - runs[accuracy.Spec("tiny", "dense", spec.seed)]["validation"]) < 0.05
    text = out.with_suffix(".md").read_text()
    assert (
        text.splitlines()[0] == "Made by `python examples/accuracy.py --report --quick` from 6 runs in `quick.jsonl`."
    )
    assert text.partition("\n\n")[2].strip() in capsys.readouterr().out
    assert "<svg" in out.with_suffix(".svg").read_text()

    kept = out.read_text().splitlines()
    out.write_text("\n".join(kept[:-1]) + "\n")
    accuracy.main(["--quick", "--out", str(out)])
    again = out.read_text().splitlines()
    assert again[:-1] == kept[:-1]  # what was there was not run again
    first, second = (json.loads(lines[-1]) for lines in (kept, again))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}  # same seed, same bits
