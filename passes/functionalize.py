"""One region becomes an ATen program in single-assignment form, split into numbers and elements.

Before: a region of the Dynamo graph: in-place torch calls on tensors and Python numbers. After: an `UpdateProgram`, two
functional ATen graphs: `scalars`, what happens to 0-d tensors (step counters, bias corrections), and `elements`, what
happens to each element, which reads the results of the first as 0-d inputs. They are kept apart because a power in the
inner loop of a kernel costs more than the rest of the update (design.md, fact 8).

A number that the graph was specialised on is a constant of the program. One that changes (a scheduled learning rate) is a
0-d fp64 input; torch then computes as it would have with the number, up to the rounding of that number.

Not every update is elementwise. One that is not raises `NotElementwise` with the operator that decided it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qcompile._compat import example_of, new_fake_mode, settled, trace
from qcompile.passes.find_state import Inputs
from qcompile.passes.outline_updates import Region
from qcompile.passes.thread_writes import is_scalar

aten = torch.ops.aten
# Elementwise without the tag: they copy, convert, or fill with one value in the shape of their argument.
SHAPE_PRESERVING = frozenset(
    {
        aten.clone.default,
        aten.copy.default,
        aten.copy_.default,
        aten._to_copy.default,
        aten.full_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.alias.default,
        aten.detach.default,
    }
)


class NotElementwise(Exception):  # noqa: N818
    """The update mixes elements, so it cannot run block by block. Becomes a reason in the plan."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of the parameter's shape that the update reads.

    Attributes:
        index: its place among the region's inputs and, after them, its outputs.
        role: "param", "state", "input", or "result": written for others to read, and never read.
        written: whether the update writes it.
    """

    index: int
    role: str
    dtype: torch.dtype
    written: bool


@dataclass(frozen=True, slots=True)
class UpdateProgram:
    """A functional update.

    Attributes:
        operands: inputs of `elements`, in order; after them come the results of `scalars`.
        elements: returns the new value of each written operand, in order.
        numbers: which of the region's inputs `scalars` reads, in order.
        scalars: returns the 0-d inputs of `elements`, then the new value of each number in `written_numbers`.
        written_numbers: positions in `numbers` of the 0-d tensors that the update writes.
        scalar_dtypes: dtypes of the 0-d inputs of `elements`.
    """

    operands: tuple[Operand, ...]
    elements: fx.GraphModule
    numbers: tuple[int, ...]
    scalars: fx.GraphModule
    written_numbers: tuple[int, ...]
    scalar_dtypes: tuple[torch.dtype, ...]


def functionalize(region: Region, inputs: Inputs) -> UpdateProgram:
    """Trace `region` and split it; raises `NotElementwise`."""
    shape = _shape_of(region, inputs)
    gm = functional_graph(region)
    _check_elementwise(gm, shape)
    return _split(gm, region, inputs)


def functional_graph(region: Region) -> fx.GraphModule:
    """The region in ATen: a placeholder per input, a 0-d fp64 tensor for a Python number, `copy_` into what it writes at
    the end, and the region's outputs. Raises `NotElementwise` where it cannot be traced.
    """
    args, mode = _fake_args(region)
    run = torch.func.functionalize(_runner(_region_graph(region)), remove="mutations_and_views")
    try:
        gm = trace(run, args, mode, decompose=False)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise NotElementwise(f"its update could not be traced: {type(error).__name__}: {first}") from error
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        value = getattr(gm, str(node.target))
        if value.dim() == 0:  # a number that the trace met as a tensor
            with gm.graph.inserting_before(node):
                number = gm.graph.call_function(aten.scalar_tensor.default, (value.item(),), {"dtype": value.dtype})
            number.meta = dict(node.meta)
            node.replace_all_uses_with(number)
    gm.graph.eliminate_dead_code()
    return gm


def _shape_of(region: Region, inputs: Inputs) -> torch.Size:
    """The shape of everything in an elementwise region."""
    buffers = [example_of(a) for a in region.inputs if a in inputs.params or a in inputs.state]
    if any(not isinstance(extent, int) for buffer in buffers for extent in settled(buffer.shape)):
        raise NotElementwise("it was traced for buffers of any size")
    shapes = {settled(buffer.shape) for buffer in buffers}
    if len(shapes) != 1:
        found = ", ".join(sorted(str(tuple(s)) for s in shapes)) or "none"
        raise NotElementwise(f"its update touches parameters or state of several shapes: {found}")
    (shape,) = shapes
    for node in region.inputs:
        example = example_of(node)
        if isinstance(example, Tensor) and example.dim() > 0 and settled(example.shape) != shape:
            raise NotElementwise(f"its update reads a tensor of shape {tuple(example.shape)}")
    return shape


def _fake_args(region: Region) -> tuple[list[Tensor], Any]:
    mode = new_fake_mode()
    args = []
    with mode:
        for node in region.inputs:
            example = example_of(node)
            if not isinstance(example, Tensor):
                args.append(torch.empty((), dtype=torch.float64))
                continue
            if example.dtype.is_complex or example.layout != torch.strided:
                raise NotElementwise(f"it is {'complex' if example.dtype.is_complex else 'sparse'}")
            shape, stride = settled(example.shape), settled(example.stride())
            if not all(isinstance(size, int) for size in shape):
                raise NotElementwise(f"its update reads a tensor of changing shape {tuple(example.shape)}")
            args.append(torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device))
    return args, mode


def _region_graph(region: Region) -> fx.Graph:
    graph, env = fx.Graph(), {}
    for i, node in enumerate(region.inputs):
        env[node] = graph.placeholder(f"input_{i}")
    for node in region.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in region.outputs))
    return graph


def _runner(graph: fx.Graph) -> Callable[..., list[Tensor]]:
    def run(*args: Tensor) -> list[Tensor]:
        values: dict[fx.Node, Any] = {}
        left = iter(args)
        for node in graph.nodes:
            if node.op == "output":
                return [values[n] for n in node.args[0]]
            if node.op == "placeholder":
                values[node] = next(left)
            else:
                dtype = _number_dtype(node)
                value_of = lambda n, dtype=dtype: _as_number(n, values[n], dtype)  # noqa: E731
                node_args, node_kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
                values[node] = _call(node, node_args, node_kwargs)
        raise AssertionError("a graph has an output")

    return run


def _number_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a 0-d tensor that is computed here, which the Python numbers in it do not change."""
    example = example_of(node)
    is_tensor = isinstance(example, Tensor) and example.dim() == 0 and example.is_floating_point()
    return example.dtype if is_tensor else None


def _as_number(node: fx.Node, value: Any, dtype: torch.dtype | None) -> Any:
    """A Python number in the place of which stands a 0-d fp64 tensor, which would make another 0-d tensor fp64."""
    is_number = dtype is not None and isinstance(value, Tensor) and isinstance(example_of(node), NUMBERS)
    return value.to(dtype) if is_number and value.dtype == torch.float64 else value


NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
# What Python numbers go through, for 0-d tensors in their place.
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "item": lambda x: x if x.dim() == 0 else x.sum(),
    "sym_float": lambda x: x.double(),
    "sym_int": torch.trunc,
    "sym_max": lambda a, b: torch.maximum(*_as_tensors(a, b)),
    "sym_min": lambda a, b: torch.minimum(*_as_tensors(a, b)),
    "sym_sqrt": torch.sqrt,
    "_sym_sqrt": torch.sqrt,
}


def _as_tensors(*values: Any) -> list[Tensor]:
    return [torch.as_tensor(v, dtype=torch.float64) for v in values]


def _is_number_over_tensor(node: fx.Node) -> bool:
    """Whether a Python number is divided by a tensor, which torch computes as a product with the reciprocal."""
    if node.target is not operator.truediv:
        return False
    above, below = (example_of(a) if isinstance(a, fx.Node) else a for a in node.args)
    return isinstance(below, Tensor) and isinstance(above, NUMBERS)


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what the node calls; a number that is an input arrives as a 0-d tensor where torch may want a Python number."""
    if _is_number_over_tensor(node):
        return args[1].reciprocal() * args[0]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in OF_NUMBERS and isinstance(args[0], (Tensor, int, float)):
        return OF_NUMBERS[name](*args)
    for factor in ("alpha", "value"):
        if isinstance(kwargs.get(factor), Tensor) and len(args) > 1:
            args = (args[0], args[1] * kwargs[factor], *args[2:])
            kwargs = {k: v for k, v in kwargs.items() if k != factor}
    if name in ("lerp", "lerp_"):
        start, end, weight = [*args, *(kwargs[k] for k in ("input", "end", "weight") if k in kwargs)]
        if isinstance(weight, Tensor) and weight.dim() == 0:
            change = (end - start) * weight
            return start.add_(change) if name == "lerp_" else start + change
    call: Any = getattr(type(args[0]), name) if node.op == "call_method" else node.target
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        # `square_`, `min(..., out=x)` and a few others, which `functionalize` does not know
        if "alias annotations" not in str(error) or not hasattr(torch, name.removesuffix("_")):
            raise
        written = kwargs.get("out", args[0])
        others = {k: v for k, v in kwargs.items() if k != "out"}
        return written.copy_(getattr(torch, name.removesuffix("_"))(*args, **others))


def _check_elementwise(gm: fx.GraphModule, shape: torch.Size) -> None:
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            raise NotElementwise("its update reads a constant tensor")
        if node.op != "call_function" or _is_number(node):
            continue
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise not in tags and node.target not in SHAPE_PRESERVING:
            raise NotElementwise(f"{node.target} in its update is not elementwise")
        value = node.meta["val"]
        if value.shape != shape:
            raise NotElementwise(f"{node.target} in its update makes a tensor of shape {tuple(value.shape)}")
        if torch.Tag.nondeterministic_seeded in tags:
            raise NotElementwise(f"{node.target} in its update draws random numbers")


def _is_number(node: fx.Node) -> bool:
    return node.meta["val"].dim() == 0 and all(a.meta["val"].dim() == 0 for a in node.all_input_nodes)


def _split(gm: fx.GraphModule, region: Region, inputs: Inputs) -> UpdateProgram:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    results = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    written = {n.args[0]: n.args[1] for n in gm.graph.nodes if n.target is aten.copy_.default}
    computed = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not aten.copy_.default]
    is_number = {n: _is_number(n) for n in [*placeholders, *computed]}

    numbers = [n for n in placeholders if is_number[n]]
    elements = [n for n in placeholders if not is_number[n]]
    wanted = [
        n for n in is_number if is_number[n] and any(not is_number.get(u, False) and u in is_number for u in n.users)
    ]
    wanted += [
        value for target, value in written.items() if not is_number[target] and is_number[value] and value not in wanted
    ]
    written_numbers = [n for n in numbers if n in written]
    element_dtype = torch.float64 if any(n.meta["val"].dtype == torch.float64 for n in elements) else torch.float32

    scalars, env = _subgraph([], (), numbers, [n for n in computed if is_number[n]])
    dtypes = [element_dtype if n.meta["val"].is_floating_point() else n.meta["val"].dtype for n in wanted]
    casts = zip(wanted, dtypes, strict=True)
    _compute_in_float32(scalars, env)
    ready = [scalars.call_function(aten._to_copy.default, (env[n],), {"dtype": dtype}) for n, dtype in casts]
    scalars.output([*ready, *(env[written[n]] for n in written_numbers)])

    body, env = _subgraph(elements, results, wanted, [n for n in computed if not is_number[n]])
    targets = [n for n in elements if n in written]
    body.output([*(env[written[n]] for n in targets), *(env[n] for n in results)])

    where = {n: i for i, n in enumerate(placeholders)}
    roles = {n: _role(region.inputs[i], inputs) for n, i in where.items()}
    operands = [Operand(where[n], roles[n], n.meta["val"].dtype, n in written) for n in elements]
    operands += [Operand(len(placeholders) + i, "result", n.meta["val"].dtype, True) for i, n in enumerate(results)]
    return UpdateProgram(
        operands=tuple(operands),
        elements=fx.GraphModule({}, body),
        numbers=tuple(where[n] for n in numbers),
        scalars=fx.GraphModule({}, scalars),
        written_numbers=tuple(numbers.index(n) for n in written_numbers),
        scalar_dtypes=tuple(dtypes),
    )


def _compute_in_float32(graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
    """Let a number in 16 bits (NAdam's `mu_product`, which torch casts when it loads a checkpoint) be read in 32.

    Eager torch computes with it as a Python float; 1 - x would have three digits.
    """
    for source, node in env.items():
        if source.meta["val"].dtype in (torch.bfloat16, torch.float16):
            with graph.inserting_after(node):
                wide = graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float32})
            wide.meta = {"val": source.meta["val"].to(torch.float32)}
            node.replace_all_uses_with(wide, lambda user, wide=wide: user is not wide)  # type: ignore[misc]
            env[source] = wide


def _role(node: fx.Node, inputs: Inputs) -> str:
    if is_scalar(node):
        return "input"
    return "param" if node in inputs.params else "state" if node in inputs.state else "input"


def _subgraph(
    elements: list[fx.Node], results: Sequence[fx.Node], numbers: list[fx.Node], computed: list[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph of `computed` over a placeholder per element tensor, per result (nothing reads that), and per number."""
    graph, env = fx.Graph(), {}
    for node in elements:
        env[node] = graph.placeholder(node.name)
    for i, node in enumerate(results):
        graph.placeholder(f"result_{i}").meta = dict(node.meta)
    for node in numbers:
        env[node] = graph.placeholder(node.name)
    for node in [*elements, *numbers]:
        env[node].meta = dict(node.meta)
    for node in computed:
        env[node] = graph.node_copy(node, lambda n: env[n])
    return graph, env
