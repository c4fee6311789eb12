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
from qcompile.passes.pipeline import CompiledClass, CompiledGraph, PlannedRegion
from qcompile.passes.thread_writes import is_scalar
from qcompile.runtime.formats import Format
from qcompile.runtime.launch import Region, Source, UpdateClass
from qcompile.runtime.layout import row_order
from qcompile.runtime.region_op import register
from qcompile.runtime.state import parts_of


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
    parts = {node: _split_input(graph, node, quantized[node]) for node in original if node in quantized}
    order = {n: i for i, n in enumerate(graph.nodes)}
    numbers = []
    for group in compiled.classes:
        for item in group.regions:
            numbers.append(_embed(graph, group, item, compiled, parts, order))
    erase_regions(graph, {n for c in compiled.classes for item in c.regions for n in item.region.nodes})
    for node in parts:
        graph.erase_node(node)
    where = {
        part: (original[n], name)
        for n, held in parts.items()
        for part, name in zip(held, parts_of(quantized[n]), strict=True)
    }
    arguments = (where.get(n) or (original[n], None) for n in graph.nodes if n.op == "placeholder")
    graph.lint()
    assert not any(n in inputs.state and n in quantized for n in graph.nodes)
    return Embedded(tuple(arguments), tuple(numbers))


def _split_input(graph: fx.Graph, node: fx.Node, fmt: Format) -> tuple[fx.Node, ...]:
    names = parts_of(fmt)
    with graph.inserting_before(node):
        held = tuple(graph.placeholder(f"{node.name}_{name}") for name in names)
    for part, name in zip(held, names, strict=True):
        inner_source(node, part, name)
    return held


def _embed(
    graph: fx.Graph,
    group: CompiledClass,
    item: PlannedRegion,
    compiled: CompiledGraph,
    parts: dict[fx.Node, tuple[fx.Node, ...]],
    order: dict[fx.Node, int],
) -> int:
    region, program = item.region, item.program
    written: list[fx.Node] = []
    read: list[fx.Node] = []
    places: list[Callable[[int], Source]] = []
    with graph.inserting_after(max(region.nodes, key=order.__getitem__)):
        anchor = graph.call_function(torch.ops.qcompile.update.default, ())
    for operand, fmt in zip(program.operands, item.storage, strict=True):
        node = region.inputs[operand.index]
        if fmt is not None:
            at = len(written)
            written += parts[node]
            places.append(functools.partial(_run_of, at, len(parts[node])))
        else:
            places.append(_place(node, written if operand.written else read, operand.written))
    written_numbers = {program.numbers[i] for i in program.written_numbers}
    for index in program.numbers:
        node = _as_tensor(graph, region.inputs[index], anchor)
        places.append(_place(node, written if index in written_numbers else read, index in written_numbers))
    sources = [place(len(written)) for place in places]
    count = len(program.operands)
    param = compiled.inputs.tensors[item.model]
    bound = Region(tuple(sources[:count]), tuple(sources[count:]), row_order(param))
    number = register(UpdateClass(group.layout, [bound], group.quantized, group.dense, param.device))
    anchor.args = (number, written, read)
    return number


def _run_of(at: int, length: int, count: int) -> Source:
    return tuple(range(at, at + length))


def _as_tensor(graph: fx.Graph, node: fx.Node, anchor: fx.Node) -> fx.Node:
    """A number of the graph as a 0-d tensor.

    A Python float that changes arrives as a 0-d tensor and is read by `item`. AOTAutograd turns arithmetic on it back into
    tensor operations, and takes a float that is in none for a constant, which would be compiled again for every value.
    """
    number = next((user for user in node.users if user.target == "item"), None)
    if number is None and isinstance(example_of(node), torch.Tensor):
        return node
    with graph.inserting_before(anchor):
        one = graph.call_function(torch.ones, ((),), {"dtype": torch.float64})
        return graph.call_function(torch.mul, (one, number or node))


def _place(node: fx.Node, tensors: list[fx.Node], is_written: bool) -> Callable[[int], Source]:
    at = len(tensors)
    tensors.append(node)
    return lambda count: at if is_written else count + at


def erase_regions(graph: fx.Graph, owned: set[fx.Node]) -> None:
    """Remove the regions' operations from the graph, but for numbers that the rest reads too."""
    for node in reversed(list(graph.nodes)):
        if node in owned and not node.users:
            graph.erase_node(node)
    assert all(is_scalar(n) for n in graph.nodes if n in owned)
