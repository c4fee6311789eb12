"""The examples for the places where people train: each ends with an error where state is not quantized."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = Path(__file__).resolve().parent.parent / "examples" / "trainers"
NEEDS = {
    "plain_loop": (),
    "with_grad_scaler": (),
    "with_accelerate": ("accelerate",),
    "with_lightning": ("lightning",),
    "with_transformers": ("transformers", "accelerate"),
    "with_timm": ("timm", "torchvision"),
}


def test_every_example_is_here() -> None:
    assert {path.stem for path in TRAINERS.glob("*.py")} == NEEDS.keys()
    assert all(len(path.read_text().splitlines()) < 60 for path in TRAINERS.glob("*.py"))


@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, tmp_path: Path) -> None:
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -e '.[trainers]'")
    command = [sys.executable, "-W", "ignore", str(TRAINERS / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recompile_limit" not in done.stderr
