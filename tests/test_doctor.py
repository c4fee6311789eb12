"""`python -m qcompile doctor`, in processes of its own: where all is well, and where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qcompile import doctor


def run(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qcompile", "doctor"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **environment}, check=False
    )


def test_a_healthy_machine(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "ready"
    assert [line.split()[1] for line in lines[:-1] if line[0] != " "] == [c.__name__[1:] for c in doctor.CHECKS]
    assert "AdamW in 8 bits on cpu:" in done.stdout or torch.cuda.is_available()


def test_no_compiler(tmp_path: Path) -> None:
    """Both the compiler and the step that needs it are faults."""
    done = run(tmp_path, CXX="/nonexistent/g++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "fault compiler    CXX is '/nonexistent/g++', which is no program" in done.stdout
    assert "apt install g++" in done.stdout
    assert "fault step        not tried, because it needs a C++ compiler" in done.stdout
    assert done.stdout.splitlines()[-1] == "not ready: compiler, step"


def test_each_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "missing_names", lambda: ["torch._inductor.gone"])
    assert doctor._torch().state == "fault"
    assert "torch._inductor.gone" in doctor._torch().found
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    assert doctor._torch().state == "note"
    monkeypatch.setattr(doctor, "FREE", 1 << 62)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "not" / "there"))
    assert "TORCHINDUCTOR_CACHE_DIR" in doctor._cache().remedy
    monkeypatch.setattr(doctor, "CHECKS", (doctor._python, lambda: 1 / 0))  # type: ignore[arg-type, return-value]
    assert "ZeroDivisionError" in str([*doctor.examine()][-1])
