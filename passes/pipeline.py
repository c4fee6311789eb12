"""The passes in order: from one Dynamo graph to update classes and a rest.

    flatten_foreach    first, so that the updates of different parameters fall apart
    thread_writes      makes in-place writes edges, along which the graph can be cut
    find_state         on the flattened graph; knows parameters and state by identity
    keep_replaced      needs to know what is state; gives outlining a write where Python code would have made one
    outline_updates    needs all of that; afterwards each region is compiled for itself
    per distinct region program, once:
      functionalize    the other passes read a single-assignment ATen program
      infer_sign       on the program before decomposition, where a square is still visible
      find_constraints needs the intervals: what they do not prove to be where a root is defined
      infer_preconditioner  needs the signs: it is a non-negative state that divides
      infer_memory     needs them too
    a region that is not elementwise, once:
      split_updates    needs to know that it is not; what it makes of it is analysed like any other region
    per region:
      plan_storage     needs the tensors (size, strides, values), so it is made for each region
    per program and storage, once per process:
      quantize_update  writes the decision into the graph
      verify           between the last rewrite and code generation
      lower            Inductor

Nothing of the user's is changed here: conversion of state is `qcompile.backend`'s, after everything has compiled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qcompile._compat import copy_of, is_read_again
from qcompile._compat_distributed import is_dtensor, local_of
from qcompile._compat_inductor import code_language
from qcompile.exc import OverlappingMemoryError
from qcompile.options import Choices, Options
from qcompile.passes.analyse import Analysed, analyse, operand_names
from qcompile.passes.find_sharding import is_sharded, sharding_conflict
from qcompile.passes.find_state import Inputs, find_state
from qcompile.passes.flatten_foreach import flatten_foreach
from qcompile.passes.functionalize import NotElementwise, UpdateProgram
from qcompile.passes.infer_preconditioner import Preconditioner
from qcompile.passes.keep_replaced import keep_replaced
from qcompile.passes.log_graphs import GraphLog, log
from qcompile.passes.lower import lower
from qcompile.passes.outline_updates import Region, outline_updates
from qcompile.passes.plan_storage import StatePlan, node_of_param, plan_storage, refuse_state
from qcompile.passes.quantize_update import Storage, quantize_update
from qcompile.passes.show_program import show_program
from qcompile.passes.split_updates import split_update
from qcompile.passes.thread_writes import thread_writes, written_by
from qcompile.passes.verify import verify
from qcompile.runtime.formats import Format
from qcompile.runtime.launch import Kernel, Layout
from qcompile.runtime.layout import may_overlap, order_of, row_order
from qcompile.runtime.state import QuantizedState

READ_LATER = "it is sharded, and the graph reads what the update writes"
DEFERRED = "the compiled function holds it in a variable; it is converted when that has run"


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """A region, its program, the plan of each of its state operands, and the storage that follows from them."""

    region: Region
    program: UpdateProgram
    preconditioners: tuple[Preconditioner, ...]
    plans: dict[fx.Node, StatePlan]
    inputs: Inputs

    @property
    def order(self) -> Tensor:
        """What a launch follows, without memory: the parameter, or a state buffer where none is updated."""
        node = node_of_param(self.region, self.inputs)
        slot, tensor = self.inputs.state.get(node), self.inputs.tensors[node]
        return row_order(tensor) if slot is None else order_of(tensor, local_of(slot.param))

    @property
    def device(self) -> torch.device:
        return self.inputs.tensors[node_of_param(self.region, self.inputs)].device

    def show(self) -> str:
        """The update as Python for people."""
        numbers = [self.inputs.numbers.get(self.region.inputs[i]) for i in self.program.numbers]
        names = operand_names(self.program, self.region, self.inputs)
        return show_program(self.program, names, ["number" if slot is None else slot.key for slot in numbers])

    @property
    def storage(self) -> tuple[Format | None, ...]:
        state = (self.region.inputs[o.index] if o.role == "state" else None for o in self.program.operands)
        return tuple(None if node is None else self.plans[node].format for node in state)

    @property
    def key(self) -> tuple[str, Storage]:
        return self.region.key, self.storage


# A region of the class, its storage, the device, and Inductor's configuration.
MakeKernel = Callable[[PlannedRegion, Storage, torch.device, Mapping[str, Any]], Kernel]


@dataclass(frozen=True, slots=True)
class CompiledClass:
    """An update class: its regions, what they share, and its kernels."""

    regions: tuple[PlannedRegion, ...]
    layout: Layout
    quantized: Kernel | None
    dense: Kernel | None


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """What became of a graph.

    Attributes:
        gm: the graph that was compiled, a copy of Dynamo's; its region nodes are still in it.
        inputs: its inputs.
        classes: the update classes.
        refused: plans of the state that no region could take.
        in_place: whether each region runs in its place in the graph, instead of after the rest.
        deferred: plans of state that the running function holds in a variable: it is updated as it is stored now, and
            converted when the function has run.
    """

    gm: fx.GraphModule
    inputs: Inputs
    classes: tuple[CompiledClass, ...]
    refused: dict[fx.Node, StatePlan]
    in_place: bool
    deferred: dict[fx.Node, StatePlan]


def updates_state(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether `gm` writes anything in place and reads optimizer state; a quick answer for the many graphs that do not."""
    if not any(written_by(n) or "_foreach_" in getattr(n.target, "__name__", "") for n in gm.graph.nodes):
        return False
    return bool(find_state(gm, example_inputs).state)


def compile_updates(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    settings: Mapping[str, Any],
    make_kernel: MakeKernel | None = None,
) -> CompiledGraph:
    """Run all passes; `example_inputs` are the real values of the placeholders.

    `make_kernel` stands in for quantization, verification and Inductor.
    """
    make_kernel = make_kernel or _kernel
    gm = copy_of(gm)
    graphs = GraphLog(gm)
    flatten_foreach(gm)
    graphs.after("flatten_foreach")
    thread_writes(gm)
    graphs.after("thread_writes")
    inputs = find_state(gm, example_inputs)
    keep_replaced(gm, inputs)
    graphs.after("keep_replaced")
    outline = outline_updates(gm, inputs)
    owners = {id(p): p for slot in inputs.state.values() if (p := slot.param) is not None}
    for p in map(local_of, owners.values()):
        if may_overlap(p):
            raise OverlappingMemoryError(tuple(p.shape), p.stride())
    wanted = Choices.of(options, owners.values())
    wanted.require_matches(_states(inputs))
    refused = {node: refuse_state(node, inputs, reason, wanted) for node, reason in outline.refused.items()}
    planned: list[PlannedRegion] = []
    deferred: dict[fx.Node, StatePlan] = {}
    in_place = outline.in_place
    is_spread = any(map(is_dtensor, inputs.given.values()))
    for region in outline.regions:
        why = READ_LATER if is_spread and outline.in_place else None
        analysed, dense, reasons = _analyse(gm, region, inputs, why)
        in_place |= not analysed or analysed[0].region is not region
        for node, reason in reasons.items():
            refused[node] = refuse_state(node, inputs, reason, wanted)
        final = plan_storage(analysed, {**dense, **reasons}, inputs, wanted)
        plans = {node: _for_now(node, plan, inputs) for node, plan in final.items()}
        deferred.update({node: final[node] for node in plans if plans[node] is not final[node]})
        for a in analysed:
            own = {node: plans[node] for _, node in a.state()}
            planned.append(PlannedRegion(a.region, a.program, a.preconditioners, own, inputs))
    by_key: dict[tuple[str, Storage], list[PlannedRegion]] = {}
    for item in planned:
        by_key.setdefault(item.key, []).append(item)
    graphs.after("split_updates")
    classes = tuple(_compile_class(tuple(group), inputs, settings, make_kernel) for group in by_key.values())
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", "\n".join(_class_line(i, group) for i, group in enumerate(classes)) or "no update class")
    return CompiledGraph(gm, inputs, classes, refused, in_place and not is_spread, deferred)


# Kept for the life of the process: a reloaded checkpoint or a new parameter group compiles nothing again.
_KERNELS: dict[tuple[Any, ...], Kernel] = {}


def forget_kernels() -> None:
    """Compile every kernel again when it is next needed, for measurements; those that are in use stay."""
    _KERNELS.clear()


def _states(inputs: Inputs) -> Iterator[tuple[Tensor, list[str]]]:
    """Every parameter of the optimizers in the graph, with the keys of its state."""
    for optimizer in {id(o): o for slot in inputs.state.values() if (o := slot.optimizer()) is not None}.values():
        for group in optimizer.param_groups:
            yield from ((p, list(optimizer.state.get(p, {}))) for p in group["params"])


def _analyse(
    gm: fx.GraphModule, region: Region, inputs: Inputs, refusal: str | None
) -> tuple[list[Analysed], Mapping[fx.Node, str], dict[fx.Node, str]]:
    """A region, or those it is cut into; state that had better stay dense; and state that no region could take, with reasons."""
    dense: Mapping[fx.Node, str] = {}
    analysed: list[Analysed] = []
    refused: dict[fx.Node, str] = {}
    refusal = refusal or sharding_conflict(region, inputs)
    if refusal is not None:
        return [], {}, _refusals(region, inputs, refusal)
    try:
        return [analyse(region, inputs)], {}, {}
    except NotElementwise as reason:
        if is_sharded(region, inputs):
            return [], {}, _refusals(region, inputs, f"it is sharded, and its update mixes elements: {reason}")
    try:
        split = split_update(gm, region, inputs)
    except NotElementwise as reason:
        return [], {}, _refusals(region, inputs, str(reason))
    dense = split.dense
    for part in split.regions:
        try:
            analysed.append(analyse(part, inputs))
        except NotElementwise as reason:
            refused.update(_refusals(part, inputs, str(reason)))
    return analysed, dense, refused


def _refusals(region: Region, inputs: Inputs, reason: str) -> dict[fx.Node, str]:
    """One reason for all state that a region touches."""
    return {n: reason for n in region.inputs if n in inputs.state}


def _for_now(node: fx.Node, plan: StatePlan, inputs: Inputs) -> StatePlan:
    """The plan, or one that leaves a state as it is stored, where the function that is being compiled would not see another."""
    tensor, slot = inputs.tensors[node], inputs.state[node]
    stored = tensor.format if isinstance(tensor, QuantizedState) else None
    is_same = (stored is None) == (plan.format is None)
    if is_same or node.op != "placeholder" or slot.marked is not None or is_read_again(node, slot.holders()):
        return plan
    return dataclasses.replace(plan, format=stored, reason=None if stored else DEFERRED, by_choice=True, partner=None)


def _class_line(i: int, group: CompiledClass) -> str:
    first = group.regions[0]
    names = operand_names(first.program, first.region, first.inputs)
    stored = (f"{name} {fmt or 'dense'}" for name, fmt in zip(names, group.layout.storage, strict=True))
    return f"class {i}, {len(group.regions)} region(s): {', '.join(stored)}\n{first.show()}"


def _compile_class(
    group: tuple[PlannedRegion, ...], inputs: Inputs, settings: Mapping[str, Any], make_kernel: MakeKernel
) -> CompiledClass:
    first = group[0]
    program, storage = first.program, first.storage
    device = first.device
    block = next((fmt.block_size for fmt in storage if fmt is not None), None)
    sizes = [item.order.numel() for item in group]
    tail = tuple(
        torch.float32 if fmt is not None and operand.dtype != torch.float32 else None
        for operand, fmt in zip(program.operands, storage, strict=True)
    )
    quantized = None if block is None else make_kernel(first, storage, device, settings)
    needs_dense = block is None or any(size % block for size in sizes)
    layout = Layout(
        storage,
        tuple(operand.written for operand in program.operands),
        program.scalars,
        len(program.scalar_dtypes),
        program.written_numbers,
        program.elements,
    )
    dense = make_kernel(first, tail, device, settings) if needs_dense else None
    return CompiledClass(group, layout, quantized, dense)


def _kernel(item: PlannedRegion, storage: Storage, device: torch.device, settings: Mapping[str, Any]) -> Kernel:
    language = code_language(device)
    cache_key = (item.region.key, storage, language, repr(sorted(settings.items())))
    if cache_key not in _KERNELS:
        in_place = language != "C++"
        update = quantize_update(item.program, storage, device, in_place, item.preconditioners)
        verify(update, item.program, storage)
        _KERNELS[cache_key] = lower(update, device, settings)
    return _KERNELS[cache_key]
