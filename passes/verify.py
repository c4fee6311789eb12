"""The specification of a kernel graph, checked before it is lowered.

What must hold: a quantized state has no dense placeholder left; every input that is written is written once, by a copy
after which nothing reads it under its old name; nothing else is in place; extents depend on the rows alone.
"""

from __future__ import annotations

import torch
from torch import fx

from qcompile.exc import GraphSpecError
from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.quantize_update import QuantizedUpdate, Storage
from qcompile.runtime.formats import Format

COPY = torch.ops.aten.copy_.default


def verify(update: QuantizedUpdate, program: UpdateProgram, storage: Storage) -> None:
    """Raise `GraphSpecError` where `update` breaks the specification."""
    nodes = list(update.graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    _verify_inputs(placeholders, program, storage)
    wanted = _written(program, storage, update.returned_scales)
    copies = [n for n in nodes if n.target is COPY]
    found = sorted(placeholders.index(n.args[0]) for n in copies if n.args[0] in placeholders)
    if found != wanted or len(copies) != len(wanted):
        raise GraphSpecError("quantize_update", f"inputs {found} are written, expected {wanted}")
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable and node.target is not COPY:
            raise GraphSpecError("quantize_update", f"{node.target} writes in place")
    outputs = nodes[-1].args[0]
    if len(outputs) != len(update.returned_scales):
        raise GraphSpecError("quantize_update", f"{len(outputs)} outputs, expected {len(update.returned_scales)}")


def _verify_inputs(placeholders: list[fx.Node], program: UpdateProgram, storage: Storage) -> None:
    at = 0
    for operand, fmt in zip(program.operands, storage, strict=True):
        expected = [fmt.code_dtype, torch.float32] if isinstance(fmt, Format) else [fmt or operand.dtype]
        found = [n.meta["val"].dtype for n in placeholders[at : at + len(expected)]]
        if found != expected:
            raise GraphSpecError("quantize_update", f"operand {operand} is stored as {fmt} but arrives as {found}")
        at += len(expected)
    if len(placeholders) != at + len(program.scalar_dtypes):
        raise GraphSpecError(
            "quantize_update", f"{len(placeholders)} inputs, expected {at + len(program.scalar_dtypes)}"
        )


def _written(program: UpdateProgram, storage: Storage, returned: tuple[int, ...]) -> list[int]:
    wanted, at = [], 0
    for i, (operand, fmt) in enumerate(zip(program.operands, storage, strict=True)):
        if operand.written:
            wanted += [at, at + 1] if isinstance(fmt, Format) and i not in returned else [at]
        at += 2 if isinstance(fmt, Format) else 1
    return wanted
