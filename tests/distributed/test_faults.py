"""Ranks that differ, ranks that die, and training that goes on from the checkpoint before."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pool import Ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_fsdp.py"


@pytest.mark.parametrize(
    ("how", "differing", "expected"),
    [
        ("fsdp", {"recipe": "4bit"}, r"recipe: '8bit' on rank 0; '4bit' on rank 1"),
        (
            "ddp",
            {"block_size": 64, "seed": 7},
            r"block_size: None on rank 0; 64 on rank 1\s+seed: 0 on rank 0; 7 on rank 1",
        ),
    ],
)
def test_ranks_that_differ_say_so(two: Ranks, how: str, differing: dict[str, object], expected: str) -> None:
    """Every rank raises, with what each was told, before the first update; none hangs."""
    found = two.outcomes("train", how=how, compiled="step", rank_options={1: differing})
    for ok, text in found:
        assert not ok
        assert "RanksDifferError: ranks that train together differ in what they compile" in text
        assert re.search(expected, text)


def test_one_rank_of_a_mesh_differs(four: Ranks) -> None:
    """All four name it, also those that share no group with it."""
    found = four.outcomes("train", how="hsdp", compiled="step", rank_options={3: {"recipe": "4bit"}})
    assert ["recipe: '8bit' on rank 0, 1, 2; '4bit' on rank 3" in text for _, text in found] == [True] * 4


def test_a_rank_that_dies_stops_the_others(two: Ranks) -> None:
    first, second = two.outcomes("die_at", step=3, rank=1, how="fsdp")
    assert second == (False, "ended with -9")
    assert not first[0]
    assert "RuntimeError" in first[1]
    assert "peer" in first[1] or "remote" in first[1]


def run_example(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    size = ["--layers", "1", "--width", "64", "--context", "32", "--batch", "8", "--steps", "12", "--every", "3"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(EXAMPLE),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *size, *arguments], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )


def test_the_example_dies_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    done = run_example(tmp_path, 1, "--losses", "whole")
    assert done.returncode == 0, done.stderr
    died = run_example(tmp_path, 2, "--losses", "parts", "--checkpoints", "run", "--die-at", "8")
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr
    resumed = run_example(tmp_path, 1, "--losses", "parts", "--checkpoints", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on from run/step-6 on 1 rank(s)" in resumed.stdout
    whole, parts = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("whole", "parts")
    )
    assert [line["step"] for line in parts] == [*range(1, 8), *range(7, 13)]
    expected = {line["step"]: line["loss"] for line in whole}
    for line in parts:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-3)
    assert expected[12] < expected[1] - 0.3
