"""Ranks that train together compile the same, or learn at once that they do not.

Another recipe on one rank would train on: its state is its own. Only the loss curve would tell, or a checkpoint that no
longer loads. So the first compiled step of an optimizer whose parameters are spread over ranks compares what each was told.
It is the one collective that is not the user's, and it is not in the compiled step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qcompile._compat_distributed import is_dtensor
from qcompile.exc import RanksDifferError
from qcompile.names import alive
from qcompile.options import Options

_agreed: WeakSet[Optimizer] = WeakSet()
COMPARED = ("recipe", "block_size", "min_numel", "seed", "train_steps", "strict")


def require_agreement(optimizer: Optimizer, options: Options) -> None:
    """Compare what the ranks of an optimizer were compiled with, once; nothing where its parameters are one process's.

    Raises:
        RanksDifferError: on every rank, with what each was told.
    """
    if optimizer in _agreed:
        return
    groups = _groups_of([p for group in optimizer.param_groups for p in group["params"]])
    if groups:
        import torch.distributed as dist

        told: Any = {
            dist.get_rank(): {"torch": torch.__version__} | {name: getattr(options, name) for name in COMPARED}
        }
        for group in groups:  # along one dimension of the mesh after the other, so that each rank hears of all
            heard: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(heard, told, group=group)
            told = {rank: value for part in heard for rank, value in part.items()}
        _compare(told)
    _agreed.add(optimizer)


def _compare(told: Mapping[int, Mapping[str, Any]]) -> None:
    names = next(iter(told.values()))
    differing = {name: {rank: value[name] for rank, value in sorted(told.items())} for name in names}
    differing = {name: values for name, values in differing.items() if len(set(map(repr, values.values()))) > 1}
    if differing:
        raise RanksDifferError(differing)


def _groups_of(params: Iterable[Tensor]) -> list[Any]:
    """The process groups that parameters are spread over, one per dimension of their mesh; none in a single process."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    own = {id(p): p for p in params}
    for p in own.values():
        if is_dtensor(p):
            return list(p.device_mesh.get_all_groups())  # type: ignore[attr-defined]
    for module in alive(lambda kind: issubclass(kind, nn.parallel.DistributedDataParallel)):
        if any(id(p) in own for p in module.parameters()):
            return [module.process_group]
    return []
