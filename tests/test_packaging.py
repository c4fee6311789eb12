"""The wheel holds everything, and works away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout."""
    import shutil

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("qcompile", "passes", "runtime", "pyproject.toml", "README.md", "LICENSE"):
        path = CHECKOUT / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, source / name, ignore=ignore) if path.is_dir() else shutil.copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = out.glob("torch_qcompile-*.whl")
    return found


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("qcompile", "qcompile"), ("passes", "qcompile/passes"), ("runtime", "qcompile/runtime")):
        for path in (CHECKOUT / folder).glob("*.py"):
            assert f"{inside}/{path.name}" in names
    assert "qcompile/py.typed" in names


def test_the_wheel_works_on_its_own(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.path[:] = [p for p in sys.path if p != sys.argv[2]]; "
        "import qcompile, qcompile.passes.pipeline as p; print(qcompile.__file__, p.__file__)"
    )
    command = [sys.executable, "-c", code, str(target), str(CHECKOUT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(target / "qcompile/__init__.py"), str(target / "qcompile/passes/pipeline.py")]


def test_the_checkout_works_without_an_install(tmp_path: Path) -> None:
    code = "import qcompile.runtime.formats as f; print(f.__file__)"
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path[:0] = {[p for p in sys.path if 'site-packages' in p]!r}; {code}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(CHECKOUT / "runtime/formats.py")
