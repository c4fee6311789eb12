"""The same update on a GPU: one generated Triton kernel per class, equal to the CPU's numbers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import qcompile
from qcompile.runtime.state import QuantizedState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def run(device: str, params, train, recipe: str = "8bit", **flags):
    ours = [torch.nn.Parameter(p.detach().to(device)) for p in params((256, 512), (40, 103), (17,))]
    optimizer = torch.optim.AdamW(ours, lr=1e-3, **flags)
    step = torch.compile(optimizer.step, backend="qstate", options={"recipe": recipe})
    for t in range(4):
        for i, p in enumerate(ours):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i)).to(device)
        step()
    return ours, optimizer


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": True}], ids=["default", "fused", "foreach"])
@pytest.mark.parametrize("recipe", ["8bit", "4bit", "zip-sr", "ze-eden", "dettmers-8bit"])
def test_equals_the_cpu(params, train, recipe, flags) -> None:
    gpu, optimizer = run("cuda", params, train, recipe, **flags)
    cpu, reference = run("cpu", params, train, recipe)
    for a, b in zip(gpu, cpu, strict=True):
        # where an element fell on the other side of a border, its update differs: rarely, and by less than itself
        apart = (a.cpu() - b).abs()
        assert (apart > 1e-5).float().mean() < 1e-3
        assert apart.max() <= 4e-3
    for a, b in zip(gpu[:2], cpu[:2], strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            x, y = optimizer.state[a][key], reference.state[b][key]
            assert isinstance(x, QuantizedState)
            assert x.codes.is_cuda
            assert (x.codes.cpu() != y.codes).float().mean() < 1e-3
            if x.counter is not None:
                assert torch.equal(x.counter.cpu(), y.counter)


def test_one_kernel_per_class_that_touches_everything_once(params, train) -> None:
    _, optimizer = run("cuda", params, train)
    report = qcompile.explain(optimizer)
    (kernel,) = (k for k in report.kernels if k.role == "quantized blocks")
    assert kernel.language == "Triton"
    assert kernel.source.count("@triton.jit") == 1
    blocks = list(re.findall(r"tl\.load\((\w+) \+ \(r0", kernel.source))
    assert len(blocks) == len(set(blocks)) == 4
    assert len(re.findall(r"tl\.store\(", kernel.source)) == 6, "parameter, two codes, one scale and two ends"


@pytest.mark.parametrize("recipe", ["8bit", "4bit", "zip-sr"])
def test_saved_kernels_run_alone(params, train, recipe, tmp_path) -> None:
    _, optimizer = run("cuda", params, train, recipe)
    for path in qcompile.explain(optimizer).save_kernels(tmp_path):
        found = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
        assert found.returncode == 0, found.stdout + found.stderr


def test_state_takes_a_quarter_on_the_device() -> None:
    p = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    optimizer = torch.optim.AdamW([p])
    step = torch.compile(optimizer.step, backend="qstate")
    p.grad = torch.randn_like(p)
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 2.05 * p.numel()
