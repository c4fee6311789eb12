"""What `python -m qcompile bench` compares: implementations of one optimizer step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from qcompile.bench_peers import Peer
from qcompile.recipes import RECIPES

# So small that the parameters, which all candidates share, stay what they are.
LR = 1e-8
WEIGHT_DECAY = 1e-2


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer of torch.optim: its class, hyper-parameters, and how many states of the parameter's size it keeps."""

    cls: type[Optimizer]
    options: Mapping[str, object]
    states: int

    @property
    def has_fused(self) -> bool:
        return "fused" in inspect.signature(self.cls).parameters

    def make(self, params: Sequence[nn.Parameter], **switches: bool) -> Optimizer:
        make = cast("Callable[..., Optimizer]", self.cls)
        return make(list(params), lr=LR, **self.options, **switches)


OPTIMIZERS = {
    "adamw": Kind(torch.optim.AdamW, {"weight_decay": WEIGHT_DECAY}, 2),
    "adam": Kind(torch.optim.Adam, {}, 2),
    "nadam": Kind(torch.optim.NAdam, {}, 2),
    "radam": Kind(torch.optim.RAdam, {}, 2),
    "adamax": Kind(torch.optim.Adamax, {}, 2),
    "adadelta": Kind(torch.optim.Adadelta, {}, 2),
    "adagrad": Kind(torch.optim.Adagrad, {}, 1),
    "rmsprop": Kind(torch.optim.RMSprop, {"alpha": 0.99}, 1),
    "sgd": Kind(torch.optim.SGD, {"momentum": 0.9}, 1),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of the step.

    Attributes:
        name: as in the table.
        kind: "torch" (eager), "stock" (`torch.compile`), "ours" or "peer".
        make: an optimizer, without state, from parameters.
        options: keywords of `torch.compile`; None runs the step as it is.
        state_bytes: about how many bytes of state per parameter it keeps.
        spare_bytes: about how many bytes per parameter a step needs beside that for a moment.
    """

    name: str
    kind: str
    make: Callable[[Sequence[nn.Parameter]], Optimizer]
    options: Mapping[str, object] | None
    state_bytes: float
    spare_bytes: float

    def step_of(self, optimizer: Optimizer) -> Callable[[], object]:
        """What is timed."""
        if self.options is None:
            return optimizer.step
        return cast("Callable[[], object]", torch.compile(optimizer.step, **self.options))  # type: ignore[call-overload]


def find_candidates(
    optimizer: str, recipes: Sequence[str], peers: Sequence[Peer], dtype: torch.dtype
) -> list[Candidate]:
    """Candidates in the order of the table; the first one that runs is the base of the ratios."""
    kind, dense = OPTIMIZERS[optimizer], OPTIMIZERS[optimizer].states * dtype.itemsize

    def eager(name: str, spare: float, **switches: bool) -> Candidate:
        return Candidate(f"torch {name}", "torch", lambda params: kind.make(params, **switches), None, dense, spare)

    found = [eager("fused", 0, fused=True)] if kind.has_fused else []
    found.append(eager("foreach", 2 * dtype.itemsize, foreach=True))
    off = {"foreach": False, "fused": False} if kind.has_fused else {"foreach": False}
    found.append(eager("for-loop", 0, **off))
    found.append(Candidate("torch.compile", "stock", kind.make, {}, dense, 0))
    for name in recipes:
        recipe, options = RECIPES[name], {"backend": "qstate", "options": {"recipe": name}}
        bytes_of_two = recipe.bytes_per_parameter() if recipe.quantized else 2 * dtype.itemsize
        found.append(Candidate(name, "ours", kind.make, options, bytes_of_two / 2 * kind.states, 0))
    for peer in peers:
        found.append(Candidate(peer.name, "peer", _maker(peer), None, peer.state_bytes, 0))
    return found


def _maker(peer: Peer) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    return lambda params: peer.make(params, LR, WEIGHT_DECAY)


def bytes_needed(candidates: Sequence[Candidate], dtype: torch.dtype) -> float:
    """About how many bytes per parameter all candidates need at once: parameters, gradients, states, the most spare."""
    most_spare = max((c.spare_bytes for c in candidates), default=0.0)
    return 2 * dtype.itemsize + math.fsum(c.state_bytes for c in candidates) + most_spare
