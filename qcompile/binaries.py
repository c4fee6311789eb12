"""Read what ptxas or LLVM made of a Triton kernel: registers, stack, and how wide the accesses of each tensor are."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qcompile.kernel_source import GeneratedKernel
from qcompile.runtime.launch import Kernel

WIDTHS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


def usage(binary: Any) -> tuple[int, int]:
    """Registers per thread, and bytes of stack per thread."""
    if "cubin" not in binary.asm:
        text = binary.asm["amdgcn"]
        return int(re.search(r"\.vgpr_count: +(\d+)", text)[1]), int(  # type: ignore[index]
            re.search(r"\.private_segment_fixed_size: +(\d+)", text)[1]  # type: ignore[index]
        )
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def widths(ptx: str, kernel: GeneratedKernel) -> dict[str, tuple[int, int]]:
    """Bytes of the narrowest load and store instruction of each tensor, which an address is followed back to."""
    pointers = [parameter for parameter, _, _ in kernel.tensors]
    signature = re.search(rf"def {kernel.name}\((.*?)\):", kernel.text)
    order = [] if signature is None else [p.split(":")[0].strip() for p in signature[1].split(",")]

    def origin(line: str) -> tuple[str, str] | None:
        load = re.search(r"ld\.param\.b64\s+(%rd\d+), \[\w+_param_(\d+)\]", line)
        known = load is not None and int(load[2]) < len(order) and order[int(load[2])] in pointers
        return (load[1], kernel.pointers[order[int(load[2])]]) if load is not None and known else None

    return _followed(ptx, origin)


def table_widths(ptx: str, kernel: Kernel, inputs: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The same, of addresses that come from a table, a row of 8-byte columns."""
    addresses: dict[str, int] = {}  # registers that point into the row, and how many bytes behind its begin

    def origin(line: str) -> tuple[str, str] | None:
        if add := re.search(r"add\.s64\s+(%rd\d+), (%rd\d+), (\d+);", line):
            addresses[add[1]] = addresses.get(add[2], 0) + int(add[3])
        load = re.search(r"ld\.global\.b64\s+\{ (%rd\d+) \}, \[ (%rd\d+) \+ (\d+) \];", line)
        if load is None:
            return None
        column = (addresses.get(load[2], 0) + int(load[3])) // 8
        return (load[1], inputs[kernel.columns[column]]) if column < len(kernel.columns) else None

    return _followed(ptx, origin)


def _followed(ptx: str, origin_of: Callable[[str], tuple[str, str] | None]) -> dict[str, tuple[int, int]]:
    origin: dict[str, str] = {}
    found: dict[str, tuple[int, int]] = {}
    for line in ptx.splitlines():
        if begins := origin_of(line):
            origin[begins[0]] = begins[1]
        elif access := re.search(r"\b(ld|st)\.global\S*?\.(?:v(\d)\.)?(b\d+)\s.*\[ *(%rd\d+)", line):
            if access[4] in origin:
                at, size = access[1] == "st", int(access[2] or 1) * WIDTHS[access[3]]
                both = list(found.get(origin[access[4]], (0, 0)))
                both[at] = min(both[at] or size, size)
                found[origin[access[4]]] = (both[0], both[1])
        elif registers := re.findall(r"%rd\d+", line):
            known = [origin[r] for r in registers[1:] if r in origin]
            if known:
                origin[registers[0]] = known[0]
    return found
