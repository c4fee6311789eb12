"""What the generated Triton kernels cost on a GPU, read from the compiled code without a GPU.

Inductor generates an update kernel as it would on a GPU, ptxas (or LLVM, for AMD) compiles it for an architecture, and what
it used is read from the binary. The launch configurations are those that Inductor would start with: for a kernel over
blocks the one that qcompile gives it, where nothing is quantized each of those that Inductor's heuristics offer. The
source is generated for compute capability 9.0 and compiled for every architecture; nothing is run.

    >>> print(qcompile.kernels.stats("sm_90", recipe="8bit"))  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from qcompile._compat_dynamo import dynamo_settings
from qcompile._compat_inductor import loaded_kernel
from qcompile.binaries import table_widths, usage, widths
from qcompile.exc import InvalidOptionError, NoTritonCompilerError
from qcompile.kernel_source import Access, GeneratedKernel, Traffic, accesses_of, read_module, traffic
from qcompile.options import Options
from qcompile.passes.lower import generate_triton
from qcompile.passes.pipeline import PlannedRegion, compile_updates
from qcompile.passes.quantize_update import Storage, quantize_update
from qcompile.passes.verify import verify
from qcompile.runtime.formats import MAX_BLOCK_SIZE, Format
from qcompile.runtime.launch import Kernel

__all__ = ["ARCHITECTURES", "KernelStats", "Statistics", "TensorStats", "Traffic", "stats", "stats_of", "traffic"]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
ARCHITECTURE = re.compile(r"sm_\d{2,3}|gfx9\w+")
CAPABILITY = 90
SETTINGS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}


@dataclass(frozen=True, slots=True)
class TensorStats:
    """How a kernel accesses one tensor.

    Attributes:
        name: `param`, `grad`, or the key of a state with `codes` or `scale`; a part of a block has its number.
        access: how often the kernels of the class load and store each of its elements.
        load_bytes, store_bytes: of one instruction of one thread; 0 where there is none, or on AMD, where it is not known.
    """

    name: str
    access: Access
    load_bytes: int
    store_bytes: int


@dataclass(frozen=True, slots=True)
class KernelStats:
    """One compiled kernel.

    Attributes:
        optimizer, recipe, dtype, block_size: what it updates; the block size is in elements.
        arch: `sm_90` or `gfx942`.
        name: of the generated function.
        kernels: how many kernels its update class has.
        passes: loops over memory inside a block; 0 when the block is held in registers.
        rows: blocks per program (XBLOCK).
        warps: per program.
        registers: per thread.
        stack: bytes per thread that were spilled to local memory, or are addressed there.
        shared: bytes of shared memory per program.
        tensors: those with an element per element or per block of the parameter.
        refused: why Triton cannot compile it for the architecture (sm_80 has no 8-bit floats, say), else empty. Then the
            numbers of the binary are 0.
    """

    optimizer: str
    recipe: str
    dtype: str
    block_size: int
    arch: str
    name: str
    kernels: int
    passes: int
    rows: int
    warps: int
    registers: int
    stack: int
    shared: int
    tensors: tuple[TensorStats, ...]
    refused: str = ""

    def tensor(self, name: str) -> tuple[TensorStats, ...]:
        """The tensors of a name, in all parts."""
        return tuple(t for t in self.tensors if re.sub(r"\[\d+\]$", "", t.name) == name)

    @property
    def loaded(self) -> float:
        """Bytes loaded per element of the parameter."""
        return sum(t.access.loads * t.access.columns * t.access.bytes for t in self.tensors) / self.block_size

    @property
    def stored(self) -> float:
        """Bytes stored per element of the parameter."""
        return sum(t.access.stores * t.access.columns * t.access.bytes for t in self.tensors) / self.block_size


@dataclass(frozen=True, slots=True)
class Statistics:
    """All kernels that were looked at; prints as a table."""

    rows: tuple[KernelStats, ...]

    def __str__(self) -> str:
        head = ("recipe", "block", "arch", "kernels", "passes", "rows", "warps", "registers", "stack B", "shared B",
                "load B/el", "store B/el", "most loads, stores", "param B", "grad B", "")  # fmt: skip
        table = [head, *(_row(kernel) for kernel in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join(lines)


def _row(kernel: KernelStats) -> tuple[str, ...]:
    most = (max((getattr(t.access, what) for t in kernel.tensors), default=0) for what in ("loads", "stores"))
    wide = [
        sorted({b for t in kernel.tensor(n) for b in (t.load_bytes, t.store_bytes) if b}) for n in ("param", "grad")
    ]
    counts = (kernel.block_size, kernel.arch, kernel.kernels, kernel.passes, kernel.rows, kernel.warps)
    of_binary = ("-",) * 3 if kernel.refused else (kernel.registers, kernel.stack, kernel.shared)
    return (
        kernel.recipe,
        *map(str, (*counts, *of_binary)),
        f"{kernel.loaded:.3f}",
        f"{kernel.stored:.3f}",
        ", ".join(map(str, most)),
        *("/".join(map(str, w)) or "-" for w in wide),
        kernel.refused,
    )


def stats(
    arch: str | Sequence[str] = "sm_90",
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "AdamW",
    recipe: str | Sequence[str] = "8bit",
    dtype: torch.dtype = torch.float32,
    block_size: int | None = None,
) -> Statistics:
    """Generate and compile the kernels of an optimizer's update, and report what they use.

    Args:
        arch: one or more of `ARCHITECTURES`, or another `sm_` or `gfx9` architecture that Triton knows.
        optimizer: the name of a class in `torch.optim`, with its defaults (and momentum, where the default is none), or
            a function that makes an optimizer of a list of parameters.
        recipe: one or more names of recipes.
        dtype: of parameters and gradients.
        block_size: elements per scale; None is the recipe's own.

    Raises:
        InvalidOptionError: an argument has a value that it cannot take.
        NoTritonCompilerError: Triton is not installed, or runs as an interpreter.
    """
    archs = [arch] if isinstance(arch, str) else list(arch)
    _require_compiler(archs)
    label = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "optimizer")
    found = []
    for name in [recipe] if isinstance(recipe, str) else recipe:
        for kernel, names in _generated(optimizer, name, dtype, block_size):
            subject = (label, name, str(dtype).removeprefix("torch."), kernel.block_size)
            found += [row for one in archs for row in _compiled(kernel, names, one, subject)]
    return Statistics(tuple(found))


def stats_of(kernel: Kernel, arch: str = "sm_90") -> Statistics:
    """The same of one kernel, as an optimizer's step was compiled with; its tensors have the names of the kernel.

    Raises:
        InvalidOptionError: it is a C++ kernel, or `arch` has a value that it cannot take.
        NoTritonCompilerError: Triton is not installed, or runs as an interpreter.
    """
    if kernel.language != "Triton":
        raise InvalidOptionError(
            "kernel", f"{kernel.name} in {kernel.language}", "a Triton kernel; use stats() on a CPU"
        )
    _require_compiler([arch])
    return Statistics(tuple(_compiled(kernel, [], arch, ("", "", "", kernel.block_size))))


def _require_compiler(archs: Sequence[str]) -> None:
    for name in archs:
        if not ARCHITECTURE.fullmatch(name):
            raise InvalidOptionError("arch", name, f"sm_ or gfx9 and a number, such as {', '.join(ARCHITECTURES)}")
    if importlib.util.find_spec("triton") is None:
        raise NoTritonCompilerError("triton is not installed", "install the version that this torch is built for")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise NoTritonCompilerError("TRITON_INTERPRET=1 replaces it", "unset it before Python starts")


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


def _generated(
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer], recipe: str, dtype: torch.dtype, block_size: int | None
) -> Iterator[tuple[Kernel, list[str]]]:
    """One kernel per update class, on blocks if anything is quantized, with the names of its inputs."""
    gm, inputs, _ = _step_graph(optimizer, dtype)
    names: dict[int, list[str]] = {}

    def generate(item: PlannedRegion, storage: Storage, device: torch.device, settings: Mapping[str, Any]) -> Kernel:
        update = quantize_update(item.program, storage, device, True, item.preconditioners)
        verify(update, item.program, storage)
        kernel = generate_triton(update, CAPABILITY)
        names[id(kernel)] = _input_names(item, storage, update.parts)
        return kernel

    options = Options(recipe=recipe, block_size=block_size, min_numel=0)
    for group in compile_updates(gm, inputs, options, {}, generate).classes:
        if (kernel := group.quantized or group.dense) is not None:
            yield kernel, names[id(kernel)]


@functools.lru_cache(maxsize=16)
def _step_graph(
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer], dtype: torch.dtype
) -> tuple[fx.GraphModule, list[Any], Optimizer]:
    """Dynamo's graph of a second step on one parameter, which every block size divides; the values of its inputs; and the
    optimizer, which has to live, for its state is found through it."""
    if isinstance(optimizer, str) and not isinstance(getattr(torch.optim, optimizer, None), type):
        raise InvalidOptionError("optimizer", optimizer, "the name of a class in torch.optim, or a function")
    param = nn.Parameter(torch.zeros(2, MAX_BLOCK_SIZE, dtype=dtype))
    param.grad = torch.ones_like(param)
    if isinstance(optimizer, str):
        made = getattr(torch.optim, optimizer)([param], **SETTINGS.get(optimizer, {}))
    else:
        made = optimizer([param])
    made.step()  # makes the state
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    with dynamo_settings(recompile_limit=1000):
        torch.compile(made.step, backend=keep)()
    if not found:
        raise InvalidOptionError("optimizer", optimizer, "one whose step torch.compile can trace")
    return (*found[0], made)


def _input_names(item: PlannedRegion, storage: Storage, parts: int) -> list[str]:
    """What people call the inputs of a kernel, in order."""

    def numbered(name: str, count: int) -> list[str]:
        return [name] if count == 1 else [f"{name}[{k}]" for k in range(count)]

    names: list[str] = []
    roles = {"param": "param", "input": "grad"}
    for operand, fmt in zip(item.program.operands, storage, strict=True):
        node = item.region.inputs[operand.index] if operand.index < len(item.region.inputs) else None
        slot = item.inputs.state.get(node) if node is not None else None
        name = roles.get(operand.role, operand.role) if slot is None else slot.key
        if not isinstance(fmt, Format):
            names += numbered(name, parts)
            continue
        names += numbered(f"{name} codes", parts * fmt.bits // 8)
        names += numbered(f"{name} scale", fmt.scale_count)
        names += [f"{name} key", f"{name} store"] if fmt.random else []
    names += [f"number {k}" for k in range(len(item.program.scalar_dtypes))]
    return [*names, "first row"]


def _compiled(kernel: Kernel, names: list[str], arch: str, subject: tuple[str, str, str, int]) -> Iterator[KernelStats]:
    """Compile a kernel as it is launched: over a table; or, where it has none, in each configuration Inductor starts with."""
    module = read_module(kernel.module or kernel.source)
    called = dict(zip(module.inputs, names, strict=False))
    accesses = {a.tensor: a for a in accesses_of(kernel)}
    for one in module.kernels:
        for binary, rows in _over_a_table(kernel, arch) if kernel.module else _alone(one, arch):
            refused = binary if isinstance(binary, str) else ""
            ptx = "" if refused else binary.asm.get("ptx", "")
            found = table_widths(ptx, kernel, module.inputs) if kernel.module else widths(ptx, one)
            tensors = tuple(
                TensorStats(called.get(name, name), accesses[name], *found.get(name, (0, 0)))
                for name in dict.fromkeys(one.pointers.values())
                if accesses[name].columns
            )
            registers, stack = (0, 0) if refused else usage(binary)
            yield KernelStats(
                *subject,
                arch=arch,
                name=one.name,
                kernels=len(module.kernels),
                passes=one.passes,
                rows=rows,
                warps=kernel.warps if refused else binary.metadata.num_warps,
                registers=registers,
                stack=stack,
                shared=0 if refused else binary.metadata.shared,
                tensors=tensors,
                refused=refused,
            )


def _alone(one: GeneratedKernel, arch: str) -> Iterator[tuple[Any, int]]:
    """Binaries of a kernel of one region, and how many rows a program of each has: what `CachingAutotuner` gives to Triton."""
    with loaded_kernel(one.text, one.name, CAPABILITY) as tuner:
        for config in tuner.configs:
            meta = tuner.triton_meta
            constants = {**meta["constants"], **config.kwargs}
            source = (tuner.fn, dict(meta["signature"]), constants, meta["configs"][0])
            yield _binary(source, arch, config.num_warps, config.num_stages), config.kwargs.get("XBLOCK", 1)


def _over_a_table(kernel: Kernel, arch: str) -> Iterator[tuple[Any, int]]:
    """The same for the kernel of a class."""
    signature = {"table": "*i64", "regions": "*i32", "ALIGN": "constexpr", "XBLOCK": "constexpr"}
    with loaded_kernel(kernel.source, "kernel", CAPABILITY) as function:
        source = (function, signature, {"ALIGN": 16, "XBLOCK": kernel.unit}, {(0,): [["tt.divisibility", 16]]})
        yield _binary(source, arch, kernel.warps, None), kernel.unit


def _binary(source: tuple[Any, ...], arch: str, warps: int, stages: int | None) -> Any:
    """Compile (function, signature, constants, attributes) for a target; a string is why Triton refuses to."""
    import triton
    from triton.compiler import ASTSource, CompilationError

    function, signature, constants, attributes = source
    target = _target(arch)
    # a wavefront of AMD has 64 lanes, where the configuration was made for 32
    options: dict[str, Any] = {"num_warps": max(1, warps * 32 // target.warp_size), "sanitize_overflow": False}
    options |= {} if stages is None else {"num_stages": stages}
    try:
        built = ASTSource(function, signature, constexprs=constants, attrs=attributes)
        return triton.compile(built, target=target, options=options)
    except CompilationError as error:
        return f"not compiled: {str(error).splitlines()[-1]}"
