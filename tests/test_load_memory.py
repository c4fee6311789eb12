"""How much memory loading a checkpoint takes: what is quantized, and one dense tensor, never all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SIZES = 3 * [1 << 24]  # 64 MiB of fp32 each; AdamW has twice that
MIB = 1 << 20

SCRIPT = """
import gc, sys, threading, time
import torch
from torch import nn

kind, path, sizes = sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3:]]


def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def trained(sizes):
    params = [nn.Parameter(torch.zeros(n)) for n in sizes]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    return params, optimizer, torch.compile(optimizer.step, backend="qstate")


def update(params, step):
    for p in params:
        p.grad = torch.ones_like(p)
    step()


params, optimizer, step = trained([8192, 8192])  # compiles what the large ones need, too
for _ in range(2):
    update(params, step)
params, optimizer, step = trained(sizes)
if kind == "save quantized":
    update(params, step)
    torch.save(optimizer.state_dict(), path)
elif kind == "save dense":
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
else:
    for p in params:
        p.grad = torch.ones_like(p)
    gc.collect()
    most, done = [0], threading.Event()
    before = anonymous()

    def watch():
        while not done.is_set():
            most[0] = max(most[0], anonymous() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    optimizer.load_state_dict(torch.load(path, weights_only=True, mmap=True))
    step()
    done.set()
    watcher.join()
    stored = sum(v.stored_bytes for s in optimizer.state.values() for v in s.values() if hasattr(v, "stored_bytes"))
    print(most[0], stored, float(optimizer.state[params[0]]["step"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory of a process")
@pytest.mark.parametrize("kind", ["quantized", "dense"])
def test_loading_takes_the_quantized_size_and_one_dense_tensor(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"

    def run(what: str) -> str:
        command = [sys.executable, "-c", SCRIPT, what, str(path), *map(str, SIZES)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    run(f"save {kind}")
    most, stored, step = (float(x) for x in run("load").split()[-3:])
    assert step == 2
    quantized = 2 * sum(SIZES) * (1 + 2 / 256)
    assert stored == pytest.approx(quantized, rel=0.02)
    # 48 MiB for a trace of the step and pieces of the tensor that is being converted; all dense state takes 384.
    assert most <= quantized + 4 * max(SIZES) + 48 * MIB, f"{most / MIB:.0f} MiB"
    print(
        f"{kind}: {most / MIB:.0f} MiB at most, quantized {stored / MIB:.0f}, largest dense {4 * max(SIZES) / MIB:.0f}"
    )
