"""The example runs, and what it prints is what was trained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_train_gpt(tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    arguments = [
        "--layers",
        "1",
        "--width",
        "64",
        "--context",
        "32",
        "--batch",
        "4",
        "--steps",
        "12",
        "--validation-batches",
        "2",
    ]
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *arguments, "--plot", str(plot), "--explain"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(dense|8bit) +([\d.]+ +[\d.]+)", done.stdout, re.MULTILINE))
    (dense, dense_bytes), (ours, our_bytes) = (map(float, rows[k].split()) for k in ("dense", "8bit"))
    assert abs(ours - dense) < 0.05
    assert 7.9 < dense_bytes < 8.1
    assert our_bytes < 2.5
    share = float(re.findall(r"buffers at ([\d.]+) of their dense bytes", done.stdout)[0])
    # blocks end where rows of 64 do: 1 + 2/64 and 1 + 8/64 bytes of 8; the tails of 12 buffers' counters are the rest
    assert share <= (2 + 10 / 64) / 8 + 1e-3
    assert "blocks.0.qkv.weight" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_compare_memory(tmp_path: Path) -> None:
    plot = tmp_path / "memory.png"
    command = [sys.executable, str(EXAMPLES / "compare_memory.py"), "--layers", "4", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    rows = {
        name.strip(): numbers.split()
        for name, numbers in re.findall(r"^(dense, .{9}|8bit, .{15,16})([ \d.]+)$", done.stdout, re.M)
    }
    assert len(rows) == 4, done.stdout
    layers = {name: float(numbers[-1]) for name, numbers in rows.items()}
    assert layers["8bit, several graphs"] >= 4
    assert layers["8bit, one graph"] <= 2
    found, bound = map(float, re.findall(r"([\d.]+) MiB", done.stdout))
    assert found <= bound
    assert float(rows["8bit, one graph"][1]) <= 0.26 * float(rows["dense, eager"][1])
    assert plot.read_bytes().startswith(b"\x89PNG")
