"""Inductor for what is not ours in a graph: the private names, and what it computes wrongly."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from qcompile._compat_inductor import IN_OURS

log = logging.getLogger("qcompile")
CUSTOM_PASS = "post_grad_custom_pre_pass"
aten = torch.ops.aten


def stock_inductor(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """What `backend="inductor"` does, without its mistakes in `torch.add(x, a @ b, alpha=number)` and `old.copy_(x); x.add_(y)`.

    Numbers that `item` reads are in our graphs (see `dense_step.SETTINGS`), and not in those of `backend="inductor"`. Where
    AOTAutograd has to know such a number (`x.sub_(y, alpha=number)`) the graph runs as it is.
    """
    from torch._dynamo.utils import dynamo_timed
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        with dynamo_timed(IN_OURS):
            patches = {
                **settings,
                CUSTOM_PASS: [_products_with_alpha(), _copies_of_what_changes(), *_passes_of(settings)],
            }
            return cast("Callable[..., Any]", compile_fx(gm, list(inputs), config_patches=patches))
    except GuardOnDataDependentSymNode as error:
        log.info("a graph runs uncompiled: %s", str(error).partition("\n")[0])
        return gm.forward


def inductor_apart(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The same for a graph with other inputs than Dynamo's, of whose guards and sources it is to know nothing."""
    from torch._guards import tracing

    with tracing(None):
        return stock_inductor(gm, inputs, settings)


def _passes_of(settings: Mapping[str, Any]) -> list[Any]:
    """The user's own passes at that place."""
    import torch._inductor.config as inductor_config

    own = settings.get(CUSTOM_PASS, getattr(inductor_config, CUSTOM_PASS))
    return [] if own is None else list(own) if isinstance(own, (list, tuple)) else [own]


@functools.cache
def _products_with_alpha() -> Any:
    """A pass that writes `add(x, a @ b, alpha=c)` as `add(x, c * (a @ b))`.

    Inductor makes `addmm(x, a, b)` of the first, and loses c: its pattern matcher overlooks keywords that a pattern does not name (torch 2.13;
    pytorch#167313 is the like of it for `addmm`). In one graph with its backward, a step of SGD is of that form: gradient ascent, with a
    learning rate of 1.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class ProductsWithAlpha(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
                alpha = node.kwargs.get("alpha", 1)
                if alpha == 1 or not any(isinstance(a, fx.Node) and a.target == aten.mm.default for a in node.args):
                    continue
                x, y = node.args
                with graph.inserting_before(node):
                    scaled = graph.call_function(aten.mul.Tensor, (y, alpha))
                scaled.meta.update(y.meta if isinstance(y, fx.Node) else node.meta)
                node.args, node.kwargs = (x, scaled), {}

        def uuid(self) -> str:
            return "qcompile products with alpha 1"

    return ProductsWithAlpha()


@functools.cache
def _copies_of_what_changes() -> Any:
    """A pass that keeps what an input was, where another takes it over and it is written itself (pytorch#198131).

    At the end of a graph are its inputs' new values, one `copy_` after the other, as if they were written at once. Inductor writes them in turn,
    and has dropped the copy that `old.copy_(param); param.add_(update)` makes: `old` would be the new parameter (torch 2.13 to 2.15).
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_utils import get_node_storage

    sources = {aten.copy.default: 1, aten.clone.default: 0, aten.alias.default: 0}

    class CopiesOfWhatChanges(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            copies = list(graph.find_nodes(op="call_function", target=aten.copy_.default))
            earlier = set(itertools.takewhile(lambda node: node is not copies[0], graph.nodes)) if copies else set()
            written = set()
            for node in copies:
                target, value = node.args[:2]
                while isinstance(value, fx.Node) and value.target in sources:
                    value = value.args[sources[value.target]]  # type: ignore[index]
                if value in earlier and get_node_storage(value) in written:
                    with graph.inserting_before(copies[0]):  # computed, since a clone would be dropped
                        kept = graph.call_function(aten.maximum.default, (value, value))
                    kept.meta.update(value.meta)
                    node.args = (target, kept)
                written.add(get_node_storage(target))

        def uuid(self) -> str:
            return "qcompile copies of what changes 1"

    return CopiesOfWhatChanges()
