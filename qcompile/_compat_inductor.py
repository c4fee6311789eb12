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

from qcompile._compat_compile_time import less_repeated_work

log = logging.getLogger("qcompile")


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's configuration for a mode of `torch.compile`."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode else {}


# Where torch and we write down how long a part of a compilation took: Dynamo with everything below it, a backend, Inductor
# as far as our backend calls it, and waiting for compilers of generated code, which run in other processes.
IN_OURS = "qcompile.inductor"
TIMERS = {
    "total": "_compile.compile_inner",
    "backend": "OutputGraph.call_user_compiler",
    "inductor": IN_OURS,
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


def launch_of(columns: int, parts: int) -> tuple[int, int]:
    """Rows and warps of a Triton program over rows of `columns` elements, one of the `parts` of a block: 128 threads or more,
    each with four elements of the block (16 bytes of fp32), or one of each part."""
    each = max(1, 4 // parts)
    rows = max(1, 128 * each // columns)
    return rows, max(1, rows * columns // each // (64 if torch.version.hip else 32))


@contextlib.contextmanager
def _one_pass_reductions(parts: int) -> Iterator[None]:
    """Keep a whole block in registers up to 4096 elements; Inductor loops, and reads everything twice, from 1024 on.

    And launch so that a thread has four elements of the block, or one of each of its `parts`. Inductor gives one warp 1024 elements
    of blocks from 256 to 1024, which takes all 255 registers of a thread, and up to 64 elements a thread below, which spills.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.triton import FixedTritonConfig
    from torch._inductor.virtualized import V

    class OnePass(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            return not cooperative_reduction

        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
            size = features.reduction_numel
            if features.is_reduction() and size.is_Integer and not int(size) & (int(size) - 1):
                rows, warps = launch_of(int(size), parts)
                launch = {"XBLOCK": rows, "num_warps": warps, "num_stages": 1}
                return {**kernel_kwargs, "fixed_config": FixedTritonConfig(launch)}
            return kernel_kwargs

    with V.set_choices_handler(OnePass()):
        yield


class _WhenCalled:
    """A kernel of a generated module that is compiled when it is called, in C++, or run, in Triton."""

    def __init__(self, compile_now: Callable[[], Any]) -> None:
        self._compile, self._kernel = compile_now, None

    def _compiled(self) -> Any:
        if self._kernel is None:
            future = self._compile()
            self._kernel = future.result() if hasattr(future, "result") else future
        return self._kernel

    def __call__(self, *args: Any) -> Any:
        return self._compiled()(*args)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled().run(*args, **kwargs)


@contextlib.contextmanager
def _compiled_when_called() -> Iterator[None]:
    """Leave the kernels of a generated module uncompiled until they are called, which they may never be (`compile_cpp`)."""
    import torch._inductor.config as inductor_config
    from torch._inductor.async_compile import AsyncCompile

    cpp, triton = AsyncCompile.cpp_pybinding, AsyncCompile.triton
    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args: _WhenCalled(lambda: cpp(*args))),
        mock.patch.object(AsyncCompile, "triton", lambda *args, **named: _WhenCalled(lambda: triton(*args, **named))),
        inductor_config.patch(compile_threads=1),  # else it begins while it generates
    ):
        yield


def compile_cpp(source: str) -> Callable[[Tensor, int], Any]:
    """Compile `kernel(const int64_t*, const int64_t)` as Inductor compiles its own C++, and with its cache."""
    from torch._dynamo.utils import dynamo_timed
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    with dynamo_timed(IN_OURS), dynamo_timed(TIMERS["codegen"]):
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
    gm: fx.GraphModule, inputs: Sequence[Tensor], mode: Any, settings: Mapping[str, Any], parts: int = 1
) -> tuple[Callable[[list[Any]], Any], str]:
    """Compile a functional ATen graph, whose last nodes copy into inputs, and give the callable and its source.

    A block of it arrives in `parts` ranges of columns. The callable takes a list, which it empties, and returns the graph's outputs.
    """
    import torch._inductor.config as inductor_config
    from torch._dynamo.utils import dynamo_timed
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    allowed = {k: v for k, v in settings.items() if not k.startswith("triton.cudagraph")}
    with (
        dynamo_timed(IN_OURS),
        inductor_config.patch({"max_fusion_size": 1024, **allowed}),
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        _outer_loop_fusion_without_key_error(),
        _one_pass_reductions(parts),
        _decoded_where_used(),
        less_repeated_work(),
        _compiled_when_called(),
    ):
        compiled = compile_fx_inner(gm, list(inputs))
    return cast("Callable[[list[Any]], Any]", compiled), str(getattr(compiled, "source_code", ""))


class _Generated(BaseException):  # no Exception: Inductor wraps those
    """Carries a generated module out of Inductor before it is loaded."""


def triton_source(
    gm: fx.GraphModule, inputs: Sequence[Tensor], mode: Any, settings: Mapping[str, Any], parts: int, capability: int
) -> str:
    """What `lower_with_inductor` would load on a CUDA GPU of this compute capability (90: 9.0), which need not be there.

    The graph and its fake inputs were traced on a CPU, because torch cannot dispatch to a device it was not built for; from
    here on they are a GPU's, and the graph is of no other use.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.graph import GraphLowering

    gpu = torch.device("cuda", 0)
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": gpu}
        if isinstance(value := node.meta.get("val"), Tensor):
            value.fake_device = gpu  # type: ignore[attr-defined]
    for tensor in inputs:
        tensor.fake_device = gpu  # type: ignore[attr-defined]

    def generate(self: Any) -> Any:
        raise _Generated(str(self.codegen()[0].value))

    try:
        with (
            mock.patch.object(GraphLowering, "compile_to_module", generate),
            inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, cpp_wrapper=False),
            _pretended_gpu(capability),
        ):
            lower_with_inductor(gm, inputs, mode, settings, parts)
    except _Generated as generated:
        return str(generated)
    raise AssertionError("Inductor compiled a graph without generating code")


@contextlib.contextmanager
def _pretended_gpu(capability: int) -> Iterator[None]:
    """Answer what Inductor asks about the GPU it generates for, where there is none."""
    if torch.cuda.is_available():
        yield
        return
    from types import SimpleNamespace

    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    numbers = {
        "major": capability // 10,
        "multi_processor_count": 132,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "warp_size": 32,
    }
    known = DeviceProperties(type="cuda", index=0, cc=capability, max_threads_per_block=1024, **numbers)
    torchs = SimpleNamespace(**numbers, minor=capability % 10, name="none", total_memory=1 << 36)
    with (
        _stub_driver(capability),
        mock.patch.object(DeviceProperties, "create", return_value=known),
        mock.patch.object(scheduler, "has_triton", return_value=True),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=torchs),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield


@contextlib.contextmanager
def _stub_driver(capability: int) -> Iterator[None]:
    """The least a Triton driver must answer while code is generated; the one before is put back."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Stub:
        is_active = staticmethod(lambda: True)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda index=0: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))

    before = driver._active
    driver.set_active(Stub())
    try:
        yield
    finally:
        driver._active = before


@contextlib.contextmanager
def loaded_kernel(source: str, name: str, capability: int) -> Iterator[Any]:
    """Inductor's autotuner of one Triton kernel: `fn`, `configs`, `triton_meta`, `inductor_meta`; nothing is compiled yet."""
    import importlib.util
    import tempfile
    from pathlib import Path

    from torch._inductor.runtime import triton_helpers

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")  # in a file, for Triton reads the text of functions from where they stand
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with (
            _pretended_gpu(capability),
            mock.patch.object(triton_helpers, "set_driver_to_gpu", return_value=None),
            mock.patch.object(
                torch.cuda, "is_available", return_value=True
            ),  # else launch configurations are not CUDA's
        ):
            spec.loader.exec_module(module)
        yield getattr(module, name)
