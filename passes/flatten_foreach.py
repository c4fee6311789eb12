"""`torch._foreach_*` calls become one call per tensor.

Before: a Dynamo graph in which an optimizer may update lists of tensors. After: the same program without `_foreach_`
calls, so that the updates of different parameters fall apart. An `_foreach_` function that has no per-tensor twin is
left as it is, and what depends on it will not be outlined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

PREFIX = "_foreach_"
RENAMED: dict[str, Callable[..., Any]] = {
    "norm": torch.linalg.vector_norm,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp_min": lambda x, y: torch.clamp(x, min=y),
    "clamp_max": lambda x, y: torch.clamp(x, max=y),
}


def flatten_foreach(gm: fx.GraphModule) -> None:
    """Rewrite `gm` in place."""
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.startswith(PREFIX):
            _flatten(gm.graph, node, name.removeprefix(PREFIX))
    gm.graph.lint()


def _flatten(graph: fx.Graph, node: fx.Node, name: str) -> None:
    lists = [a for a in node.args if isinstance(a, (list, tuple))]
    if not lists or (not name.endswith("_") and name not in RENAMED and not hasattr(torch, name)):
        return
    results = []
    for i in range(len(lists[0])):
        args = tuple(a[i] if isinstance(a, (list, tuple)) else a for a in node.args)
        kwargs = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in node.kwargs.items()}
        with graph.inserting_before(node):
            results.append(_one(graph, name, args, kwargs))
    examples = node.meta.get("example_value")
    for i, result in enumerate(results):
        if isinstance(examples, (list, tuple)):
            result.meta["example_value"] = examples[i]
        elif isinstance(result.args[0], fx.Node):
            result.meta["example_value"] = result.args[0].meta.get("example_value")
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    if node.users:  # the list itself is handed on
        node.replace_all_uses_with(results)  # type: ignore[arg-type]
    graph.erase_node(node)


def _one(graph: fx.Graph, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    if name.rstrip("_") in ("addcdiv", "addcmul") and len(args) == 4:
        args, kwargs = args[:3], {"value": args[-1]}
    if name in ("maximum_", "minimum_"):
        return graph.call_method("clamp_", args[:1], {"min" if name == "maximum_" else "max": args[1]})
    if name.endswith("_"):
        return graph.call_method(name, args, kwargs)
    return graph.call_function(RENAMED.get(name, getattr(torch, name, None)), args, kwargs)  # type: ignore[arg-type]
