"""Put every region into the rest of the graph as one mutating operator.

Before: the graph with its regions, and a plan for each; state is stored as planned. After: a graph without regions and
without `QuantizedState`: a quantized state has become the tensors that it holds, and where the last operation of
a region was stands `qcompile::update`, with what it writes and what it reads. The record says where the inputs come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from qcompile._compat import example_of, inner_source
from qcompile.passes.find_state import Slot
from qcompile.passes.pipeline import CompiledClass, CompiledGraph, PlannedRegion
from qcompile.passes.split_updates import as_tensor, erase_regions
from qcompile.runtime.formats import Format
from qcompile.runtime.launch import Region, Source, UpdateClass
from qcompile.runtime.region_op import register
from qcompile.runtime.state import QuantizedState, parts_of


@dataclass(frozen=True, slots=True)
class Embedded:
    """Where inputs come from, and which updates the graph runs.

    Attributes:
        arguments: for each placeholder, in order, the position of the original argument and the part of it, or None.
        numbers: the registered updates.
    """

    arguments: tuple[tuple[int, str | None], ...]
    numbers: tuple[int, ...]


def embed_updates(compiled: CompiledGraph) -> Embedded:
    """Rewrite `compiled.gm` in place."""
    gm, inputs = compiled.gm, compiled.inputs
    graph = gm.graph
    original = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    quantized = {
        item.region.inputs[operand.index]: fmt
        for group in compiled.classes
        for item in group.regions
        for operand, fmt in zip(item.program.operands, item.storage, strict=True)
        if fmt is not None
    }
    parts = {node: _split_input(gm, node, fmt, inputs.state[node]) for node, fmt in quantized.items()}
    items = [(group, item) for group in compiled.classes for item in group.regions]
    order = {n: i for i, n in enumerate(graph.nodes)}
    results: dict[fx.Node, fx.Node] = {}
    anchors = []
    for _, item in items:
        with graph.inserting_after(max(item.region.nodes, key=order.__getitem__)):
            anchors.append(graph.call_function(torch.ops.qcompile.update.default, ()))
        with graph.inserting_before(anchors[-1]):
            results.update({node: _empty_like(graph, node) for node in item.region.outputs})
    embed = _Embed(compiled, parts, results)
    numbers = [embed.region(group, item, anchor) for (group, item), anchor in zip(items, anchors, strict=True)]
    owned = {n for _, item in items for n in item.region.nodes}
    for node, result in results.items():
        for user in [u for u in node.users if u not in owned]:
            user.replace_input_with(node, result)
    erase_regions(graph, owned)
    for node in parts:
        graph.erase_node(node)
    where = {
        part: (original[n], name)
        for n, held in parts.items()
        for part, name in zip(held, parts_of(quantized[n]), strict=True)
        if n in original
    }
    arguments = (where.get(n) or (original[n], None) for n in graph.nodes if n.op == "placeholder")
    graph.lint()
    assert not any(n in inputs.state and n in quantized for n in graph.nodes)
    return Embedded(tuple(arguments), tuple(numbers))


def _split_input(gm: fx.GraphModule, node: fx.Node, fmt: Format, slot: Slot) -> tuple[fx.Node, ...]:
    names = parts_of(fmt)
    with gm.graph.inserting_before(node):
        if node.op == "placeholder":
            held = tuple(gm.graph.placeholder(f"{node.name}_{name}") for name in names)
            for part, name in zip(held, names, strict=True):
                inner_source(node, part, name)
        else:
            for name in names:
                gm.register_buffer(f"{node.target}_{name}", getattr(slot.get(), name))
                inner_source(str(node.target), gm, name, f"{node.target}_{name}")
            held = tuple(gm.graph.get_attr(f"{node.target}_{name}") for name in names)
    return held


def _empty_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Memory for a result of a region."""
    example = example_of(node)
    kwargs = {"dtype": example.dtype, "device": example.device}
    return graph.call_function(torch.empty_strided, (tuple(example.shape), tuple(example.stride())), kwargs)


@dataclass(frozen=True, slots=True)
class _Embed:
    """Fills in the operators: `parts` stand for quantized state, `results` for what regions make."""

    compiled: CompiledGraph
    parts: dict[fx.Node, tuple[fx.Node, ...]]
    results: dict[fx.Node, fx.Node]

    def region(self, group: CompiledClass, item: PlannedRegion, anchor: fx.Node) -> int:
        region, program = item.region, item.program
        written: list[fx.Node] = []
        read: list[fx.Node] = []
        places: list[Callable[[int], Source]] = []
        tensors = [*(self.results.get(n, n) for n in region.inputs), *(self.results[n] for n in region.outputs)]
        for operand, fmt in zip(program.operands, item.storage, strict=True):
            node = self._dense(tensors[operand.index], anchor) if fmt is None else tensors[operand.index]
            if fmt is not None:
                at = len(written)
                written += self.parts[node]
                places.append(functools.partial(_run_of, at, len(self.parts[node])))
            else:
                places.append(_place(node, written if operand.written else read, operand.written))
        written_numbers = {program.numbers[i] for i in program.written_numbers}
        for index in program.numbers:
            with anchor.graph.inserting_before(anchor):
                node = as_tensor(anchor.graph, tensors[index])
            places.append(_place(node, written if index in written_numbers else read, index in written_numbers))
        sources = [place(len(written)) for place in places]
        count = len(program.operands)
        bound = Region(tuple(sources[:count]), tuple(sources[count:]), item.order)
        number = register(UpdateClass(group.layout, [bound], group.quantized, group.dense, item.device))
        anchor.args = (number, written, read)
        return number

    def _dense(self, node: fx.Node, anchor: fx.Node) -> fx.Node:
        """What an operator reads of a state that another graph quantizes: a dense copy."""
        slot = self.compiled.inputs.state.get(node)
        if slot is None or not isinstance(slot.get(), QuantizedState):
            return node
        with anchor.graph.inserting_before(anchor):
            return anchor.graph.call_function(torch.ops.aten.clone.default, (node,))


def _run_of(at: int, length: int, count: int) -> Source:
    return tuple(range(at, at + length))


def _place(node: fx.Node, tensors: list[fx.Node], is_written: bool) -> Callable[[int], Source]:
    at = len(tensors)
    tensors.append(node)
    return lambda count: at if is_written else count + at
