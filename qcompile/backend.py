"""The `qstate` backend: what `torch.compile(..., backend="qstate")` calls with each graph.

A graph that updates optimizer state goes through `passes.pipeline`; what is left of it, and every other graph, is
compiled as `backend="inductor"` would.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import hooks
from qcompile._compat import (
    example_of,
    mark_static,
    require_supported_torch,
    settled,
    trace_again,
    trace_artifact,
    with_arguments,
    without_unused_attributes,
)
from qcompile._compat_distributed import local_of, with_local
from qcompile._compat_dynamo import guard_kinds, guard_strides, keep_gradients_static
from qcompile._compat_inductor import mode_options
from qcompile._compat_stock import inductor_apart, stock_inductor
from qcompile.dense_step import activity
from qcompile.exc import NotQuantizedError
from qcompile.options import Options
from qcompile.passes.embed_updates import embed_updates
from qcompile.passes.find_state import Slot
from qcompile.passes.pipeline import CompiledClass, CompiledGraph, PlannedRegion, compile_updates, updates_state
from qcompile.passes.plan_storage import StatePlan
from qcompile.passes.split_updates import erase_regions
from qcompile.plan import apply_plans, convert_arguments, refusals, settle
from qcompile.runtime.formats import Format
from qcompile.runtime.launch import Region, Source, UpdateClass
from qcompile.runtime.region_op import forget
from qcompile.runtime.state import QuantizedState
from qcompile.runtime.views import given_of, weakly


def qstate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        gm: Dynamo's graph. The graph is not changed; the state tensors that the module holds are let go.
        example_inputs: the values of its placeholders, in order.
        options: see `qcompile.options.Options`.
        mode: a mode of `torch.compile`, for Inductor.

    Raises:
        UnsupportedTorchError: torch lacks an API that is needed.
        UnknownRecipeError, UnknownOptionError, InvalidOptionError: `options` is wrong.
        NotQuantizedError: `strict=True` and some state would stay dense.
        UnmatchedOverrideError, FormatMismatchError: an override matches nothing, or asks for what a state cannot take.
    """
    require_supported_torch()
    hooks.note_graph(gm, example_inputs)
    guard_kinds(gm, example_inputs)
    keep_gradients_static(gm, example_inputs)
    chosen = Options.parse(options)
    settings = mode_options(mode)
    settings.update({name.replace("-", "_"): value for name, value in (chosen.inductor or {}).items()})
    if not updates_state(gm, example_inputs):
        return _compiled(gm, example_inputs, settings)
    if changing := _of_changing_shape(gm, example_inputs):
        held = [t for tensor in changing if isinstance(tensor, QuantizedState) for t in tensor.stored]
        marked = [mark_static(tensor) for tensor in [*changing, *held]]
        if any(marked):
            trace_again("an update is compiled for each shape")
    compiled = compile_updates(gm, example_inputs, chosen, settings)
    if chosen.strict and (found := refusals(compiled)):
        raise NotQuantizedError(found)
    if apply_plans(compiled, chosen):
        trace_again("optimizer state was converted")
    trace_artifact("qcompile_update_graph", lambda: str(compiled.gm.graph))
    for i, group in enumerate(compiled.classes):
        trace_artifact(f"qcompile_update_class_{i}", functools.partial(_class_text, group))
    later = _deferred(compiled)
    returned = _take_returned_state(compiled)
    for node in compiled.inputs.state:
        if node.op == "get_attr":  # Dynamo's module lives as long as the optimizer, and would keep the dense state
            delattr(gm, str(node.target))
    plans = [plan for group in compiled.classes for item in group.regions for plan in item.plans.values()]
    pending = [(p.slot, p.if_positive) for p in plans if p.if_positive is not None and p.slot.marked is None]
    if compiled.in_place:
        run = _one_program(compiled, example_inputs, settings)
        guard_strides(gm, range(len(example_inputs)))
    else:
        rest = _Rest(compiled)
        run = _executable(compiled, rest, rest.compile(example_inputs, settings))
        guard_strides(gm, rest.read)
    return _with_state(run, returned, later, pending, chosen.seed)


hooks.install(qstate)


def _class_text(group: CompiledClass) -> str:
    """The update of a class, and the sources of its kernels."""
    sources = [kernel.source for kernel in (group.quantized, group.dense) if kernel is not None]
    return "\n\n".join([f"{len(group.regions)} region(s)", group.regions[0].show(), *sources])


def _compiled(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """What no region took, compiled as `backend="inductor"` would.

    It may read a state that is stored relative to another, of which Inductor, that sees its parts, knows nothing: such a
    state arrives as dense values.
    """

    def decoded(value: Any) -> Any:
        own = local_of(value)
        if isinstance(own, QuantizedState) and (own.partner is not None or own is not value):
            return with_local(value, own.dequantize())
        return value

    held = {str(n.target): getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"}
    held = {name: value for name, value in held.items() if decoded(value) is not value}
    if all(decoded(value) is value for value in inputs) and not held:
        return stock_inductor(gm, inputs, settings)
    plain = [decoded(value) for value in (*inputs, *held.values())]
    program = inductor_apart(with_arguments(gm, [*held]), plain, settings)
    return lambda *args: program(*map(decoded, (*args, *held.values())))


def _of_changing_shape(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Tensor]:
    """Tensors that Dynamo traced with symbolic sizes, because it saw others in their place: a function per parameter."""
    placeholders = (n for n in gm.graph.nodes if n.op == "placeholder")
    pairs = ((example_of(n), value) for n, value in zip(placeholders, example_inputs, strict=True))
    return [
        value
        for example, value in pairs
        if isinstance(example, Tensor) and not all(isinstance(s, int) for s in settled(example.shape))
    ]


def _take_returned_state(compiled: CompiledGraph) -> dict[int, Source]:
    """Let the graph return nothing where it returns a state buffer, which is given back as it is; by position."""
    nodes = list(compiled.gm.graph.nodes)
    output = nodes[-1]
    positions = {n: i for i, n in enumerate(n for n in nodes if n.op == "placeholder")}
    state = compiled.inputs.state
    found = {i: n for i, n in enumerate(output.args[0]) if n in state}
    output.args = (tuple(None if i in found else n for i, n in enumerate(output.args[0])),)
    return {i: positions[n] if n in positions else weakly(state[n].raw()) for i, n in found.items()}


def _deferred(compiled: CompiledGraph) -> dict[int, StatePlan]:
    """Plans to carry out after a run, by position of the argument."""
    placeholders = [n for n in compiled.gm.graph.nodes if n.op == "placeholder"]
    return {i: compiled.deferred[n] for i, n in enumerate(placeholders) if n in compiled.deferred}


def _with_state(
    run: Callable[..., Any],
    returned: dict[int, Source],
    later: dict[int, StatePlan],
    pending: list[tuple[Slot, Format]],
    seed: int,
) -> Callable[..., Any]:
    """`run`, which also gives back the state that it returned, and then converts what could not be converted before."""
    if not returned and not later and not pending:
        return run

    def with_state(*args: Any) -> Any:
        results = [*run(*args)]
        convert_arguments({i: (args[i], plan) for i, plan in later.items()}, seed)
        for i, source in returned.items():
            results[i] = given_of(source, args)
        pending[:] = settle(pending, seed)
        return tuple(results)

    return with_state


def _follow_dense(compiled: CompiledGraph) -> None:
    """State that went dense is read from where it is now."""
    for node, slot in compiled.inputs.state.items():
        if node.op == "get_attr" and hasattr(compiled.gm, str(node.target)) and slot.optimizer() is not None:
            setattr(compiled.gm, str(node.target), slot.raw())


def _one_program(
    compiled: CompiledGraph, example_inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph that makes its own gradients, with every update as an operator in it."""
    placeholders = [n for n in compiled.gm.graph.nodes if n.op == "placeholder"]
    values = [_state_now(compiled.inputs.state.get(n), v) for n, v in zip(placeholders, example_inputs, strict=True)]
    embedded = embed_updates(compiled)
    _follow_dense(compiled)

    def picked(args: Sequence[Any]) -> list[Any]:
        return [args[i] if part is None else getattr(args[i], part) for i, part in embedded.arguments]

    program = stock_inductor(without_unused_attributes(compiled.gm), picked(values), settings)

    def run(*args: Any) -> Any:
        activity.ran += 1
        return program(*picked(args))

    weakref.finalize(run, forget, embedded.numbers)
    return run


def _state_now(slot: Slot | None, value: Any) -> Any:
    """What a state buffer is after conversion; any other value as it is."""
    return value if slot is None or slot.optimizer() is None else slot.raw()


class _Rest:
    """The graph without its regions, which also hands out what the regions read from it."""

    def __init__(self, compiled: CompiledGraph) -> None:
        self.compiled, self.gm = compiled, compiled.gm
        graph = self.gm.graph
        self.placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        items = [item for group in compiled.classes for item in group.regions]
        owned = {n for item in items for n in item.region.nodes}
        wanted = dict.fromkeys(a for item in items for a in item.region.inputs)
        self.handed = [n for n in wanted if n.op not in ("placeholder", "get_attr")]
        self.read: list[int] = []  # arguments that the rest reads, once it is compiled
        self.positions = {n: i for i, n in enumerate(self.placeholders)}
        self.positions.update({n: len(self.placeholders) + i for i, n in enumerate(self.handed)})
        output = next(n for n in graph.nodes if n.op == "output")
        self.outputs = len(output.args[0])
        output.args = ((*output.args[0], *self.handed),)
        erase_regions(graph, owned)
        for node in list(graph.nodes):
            if node.op == "get_attr" and not node.users:
                graph.erase_node(node)

    def compile(self, example_inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Compile what is left, or None where nothing is. State that went dense is read from where it is now."""
        _follow_dense(self.compiled)
        left = [n for n in self.gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        if not left and not self.outputs:
            return None
        for i, node in enumerate(self.placeholders):
            if not node.users:
                self.gm.graph.erase_node(node)
            else:
                self.read.append(i)
        self.gm.graph.lint()
        return _compiled(without_unused_attributes(self.gm), [example_inputs[i] for i in self.read], settings)


def _executable(compiled: CompiledGraph, rest: _Rest, run_rest: Callable[..., Any] | None) -> Callable[..., Any]:
    classes = [_bind(group, compiled, rest) for group in compiled.classes]
    outputs, read = rest.outputs, rest.read

    def run(*args: Any) -> Any:
        activity.ran += 1
        for group in classes:
            group.follow()
        results = tuple(run_rest(*(args[i] for i in read))) if run_rest is not None else ()
        values = [*args, *results[outputs:]]
        with torch.no_grad():
            for group in classes:
                group.run(values)
        return results[:outputs]

    return run


def _bind(group: CompiledClass, compiled: CompiledGraph, rest: _Rest) -> UpdateClass:
    regions = [_region(item, compiled, rest) for item in group.regions]
    return UpdateClass(group.layout, regions, group.quantized, group.dense, group.regions[0].device)


def _region(item: PlannedRegion, compiled: CompiledGraph, rest: _Rest) -> Region:
    inputs = compiled.inputs

    def source(index: int) -> Source:
        node = item.region.inputs[index]
        if node in rest.positions:
            return rest.positions[node]
        if node in inputs.state and isinstance(value := inputs.state[node].get(), Tensor):
            return value
        return inputs.given[node]

    return Region(
        tuple(source(operand.index) for operand in item.program.operands),
        tuple(source(index) for index in item.program.numbers),
        item.order,
    )
