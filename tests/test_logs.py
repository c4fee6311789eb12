"""What `TORCH_LOGS="+qcompile"` and `TORCH_TRACE` show, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STEP = """
import torch
p = torch.nn.Parameter(torch.randn(64, 128))
optimizer = torch.optim.AdamW([p], foreach=True)
p.grad = torch.randn_like(p)
torch.compile(optimizer.step, backend="qstate")()
"""


def run(tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STEP],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_diff_per_pass_at_debug_level(tmp_path: Path) -> None:
    shown = run(tmp_path, TORCH_LOGS="+qcompile")
    assert "graph with an update:" in shown
    assert "thread_writes: changed" in shown
    assert "keep_replaced: nothing changed" in shown
    assert "class 0, 1 region(s): param dense, exp_avg update-linear8-signed" in shown
    assert "lerp_1 = lerp(exp_avg, input, 0.1)" in shown


def test_silence_without_it(tmp_path: Path) -> None:
    assert "thread_writes" not in run(tmp_path)


def test_the_structured_trace(tmp_path: Path) -> None:
    run(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    text = "".join(path.read_text() for path in (tmp_path / "trace").iterdir())
    for name in ("qcompile_update_graph", "qcompile_update_class_0"):
        assert f'"name": "{name}"' in text
    assert "def update(param, exp_avg, input, exp_avg_sq, step):" in text
