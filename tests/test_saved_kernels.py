"""Kernels in files: a Triton one runs on its own, and says so when it is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_params, set_grads

import qcompile
from qcompile.exc import InvalidOptionError, NoTritonCompilerError


def ran(path: Path) -> tuple[int, list[str], str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, cwd=path.parent)
    return found.returncode, found.stdout.splitlines(), found.stderr


def report(recipe: str, **options: int) -> qcompile.Report:
    (p,) = make_params((5, 300))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    step = torch.compile(
        optimizer.step, backend="qstate", options={"recipe": recipe, "block_size": 128, "min_numel": 0, **options}
    )
    set_grads([p], 0)
    step()
    return qcompile.explain(optimizer)


@pytest.mark.parametrize("recipe", ["8bit", pytest.param("zip-sr", marks=pytest.mark.slow)])
def test_a_triton_kernel_runs_alone_and_notices_a_fault(triton_on_cpu: None, recipe: str, tmp_path: Path) -> None:
    found = report(recipe)
    paths = found.save_kernels(tmp_path / "kernels")
    assert [p.suffix for p in paths] == [".py"] * len(found.kernels)
    assert {k.role for k in found.kernels} == {"quantized blocks", "dense tensors and tails"}
    for kernel, path in zip(found.kernels, paths, strict=True):
        assert "qcompile" not in path.read_text()
        code, lines, errors = ran(path)
        assert code == 0, "\n".join([*lines, errors])
        if (
            recipe == "8bit"
        ):  # parameter and moments; of the first moment codes and scale, of the second codes and two scales
            assert len(lines) == (6 if kernel.role == "quantized blocks" else 3), lines
        assert "program" in kernel.grid
    good = paths[0].read_text()
    wrong = good.replace("0.999, tl.float32", "0.99, tl.float32")  # in the kernel, not in what it is compared with
    assert wrong != good
    paths[0].write_text(wrong)
    code, lines, errors = ran(paths[0])
    assert (code, any("too much" in line for line in lines)) == (1, True), errors
    with pytest.raises(NoTritonCompilerError, match="TRITON_INTERPRET"):
        found.kernels[0].stats()
    with pytest.raises(InvalidOptionError, match="arch='sm90'"):
        found.kernels[0].stats("sm90")


def test_a_cpp_kernel_is_saved_to_be_read(tmp_path: Path) -> None:
    found = report("8bit")
    paths = found.save_kernels(tmp_path)
    assert [path.read_text() for path in paths] == [kernel.source for kernel in found.kernels]
    assert all(path.suffix == ".cpp" for path in paths)
    assert "kernel" not in found.to_dict()["kernels"][0]
    assert found.to_dict()["kernels"][0]["grid"].startswith("one call; the blocks")
    with pytest.raises(InvalidOptionError, match="a Triton kernel"):
        found.kernels[0].stats()
