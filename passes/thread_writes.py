"""Make the order of in-place writes visible as data flow.

Before: a Dynamo graph in which `x.mul_(2)` may have no user although everything that reads `x` later depends on it.
After: whatever reads `x` after the write reads the node of the write instead, which is the same tensor. A pass that cuts
the graph along its edges then cannot lose a write. What the graph returns is read when all is done, so where it returns an
input it names that input.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from qcompile._compat import example_of

IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod", "setitem")
)


def thread_writes(gm: fx.GraphModule) -> None:
    """Rewrite `gm` in place."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    output = next(n for n in gm.graph.nodes if n.op == "output")
    whole: dict[fx.Node, fx.Node] = {}  # the input that an in-place node returns
    for node in list(gm.graph.nodes):
        if not returns_what_it_writes(node):
            continue
        for target in written_by(node):
            root = whole.get(target, target)
            if root.op in ("placeholder", "get_attr"):
                whole[node] = root
            for user in [u for u in target.users if order[u] > order[node] and u is not output]:
                user.replace_input_with(target, node)
    for node in [n for n in output.all_input_nodes if n in whole]:
        output.replace_input_with(node, whole[node])
    gm.graph.lint()


def returns_what_it_writes(node: fx.Node) -> bool:
    """Whether the result of an in-place node is the tensor it wrote."""
    if node.op == "call_method" or "out" in node.kwargs:
        return bool(written_by(node)) and not isinstance(node.args[0], (list, tuple))
    return node.target in IN_PLACE_OPERATORS and node.target is not operator.setitem


def written_by(node: fx.Node) -> list[fx.Node]:
    """Nodes whose tensors `node` writes in place."""
    if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if node.op != "call_function":
        return []
    out = [a for a in [node.kwargs.get("out")] if isinstance(a, fx.Node)]
    name = getattr(node.target, "__name__", "")
    if node.target in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        first = node.args[0]
        return out + [a for a in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(a, fx.Node)]
    if schema := getattr(node.target, "_schema", None):
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                out += [a for a in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(a, fx.Node)]
    return out


def is_scalar(node: fx.Node) -> bool:
    """Whether a node is a number or a tensor without dimensions."""
    example = example_of(node)
    if isinstance(example, Tensor):
        return example.dim() == 0
    return isinstance(example, (int, float, torch.SymInt, torch.SymFloat))
