"""Which optimizers keep their state in 8 bits, and what that does to the loss.

    python examples/optimizers.py
    python examples/optimizers.py --all --out optimizers.md
    python examples/optimizers.py --only 'Adam|heavyball' --verbose

Trains a small model with every optimizer of torch.optim, with each of its switches, and with five written by hand
(`handwritten.py`); `--all` adds those of other packages, as far as they are installed, and a second task. Each is trained
twice from the same weights on the same batches: as it is, eagerly, and with `torch.compile(optimizer.step,
backend="qstate")`. One row of Markdown each: the dense loss (mean of the last ten steps), how far the other one is from
it, stored over dense bytes of the quantized buffers and of all state, what was compiled, and what was proved.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from handwritten import HANDWRITTEN
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from train_gpt import GPT, loss_of

import qcompile

Batches = Iterator[tuple[Tensor, Tensor]]
LARGE = 4096  # `min_numel`: smaller state stays dense
WARMUP_STEPS = 10  # compilations happen in these


@dataclass(frozen=True)
class Row:
    """An optimizer to try: how it is made from a model, and what it needs of the training loop.

    `dense` makes the one to compare with, where eager torch refuses the switch; `refused`: training is expected to fail.
    """

    family: str
    name: str
    make: Callable[[nn.Module], Optimizer]
    dense: Callable[[nn.Module], Optimizer] | None = None
    closure: bool = False
    create_graph: bool = False
    sparse: bool = False
    refused: bool = False

    @property
    def title(self) -> str:
        return self.name if self.family == "torch.optim" else f"{self.family}: {self.name}"


@dataclass(frozen=True)
class Task:
    """A model, the loss that it is trained with, and batches without end."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batches: Callable[[], Batches]


@dataclass(frozen=True)
class Run:
    """One training: its losses, what `explain` says afterwards (None if dense), and the seconds of each step."""

    losses: list[float]
    report: qcompile.Report | None
    seconds: list[float]

    @property
    def final(self) -> float:
        last = self.losses[-10:]
        return sum(last) / len(last)

    @property
    def fell(self) -> bool:
        return self.final < 0.98 * self.losses[0]

    @property
    def compile_seconds(self) -> float:
        typical = sorted(self.seconds)[len(self.seconds) // 2]
        return sum(max(0.0, s - typical) for s in self.seconds[:WARMUP_STEPS])


@dataclass(frozen=True)
class Outcome:
    """What a row came to: `word` is quantized, partly, dense, no state, refused or failed; `text` says why."""

    row: Row
    word: str
    text: str
    runs: tuple[tuple[Run, Run], ...] = ()

    @property
    def differences(self) -> list[float]:
        """Per task: relative difference of the final loss to that of the dense run."""
        return [quantized.final / dense.final - 1 for dense, quantized in self.runs]


# --- The two tasks


def network(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, outputs)
    )


def regression_batches() -> Batches:
    """What a random network makes of random inputs, scaled to variance 1, out of 1024 samples."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(128, 128, generator=generator) / 128**0.5 for _ in range(2)]
    x = torch.randn(1024, 128, generator=generator)
    y = torch.tanh(2 * x @ weights[0]) @ weights[1]
    y /= y.std()
    while True:
        chosen = torch.randint(len(x), (64,), generator=generator)
        yield x[chosen], y[chosen]


def language_batches() -> Batches:
    """Text of a Markov chain of second order over 32 of the 256 bytes."""
    generator = torch.Generator().manual_seed(2)
    following = torch.softmax(3 * torch.randn(32 * 32, 32, generator=generator), 1)
    tokens = torch.randint(32, (16, 2), generator=generator)
    while True:
        for _ in range(32):
            last = following[tokens[:, -2] * 32 + tokens[:, -1]]
            tokens = torch.cat([tokens, torch.multinomial(last, 1, generator=generator)], 1)
        tokens = tokens[:, -33:]
        yield 8 * tokens[:, :-1], 8 * tokens[:, 1:]


REGRESSION = Task(
    "regression", lambda: network(128, 256, 128), lambda m, x, y: mse_loss(m(x), y), regression_batches
)
LANGUAGE = Task("language", lambda: GPT(layers=1, width=128, context=32), loss_of, language_batches)


# --- The rows

# What differs from a class's own defaults, so that it trains on these tasks. Keys are `Row.family` and a class.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("torch.optim", "ASGD"): {"lr": 0.1},
    ("torch.optim", "Adagrad"): {"lr": 0.02},
    ("torch.optim", "Muon"): {"lr": 0.02},
    ("torch.optim", "RMSprop"): {"lr": 1e-3},
    ("torch.optim", "Rprop"): {"lr": 1e-4},
    ("torch.optim", "SGD"): {"lr": 0.1, "momentum": 0.9},
}
# Variants of torch's classes beyond their switches.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "Adagrad": ({"initial_accumulator_value": 0.1}, {"lr_decay": 0.01}),
    "RMSprop": ({"momentum": 0.9}, {"momentum": 0.9, "centered": True}),
    "SGD": ({"momentum": 0.0}, {"dampening": 0.5}),
}


def make_with(cls: type[Optimizer], model: nn.Module, matrices: bool = False, **options: Any) -> Optimizer:
    return cls([p for p in model.parameters() if p.dim() == 2 or not matrices], **options)


def optimizers_of(module: ModuleType) -> dict[str, type[Optimizer]]:
    """The optimizers a module shows, by name."""
    found = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return {n: c for n, c in sorted(found.items()) if issubclass(c, Optimizer) and c is not Optimizer and n[0] != "_"}


def switches(cls: type[Optimizer]) -> Iterator[dict[str, bool]]:
    """Each boolean option of a constructor, turned."""
    for name, parameter in inspect.signature(cls).parameters.items():
        if isinstance(parameter.default, bool) or name in ("foreach", "fused"):
            yield {name: not parameter.default}


def torch_rows() -> Iterator[Row]:
    for name, cls in optimizers_of(torch.optim).items():
        base = SETTINGS.get(("torch.optim", name), {}) | {"matrices": name == "Muon"}
        plain = functools.partial(make_with, cls, **base)
        for options in ({}, *VARIANTS.get(name, ()), *switches(cls)):
            yield Row(
                family="torch.optim",
                name=", ".join([name, *(f"{k}={v}" for k, v in options.items())]),
                make=functools.partial(make_with, cls, **base | options),
                dense=plain if "capturable" in options else None,  # eager torch has it on accelerators only
                closure=name == "LBFGS",
                sparse=name == "SparseAdam",
                refused="differentiable" in options,
            )


def handwritten_rows() -> Iterator[Row]:
    for cls in HANDWRITTEN:
        yield Row("by hand", cls.__name__, functools.partial(make_with, cls))


def of_module(family: str, module: ModuleType) -> Iterator[Row]:
    for name, cls in optimizers_of(module).items():
        options = SETTINGS.get((family, name), {})
        yield Row(family, name, functools.partial(make_with, cls, **options), closure="Closure" in name)


def lion_pytorch_rows() -> Iterator[Row]:
    import lion_pytorch

    yield from of_module("lion-pytorch", lion_pytorch)


def schedulefree_rows() -> Iterator[Row]:
    import schedulefree

    yield from of_module("schedulefree", schedulefree)


def optimi_rows() -> Iterator[Row]:
    import optimi

    yield from of_module("torch-optimi", optimi)


def muon_rows() -> Iterator[Row]:
    import muon

    def with_adam(model: nn.Module) -> Optimizer:
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() == 2) == use_muon], "use_muon": use_muon}
            for use_muon in (True, False)
        ]
        return muon.SingleDeviceMuonWithAuxAdam(groups)

    yield Row("muon", "SingleDeviceMuon", functools.partial(make_with, muon.SingleDeviceMuon, matrices=True))
    yield Row("muon", "SingleDeviceMuonWithAuxAdam", with_adam)


def adam_mini_rows() -> Iterator[Row]:
    import adam_mini

    def make(model: nn.Module) -> Optimizer:
        return adam_mini.Adam_mini(model.named_parameters(), dim=128, n_heads=4)

    yield Row("adam-mini", "Adam_mini", make)


def heavyball_rows() -> Iterator[Row]:
    import heavyball

    for name in ("AdamW", "Muon", "SOAP", "PSGDKron"):
        options = SETTINGS.get(("heavyball", name), {})
        yield Row("heavyball", name, functools.partial(make_with, getattr(heavyball, name), **options))


def pytorch_optimizer_rows() -> Iterator[Row]:
    import pytorch_optimizer

    for name in pytorch_optimizer.get_supported_optimizers():
        cls = pytorch_optimizer.load_optimizer(name)
        yield Row(
            family="pytorch-optimizer",
            name=cls.__name__,
            make=functools.partial(make_by_signature, cls),
            closure=name in ("alig", "bsam", "lbfgs"),
            create_graph=name in ("adahessian", "sophiah"),
        )


def make_by_signature(cls: type[Optimizer], model: nn.Module) -> Optimizer:
    """pytorch-optimizer's classes want a model, parameters or another optimizer, and some the size of the training."""
    known = {
        "params": model.parameters(),
        "model": model,
        "num_data": 1024,
        "num_iterations": 200,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    needed = [n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty and n in known]
    return cls(**{n: known[n] for n in needed}, **SETTINGS.get(("pytorch-optimizer", cls.__name__), {}))


PACKAGES: dict[str, Callable[[], Iterator[Row]]] = {
    "lion-pytorch": lion_pytorch_rows,
    "schedulefree": schedulefree_rows,
    "torch-optimi": optimi_rows,
    "muon": muon_rows,
    "adam-mini": adam_mini_rows,
    "heavyball": heavyball_rows,
    "pytorch-optimizer": pytorch_optimizer_rows,
}
# --- Training


def train(row: Row, task: Task, steps: int, recipe: str | None) -> Run:
    """Train with the optimizer as it is (no recipe), or with its step compiled by `qstate`."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = task.model()
    optimizer = row.make(model) if recipe is not None or row.dense is None else row.dense(model)
    if hasattr(optimizer, "train"):  # schedulefree
        optimizer.train()
    step = optimizer.step
    if recipe is not None:
        step = torch.compile(optimizer.step, backend="qstate", options={"recipe": recipe})
    sign = -1 if optimizer.defaults.get("maximize") else 1
    losses, seconds = [], []

    def backward(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(model, x, y)
        (sign * loss).backward(create_graph=row.create_graph)
        if row.sparse:
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad.to_sparse()
        return loss.detach()

    for _, batch in zip(range(steps), task.batches(), strict=False):
        losses.append(backward(*batch).item())
        start = time.perf_counter()
        step(functools.partial(backward, *batch)) if row.closure else step()
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(f"the loss is {losses[-1]} after {len(losses)} steps")
    return Run(losses, None if recipe is None else qcompile.explain(optimizer), seconds)
