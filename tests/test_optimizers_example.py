"""The coverage table: its columns are what the report says, and a row that fails is told."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example; its model has no biases, which would be a class to compile of their own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("optimizers")
    monkeypatch.setattr(module, "REGRESSION", dataclasses.replace(module.REGRESSION, model=small_network))
    return module


def small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128, bias=False), nn.GELU(), nn.Linear(128, 128, bias=False))


def table(text: str) -> dict[str, list[str]]:
    """Cells by the first one of their row."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}


def test_rows_say_what_was_trained(
    optimizers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "PACKAGES", {})
    out = tmp_path / "optimizers.md"
    chosen = ["by hand: LaProp", "by hand: FlatAdamW"]
    assert optimizers.main(["--steps", "3", "--only", f"^({'|'.join(chosen)})$", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = table(printed)
    assert table(out.read_text()) == rows
    header = rows.pop("optimizer")
    assert list(rows) == chosen
    for title, cells in rows.items():
        row = dict(zip(header, cells, strict=True))
        loss, difference = row["regression: dense loss, difference"].split(", ")
        assert 0.8 < float(loss) < 1.1
        assert abs(float(difference.partition(" %")[0])) < 0.1, title
        own, total = map(float, row["bytes: quantized, all"].split(", "))
        assert own <= 0.27, title
        assert "exp_avg_sq >= 0" in row["proved"] or "v >= 0" in row["proved"], title
        if title != "by hand: FlatAdamW":
            assert total <= 0.27
            assert row["state"] == "quantized"
    assert "2 rows: " in printed
    assert "0 failed" in printed


def test_columns_are_what_the_report_says(optimizers: ModuleType) -> None:
    row = optimizers.row_of("torch.optim", torch.optim.AdamW, {})
    run = optimizers.train(row, optimizers.REGRESSION, 3, "8bit")
    outcome = optimizers.Outcome(row, *optimizers.verdict(run.report), ((run, run),))
    _, loss, bytes_, compiled, _, proved, state = optimizers.cells(outcome, [optimizers.REGRESSION])
    quantized = [s for s in run.report.states if s.reason is None]
    own = sum(s.stored_bytes for s in quantized) / sum(s.dense_bytes for s in quantized)
    total = run.report.state_bytes / run.report.dense_state_bytes
    assert bytes_ == f"{own:.3f}, {total:.3f}"
    assert compiled == f"{len(run.report.classes)}, {len(run.report.kernels)}, {run.report.graphs}"
    assert loss.startswith(f"{sum(run.losses) / 3:.4f}, +0.00 %")
    assert "`exp_avg_sq >= 0`" in proved
    assert "`h(v) = " in proved
    assert state == "quantized"
    assert pickle.loads(pickle.dumps(outcome)).differences == outcome.differences  # how a job hands it over


def test_a_closure_is_a_function(optimizers: ModuleType) -> None:
    """Dynamo cannot trace LBFGS with another kind of closure."""
    row = optimizers.row_of("torch.optim", torch.optim.LBFGS, {"max_iter": 2})
    outcome = optimizers.attempt(row, optimizers.arguments(["--steps", "2"]))
    assert (outcome.word, outcome.again) == ("dense", (None,)), outcome.text


def test_a_far_row_has_another_dense_run(optimizers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "NOTABLE", -1.0)  # everything is far
    monkeypatch.setattr(optimizers, "APART", 0.01)  # what 1e-6 does to three losses is less than a bit of them
    row = optimizers.row_of("torch.optim", torch.optim.SGD, {"lr": 0.1})
    outcome = optimizers.attempt(row, optimizers.arguments(["--steps", "3"]))
    (again,) = outcome.again
    assert 0 < abs(again) < 0.01
    cell = optimizers.cells(outcome, [optimizers.REGRESSION])[1]
    assert cell.endswith(f"({100 * again:+.2f} % dense, from weights 0.01 apart)")


class Broken(torch.optim.SGD):
    """Cannot step."""

    def step(self, closure: None = None) -> None:
        raise ValueError("a bad | step\nwith a second line")


@pytest.mark.parametrize("refused", [False, True])
def test_a_failure_is_a_row(
    refused: bool, optimizers: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = optimizers.row_of("torch.optim", torch.optim.SGD, {"momentum": 0.0})

    def broken(model: nn.Module) -> torch.optim.Optimizer:
        return Broken(model.parameters(), lr=0.1)

    failing = optimizers.Row("torch.optim", "Broken", broken, refused=refused)
    monkeypatch.setattr(optimizers, "torch_rows", lambda: [failing, plain])
    assert optimizers.main(["--steps", "2", "--only", "^(Broken|SGD)", *["--verbose"]]) == int(not refused)
    printed = capsys.readouterr()
    assert "eager fails: ValueError: a bad \\| step |" in printed.out
    assert "second line" not in printed.out
    assert "second line" in printed.err  # the traceback
    assert "SGD, momentum=0.0" in table(printed.out)  # the table went on
    assert "1 no state, 1 eager fails, 0 failed" in printed.out


def test_a_quantized_run_that_fails_is_a_failure(optimizers: ModuleType) -> None:
    sizes = iter([0.1, -1.0])  # the second optimizer is the one to compile
    row = optimizers.Row("torch.optim", "Odd", lambda model: torch.optim.SGD(model.parameters(), lr=next(sizes)))
    args = optimizers.arguments(["--steps", "2"])
    outcome = optimizers.attempt(row, args)
    assert outcome.word == "failed"
    assert outcome.text == "ValueError: Invalid learning rate: -1.0"


def test_every_class_and_option_of_torch_has_a_row(optimizers: ModuleType) -> None:
    titles = [row.title for row in optimizers.torch_rows()]
    assert len(titles) == len(set(titles))
    classes = {v for v in vars(torch.optim).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)}
    assert {t.partition(",")[0] for t in titles} == {c.__name__ for c in classes - {torch.optim.Optimizer}}
    for title in ("AdamW, amsgrad=True", "Muon, nesterov=False", "Adam, fused=True", "RMSprop, centered=True"):
        assert title in titles
