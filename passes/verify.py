"""The specification of a kernel graph, checked before it is lowered.

What must hold: a quantized state has no dense placeholder left; every input that is written is written once, by a copy
after which nothing reads it under its old name; nothing else is in place; extents depend on the rows alone.
"""

from __future__ import annotations

import torch
from torch import fx

from qcompile.exc import GraphSpecError
from qcompile.passes.functionalize import Operand, UpdateProgram
from qcompile.passes.quantize_update import QuantizedUpdate, Storage
from qcompile.runtime.formats import Format

COPY = torch.ops.aten.copy_.default


def verify(update: QuantizedUpdate, program: UpdateProgram, storage: Storage) -> None:
    """Raise `GraphSpecError` where `update` breaks the specification."""
    nodes = list(update.graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    _verify_inputs(placeholders, program, storage, update.parts)
    wanted = written_inputs(program, storage, update)
    copies = [n for n in nodes if n.target is COPY]
    found = sorted(placeholders.index(n.args[0]) for n in copies if n.args[0] in placeholders)
    if found != wanted or len(copies) != len(wanted):
        raise GraphSpecError("quantize_update", f"inputs {found} are written, expected {wanted}")
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable and node.target is not COPY:
            raise GraphSpecError("quantize_update", f"{node.target} writes in place")
    outputs = nodes[-1].args[0]
    returned = sum(fmt.reductions for i in update.returned_scales if isinstance(fmt := storage[i], Format))
    if len(outputs) != returned:
        raise GraphSpecError("quantize_update", f"{len(outputs)} outputs, expected {returned}")


def _verify_inputs(placeholders: list[fx.Node], program: UpdateProgram, storage: Storage, parts: int) -> None:
    at = 0
    for operand, fmt in zip(program.operands, storage, strict=True):
        expected = [dtype for dtype, _ in _inputs_of(operand, fmt, parts)]
        found = [n.meta["val"].dtype for n in placeholders[at : at + len(expected)]]
        if found != expected:
            raise GraphSpecError("quantize_update", f"operand {operand} is stored as {fmt} but arrives as {found}")
        at += len(expected)
    at += len(program.scalar_dtypes) + any(isinstance(fmt, Format) and fmt.random for fmt in storage)
    if len(placeholders) != at:
        raise GraphSpecError("quantize_update", f"{len(placeholders)} inputs, expected {at}")


def _inputs_of(operand: Operand, fmt: Format | torch.dtype | None, parts: int) -> list[tuple[torch.dtype, str]]:
    """dtype and kind of the inputs that an operand has."""
    if not isinstance(fmt, Format):
        return [(fmt or operand.dtype, "block")] * parts
    inputs = [(fmt.code_dtype, "block")] * (parts * fmt.bits // 8) + [(fmt.scale_dtype, "scale")] * fmt.scale_count
    return inputs + [(torch.int32, "counter")] * 2 * fmt.random


def written_inputs(program: UpdateProgram, storage: Storage, update: QuantizedUpdate) -> list[int]:
    """Positions of the inputs that the kernel writes in place."""
    wanted, at = [], 0
    for i, (operand, fmt) in enumerate(zip(program.operands, storage, strict=True)):
        kinds = {"block"} if i in update.returned_scales else {"block", "scale"}
        for _, kind in _inputs_of(operand, fmt, update.parts):
            if operand.written and kind in kinds:
                wanted.append(at)
            at += 1
    return wanted
