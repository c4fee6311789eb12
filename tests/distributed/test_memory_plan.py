"""`python -m qcompile plan` counts what is measured, on 1, 2 and 4 ranks, in memory and in a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import jobs
import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from pool import Ranks

from qcompile.__main__ import main
from qcompile.bench_shapes import model_shapes
from qcompile.memory_plan import plan_memory, zero_partition

SHAPES = [tuple(p.shape) for p in jobs.Net().parameters()]


@pytest.mark.parametrize(
    ("count", "how", "name"), [(2, "ddp", "DDP"), (2, "zero", "ZeRO-1"), (2, "fsdp", "FSDP2"), (4, "fsdp", "FSDP2")]
)
@pytest.mark.parametrize("recipe", ["8bit", "dense"])
def test_bytes_of_every_rank(two: Ranks, four: Ranks, count: int, how: str, name: str, recipe: str) -> None:
    results = {2: two, 4: four}[count].run("train", how=how, compiled="step", steps=2, recipe=recipe)
    planned = plan_memory(SHAPES, count, recipe).ranks[name]
    assert [held.state for held in planned] == [result["bytes"] for result in results]
    assert [held.dense_state for held in planned] == [result["dense"] for result in results]
    local = [sum(value.numel() for value in result["state"].values()) for result in results]
    if how == "fsdp":
        assert [held.parameters for held in planned] == [2 * n for n in local]  # two moments each, four bytes


def test_one_process() -> None:
    for recipe in ("8bit", "4bit", "zip-sr"):
        found = jobs.train("alone", "step", steps=2, recipe=recipe)
        (held,) = plan_memory(SHAPES, 1, recipe).ranks["FSDP2"]
        assert (held.state, held.dense_state) == (found["bytes"], found["dense"])


def test_size_of_a_checkpoint(two: Ranks, tmp_path: Path) -> None:
    """Files add at most 4 KiB to each entry."""
    two.run("save", path=str(tmp_path), how="fsdp", recipe="8bit")
    stored = checkpoint.FileSystemReader(tmp_path).read_metadata().storage_data
    size = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    planned = plan_memory(SHAPES, 2, "8bit").checkpoint
    assert planned <= size <= planned + 4096 * len(stored)


def test_zero_shares_out_as_torch_does() -> None:
    """The largest first, each to the rank that has least."""
    assert zero_partition([(5,), (4,), (3,), (3,)], 2) == [[0, 3], [1, 2]]


def test_a_large_model(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", "llama-70b", "--ranks", "64", "--recipe", "4bit"])
    out = capsys.readouterr().out
    assert "llama-70b: 68,976,648,192 parameters in float32, AdamW, 4bit, 64 rank(s)" in out
    shapes = model_shapes("llama-70b")
    assert sum(map(math.prod, shapes)) == 68_976_648_192
    plan = plan_memory(shapes, 64, "4bit", dtype=torch.bfloat16)
    everywhere = sum(held.state for held in plan.ranks["FSDP2"])
    assert everywhere / plan.count == pytest.approx(1.078, abs=0.002)


def test_numbers_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--ranks", "0"])
    assert "--ranks 0 --scale 1 --bandwidth 2: all are above 0" in capsys.readouterr().err
