"""The optimizers of the table: torch's with each of their switches, and those of other packages, each with its settings."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Make = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Row:
    """An optimizer to try: how it is made from a model, and what it needs of the training loop.

    `dense` makes the one to compare with where eager torch refuses an option; `refused`: neither can train.
    """

    family: str
    name: str
    make: Make
    dense: Make | None = None
    refused: bool = False
    closure: bool = False
    create_graph: bool = False
    sparse: bool = False

    @property
    def title(self) -> str:
        return self.name if self.family == "torch.optim" else f"{self.family}: {self.name}"


# Where a class's own learning rate does not train these tasks (a name alone is pytorch-optimizer's), and other settings.
LEARNING_RATES = {
    1e-5: "Kate",
    1e-4: "torch.optim.Rprop",
    5e-4: "lion-pytorch.Lion torch-optimi.Lion Lion",
    1e-3: "torch.optim.NAdam torch.optim.RMSprop AdaMuon FOCUS GrokFastAdamW RMSprop",
    3e-3: "torch.optim.RAdam RAdam",
    0.01: "AdaHessian AdamMini Lamb NovoGrad Ranger SaRA SCION VSGD Yogi",
    0.02: "torch.optim.Muon",
    0.05: "torch.optim.SGD torch-optimi.SGD AdaMod SCIONLight",
    0.3: "torch.optim.ASGD AccSGD Adai AggMo ApolloDQN ASGD AvaGrad MSVAG PID QHM ScalableShampoo SGD SGDP SGDW TAM",
    1.0: "Gravity LARS PNM SRMM",
}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("torch.optim", "LBFGS"): {"max_iter": 4, "history_size": 10, "line_search_fn": "strong_wolfe"},
    ("pytorch-optimizer", "LBFGS"): {"max_iter": 4, "history_size": 10},
    ("torch.optim", "SGD"): {"momentum": 0.9},
    ("torch-optimi", "SGD"): {"momentum": 0.9},
    ("torch-optimi", "StableAdamW"): {"triton": False},  # it uses Triton where that is installed, GPU or not
    ("adam-mini", "Adam_mini"): {"dim": 128, "n_heads": 4},
}
# Variants of torch's classes beyond the boolean options that their constructors show.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "Adagrad": ({"initial_accumulator_value": 1e-4}, {"lr_decay": 0.01}),
    "RMSprop": ({"momentum": 0.9, "lr": 2e-4}, {"momentum": 0.9, "centered": True, "lr": 2e-4}),
    "SGD": ({"momentum": 0.0, "lr": 0.3}, {"dampening": 0.5}),
}
# How other packages are imported, and their optimizers; those left out need torch.distributed or repeat others.
PACKAGES: dict[str, tuple[str, Callable[[Any], Iterable[type[Optimizer]]]]] = {
    "lion-pytorch": ("lion_pytorch", lambda m: optimizers_of(m)),
    "schedulefree": ("schedulefree", lambda m: optimizers_of(m)),
    "torch-optimi": ("optimi", lambda m: optimizers_of(m)),
    "muon": ("muon", lambda m: [m.SingleDeviceMuon, m.SingleDeviceMuonWithAuxAdam]),
    "adam-mini": ("adam_mini", lambda m: [m.Adam_mini]),
    "heavyball": ("heavyball", lambda m: heavyball_optimizers(m)),
    "pytorch-optimizer": ("pytorch_optimizer", lambda m: map(m.load_optimizer, m.get_supported_optimizers())),
}


def optimizers_of(module: Any) -> list[type[Optimizer]]:
    shown = [value for name, value in sorted(vars(module).items()) if name[0] != "_" and inspect.isclass(value)]
    return [cls for cls in shown if issubclass(cls, Optimizer) and cls is not Optimizer]


def heavyball_optimizers(module: Any) -> list[type[Optimizer]]:
    module.utils.compile_mode = "default"  # its own autotunes PSGD's products for a quarter of an hour on a CPU
    return [module.AdamW, module.Muon, module.SOAP, module.PSGDKron]


def make_with(cls: type[Optimizer], options: dict[str, Any], model: nn.Module) -> Optimizer:
    """Give a constructor what it cannot do without. Muons want matrices apart; two of them take nothing else."""
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) == flag] for flag in (True, False))
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    only_matrices = cls is torch.optim.Muon or cls.__name__ == "SingleDeviceMuon"
    in_groups = cls.__module__.startswith("pytorch_optimizer.optimizer.muon")
    known: dict[str, object] = {
        "params": matrices if only_matrices else groups if in_groups else model.parameters(),
        "param_groups": groups,
        "named_parameters": model.named_parameters(),
        "model": model,
        "lr": 1e-3,
        "num_iterations": 200,
    }
    needed = [n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty and n in known]
    return cls(**{n: known[n] for n in needed} | options)


def switched(cls: type[Optimizer]) -> Iterator[dict[str, Any]]:
    """Each boolean option of a constructor, turned."""
    for name, parameter in inspect.signature(cls).parameters.items():
        if isinstance(parameter.default, bool) or name in ("foreach", "fused"):
            yield {name: not parameter.default}


def row_of(family: str, cls: type[Optimizer], options: dict[str, Any]) -> Row:
    name, key = cls.__name__, f"{family}.{cls.__name__}".removeprefix("pytorch-optimizer.")
    rates = [{"lr": lr} for lr, names in LEARNING_RATES.items() if key in names.split()]
    base = SETTINGS.get((family, name), {}) | (rates[0] if rates else {})
    return Row(
        family,
        ", ".join([name, *(f"{key}={value}" for key, value in options.items())]),
        functools.partial(make_with, cls, base | options),
        dense=functools.partial(make_with, cls, base) if "capturable" in options else None,
        refused="differentiable" in options,
        closure=name.endswith("Closure") or name in ("AliG", "LBFGS"),
        create_graph=name in ("AdaHessian", "SophiaH"),
        sparse=name == "SparseAdam",
    )


def torch_rows() -> list[Row]:
    classes = [(cls, ({}, *VARIANTS.get(cls.__name__, ()), *switched(cls))) for cls in optimizers_of(torch.optim)]
    return [row_of("torch.optim", cls, options) for cls, all_options in classes for options in all_options]


def rows_of(package: str) -> list[Row]:
    """The rows of another package; none, told on stderr, where it is not installed."""
    module, classes = PACKAGES[package]
    try:
        return [row_of(package, cls, {}) for cls in classes(importlib.import_module(module))]
    except ImportError as error:
        print(f"{package}: not installed ({error})", file=sys.stderr)
        return []
