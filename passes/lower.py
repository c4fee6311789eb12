"""Hand a verified kernel graph to Inductor.

Before: a `QuantizedUpdate`. After: a `Kernel`, compiled for the device, with its source. The compiled code must not have
assumed anything about the number of rows but the bound of 32-bit indices, which the launcher respects.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from qcompile._compat_inductor import (
    code_language,
    compile_cpp,
    compile_triton,
    lower_with_inductor,
    triton_source,
)
from qcompile.exc import GraphSpecError
from qcompile.passes.quantize_update import QuantizedUpdate
from qcompile.passes.rewrite_cpp import ClassFunction, rewrite_cpp
from qcompile.passes.rewrite_triton import rewrite_triton
from qcompile.passes.show_program import show_kernel
from qcompile.runtime.launch import LAUNCH, Kernel

NAME = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)


def lower(update: QuantizedUpdate, device: torch.device, settings: Mapping[str, Any]) -> Kernel:
    """Compile `update` with Inductor for `device`; `settings` is Inductor's configuration."""
    language = code_language(device)
    shown = show_kernel(update) if language == "Triton" else ""  # before Inductor changes the graph
    call, source = lower_with_inductor(update.graph, update.inputs, update.world.fake_mode, settings, update.parts)
    most = LAUNCH // update.block_size
    if guards := [expr for expr in update.world.guards() if not _holds_up_to(expr, most)]:
        raise GraphSpecError("lower", f"the kernel holds only where {guards}")
    kernel = _kernel(call, language, source, shown, update)
    if language == "C++":
        function = rewrite_cpp(source, update.scales)
        return kernel if function is None else _with_class(kernel, function, compile_cpp(function.source))
    function = rewrite_triton(source, update.block_size, update.parts)
    if function is None:
        return kernel
    return _with_class(kernel, function, compile_triton(function.source, function.unit, function.warps))


def generate_triton(update: QuantizedUpdate, capability: int) -> Kernel:
    """The kernel that `lower` would make on a CUDA GPU of this compute capability (90: 9.0), to read but not to run.

    `update` was traced on a CPU, and cannot be lowered again.
    """
    shown = show_kernel(update)
    source = triton_source(update.graph, update.inputs, update.world.fake_mode, {}, update.parts, capability)
    kernel = _kernel(_not_loaded, "Triton", source, shown, update)
    function = rewrite_triton(source, update.block_size, update.parts)
    return kernel if function is None else _with_class(kernel, function, _not_loaded)


def _kernel(call: Callable[..., Any], language: str, source: str, shown: str, update: QuantizedUpdate) -> Kernel:
    name = ", ".join(NAME.findall(source)) or "none"
    scales = update.returned_scales
    return Kernel(call, name, language, source, update.parts, scales, update.block_size, reference=shown)


def _with_class(kernel: Kernel, function: ClassFunction, call: Callable[..., Any]) -> Kernel:
    return dataclasses.replace(
        kernel,
        source=function.source,
        module=kernel.source,
        call_table=call,
        columns=function.columns,
        unit=function.unit,
        warps=function.warps,
        wide=function.wide,
    )


def _not_loaded(*args: Any) -> Any:
    raise RuntimeError("this kernel was generated to be read; use lower() to make one that runs")


def _holds_up_to(expr: str, most: int) -> bool:
    """Whether a condition on the number of rows is a bound that `most` rows keep."""
    bound = re.fullmatch(r"(?:(\d+)\*)?\w+ <= (\d+)", expr)
    return bound is not None and int(bound[1] or 1) * most <= int(bound[2])
