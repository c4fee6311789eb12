"""The update of a class as Python that people read: one line per operation, state and numbers under their own names.

Before: a functional program, or the graph of a kernel. After: text; nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.quantize_update import QuantizedUpdate
from qcompile.passes.verify import COPY


def show_program(program: UpdateProgram, operands: Sequence[str], numbers: Sequence[str]) -> str:
    """A function of the operands and numbers, by name, that returns what is written.

    What is computed once for a parameter (bias corrections) comes first, then what is computed for each element.
    """
    operands, numbers = _distinct([*operands], []), _distinct([*numbers], operands)
    own = _Lines({*operands, *numbers})
    scalars = own.of(program.scalars, list(numbers), "once")
    count = len(program.scalar_dtypes)
    elements = own.of(program.elements, [*operands, *scalars[:count]], "for each element")
    written = [name for name, operand in zip(operands, program.operands, strict=True) if operand.written]
    counters = [numbers[i] for i in program.written_numbers]
    results = dict(zip([*written, *counters], [*elements, *scalars[count:]], strict=True))
    changed = {name: value for name, value in results.items() if name != value}
    lines = [f"def update({', '.join([*operands, *numbers])}):", *own.lines]
    return "\n".join([*lines, f"    {', '.join(changed)} = {', '.join(changed.values())}" if changed else "    pass"])


def show_kernel(update: QuantizedUpdate) -> str:
    """Two functions that run where torch is all there is: `make_inputs(rows, device)`, and the graph as `reference(*inputs)`.

    `DEVICE`, `device`, `inf`, `nan` and `multiply_add`, which rounds once, are the caller's. `WRITTEN` are the inputs that are written.
    """
    placeholders = [n for n in update.graph.graph.nodes if n.op == "placeholder"]
    written = sorted(placeholders.index(n.args[0]) for n in update.graph.graph.nodes if n.target is COPY)
    code = re.sub(r"device\(type='\w+'(, index=\d+)?\)", "DEVICE", update.graph.code.strip())
    code = re.sub(r"^def \w+\(self, ", "def reference(", code).replace("torch.ops.prims.fma.default", "multiply_add")
    made = [f"        torch.empty_strided({_sizes(t)}, dtype={t.dtype}, device=device)," for t in update.inputs]
    return "\n".join(
        [
            f"WRITTEN = {written}  # which of the inputs",
            "def make_inputs(rows, device):",
            "    return [",
            *made,
            "    ]",
            "",
            "",
            code,
        ]
    )


def _sizes(tensor: Tensor) -> str:
    """Shape and strides, of which the first dimension is `rows` long."""
    shape = ["rows", *map(str, tensor.shape[1:])] if tensor.dim() else []
    return f"({', '.join(shape)}{',' * (len(shape) == 1)}), {tuple(map(int, tensor.stride()))}"


def _distinct(names: list[str], others: Sequence[str]) -> list[str]:
    """Identifiers: dots become underscores, and what is there already gets a number."""
    found: list[str] = []
    for name in (name.replace(".", "_") for name in names):
        same = sum(other.rstrip("0123456789").rstrip("_") == name for other in (*others, *found))
        found.append(f"{name}_{same + 1}" if same else name)
    return found


class _Lines:
    """The lines of several graphs after each other, with names that no other value has."""

    def __init__(self, taken: set[str]) -> None:
        self.lines: list[str] = []
        self.taken = taken

    def of(self, gm: fx.GraphModule, arguments: list[str], comment: str) -> list[str]:
        """Write a graph that is given values of these names; the names of what it returns."""
        names: dict[fx.Node, str] = {}
        left = iter(arguments)
        lines: list[str] = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                names[node] = next(left)
            elif node.op == "output":
                if lines:
                    self.lines += [f"    # {comment}", *lines]
                return [_text(a, names.__getitem__) for a in node.args[0]]
            else:
                names[node] = self._name(node)
                parts = [_text(a, names.__getitem__) for a in node.args]
                parts += [f"{key}={_text(value, names.__getitem__)}" for key, value in node.kwargs.items()]
                lines.append(f"    {names[node]} = {_operation(node)}({', '.join(parts)})")
        raise AssertionError("a graph has an output")

    def _name(self, node: fx.Node) -> str:
        base = _operation(node)
        name = next(name for name in _numbered(base) if name not in self.taken)
        self.taken.add(name)
        return name


def _numbered(base: str) -> Iterator[str]:
    i = 1
    while True:
        yield f"{base}_{i}"
        i += 1


def _operation(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    return name.partition(".")[0].lstrip("_")


def _text(value: Any, name_of: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return name_of(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, name_of) for item in value)}]"
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value).removeprefix("torch.")
