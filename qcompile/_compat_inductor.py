"""The private names of Inductor, and what has to be different in it for one kernel per update: see `_compat`.

What is patched here is patched while a kernel of ours is compiled, and Inductor's cache knows nothing of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx

log = logging.getLogger("qcompile")


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's configuration for a mode of `torch.compile`."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode else {}


# Where torch and we write down how long a part of a compilation took: Dynamo with everything below it, a backend, Inductor
# as far as our backend calls it, and waiting for compilers of generated code, which run in other processes.
_IN_OURS = "qcompile.inductor"
TIMERS = {
    "total": "_compile.compile_inner",
    "backend": "OutputGraph.call_user_compiler",
    "inductor": _IN_OURS,
    "codegen": "async_compile.wait",
}


def compile_seconds() -> dict[str, float]:
    """Seconds that this process has spent compiling since Dynamo was reset, by the keys of `TIMERS`; each holds the next."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: sum(compilation_time_metrics.get(key, ())) for name, key in TIMERS.items()}


def fresh_cache() -> contextlib.AbstractContextManager[None]:
    """Inductor with an empty cache, which is deleted at the end."""
    from torch._inductor.utils import fresh_cache

    return cast("contextlib.AbstractContextManager[None]", fresh_cache())


def stock_inductor(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """What `backend="inductor"` does.

    Numbers that `item` reads are in our graphs (see `dense_step.SETTINGS`), and not in those of `backend="inductor"`. Where
    AOTAutograd has to know such a number (`x.sub_(y, alpha=number)`) the graph runs as it is.
    """
    from torch._dynamo.utils import dynamo_timed
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        with dynamo_timed(_IN_OURS):
            return cast("Callable[..., Any]", compile_fx(gm, list(inputs), config_patches=dict(settings) or None))
    except GuardOnDataDependentSymNode as error:
        log.info("a graph runs uncompiled: %s", str(error).partition("\n")[0])
        return gm.forward


def inductor_apart(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The same for a graph with other inputs than Dynamo's, of whose guards and sources it is to know nothing."""
    from torch._guards import tracing

    with tracing(None):
        return stock_inductor(gm, inputs, settings)


@contextlib.contextmanager
def _outer_loop_fusion_without_key_error() -> Iterator[None]:
    """Inductor's C++ asks where a buffer is read by a node that reads it under the name of its mutation, and fails.

    `LoopBody.get_read_expr` raises KeyError in `try_outer_loop_fusion_with_local_buf` (torch 2.11 to 2.14). None makes
    the caller keep that buffer in memory, which is what it does for every other pattern it does not know.
    """
    from torch._inductor.loop_body import LoopBody

    original = LoopBody.get_read_expr

    def get_read_expr(self: Any, name: str) -> Any:
        with contextlib.suppress(KeyError):
            return original(self, name)
        return None

    with mock.patch.object(LoopBody, "get_read_expr", get_read_expr):
        yield


@contextlib.contextmanager
def _decoded_where_used() -> Iterator[None]:
    """Compute what is one number per block, or is decoded from codes, where it is used.

    Inductor stores what takes many operations, or is used twice and has a logarithm in it. Of one number per row that makes
    a loop over rows alone, which keeps two loops over elements apart; of decoded state it makes a pass over memory.
    """
    from torch._inductor.ir import Pointwise, StorageBox
    from torch._inductor.virtualized import V

    on_reuse, exceeded = StorageBox.should_realize_on_reuse, StorageBox.has_exceeded_max_reads

    def is_small(name: str) -> bool:
        buffer = V.graph.graph_inputs.get(name) or V.graph.try_get_buffer(name)
        size = [] if buffer is None else list(buffer.get_size())
        return buffer is not None and (buffer.get_dtype().itemsize == 1 or not size or size[-1] == 1)

    def is_cheap(box: Any) -> bool:
        data = box.data
        if not isinstance(data, Pointwise) or len(data.ranges) != 2:
            return False
        names = data.get_read_names()
        return data.ranges[1] == 1 or bool(names and all(is_small(name) for name in names))

    def should_realize_on_reuse(self: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(on_reuse(self, *args, **kwargs)) and not is_cheap(self)

    def has_exceeded_max_reads(self: Any) -> bool:
        return bool(exceeded(self)) and not is_cheap(self)

    with (
        mock.patch.object(StorageBox, "should_realize_on_reuse", should_realize_on_reuse),
        mock.patch.object(StorageBox, "has_exceeded_max_reads", has_exceeded_max_reads),
    ):
        yield


@contextlib.contextmanager
def _one_pass_reductions() -> Iterator[None]:
    """Keep a whole block in registers up to 4096 elements; Inductor loops, and reads everything twice, from 1024 on."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class OnePass(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            return not cooperative_reduction

    with V.set_choices_handler(OnePass()):
        yield


@contextlib.contextmanager
def _cpp_compiled_when_called() -> Iterator[None]:
    """Leave the C++ of a generated module uncompiled until it is called, which it may never be (see `compile_cpp`)."""
    from torch._inductor.async_compile import AsyncCompile

    original = AsyncCompile.cpp_pybinding

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Callable[..., Any]:
        compiled: list[Callable[..., Any]] = []

        def call(*args: Any) -> Any:
            if not compiled:
                future = original(self, argtypes, source_code)
                compiled.append(future.result() if hasattr(future, "result") else future)
            return compiled[0](*args)

        return call

    with mock.patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding):
        yield


def compile_cpp(source: str) -> Callable[[Tensor, int], Any]:
    """Compile `kernel(const int64_t*, const int64_t)` as Inductor compiles its own C++, and with its cache."""
    from torch._dynamo.utils import dynamo_timed
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    with dynamo_timed(_IN_OURS), dynamo_timed(TIMERS["codegen"]):
        function = CppPythonBindingsCodeCache.load_pybinding(["const int64_t*", "const int64_t"], source)
    return cast("Callable[[Tensor, int], Any]", function)


def compile_triton(source: str, unit: int, warps: int) -> Callable[[Tensor, Tensor, int], Any]:
    """Load a module with a Triton `kernel` over a table: one program of `warps` warps per `unit` rows of a region."""
    from torch._inductor.codecache import PyCodeCache

    kernel = PyCodeCache.load(source).kernel

    def launch(table: Tensor, programs: Tensor, align: int) -> None:
        kernel[(len(programs),)](table, programs, ALIGN=align, XBLOCK=unit, num_warps=warps)

    return launch


def code_language(device: torch.device) -> str:
    """What Inductor generates for a device now: "C++" or "Triton"."""
    import torch._inductor.config as inductor_config

    return "C++" if device.type == "cpu" and inductor_config.cpu_backend == "cpp" else "Triton"


def lower_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Tensor], mode: Any, settings: Mapping[str, Any]
) -> tuple[Callable[[list[Any]], Any], str]:
    """Compile a functional ATen graph, whose last nodes copy into inputs, and give the callable and its source.

    The callable takes a list, which it empties, and returns the graph's outputs.
    """
    import torch._inductor.config as inductor_config
    from torch._dynamo.utils import dynamo_timed
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    allowed = {k: v for k, v in settings.items() if not k.startswith("triton.cudagraph")}
    with (
        dynamo_timed(_IN_OURS),
        inductor_config.patch({"max_fusion_size": 1024, **allowed}),
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        _outer_loop_fusion_without_key_error(),
        _one_pass_reductions(),
        _decoded_where_used(),
        _cpp_compiled_when_called(),
    ):
        compiled = compile_fx_inner(gm, list(inputs))
    return cast("Callable[[list[Any]], Any]", compiled), str(getattr(compiled, "source_code", ""))
