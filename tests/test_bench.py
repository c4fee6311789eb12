"""The benchmark: that its shapes are those of the models, and its rows complete. No time is asserted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from qcompile import bench, bench_command, bench_peers
from qcompile.__main__ import main
from qcompile.bench_candidates import OPTIMIZERS, Candidate, bytes_needed, find_candidates
from qcompile.bench_peers import Peer
from qcompile.bench_report import FirstCall, Result, Row, spread, table
from qcompile.bench_shapes import MODELS, fitted_scale, model_shapes, parameter_count, parse_shapes
from qcompile.recipes import RECIPES

CPU = torch.device("cpu")
FAKE = """
import torch

class Good(torch.optim.AdamW):
    pass

class Bad:
    def __init__(self, *args, **kwargs):
        raise ValueError("not on\\nthis machine")
"""


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("gpt2", 148, 124_439_808),
        ("gpt2-xl", 580, 1_557_611_200),
        ("llama-7b", 291, 6_738_415_616),
        ("many-small", 300, 4_800),
    ],
)
def test_shapes_are_those_of_the_model(name: str, tensors: int, parameters: int) -> None:
    shapes = model_shapes(name)
    assert (len(shapes), parameter_count(shapes)) == (tensors, parameters)


@pytest.mark.parametrize("name", MODELS)
def test_a_scale_keeps_the_structure(name: str) -> None:
    whole, small = model_shapes(name), model_shapes(name, 0.25)
    assert [len(shape) for shape in small] == [len(shape) for shape in whole]
    assert parameter_count(small) == pytest.approx(parameter_count(whole) / 16, rel=0.02)


def test_the_largest_scale_that_fits_is_found() -> None:
    def at(scale: float) -> list[tuple[int, ...]]:
        return model_shapes("gpt2", scale)

    assert fitted_scale(at, 1e9) == 1.0
    scale = fitted_scale(at, 31e6)
    assert scale is not None
    assert 0.4 < scale < 0.5
    assert parameter_count(at(scale)) <= 31e6 < parameter_count(at(scale + 0.02))
    assert fitted_scale(at, 10) is None


def test_shapes_are_a_count_and_extents() -> None:
    assert parse_shapes("2x64x32, 1x7") == [(64, 32), (64, 32), (7,)]
    assert parse_shapes("1x1024x4096", 0.25) == [(256, 1024)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "8"], "a count and at least one extent"),
        (["--shapes", "2x64,0x4"], "'0x4' is no shape"),
        (["--shapes", "2xa"], "as in 8x1024x4096"),
        (["--scale", "2"], "a number above 0 and up to 1"),
        (["--repeats", "0"], "a whole number, 1 or more"),
        (["--model", "gpt3"], "invalid choice"),
        (["--recipe", "9bit"], "invalid choice"),
        (["--skip", "nobody"], "rows are 'torch fused'"),
        (["--peers", "--optimizer", "sgd"], "all peers have AdamW alone"),
        (["--json", "no/such/folder/out.json"], "make it first"),
    ],
)
def test_an_argument_that_is_wrong_is_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--device", "cuda"])
    assert "finds no GPU here; use --device cpu" in capsys.readouterr().err


def test_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["bench", "--plot", "out.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_on_a_gpu_the_default_is_three_models() -> None:
    asked = argparse.Namespace(shapes=None, model=None)
    assert [name for name, _ in bench_command._wanted(asked, torch.device("cuda"))] == ["gpt2", "gpt2-xl", "llama-7b"]
    assert [name for name, _ in bench_command._wanted(asked, CPU)] == ["8x1024x4096"]


@pytest.mark.parametrize(
    ("timers", "expected"),
    [
        ((5.0, 4.0, 3.0, 1.0), (1.0, 1.0, 2.0, 1.0)),
        ((50.0, 4.0, 3.0, 1.0), (None,) * 4),  # the clock was set while Dynamo was at work
        ((0.0, 0.0, 0.0, 0.0), (None,) * 4),  # nothing was compiled
    ],
)
def test_parts_of_a_first_call(
    timers: tuple[float, ...], expected: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("total", "backend", "inductor", "codegen")
    read = iter([dict.fromkeys(names, 7.0), {name: 7.0 + spent for name, spent in zip(names, timers, strict=True)}])
    monkeypatch.setattr(bench, "compile_seconds", lambda: next(read))
    monkeypatch.setattr(bench, "_timed", lambda *args, **named: 6.0)
    (candidate,) = (c for c in find_candidates(next(iter(OPTIMIZERS)), ["8bit"], (), torch.float32) if c.kind == "ours")
    found = bench._first_call(lambda: None, candidate, torch.device("cpu"))
    assert (found.dynamo, found.passes, found.inductor, found.codegen) == expected
    assert found.total == 6.0


def test_a_run_measures_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "qcompile_fake_peer"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    peers = (
        Peer(package.name, package.name, "Good", 8.0),
        Peer(package.name, package.name, "Bad", 8.0),
        Peer("qcompile_no_such_peer", "qcompile_no_such_peer.optim", "AdamW", 2.0),
        Peer(package.name, package.name, "OnGpu", 2.0, cuda_only=True),
    )
    monkeypatch.setattr(bench_peers, "PEERS", peers)
    out, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--shapes", "2x64x64", "--repeats", "2", "--recipe", "8bit", "--peers", "--copy-mb", "1"]
    main(["bench", *arguments, "--json", str(out), "--plot", str(drawn)])

    captured = capsys.readouterr()
    assert "qcompile_no_such_peer AdamW: not installed; pip install qcompile_no_such_peer" in captured.err
    assert "OnGpu: runs on CUDA alone" in captured.err
    assert "Bad: ValueError: not on this machine" in captured.out
    assert drawn.stat().st_size > 0
    found = json.loads(out.read_text())
    assert found["environment"]["versions"]["torch"]
    assert found["environment"]["threads"] == torch.get_num_threads()
    (result,) = found["results"]
    assert (result["tensors"], result["parameters"], result["base"]) == (2, 8192, "torch fused")
    assert result["copy_bytes"] == 2 << 20
    assert len(result["copy_times_ms"]) == 2
    rows = {row["name"]: row for row in result["rows"]}
    good, bad = f"{package.name} Good", f"{package.name} Bad"
    assert list(rows) == ["torch fused", "torch foreach", "torch for-loop", "torch.compile", "8bit", good, bad]
    assert rows[bad]["error"] == "ValueError: not on this machine"
    assert rows[bad]["median_ms"] is None
    for row in (row for name, row in rows.items() if name != bad):
        assert row["error"] is None
        assert row["note"] is None
        assert len(row["times_ms"]) == 2
        assert row["median_ms"] == pytest.approx(sum(row["times_ms"]) / 2)
        assert row["first_call"]["total"] > 0
    assert rows["torch fused"]["ratio"] == 1
    for name in ("torch fused", "torch foreach", "torch for-loop", "torch.compile", good):
        assert rows[name]["state_bytes"] == 8
    assert rows["torch fused"]["moved_bytes"] == 28  # gradient read; parameter and two states read and written
    stored, of_format = rows["8bit"]["state_bytes"], RECIPES["8bit"].bytes_per_parameter(64)
    assert of_format <= stored <= of_format + 0.01  # and a counter for each state with random bits
    assert rows["8bit"]["moved_bytes"] == pytest.approx(12 + 2 * of_format)  # counted in the generated code
    assert (rows["8bit"]["launches"], rows["8bit"]["launches_counted"]) == (1, "launcher")
    assert rows["torch fused"]["launches"] is None
    parts = rows["8bit"]["first_call"]
    assert all(parts[name] >= 0 for name in ("dynamo", "passes", "inductor", "codegen"))
    assert sum(parts[name] for name in ("dynamo", "passes", "inductor", "codegen")) <= parts["total"]
    assert rows["torch.compile"]["first_call"]["passes"] is None
    assert rows["torch fused"]["first_call"]["dynamo"] is None


def candidates(*names: str) -> list[Candidate]:
    return [c for c in find_candidates("adamw", [], [], torch.float32) if c.name in names]


class Silent:
    def set_description(self, text: str) -> None: ...
    def update(self) -> None: ...


def test_what_does_not_fit_is_dropped_and_gradients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    params = bench.make_parameters([(8, 8)], torch.float32, CPU)
    gradient = params[0].grad
    monkeypatch.setattr(bench, "make_parameters", lambda *args: params)
    monkeypatch.setattr(bench, "free_bytes", lambda device: 64 * 12)  # room for 8 bytes per parameter, not for 16
    work = bench.Workload("1x8x8", 1.0, ((8, 8),))
    chosen = candidates("torch foreach", "torch for-loop")
    result = bench.run_workload(work, chosen, torch.float32, CPU, 1, 1 << 10, Silent())  # type: ignore[arg-type]
    foreach, loop = result.rows
    assert foreach.error is not None
    assert foreach.error.startswith("dropped: it needs about")
    assert (loop.error, loop.ratio, result.base) == (None, 1.0, "torch for-loop")
    assert params[0].grad is gradient


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_runs_eagerly(name: str) -> None:
    rows = [c for c in find_candidates(name, [], [], torch.float32) if c.kind == "torch"]
    assert ("torch fused" in [c.name for c in rows]) == OPTIMIZERS[name].has_fused
    work = bench.Workload("1x8x8", 1.0, ((8, 8),))
    result = bench.run_workload(work, rows, torch.float32, CPU, 1, 1 << 10, Silent())  # type: ignore[arg-type]
    assert [row.error for row in result.rows] == [None] * len(rows)
    assert {row.state_bytes for row in result.rows} == {4 * OPTIMIZERS[name].states}


def test_memory_is_that_of_all_candidates_at_once() -> None:
    both = candidates("torch fused", "torch foreach")
    assert bytes_needed(both, torch.float32) == 8 + 2 * 8 + 8


def test_a_table_has_a_dash_for_what_is_unknown() -> None:
    rows = (
        Row("torch fused", "torch", None, None, (1.0, 1.0), 1.0, 0.0, 1.0, 28.0, 0.5, FirstCall(0.1), None, None, 8.0),
        Row("peer", "peer", error="ImportError: no"),
    )
    result = Result("1x8", 0.5, 1, 8, 2 << 20, (1.0, 1.0), "torch fused", rows)
    lines = table(result, "C++").splitlines()
    assert lines[0] == "1x8, scaled by 0.5: 8 parameters in 1 tensors"
    assert lines[3].split() == ["torch", "fused", "1.000", "0.000", "1.000", "28.00", "0.50", "0.10", *"-----", "8.000"]
    assert lines[-1] == "peer: ImportError: no"
    assert spread([1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0
