"""`python -m qcompile doctor`: whether everything that a compiled step needs is there and works, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from qcompile._compat import missing_names
from qcompile.runtime.state import QuantizedState

# What the tests are run with, and the least that has every name that is needed.
TESTED, LEAST_TORCH = ("2.13.0", "2.14.1"), "2.11"
FREE = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """`state` is "ok", "note" (works, with something to know) or "fault"; `remedy` what to do about it."""

    state: str
    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"{self.state:6}{self.what:12}{self.found}"]
        return "\n".join([*lines, *([f"{'':18}{self.remedy}"] if self.remedy else [])])


def examine() -> Iterator[Finding]:
    """Everything, one finding after the other; the last one compiles and runs a step."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            yield Finding(
                "fault", check.__name__.removeprefix("_"), f"{type(error).__name__}: {first}", "please report this"
            )


def _python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _torch() -> Finding:
    version = torch.__version__
    if missing := missing_names():
        return Finding(
            "fault", "torch", f"{version} lacks {', '.join(missing)}", f"install torch {' or '.join(TESTED)}"
        )
    if version.partition("+")[0] in TESTED:
        return Finding("ok", "torch", version)
    return Finding(
        "note", "torch", f"{version} has all that is needed, but the tests are run with {' and '.join(TESTED)}"
    )


def _triton() -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        if torch.cuda.is_available():
            return Finding(
                "fault", "triton", "not installed", "reinstall torch: its CUDA builds bring the triton they need"
            )
        return Finding("note", "triton", "not installed", "only needed for GPUs, and for kernel statistics without one")
    return Finding("ok", "triton", version)


def _devices() -> Finding:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("ok", "devices", ", ".join([*names, f"CPU ({capability}, {torch.get_num_threads()} threads)"]))


def _compiler() -> Finding:
    """A C++ compiler is needed for CPU kernels, and by Triton for its launchers."""
    wanted = os.environ.get("CXX")
    found = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
    remedy = "install g++ (Debian and Ubuntu: apt install g++) or clang++, or name one in the environment variable CXX"
    if found is None:
        return Finding(
            "fault",
            "compiler",
            f"CXX is {wanted!r}, which is no program" if wanted else "no g++ and no clang++",
            remedy,
        )
    return Finding("ok", "compiler", found)


def _cache() -> Finding:
    """Where Inductor keeps generated code; the directory is torch's choice unless TORCHINDUCTOR_CACHE_DIR names one."""
    wanted = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir()))
    existing = next(folder for folder in (wanted, *wanted.absolute().parents) if folder.exists())
    remedy = "name another folder in the environment variable TORCHINDUCTOR_CACHE_DIR"
    if not os.access(existing, os.W_OK):
        return Finding("fault", "cache", f"{wanted} cannot be written", remedy)
    free = shutil.disk_usage(existing).free
    if free < FREE:
        return Finding("note", "cache", f"{wanted} has {free >> 20} MiB left", remedy)
    return Finding("ok", "cache", f"{wanted}, {free >> 30} GiB free")


def _step() -> Finding:
    """Steps of AdamW, compiled with 8 bits, against the same eagerly in fp32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if _compiler().state == "fault":
        return Finding("fault", "step", "not tried, because it needs a C++ compiler")
    torch.manual_seed(0)
    weights = torch.randn(64, 128, device=device)
    gradients = [torch.randn(64, 128, device=device) for _ in range(3)]
    dense, quantized = (torch.nn.Parameter(weights.clone()) for _ in range(2))
    optimizers = [torch.optim.AdamW([p], lr=1e-2) for p in (dense, quantized)]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend="qstate")]
    for gradient in gradients:
        for p, step in zip((dense, quantized), steps, strict=True):
            p.grad = gradient.clone()
            step()
    state = optimizers[1].state[quantized]
    if not isinstance(state["exp_avg"], QuantizedState):
        return Finding(
            "fault", "step", "its state is dense", "look at print(qcompile.explain(optimizer)) of your own step"
        )
    moved = (dense.detach() - weights).norm()
    error = float((quantized.detach() - dense.detach()).norm() / moved)
    text = f"AdamW in 8 bits on {device}: {error:.1e} of the way off after {len(gradients)} steps"
    if not error < 0.02:
        return Finding(
            "fault", "step", f"{text}, more than 2e-2", "the generated code is wrong here: please report this"
        )
    return Finding("ok", "step", text)


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _torch, _triton, _devices, _compiler, _cache, _step)
