"""Optimizers of other packages with 8 or 4 bits of state, for comparison: AdamW alone, since all of them have it.

A package is imported when its optimizer is made, and never installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Peer:
    """An optimizer of another package.

    Attributes:
        package: what to import, and to install.
        module, cls: where it is.
        state_bytes: about how many bytes of state it keeps per parameter, to know whether it fits.
        options: of its constructor, beside parameters and lr.
        cuda_only: whether it has no CPU implementation.
    """

    package: str
    module: str
    cls: str
    state_bytes: float
    options: Mapping[str, object] = field(default_factory=dict)
    cuda_only: bool = False

    @property
    def name(self) -> str:
        return f"{self.package} {self.cls}"

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def make(self, params: Sequence[nn.Parameter], lr: float, weight_decay: float) -> Optimizer:
        """The optimizer; raises whatever its package raises."""
        cls = getattr(importlib.import_module(self.module), self.cls)
        return cast(Optimizer, cls(list(params), lr=lr, weight_decay=weight_decay, **self.options))


PEERS = (
    Peer("torchao", "torchao.optim", "AdamW8bit", 2.1),
    Peer("torchao", "torchao.optim", "AdamW4bit", 1.1),
    Peer("torchao", "torchao.optim", "AdamWFp8", 2.1),
    Peer("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", 2.1),
    # by default it keeps 24 bits of each parameter beside 16-bit ones, and refuses others; nobody else here does
    Peer("flashoptim", "flashoptim", "FlashAdamW", 2.2, {"master_weight_bits": None}, cuda_only=True),
    Peer("turboadam", "turboadam", "TurboAdam", 1.0, cuda_only=True),
)


def find_peers(device: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers that can run on `device`, and a line about each one that cannot."""
    found, missing = [], []
    for peer in PEERS:
        if peer.cuda_only and device.type != "cuda":
            missing.append(f"{peer.name}: runs on CUDA alone")
        elif not peer.installed:
            missing.append(f"{peer.name}: not installed; pip install {peer.package}")
        else:
            found.append(peer)
    return found, missing
