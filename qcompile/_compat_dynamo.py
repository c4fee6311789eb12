"""What Dynamo is set to while a step of ours is traced, and what it leaves behind: see `_compat`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from qcompile._compat import tracing_backend, unwrap_backend

_settings_lock = threading.Lock()
_settings_held: dict[str, tuple[int, Any]] = {}  # by name: how many hold it, and what was set before


@contextlib.contextmanager
def dynamo_settings(at_least: Mapping[str, int] | None = None, **settings: Any) -> Iterator[None]:
    """`torch._dynamo.config` with other values; those of `at_least` count where they are larger than what is set.

    The settings belong to the process: where several threads change one, it is put back when the last of them is done.
    """
    import torch._dynamo.config as dynamo_config

    with _settings_lock:
        limits = {name: max(value, getattr(dynamo_config, name)) for name, value in (at_least or {}).items()}
        wanted = {**settings, **limits}
        for name, value in wanted.items():
            holders, before = _settings_held.get(name, (0, getattr(dynamo_config, name)))
            _settings_held[name] = holders + 1, before
            setattr(dynamo_config, name, value)
    try:
        yield
    finally:
        with _settings_lock:
            for name in wanted:
                holders, before = _settings_held.pop(name)
                if holders > 1:
                    _settings_held[name] = holders - 1, before
                else:
                    setattr(dynamo_config, name, before)


@contextlib.contextmanager
def tracing_backward() -> Iterator[None]:
    """Let Dynamo trace `backward()`.

    While it does, torch 2.13 writes where a missing gradient was looked for into its only object for None
    (`TensorVariable.var_getattr`), and every function that it compiles afterwards and that returns None fails on it.
    """
    from torch._dynamo.variables import constant

    try:
        with dynamo_settings(trace_autograd_ops=True):
            yield
    finally:
        if (none := getattr(constant, "CONSTANT_VARIABLE_NONE", None)) is not None:
            none.source = None


def break_behind(gm: fx.GraphModule) -> str | None:
    """Why and where Dynamo ended a graph before its function did; None where that returned."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    first, *others = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    explained = next((line for line in others if line.startswith("Explanation: ")), "")
    where = f" at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}" if reason.user_stack else ""
    return f"{first}{where}" + (f" ({explained.removeprefix('Explanation: ')})" if explained else "")


def gradient_sources(gm: fx.GraphModule) -> dict[int, Any]:
    """Where Dynamo got the gradients among a graph's placeholders, by the place of each."""
    from torch._dynamo.source import GradSource

    placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
    sources = (getattr(node.meta.get("grapharg"), "source", None) for node in placeholders)
    return {i: source for i, source in enumerate(sources) if isinstance(source, GradSource)}


def guard_kinds(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Let Dynamo guard the dtype, shape and device of the parameters of a graph that it compiles now, and the dtype of gradients.

    Of an optimizer's parameters it checks only that they are the same objects (`mark_static_address`), and of their gradients
    that there are some. After `model.to(torch.bfloat16)` the step for fp32 would run, and write twice as many bytes as there are.
    A gradient has the shape and the device of its parameter, and with `grad_dtype = None` any dtype.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:  # not called by Dynamo
        return
    guards = context.guards_context.dynamo_guards
    for source in gradient_sources(gm).values():
        guards.add(AttrSource(source, "dtype").make_guard(GuardBuilder.EQUALS_MATCH))
    placeholders = iter(example_inputs)
    held = getattr(gm, "_param_name_to_source", None) or {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value, source = next(placeholders), getattr(node.meta.get("grapharg"), "source", None)
        elif node.op == "get_attr":
            value, source = getattr(gm, str(node.target), None), held.get(node.target)
        else:
            continue
        if isinstance(value, nn.Parameter) and source is not None:
            guards.add(source.make_guard(GuardBuilder.TENSOR_MATCH))


def keep_gradients_static(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Let AOTAutograd take the gradients among the inputs with the sizes and strides that they have.

    Where a step is compiled again because a gradient has other strides, Dynamo makes these symbols, but not in the fake gradients
    that its own graph has: those are made with the parameter, which is static. The guards of AOTAutograd then name symbols that
    Dynamo does not know, and it ends with an IndexError (torch 2.13). A gradient has its parameter's sizes, which are guarded
    (`guard_kinds`), and strides that are read are guarded too (`guard_strides`).
    """
    from torch._guards import TracingContext
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    def static(context: Any) -> Any:
        if context is None:
            return None
        dims = len(context.dynamic_sizes)
        parts = getattr(context, "inner_contexts", None)  # of a DTensor
        return dataclasses.replace(
            context,
            **({} if parts is None else {"inner_contexts": {name: static(part) for name, part in parts.items()}}),
            dynamic_sizes=[DimDynamic.STATIC] * dims,
            dynamic_strides=[DimDynamic.INFER_STRIDE] * dims,
            constraint_sizes=[None] * dims,
            constraint_strides=[None] * dims,
            view_base_context=static(context.view_base_context),
        )

    tracing = TracingContext.try_get()
    if tracing is None:  # not called by Dynamo
        return
    for value in (example_inputs[i] for i in gradient_sources(gm)):
        if value in tracing.tensor_to_context:
            tracing.tensor_to_context[value] = static(tracing.tensor_to_context[value])


def guard_strides(gm: fx.GraphModule, read: Iterable[int]) -> None:
    """Let Dynamo guard the strides of the gradients among the placeholders at these places, which code of Inductor reads.

    It does not (torch 2.13, 2.14), and the code ends with an AssertionError where a gradient has other ones: Adamax takes its size.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:  # not called by Dynamo
        return
    sources = gradient_sources(gm)
    for i in sources.keys() & read:
        stride = CallFunctionNoArgsSource(AttrSource(sources[i], "stride"))
        context.guards_context.dynamo_guards.add(stride.make_guard(GuardBuilder.EQUALS_MATCH))


def dead_entries(function: Any) -> int:
    """How often Dynamo compiled a function for objects that are gone; it counts these for its limit, and never drops them."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    entries = _debug_get_cache_entry_list(function.__code__) if hasattr(function, "__code__") else ()
    return sum(isinstance(entry.guard_manager, DeletedGuardManagerWrapper) for entry in entries)


def keep_attributes(backend: Any) -> None:
    """Let Dynamo carry out what a step assigns to its optimizer (`self.count += 1`), for `backend`.

    It notes the assignment, and forgets the optimizer, which is not among the objects whose changes it writes back (torch 2.13, 2.14): a counter
    like Ranger21's `lookahead_step` stands still.
    """
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import OptimizerVariable

    store = SideEffects.store_attr
    if hasattr(store, "for_backend"):
        return

    def store_attr(self: Any, item: Any, *args: Any, **kwargs: Any) -> None:
        store(self, item, *args, **kwargs)
        if isinstance(item, OptimizerVariable) and tracing_backend()[0] is backend:
            self.id_to_variable.setdefault(id(item.value), item)
            self.keepalive.append(item.value)

    store_attr.for_backend = backend  # type: ignore[attr-defined]
    SideEffects.store_attr = store_attr  # type: ignore[method-assign]


def trace_out(backend: Any) -> None:
    """Let Dynamo trace `f(..., out=t)` where `t` is not contiguous, for `backend`, as `t.copy_(f(...))`.

    It breaks the graph there (torch 2.13, 2.14): in Adamax and in Adam with `amsgrad`, for a parameter that is transposed or channels_last.
    """
    from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable

    call = TorchInGraphFunctionVariable.call_function
    if hasattr(call, "for_backend"):
        return

    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        if isinstance(out, TensorVariable) and unwrap_backend(tx.output.compiler_fn)[0] is backend:
            target = out.as_proxy().node.meta["example_value"]
            if not target.is_contiguous():
                result = call(self, tx, args, {k: v for k, v in kwargs.items() if k != "out"})
                # `out=` would give `t` another shape, or refuse a dtype that `copy_` converts.
                value = result.as_proxy().node.meta["example_value"] if isinstance(result, TensorVariable) else None
                if value is not None and value.shape == target.shape and torch.can_cast(value.dtype, target.dtype):
                    out.call_method(tx, "copy_", [result], {})
                    return out
        return call(self, tx, args, kwargs)

    call_function.for_backend = backend  # type: ignore[attr-defined]
    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def trace_next_time(function: Any) -> None:
    """Let Dynamo look again at a function that it has decided to run as Python from now on."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    if hasattr(function, "__code__"):
        strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
        set_code_exec_strategy(function.__code__, strategy)
