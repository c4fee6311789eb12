"""State that is replaced is written in place instead.

Before: a graph in which `state["m"] = beta * state["m"] + ...` reads one tensor and returns another, which Python code
stores in its place when the graph has run. After: the graph copies the new value into the tensor that is there and returns
that very tensor, so that the state stays the object it is, and can be quantized.

Not where the old tensor is kept too (`state["last"] = state["m"]`), nor where one new tensor goes to two places: what is
stored there would then be one object and must be two.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor, fx

from qcompile._compat import example_of, stored_values
from qcompile.passes.find_state import Inputs


def keep_replaced(gm: fx.GraphModule, inputs: Inputs) -> None:
    """Rewrite `gm`, a copy of the graph being compiled, in place."""
    stored = stored_values(gm)
    kept = Counter(new for _, new in stored)
    output = next(n for n in gm.graph.nodes if n.op == "output")
    for old, new in stored:
        if old not in inputs.state or old is None or old in kept or kept[new] > 1 or not _alike(old, new):
            continue
        if new.op in ("placeholder", "get_attr") or output.args[0].count(new) != 1:  # type: ignore[union-attr]
            continue
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_method("copy_", (old, new))
        copy.meta["example_value"] = example_of(old)
        output.args = (tuple(old if a is new else a for a in output.args[0]),)  # type: ignore[union-attr]
    gm.graph.lint()


def _alike(old: fx.Node, new: fx.Node) -> bool:
    a, b = example_of(old), example_of(new)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
