"""What the processes of `pool.Ranks` run: a small model, spread in every way, and what came of it."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import qcompile
from qcompile.runtime.state import QuantizedState

BATCH = 32


class Net(nn.Module):
    """Rows that 2 and 4 ranks divide, rows that they do not, 3 rows, of which the fourth rank has none, and one long row."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.uneven = nn.Linear(64, 129)
        self.few = nn.Linear(129, 3, bias=False)
        self.norm = nn.LayerNorm(64)
        self.long = nn.Parameter(torch.ones(4999))  # whose parts are no whole blocks
        self.register_buffer("pattern", torch.linspace(-1, 1, 4999))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.narrow(nn.functional.gelu(self.wide(x))))
        return y, self.few(torch.tanh(self.uneven(y))) + (self.long - self.pattern).square().mean()


def loss_of(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    out, few = model(x)
    return (out - y).square().mean() + few.square().mean()


def batches(steps: int, of: int, share: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One of `of` equal shares of each batch."""
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(64, 64, generator=generator) / 8
    for _ in range(steps):
        x = torch.randn(BATCH, 64, generator=generator)
        yield x.chunk(of)[share], torch.tanh(x @ mix).chunk(of)[share]


def spread_model(how: str) -> tuple[nn.Module, Callable[..., Any], int, int]:
    """A model, what to call, and which of how many shares of a batch this rank takes."""
    torch.manual_seed(0)
    model = Net()
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if how == "alone":
        return model, model, 1, 0
    if how in ("ddp", "zero"):
        return model, DistributedDataParallel(model), count, rank
    if how in ("tp", "2d"):
        mesh = init_device_mesh(
            "cpu",
            (count,) if how == "tp" else (2, count // 2),
            mesh_dim_names=("dp", "tp")[-1:] if how == "tp" else ("dp", "tp"),
        )
        parallelize_module(model, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        if how == "2d":
            fully_shard(model, mesh=mesh["dp"])
            return model, model, 2, rank // (count // 2)
        return model, model, 1, 0
    kwargs: dict[str, Any] = {}
    if how == "mixed":
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how == "offload":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how == "kept":
        kwargs["reshard_after_forward"] = False
    shape, names = ((2, count // 2), ("replicate", "shard")) if how == "hsdp" else ((count,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model.wide, model.narrow):
        fully_shard(layer, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model, model, count, rank


def make_optimizer(how: str, name: str, model: nn.Module) -> torch.optim.Optimizer:
    if how == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=getattr(torch.optim, name), lr=1e-2)
    params = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
    # torch has no foreach implementation for parameters of different meshes
    extra = {"foreach": False} if how in ("tp", "2d") and name != "Muon" else {}
    return getattr(torch.optim, name)(params, lr=1e-2, **extra)


def full(tensor: Tensor) -> Tensor:
    """All values, gathered where they are spread."""
    value = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(
    how: str,
    compiled: str | None,
    steps: int = 10,
    name: str = "AdamW",
    clip: float | None = None,
    accumulate: int = 1,
    rank_options: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and say what came of it.

    `compiled`: None (eager), "step" (`torch.compile(optimizer.step)`), "function" (`torch.compile(train_step)`) or
    "decorator".
    """
    if rank_options:
        options = {**options, **rank_options.get(dist.get_rank(), {})}
    model, call, of, share = spread_model(how)
    optimizer = make_optimizer(how, name, model)
    update = optimizer.step
    if compiled == "step":
        update = torch.compile(optimizer.step, backend="qstate", options=options)

    def step(*parts: tuple[Tensor, Tensor]) -> Tensor:
        for i, (x, y) in enumerate(parts):
            quiet = accumulate > 1 and isinstance(call, DistributedDataParallel) and i + 1 < len(parts)
            with call.no_sync() if quiet else contextlib.nullcontext():
                loss = loss_of(call, x, y) / len(parts)
                loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        update()
        optimizer.zero_grad()
        return loss

    if compiled == "function":
        step = torch.compile(step, backend="qstate", options=options)
    elif compiled == "decorator":
        step = qcompile.train_step(**options)(step)
    losses, parts = [], []
    for batch in batches(steps * accumulate, of, share):
        parts.append(batch)
        if len(parts) == accumulate:
            loss = step(*parts).detach()
            loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss) * accumulate
            if of > 1:
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            losses.append(loss.item())
            parts = []
    found = outcome(model, optimizer)
    return {"losses": losses, **found, "reason": step.explain().not_one_graph if compiled == "decorator" else None}


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and state, and what the report says of the state of this rank."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    report = qcompile.explain(inner)
    state, stored = {}, {}
    names = {id(p): key for key, p in model.named_parameters()}
    for p, entry in inner.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim():
                local = value.to_local() if isinstance(value, DTensor) else value
                if not isinstance(inner, ZeroRedundancyOptimizer):
                    state[f"{names[id(p)]}.{key}"] = (
                        local.dequantize() if isinstance(local, QuantizedState) else local.clone()
                    )
                if isinstance(local, QuantizedState):
                    stored[f"{names[id(p)]}.{key}"] = [t.clone() for t in local.stored]
    return {
        "params": {key: full(p).clone() for key, p in model.named_parameters()},
        "state": state,
        "stored": stored,
        "bytes": report.state_bytes,
        # less `long`, whose parts end in the middle of a block: each rank keeps up to 255 elements of it as they are
        "bytes_of_rows": sum(s.stored_bytes for s in report.states if s.param != "long"),
        "dense": sum(s.dense_bytes for s in report.states),
        "graphs": report.graphs,
        "formats": {(s.param, s.key): s.format if s.reason is None else s.reason for s in report.states},
    }


def collectives(how: str, compiled: str | None, **options: Any) -> list[str]:
    """Names of the collectives in one step of optimizer, after some have run."""
    model, call, of, share = spread_model(how)
    optimizer = make_optimizer(how, "AdamW", model)
    update = optimizer.step if compiled is None else torch.compile(optimizer.step, backend="qstate", options=options)
    names: list[str] = []
    for i, (x, y) in enumerate(batches(4, of, share)):
        loss_of(call, x, y).backward()
        with torch.profiler.profile() if i == 3 else contextlib.nullcontext() as profile:
            update()
        optimizer.zero_grad()
        if profile is not None:
            names = [e.name for e in profile.events() if e.name.startswith(("gloo:", "c10d::", "_c10d_functional::"))]
            count = len(profile.events())
            assert count > 0, "nothing was recorded"
    return names


class Trainer:
    """A model, its compiled optimizer, and steps from any point of the same data."""

    def __init__(self, how: str, recipe: str | None, name: str = "AdamW") -> None:
        self.model, self.call, self.of, self.share = spread_model(how)
        self.optimizer = make_optimizer(how, name, self.model)
        self.recipe, self.update = recipe, self.optimizer.step
        if recipe is not None:
            self.update = torch.compile(self.optimizer.step, backend="qstate", options={"recipe": recipe})

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for x, y in [*batches(last, self.of, self.share)][first:]:
            loss = loss_of(self.call, x, y)
            loss.backward()
            self.update()
            self.optimizer.zero_grad()
            loss = loss.detach()
            if self.of > 1:
                dist.all_reduce(loss)
            losses.append(loss.item() / self.of)
        return losses

    def state_dict(self, **options: Any) -> dict[str, Any]:
        chosen = StateDictOptions(**options)
        model = get_model_state_dict(self.model, options=chosen)
        return {"model": model, "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=chosen)}

    def load(self, found: dict[str, Any], **options: Any) -> None:
        chosen = StateDictOptions(**options)
        set_model_state_dict(self.model, found["model"], options=chosen)
        set_optimizer_state_dict(self.model, self.optimizer, found["optimizer"], options=chosen)


def save(path: str, how: str, recipe: str | None, in_background: bool = False) -> dict[str, Any]:
    """Train 10 steps, save with `torch.distributed.checkpoint`, and train 5 more."""
    trainer = Trainer(how, recipe)
    trainer.run(0, 10)
    kept = outcome(trainer.model, trainer.optimizer)
    found = trainer.state_dict()
    saved = None
    if in_background:  # in a group of its own: training goes on to communicate
        group = dist.new_group(backend="gloo")
        saved = checkpoint.async_save(found, checkpoint_id=path, process_group=group)
    else:
        checkpoint.save(found, checkpoint_id=path)
    losses = trainer.run(10, 15)
    if saved is not None:
        saved.result()
    keys = sorted(checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata)
    return {"losses": losses, **kept, "after": outcome(trainer.model, trainer.optimizer), "keys": keys}


def resume(path: str, how: str, recipe: str | None) -> dict[str, Any]:
    """Load what `save` saved, and train 5 more steps. Also the numbers of elements that were decoded on the way."""
    trainer = Trainer(how, recipe)
    if recipe is not None:
        qcompile.init_state(trainer.optimizer, recipe=recipe)
    found = trainer.state_dict()
    decoded: list[int] = []
    original = QuantizedState.dequantize

    def counting(state: QuantizedState) -> Tensor:
        decoded.append(state.numel())
        return original(state)

    QuantizedState.dequantize = counting  # type: ignore[method-assign]
    try:
        checkpoint.load(found, checkpoint_id=path)
        trainer.load(found)
    finally:
        QuantizedState.dequantize = original  # type: ignore[method-assign]
    kept = outcome(trainer.model, trainer.optimizer)
    losses = trainer.run(10, 15)
    after = outcome(trainer.model, trainer.optimizer)
    return {"losses": losses, **kept, "decoded": decoded, "after": after}


def gather(how: str, recipe: str | None) -> dict[str, Any]:
    """Train 10 steps and gather everything on rank 0, then train 5 more."""
    trainer = Trainer(how, recipe)
    trainer.run(0, 10)
    found = copy.deepcopy(
        trainer.state_dict(full_state_dict=True, cpu_offload=True)
    )  # its step counters go on counting
    return {"found": found, "losses": trainer.run(10, 15)}


def scatter(how: str, recipe: str | None, found: dict[str, Any]) -> list[float]:
    """Load what `gather` gave rank 0, and train 5 steps."""
    trainer = Trainer(how, recipe)
    if dist.get_rank() != 0:
        found = {"model": {}, "optimizer": {}}
    trainer.load(found, full_state_dict=True, broadcast_from_rank0=True)
    return trainer.run(10, 15)


def die_at(step: int, rank: int, how: str) -> None:
    """Train, and lose a rank."""
    trainer = Trainer(how, "8bit")
    trainer.run(0, step)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.run(step, step + 5)


def odd_state() -> dict[Any, str]:
    """State that is spread in another way than its parameter."""
    model, call, of, share = spread_model("fsdp")
    optimizer = make_optimizer("fsdp", "AdamW", model)
    p = model.wide.weight
    zeros = distribute_tensor(torch.zeros(p.shape), p.device_mesh, [Replicate()])
    optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": torch.zeros_like(p)}
    update = torch.compile(optimizer.step, backend="qstate")
    for x, y in batches(2, of, share):
        loss_of(call, x, y).backward()
        update()
        optimizer.zero_grad()
    return outcome(model, optimizer)["formats"]
