"""What `explain` says of a generated kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from qcompile.kernel_source import traffic
from qcompile.kernels import Statistics, stats_of
from qcompile.runtime.launch import Kernel


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One generated kernel.

    Attributes:
        name, language: of the function; "C++" or "Triton".
        source: the module's.
        role: what it is for.
        grid: what is launched, in words.
        loaded, stored: bytes per element of the parameter, counted in the source; None where its form is not known.
        kernel: what runs; not in `Report.to_dict`.
    """

    name: str
    language: str
    source: str = field(repr=False)
    role: str
    grid: str
    loaded: float | None
    stored: float | None
    kernel: Kernel = field(repr=False, metadata={"shown": False})

    def stats(self, arch: str = "sm_90") -> Statistics:
        """What a Triton kernel uses when it is compiled for `arch`, which need not be there (see `qcompile.kernels.stats`).

        Raises:
            InvalidOptionError: it is a C++ kernel, or `arch` is no architecture.
            NoTritonCompilerError: Triton is not installed, or runs as an interpreter.
        """
        return stats_of(self.kernel, arch)

    def __str__(self) -> str:
        moved = "" if self.loaded is None else f", {self.loaded:.2f} B read and {self.stored:.2f} written per element"
        return f"{self.role}: {self.name} ({self.language}{moved})"


def report_of(kernel: Kernel, role: str) -> KernelReport:
    """Describe a kernel; `role` is what it updates."""
    return KernelReport(kernel.name, kernel.language, kernel.source, role, _grid(kernel), *_moved(kernel), kernel)


def _grid(kernel: Kernel) -> str:
    if kernel.call_table is None:
        return "a launch per region, in Inductor's own grid"
    unit = "block" if kernel.block_size > 1 else "element"
    if kernel.language == "C++":
        return f"one call; the {unit}s of all regions are shared out between the threads"
    return f"one program of {kernel.warps} warp(s) per {kernel.unit} {unit}(s) of a region"


def _moved(kernel: Kernel) -> tuple[float | None, float | None]:
    try:
        found = traffic(kernel)
    except ValueError:  # another Inductor writes it in another form
        return None, None
    return found.read, found.written
