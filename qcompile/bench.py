"""`python -m qcompile bench`: time one optimizer step of every implementation there is, alternately, in one process.

All candidates update the same parameters with the same gradients and a learning rate that moves nothing, each with state
of its own. They take turns, with a large copy among them, so that whatever else happens on the machine happens to all.
The first step of each is timed apart, by what it was spent on: Dynamo, our passes, Inductor, the compiler of its code.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from qcompile._compat_dynamo import dynamo_settings
from qcompile._compat_inductor import compile_seconds
from qcompile.bench_candidates import Candidate
from qcompile.bench_report import FirstCall, Result, Row, spread
from qcompile.bench_shapes import Shape, parameter_count
from qcompile.kernel_source import traffic
from qcompile.passes.pipeline import forget_kernels
from qcompile.plan import record_of
from qcompile.runtime.launch import launches

# Steps after the first that are not timed: the second may compile again, where an optimizer makes its state in the first.
WARM_UP = 2
# Candidates share the code of the optimizer's class, and Dynamo counts compilations by code.
LIMITS = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096}
# What a candidate may take of the memory that is free.
SHARE_OF_FREE = 0.9


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of parameters: a model or shapes, `scale` is what they were scaled by."""

    name: str
    scale: float
    shapes: tuple[Shape, ...]


@dataclass(slots=True)
class _Running:
    """A candidate and what was measured of it so far; `error` is why it takes part no more."""

    candidate: Candidate
    error: str | None = None
    note: str | None = None
    optimizer: Optimizer | None = None
    step: Callable[[], object] | None = None
    first_call: FirstCall | None = None
    launches: tuple[int, str] | None = None
    seconds: list[float] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        self.error, self.optimizer, self.step = reason, None, None
        _collect()


def _collect() -> None:
    """Give memory back that nothing holds but cycles and torch's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int | None:
    """Bytes of memory that can be had on a device; None where the system does not say."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return None


def make_parameters(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Parameters with gradients, normally distributed, always the same on one device."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        param = nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator))
        param.grad = torch.empty_like(param, requires_grad=False).normal_(0, 1e-3, generator=generator)
        params.append(param)
    return params


def run_workload(
    workload: Workload,
    candidates: Sequence[Candidate],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    copy_bytes: int,
    progress: tqdm[None],
) -> Result:
    """Measure all candidates on one list of parameters.

    Args:
        repeats: timed steps of each candidate.
        copy_bytes: size of the tensor whose copy gives the bandwidth that is compared with.
        progress: gets one tick for each candidate that has run for the first time, and one for each timed round.
    """
    torch.compiler.reset()
    _collect()
    params = make_parameters(workload.shapes, dtype, device)
    source = torch.zeros(max(1, copy_bytes // 4), device=device)
    target = torch.empty_like(source)
    running = [_Running(candidate) for candidate in candidates]
    copies: list[float] = []
    with dynamo_settings(LIMITS):
        for item in running:
            progress.set_description(f"{workload.name}: first step of {item.candidate.name}")
            _start(item, params, device)
            progress.update()
        progress.set_description(f"{workload.name}: timing")
        target.copy_(source)  # whose memory is touched here for the first time
        for turn in range(repeats):
            copies.append(_timed(lambda: target.copy_(source), device))
            first = turn % len(running)  # nobody always runs behind the same neighbour
            for item in (*running[first:], *running[:first]):
                _time_once(item, device)
            progress.update()
    return _result(workload, running, params, 2 * source.nbytes, copies)


def _start(item: _Running, params: list[nn.Parameter], device: torch.device) -> None:
    """The first step, and those that warm up."""
    candidate, numel = item.candidate, sum(p.numel() for p in params)
    need, free = numel * (candidate.state_bytes + candidate.spare_bytes), free_bytes(device)
    if free is not None and need > SHARE_OF_FREE * free:
        item.fail(f"dropped: it needs about {need / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free")
        return
    gradients = [p.grad for p in params]
    forget_kernels()
    try:
        item.optimizer = candidate.make(params)
        item.step = step = candidate.step_of(item.optimizer)
        item.first_call = _first_call(step, candidate, device)
        for _ in range(WARM_UP):
            step()
        item.launches = _count_launches(step, candidate, device)
    except Exception as error:  # of a peer, of a compiler: the others are measured all the same
        item.fail(_reason(error))
    for param, gradient in zip(params, gradients, strict=True):
        if param.grad is not gradient:
            param.grad = gradient
    if candidate.kind == "ours" and item.optimizer is not None:
        reason = record_of(item.optimizer).dense_reason
        item.note = None if reason is None else f"ran dense: {reason}"


def _first_call(step: Callable[[], object], candidate: Candidate, device: torch.device) -> FirstCall:
    """Run for the first time. What is unknown of a part stays None: torch may name its timers otherwise, and they follow the
    clock of the day, which may be set in between."""
    before = compile_seconds()
    total = _timed(step, device, events=False)
    spent = {name: seconds - before[name] for name, seconds in compile_seconds().items()}
    if not 0 < spent["backend"] <= spent["total"] <= total:
        return FirstCall(total)
    ours = candidate.kind == "ours"
    inductor = spent["inductor"] if ours else spent["backend"]
    return FirstCall(
        total,
        max(0.0, spent["total"] - spent["backend"]),
        max(0.0, spent["backend"] - inductor) if ours else None,
        max(0.0, inductor - spent["codegen"]),
        spent["codegen"],
    )


def _timed(run: Callable[[], object], device: torch.device, events: bool = True) -> float:
    """Seconds, from when the device is idle until it is idle again; on CUDA by events, or the host's clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    torch.cuda.synchronize(device)
    if not events:
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _time_once(item: _Running, device: torch.device) -> None:
    if item.step is None:
        return
    try:
        item.seconds.append(_timed(item.step, device))
    except Exception as error:
        item.fail(_reason(error))


def _count_launches(step: Callable[[], object], candidate: Candidate, device: torch.device) -> tuple[int, str] | None:
    """Kernels of one step, and who counted them; None where nobody can."""
    if device.type == "cuda" and (counted := _profiled(step)):
        return counted, "profiler"
    before = launches.count
    step()
    return (launches.count - before, "launcher") if candidate.kind == "ours" else None


def _profiled(step: Callable[[], object]) -> int | None:
    """Kernels that ran on the GPU during a step, by torch's profiler; None where it does not work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        on_device = [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    except (RuntimeError, AttributeError):
        return None
    named = (e.name for e in on_device if not getattr(e, "is_user_annotation", False))
    return sum(not name.startswith(("Memcpy", "Memset")) and not name.endswith(" Sync") for name in named)


def _reason(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"


def moved_bytes(candidate: Candidate, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> float | None:
    """Bytes that one step reads and writes, per parameter.

    Of ours counted from the loads and stores of the generated kernels (`qcompile.kernels.traffic`); of torch fused by what one pass over
    memory is: the gradient is read, the parameter and each state are read and written. None for what is not known.
    """
    elements = sum(p.numel() for p in params)
    if candidate.name == "torch fused":
        states = sum(2 * value.nbytes for value in _states(optimizer))
        return (states + sum(2 * p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in params)) / elements
    if candidate.kind != "ours":
        return None
    record = record_of(optimizer)
    classes = {id(plan.slot.param): record.classes.get(place) for place, plan in record.plans.items()}
    total = 0.0
    for param in params:
        used = classes.get(id(param))
        if used is None:
            return None
        block = 0 if used.quantized is None else used.quantized.block_size
        blocked = param.numel() // block * block if block else 0
        for kernel, count in ((used.quantized, blocked), (used.dense, param.numel() - blocked)):
            total += traffic(kernel).total * count if kernel is not None and count else 0.0
    return total / elements


def stored_state_bytes(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> float:
    """Bytes of state as it is stored, per parameter: the tensors inside of subclasses, memory that is shared once.

    Numbers without dimensions (step counters) do not count.
    """
    sizes: dict[int, int] = {}
    for value in _states(optimizer):
        for part in _parts(value):
            sizes[part.data_ptr()] = max(part.nbytes, sizes.get(part.data_ptr(), 0))
    return sum(sizes.values()) / sum(p.numel() for p in params)


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        yield from (v for v in values if isinstance(v, Tensor) and v.dim() > 0)


def _parts(value: Tensor) -> Iterator[Tensor]:
    if not hasattr(value, "__tensor_flatten__"):
        yield value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from _parts(getattr(value, name))


def _result(
    workload: Workload,
    running: Sequence[_Running],
    params: Sequence[nn.Parameter],
    copy_bytes: int,
    copies: Sequence[float],
) -> Result:
    base = next((item for item in running if item.seconds and item.candidate.kind == "torch"), None)
    base_seconds = None if base is None else statistics.median(base.seconds)
    copied = copy_bytes / statistics.median(copies)
    return Result(
        workload.name,
        workload.scale,
        len(params),
        parameter_count(workload.shapes),
        copy_bytes,
        tuple(1e3 * s for s in copies),
        None if base is None else base.candidate.name,
        tuple(_row(item, params, base_seconds, copied) for item in running),
    )


def _row(item: _Running, params: Sequence[nn.Parameter], base_seconds: float | None, copied: float) -> Row:
    candidate, optimizer = item.candidate, item.optimizer
    if optimizer is None or not item.seconds:
        return Row(candidate.name, candidate.kind, item.error or "not timed")
    seconds = statistics.median(item.seconds)
    moved = moved_bytes(candidate, optimizer, params)
    count, counted_by = item.launches or (None, None)
    return Row(
        name=candidate.name,
        kind=candidate.kind,
        note=item.note,
        times_ms=tuple(1e3 * s for s in item.seconds),
        median_ms=1e3 * seconds,
        spread_ms=1e3 * spread(item.seconds),
        ratio=None if base_seconds is None else seconds / base_seconds,
        moved_bytes=moved,
        bandwidth=None if moved is None else moved * sum(p.numel() for p in params) / seconds / copied,
        first_call=item.first_call,
        launches=count,
        launches_counted=counted_by,
        state_bytes=stored_state_bytes(optimizer, params),
    )
