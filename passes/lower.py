"""Hand a verified kernel graph to Inductor.

Before: a `QuantizedUpdate`. After: a `Kernel`, compiled for the device, with its source. The compiled code must not have
assumed anything about the number of rows but the bound of 32-bit indices, which the launcher respects.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from qcompile._compat_inductor import code_language, compile_cpp, compile_triton, lower_with_inductor
from qcompile.exc import GraphSpecError
from qcompile.passes.quantize_update import QuantizedUpdate
from qcompile.passes.rewrite_cpp import rewrite_cpp
from qcompile.passes.rewrite_triton import rewrite_triton, warps_of
from qcompile.runtime.launch import LAUNCH, Kernel

NAME = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)


def lower(update: QuantizedUpdate, device: torch.device, settings: Mapping[str, Any]) -> Kernel:
    """Compile `update` with Inductor for `device`; `settings` is Inductor's configuration."""
    call, source = lower_with_inductor(update.graph, update.inputs, update.world.fake_mode, settings)
    most = LAUNCH // update.block_size
    if guards := [expr for expr in update.world.guards() if not _holds_up_to(expr, most)]:
        raise GraphSpecError("lower", f"the kernel holds only where {guards}")
    names, language = NAME.findall(source), code_language(device)
    kernel = Kernel(call, ", ".join(names) or "none", language, source, update.parts, update.returned_scales)
    in_cpp = language == "C++"
    function = rewrite_cpp(source, update.scales) if in_cpp else rewrite_triton(source, update.block_size)
    if function is None:
        return kernel
    return dataclasses.replace(
        kernel,
        source=function.source,
        call_table=compile_cpp(function.source)
        if in_cpp
        else compile_triton(function.source, function.unit, warps_of(function.unit, update.block_size)),
        columns=function.columns,
        unit=function.unit,
        wide=function.wide,
    )


def _holds_up_to(expr: str, most: int) -> bool:
    """Whether a condition on the number of rows is a bound that `most` rows keep."""
    bound = re.fullmatch(r"(?:(\d+)\*)?\w+ <= (\d+)", expr)
    return bound is not None and int(bound[1] or 1) * most <= int(bound[2])
