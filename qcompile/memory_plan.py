"""What training on many ranks will hold and write, counted by the code that stores it: on meta tensors of every rank's part."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qcompile.bench_shapes import Shape, parameter_count
from qcompile.options import Options
from qcompile.passes.plan_storage import sized
from qcompile.recipes import RECIPES, Recipe
from qcompile.runtime.formats import Format
from qcompile.runtime.state import QuantizedState

# Which formats of a recipe the state of an optimizer gets, in the order of its buffers.
OPTIMIZERS = {"AdamW": ("first", "second"), "Adam": ("first", "second"), "SGD": ("signed",), "Lion": ("signed",)}
STEP_BYTES = {"AdamW": 4, "Adam": 4}  # a step counter per parameter, an fp32 number


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one rank, or of all: `dense_state` is what the state would be without quantization, `saved` what a checkpoint of
    it takes."""

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    dense_state: int = 0
    saved: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Bytes(*(a + b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per rank under each way to spread a training, in the order of ranks."""

    count: int
    ranks: dict[str, tuple[Bytes, ...]]
    checkpoint: int
    dense_checkpoint: int


def plan_memory(
    shapes: Sequence[Shape],
    ranks: int,
    recipe: str = "8bit",
    optimizer: str = "AdamW",
    dtype: torch.dtype = torch.float32,
    block_size: int | None = None,
) -> MemoryPlan:
    """Count what each rank holds under DDP, ZeRO-1 (`ZeroRedundancyOptimizer`) and FSDP2 (`fully_shard`), and a checkpoint.

    Args:
        shapes: of the parameters, which have `dtype`, as their gradients do.
        ranks: how many processes, 1 or more.
        recipe, block_size: as in `qcompile.options.Options`.
        optimizer: a key of `OPTIMIZERS`.

    The checkpoint is that of `torch.distributed.checkpoint` under FSDP2, where a first moment in update space is written
    together with the second moment that it is relative to: each is one entry, which has to be readable by itself.

    Raises:
        UnknownRecipeError, InvalidOptionError: `recipe` or `block_size` is wrong.
    """
    options = Options(recipe=recipe, block_size=block_size)
    part = functools.lru_cache(maxsize=None)(lambda local, numel: part_bytes(local, numel, options, optimizer, dtype))
    whole = [part(shape, math.prod(shape)) for shape in shapes]
    sharded = [
        sum(
            (part(local, math.prod(shape)) for shape, local in zip(shapes, _parts(shapes, ranks, rank), strict=True)),
            Bytes(),
        )
        for rank in range(ranks)
    ]
    total = sum(whole, Bytes())
    zero = []
    for own in zero_partition(shapes, ranks):
        held = sum((whole[i] for i in own), Bytes())
        zero.append(dataclasses.replace(held, parameters=total.parameters, gradients=total.gradients))
    everywhere = sum(sharded, Bytes())
    found = {"DDP": (total,) * ranks, "ZeRO-1": tuple(zero), "FSDP2": tuple(sharded)}
    saved = everywhere.parameters + everywhere.saved
    return MemoryPlan(parameter_count(shapes), found, saved, everywhere.parameters + total.dense_state)


def part_bytes(local: Shape, numel: int, options: Options, optimizer: str, dtype: torch.dtype) -> Bytes:
    """What a rank holds of a parameter of `numel` elements, of which its part has the shape `local`."""
    tensor = torch.empty(local, dtype=dtype, device="meta")
    own = tensor.numel() * tensor.element_size()
    formats = _formats(tensor, numel, options, optimizer)
    stored = [own if fmt is None else QuantizedState.zeros_like(tensor, fmt).stored_bytes for fmt in formats]
    relative = [fmt is not None and fmt.coordinate == "update" for fmt in formats]
    step = STEP_BYTES.get(optimizer, 0)
    again = sum(stored[-1] for is_relative in relative if is_relative)
    return Bytes(own, own, sum(stored) + step, own * len(formats) + step, sum(stored) + again + step)


def _formats(tensor: torch.Tensor, numel: int, options: Options, optimizer: str) -> list[Format | None]:
    recipe = RECIPES[options.recipe]
    wanted = [_format(kind, tensor, recipe, options) for kind in OPTIMIZERS[optimizer]]
    least = min((fmt.block_size for fmt in wanted if fmt is not None), default=1)
    if numel < options.min_numel or tensor.numel() < least:
        return [None] * len(wanted)
    return [None if fmt is None else dataclasses.replace(fmt, block_size=least) for fmt in wanted]


def _format(kind: str, tensor: torch.Tensor, recipe: Recipe, options: Options) -> Format | None:
    fmt: Format | None = getattr(recipe, kind)
    return None if fmt is None else sized(fmt, tensor, recipe, options)


def _parts(shapes: Sequence[Shape], ranks: int, rank: int) -> Iterator[Shape]:
    """What `fully_shard` gives a rank: rows, as `torch.chunk` deals them out."""
    for first, *others in shapes:
        chunk = -(-first // ranks)
        yield (max(0, min(chunk, first - rank * chunk)), *others)


def zero_partition(shapes: Sequence[Shape], ranks: int) -> list[list[int]]:
    """Which parameters each rank updates under `ZeroRedundancyOptimizer`: the largest first, to the rank with least."""
    sizes, owned = [0] * ranks, [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    for i in sorted(range(len(shapes)), key=lambda i: math.prod(shapes[i]), reverse=True):
        rank = sizes.index(min(sizes))
        sizes[rank] += math.prod(shapes[i])
        owned[rank].append(i)
    return owned


def table(plan: MemoryPlan, bandwidth: float) -> str:
    """The plan for people; `bandwidth` to where checkpoints go, in GB/s."""
    lines = [
        f"{'GiB on the rank with most':26}{'parameters':>12}{'gradients':>11}{'state':>10}{'total':>10}{'dense state':>13}{'state, all ranks':>18}"
    ]
    for name, ranks in plan.ranks.items():
        most = max(ranks, key=lambda held: held.parameters + held.gradients + held.state)
        everywhere = sum(held.state for held in ranks)
        total = most.parameters + most.gradients + most.state
        numbers = (most.parameters, most.gradients, most.state, total, most.dense_state, everywhere)
        lines.append(
            f"{name:26}"
            + "".join(f"{n / 2**30:{w}.3f}" for n, w in zip(numbers, (12, 11, 10, 10, 13, 18), strict=True))
        )
    for name, size in (("checkpoint", plan.checkpoint), ("dense checkpoint", plan.dense_checkpoint)):
        lines.append(f"{name}: {size / 2**30:.3f} GiB, {size / (bandwidth * 1e9):.1f} s at {bandwidth:g} GB/s")
    return "\n".join(lines)
