"""Every private torch name that qcompile uses, each behind a function that says what it is for; Inductor's are next door.

It probes features, not versions. `tests/test_compat.py` asserts the names and signatures, so that a new torch fails
there first, with names. Imports of the compiler are inside the functions: importing qcompile stays cheap.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from qcompile._compat_distributed import local_of
from qcompile.exc import UnsupportedTorchError

copy_all, add_all = torch._foreach_copy_, torch._foreach_add_

# module, attribute paths
NEEDED = (
    ("torch._dynamo.symbolic_convert", "InstructionTranslator.current_tx"),
    ("torch._dynamo.convert_frame", "always_optimize_code_objects"),
    ("torch._dynamo.eval_frame", "_debug_get_cache_entry_list"),
    ("torch._dynamo.guards", "DeletedGuardManagerWrapper GuardBuilder.EQUALS_MATCH GuardBuilder.TENSOR_MATCH"),
    ("torch._C._dynamo.eval_frame", "_FrameAction _FrameExecStrategy set_code_exec_strategy"),
    ("torch._dynamo.exc", "TensorifyScalarRestartAnalysis TorchDynamoException FailOnRecompileLimitHit"),
    ("torch._dynamo.source", "AttrSource CallFunctionNoArgsSource DictGetItemSource GetItemSource GradSource"),
    (
        "torch._dynamo.variables",
        "BuiltinVariable ConstDictVariable ListVariable OptimizerVariable SymNodeVariable TensorVariable",
    ),
    (
        "torch._dynamo.variables",
        "TorchInGraphFunctionVariable._get_handlers TorchInGraphFunctionVariable.call_function constant",
    ),
    ("torch._dynamo.utils", "compilation_time_metrics dynamo_timed"),
    ("torch._dynamo.side_effects", "SideEffects.is_modified SideEffects.store_attr"),
    ("torch._inductor", "list_mode_options"),
    ("torch._inductor.async_compile", "AsyncCompile.cpp_pybinding AsyncCompile.triton"),
    ("torch._inductor.codecache", "CppPythonBindingsCodeCache.load_pybinding PyCodeCache.load"),
    ("torch._inductor.choices", "InductorChoices.should_use_persistent_reduction InductorChoices.triton_kernel_kwargs"),
    ("torch._inductor.codegen.triton", "FixedTritonConfig"),
    ("torch._inductor.compile_fx", "compile_fx compile_fx_inner"),
    ("torch._inductor.config", "max_fusion_size post_grad_custom_pre_pass"),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    ("torch._inductor.decomposition", "select_decomp_table"),
    ("torch._inductor.fx_utils", "get_node_storage"),
    ("torch._inductor.graph", "GraphLowering.codegen GraphLowering.compile_to_module"),
    ("torch._inductor.dtype_propagation", "DtypePropagationOpsHandler"),
    ("torch._inductor.ir", "StorageBox.has_exceeded_max_reads StorageBox.should_realize_on_reuse"),
    ("torch._inductor.ir", "Pointwise.make_loader"),
    ("torch._inductor.loop_body", "InterpreterShim.run_node LoopBody.get_read_expr"),
    ("torch._inductor.runtime.hints", "DeviceProperties.create"),
    ("torch._inductor.scheduler", "has_triton"),
    ("torch._inductor.utils", "fresh_cache"),
    ("torch._inductor.virtualized", "V.get_ops_handler V.set_fake_mode V.set_choices_handler"),
    ("torch._guards", "TracingContext tracing"),
    ("torch._logging", "trace_structured"),
    ("torch._subclasses", "FakeTensorMode"),
    ("torch.fx.experimental.proxy_tensor", "make_fx"),
    (
        "torch.fx.experimental.symbolic_shapes",
        "DimDynamic.INFER_STRIDE ShapeEnv.create_symbol ShapeEnv.create_symintnode",
    ),
    ("torch.func", "functionalize"),
    ("torch.utils._sympy.value_ranges", "ValueRanges.tighten"),
)


def missing_names(needed: Iterable[tuple[str, str]] | None = None) -> list[str]:
    """Names of `NEEDED`, or of others, that the installed torch does not have."""
    missing = []
    wanted = NEEDED if needed is None else needed
    for module, path in ((module, path) for module, paths in wanted for path in paths.split()):
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            missing.append(f"{module}.{path}")
    return missing


@functools.cache
def require_supported_torch() -> None:
    """Raise `UnsupportedTorchError` when a needed name is missing."""
    if missing := missing_names():
        raise UnsupportedTorchError(missing, torch.__version__)


def unwrap_backend(backend: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function the user named and the keywords `torch.compile` gives it, from under Dynamo's wrappers."""
    keywords: Mapping[str, Any] = {}
    while True:
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif type(backend).__name__ == "_TorchCompileWrapper":
            backend, keywords = backend.compiler_fn, backend.kwargs
        else:
            return backend, keywords


def tracing_backend() -> tuple[Any, Mapping[str, Any]]:
    """Backend and keywords for which Dynamo is tracing right now, or (None, {})."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer = InstructionTranslator.current_tx()
    except AttributeError:
        return None, {}
    return unwrap_backend(tracer.output.compiler_fn)


def enclosing_backends() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Backends of the `torch.compile`d functions on this thread's stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            context = frame.f_locals.get("self")
            if context is not None and hasattr(context, "callback"):
                yield unwrap_backend(context.callback)
        frame = cast(Any, frame.f_back)


def is_read_again(node: fx.Node, holders: Sequence[Any]) -> bool:
    """Whether traced code reads an input from one of `holders` (dicts, lists, objects), so that it will find what is put there.

    False where the input is a variable of the compiled function, or lies in a container of its own.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    source = getattr(node, "_dynamo_source", None)
    base = getattr(source, "base", None)
    if base is None:
        return source is None
    try:
        frame = InstructionTranslator.current_tx().output.root_tx
        name = base.name if isinstance(base.name, str) else base.name()
        found = eval(name, {**frame.f_globals, "L": frame.f_locals, "G": frame.f_globals})
    except Exception:  # a source that cannot be spelled; those are attributes and closures of whole steps
        return True
    return any(found is holder or getattr(found, "__dict__", None) is holder for holder in holders)


def stored_values(gm: fx.GraphModule) -> list[tuple[fx.Node | None, fx.Node]]:
    """What traced Python code stores in dicts and attributes when the graph has run: the input that is there now, and the
    node of the tensor that takes its place. Only the tracer's record of side effects knows; empty outside of a backend.
    """
    from torch._dynamo import source
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import ConstDictVariable, ListVariable

    try:
        effects: Any = InstructionTranslator.current_tx().output.side_effects
    except AttributeError:
        return []
    new: dict[Any, Any] = {}
    for value in effects.id_to_variable.values():
        if value.source is None or not effects.is_modified(value):
            continue
        if isinstance(value, ConstDictVariable):
            items = [(k.vt.as_python_constant(), v) for k, v in value.items.items() if k.vt.is_python_constant()]
            new.update({source.DictGetItemSource(value.source, k): v for k, v in items})
        elif isinstance(value, ListVariable):
            new.update({source.GetItemSource(value.source, i): v for i, v in enumerate(value.items)})
    for owner, values in effects.store_attr_mutations.items():
        if owner.source is not None:
            new.update({source.AttrSource(owner.source, name): v for name, v in values.items()})
    sources = getattr(gm, "_param_name_to_source", {})
    inputs = {n: getattr(n, "_dynamo_source", sources.get(n.target)) for n in gm.graph.nodes if not n.args}
    at, nodes = {where: n for n, where in inputs.items()}, {n.name: n for n in gm.graph.nodes}
    stored = {where: getattr(getattr(v, "proxy", None), "node", None) for where, v in new.items()}
    return [(at.get(where), nodes[n.name]) for where, n in stored.items() if n is not None and n.name in nodes]


@functools.cache
def trace_math_pow(backend: Any) -> None:
    """Let Dynamo trace `math.pow` of a changing int or float, or of a tensor, for `backend`, as it traces `**`.

    It computes it while it traces, and compiles again for each value: a bias correction, for each step; at a tensor it breaks the graph
    (torch 2.13, 2.14).
    """
    from torch._dynamo.variables import BuiltinVariable, SymNodeVariable, TensorVariable, TorchInGraphFunctionVariable

    def power(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if unwrap_backend(tx.output.compiler_fn)[0] is backend and any(
            isinstance(a, (SymNodeVariable, TensorVariable)) for a in args
        ):
            floats = [BuiltinVariable(float).call_function(tx, [a], {}) for a in args]
            return BuiltinVariable(operator.pow).call_function(tx, floats, kwargs)
        return None

    TorchInGraphFunctionVariable._get_handlers()[math.pow] = power


def global_step_hooks() -> list[Callable[..., Any]]:
    """Step hooks that every optimizer runs."""
    from torch.optim import optimizer

    return [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]


def compiling_errors() -> tuple[type[BaseException], ...]:
    """What Dynamo raises when it cannot compile, before anything has run."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def trace_again(reason: str) -> NoReturn:
    """Called in a backend: let Dynamo trace the frame again, because an input is not what it was when it was traced."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


@contextlib.contextmanager
def as_plain_inputs(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let Dynamo take tensors as inputs of the graph, although an earlier compilation marked their addresses as static.

    `backward()` does not see those: it looks for leaves among inputs alone (`TensorVariable.method_backward`, torch 2.14).
    """
    mark = "_dynamo_static_input_type"
    marks = [(t, vars(t).pop(mark)) for t in tensors if mark in vars(t)]
    try:
        yield
    finally:
        for tensor, value in marks:
            setattr(tensor, mark, value)


def always_trace(function: Any) -> None:
    """Let Dynamo trace a function although it names no `torch` and has no tensor among its variables."""
    from torch._dynamo.convert_frame import always_optimize_code_objects

    if hasattr(function, "__code__"):
        always_optimize_code_objects[function.__code__] = True


def mark_static(tensor: Tensor) -> bool:
    """Let Dynamo trace a tensor with the sizes it has, whatever it saw in its place before. False where that was done.

    `torch._dynamo.mark_static` does something else in a backend, which counts as being compiled.
    """
    done = hasattr(tensor, "_dynamo_static_indices")
    marked: Any = tensor
    marked._dynamo_static_indices, marked._has_dynamo_dim_marking = set(range(tensor.dim())), True
    return not done


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Put a text into torch's structured trace (`TORCH_TRACE`, read by tlparse); it is made only if there is one."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


# -- Dynamo's graph ------------------------------------------------------------------------------------------------


def is_graph(module: object) -> bool:
    """Whether a module is a traced graph, which holds parameters under names of its own."""
    return issubclass(type(module), fx.GraphModule) or type(module).__module__.startswith("torch._dynamo")


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def example_of(node: fx.Node) -> Any:
    """The fake value Dynamo computed for a node: a tensor (of a DTensor what a rank holds), a SymInt or SymFloat, or None."""
    return local_of(node.meta.get("example_value"))


def settled(sizes: Iterable[Any]) -> torch.Size:
    """Sizes, as ints where tracing has found out what they are: those of a gradient that is a DTensor begin as symbols."""
    given = ((size, size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size) for size in sizes)
    return torch.Size([size if known is None else known for size, known in given])


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be edited: Dynamo reads its own placeholders again after a backend returns (design.md, fact 18)."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for old, new in copies.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    return without_unused_attributes(gm, graph)


def without_unused_attributes(gm: fx.GraphModule, graph: fx.Graph | None = None) -> fx.GraphModule:
    """The same graph, or another, in a module that holds only the tensors it uses."""
    out = fx.GraphModule(gm, graph or gm.graph)
    out.meta = gm.meta
    sources = getattr(gm, "_param_name_to_source", {})
    out._param_name_to_source = {k: v for k, v in sources.items() if hasattr(out, k)}  # type: ignore[assignment]
    return out


def with_arguments(gm: fx.GraphModule, attributes: Sequence[str]) -> fx.GraphModule:
    """A copy in which tensors that the module holds arrive as arguments, behind the others."""
    gm = copy_of(gm)
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    for name in attributes:
        with gm.graph.inserting_before(first):
            argument = gm.graph.placeholder(f"{name}_argument")
        for node in [n for n in gm.graph.nodes if n.op == "get_attr" and n.target == name]:
            argument.meta = dict(node.meta)
            node.replace_all_uses_with(argument)
            first = node.next if node is first else first
            gm.graph.erase_node(node)
    out = without_unused_attributes(gm)
    out.meta = {k: v for k, v in gm.meta.items() if k != "dynamo_compile_id"}  # its inputs are not Dynamo's any more
    return out


def inner_source(owner: Any, part: Any, name: str, key: str | None = None) -> None:
    """Tell Dynamo and AOTAutograd that an input is the attribute `name` of the input `owner`.

    Both are placeholders, or `owner` is the name of an attribute of the module `part`, which holds the input as `key`.
    """
    from torch._dynamo.source import AttrSource

    if key is not None and owner in part._param_name_to_source:
        part._param_name_to_source[key] = AttrSource(part._param_name_to_source[owner], name)
    elif hasattr(owner, "_dynamo_source"):
        part._dynamo_source = AttrSource(owner._dynamo_source, name)


# -- Fake tensors with a symbolic number of rows -------------------------------------------------------------------


class SymbolicRows:
    """A fake-tensor world in which one extent, the number of rows, is symbolic; so one kernel serves every size."""

    def __init__(self, hint: int = 8192) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.shape_env = ShapeEnv()
        self.fake_mode = torch._subclasses.FakeTensorMode(shape_env=self.shape_env)
        source = ConstantSource("rows")
        symbol = self.shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.rows = self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def empty(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        with self.fake_mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def guards(self) -> list[str]:
        """Conditions on `rows` that code generation assumed."""
        return [str(guard.expr) for guard in self.shape_env.guards]


def new_fake_mode() -> Any:
    """A fake-tensor world with concrete shapes."""
    return torch._subclasses.FakeTensorMode()


def trace(function: Callable[..., Any], args: Sequence[Any], mode: Any, decompose: bool) -> fx.GraphModule:
    """An ATen graph of `function` over fake tensors; with Inductor's decompositions, or none."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, torch.no_grad():
        return make_fx(function, decomposition_table=select_decomp_table() if decompose else None)(*args)
