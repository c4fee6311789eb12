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
    assert share <= 0.26
    assert "blocks.0.qkv.weight" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
