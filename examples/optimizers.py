"""Which optimizers keep their state in 8 bits, and what that does to the loss.

    python examples/optimizers.py
    python examples/optimizers.py --all --out optimizers.md
    python examples/optimizers.py --only 'Adam|heavyball' --verbose

Trains a small model with every optimizer of torch.optim, with each of its switches, and with five written by hand
(`handwritten.py`); `--all` adds those of other packages, as far as they are installed, and a second task. Each is trained
twice from the same weights on the same batches: as it is, eagerly, and with `torch.compile(optimizer.step,
backend="qstate")`. One row of Markdown each: the dense loss (mean of the last ten steps) and how far the other is from it,
stored over dense bytes of quantized buffers and of all state, and, of the last task, what was compiled and proved.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import io
import logging
import math
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from handwritten import HANDWRITTEN
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from tqdm import tqdm
from train_gpt import GPT, loss_of

import qcompile

LARGE = 4096  # `min_numel`: smaller state stays dense
COMPILED = ("bytes: quantized, all", "classes, kernels, graphs", "compile s", "proved")
WORDS = ("quantized", "partly", "dense", "no state", "eager fails", "failed")
Batches = Iterator[tuple[Tensor, Tensor]]
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


@dataclass(frozen=True)
class Task:
    """A model, the loss that it is trained with, and batches without end."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batches: Callable[[], Batches]


@dataclass(frozen=True)
class Run:
    """One training: its losses, what `explain` says afterwards, and the seconds of each update."""

    losses: list[float]
    report: qcompile.Report
    seconds: list[float]

    @property
    def final(self) -> float:
        return sum(self.losses[-10:]) / len(self.losses[-10:])

    @property
    def compile_seconds(self) -> float:
        typical = sorted(self.seconds)[len(self.seconds) // 2]
        return sum(max(0.0, s - typical) for s in self.seconds[:10])


@dataclass(frozen=True)
class Outcome:
    """What a row came to: one of `WORDS`, why, and per task the dense and the quantized run."""

    row: Row
    word: str
    text: str
    runs: tuple[tuple[Run, Run], ...] = ()

    @property
    def differences(self) -> list[float]:
        """Relative difference of the quantized loss to the dense one, per task."""
        return [quantized.final / dense.final - 1 for dense, quantized in self.runs]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))


def regression_batches() -> Batches:
    """What a random network makes of random inputs, scaled to variance 1; 1024 samples."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(128, 128, generator=generator) / 128**0.5 for _ in range(2))
    x = torch.randn(1024, 128, generator=generator)
    y = torch.tanh(2 * x @ first) @ second
    while True:
        chosen = torch.randint(len(x), (64,), generator=generator)
        yield x[chosen], y[chosen] / y.std()


def language_batches() -> Batches:
    """Text of a Markov chain of second order over 32 of the 256 bytes."""
    generator = torch.Generator().manual_seed(2)
    of_last, of_both = torch.randn(32, 32, generator=generator), torch.randn(32, 32, 32, generator=generator)
    following = torch.softmax(2 * of_last + 2 * of_both, -1)
    text = torch.randint(32, (16, 2), generator=generator)
    while True:
        for _ in range(32):
            likely = following[text[:, -2], text[:, -1]]
            text = torch.cat([text[:, -32:], torch.multinomial(likely, 1, generator=generator)], 1)
        yield 8 * text[:, :-1], 8 * text[:, 1:]


REGRESSION = Task("regression", network, lambda model, x, y: mse_loss(model(x), y), regression_batches)
LANGUAGE = Task("language", lambda: GPT(layers=1, width=128, context=32), loss_of, language_batches)

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
    "heavyball": ("heavyball", lambda m: [m.AdamW, m.Muon, m.SOAP, m.PSGDKron]),
    "pytorch-optimizer": ("pytorch_optimizer", lambda m: map(m.load_optimizer, m.get_supported_optimizers())),
}


def optimizers_of(module: Any) -> list[type[Optimizer]]:
    shown = [value for name, value in sorted(vars(module).items()) if name[0] != "_" and inspect.isclass(value)]
    return [cls for cls in shown if issubclass(cls, Optimizer) and cls is not Optimizer]


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


def train(row: Row, task: Task, steps: int, recipe: str | None) -> Run:
    """Train with the optimizer as it is (no recipe), or with its step compiled by `qstate`."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = task.model()
    optimizer = row.make(model) if recipe is not None or row.dense is None else row.dense(model)
    if hasattr(optimizer, "train"):  # schedulefree
        optimizer.train()
    compiled = functools.partial(torch.compile, backend="qstate", options={"recipe": recipe})
    step = optimizer.step if recipe is None else compiled(optimizer.step)
    losses, seconds = [], []

    def backward(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(model, x, y)
        (-loss if optimizer.defaults.get("maximize") else loss).backward(create_graph=row.create_graph)
        for p in model.parameters() if row.sparse else ():
            p.grad = None if p.grad is None else p.grad.to_sparse()
        return loss.detach()

    for _, batch in zip(range(steps), task.batches(), strict=False):
        losses.append(backward(*batch).item())
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(f"the loss is {losses[-1]} after {len(losses) - 1} steps")
        start = time.perf_counter()
        step(functools.partial(backward, *batch)) if row.closure else step()
        seconds.append(time.perf_counter() - start)
    return Run(losses, qcompile.explain(optimizer), seconds)


def attempt(row: Row, tasks: list[Task], args: argparse.Namespace) -> Outcome:
    """Train on each task, dense and quantized; an exception becomes the row's text."""
    runs: list[tuple[Run, Run]] = []
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for task in tasks:
                word = "eager fails"
                dense = train(row, task, args.steps, None)
                word = "failed"
                runs.append((dense, train(row, task, args.steps, args.recipe)))
    except Exception as error:
        if args.verbose:
            tqdm.write(traceback.format_exc(), file=sys.stderr)
        cause = getattr(error, "inner_exception", error)  # what a backend raised
        return Outcome(row, word, f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0], tuple(runs))
    return Outcome(row, *verdict(runs[-1][1].report), tuple(runs))


def verdict(report: qcompile.Report) -> tuple[str, str]:
    """How much of the state that is large enough is quantized, in a word, and why the rest is not."""
    large = [s for s in report.states if math.prod(s.shape) >= LARGE]
    if not large:
        return "no state", f"none of {LARGE} elements or more"
    reasons: dict[str, dict[str, None]] = {}
    for state in large:
        if state.reason is not None:
            reasons.setdefault(state.reason, {})[state.key.partition(".")[0]] = None
    word = "quantized" if not reasons else "partly" if any(s.reason is None for s in large) else "dense"
    return word, "; ".join(f"{', '.join(keys)}: {reason}" for reason, keys in reasons.items())


def cells(outcome: Outcome, tasks: list[Task]) -> list[str]:
    """The row of the table."""
    losses = [""] * len(tasks)
    for i, ((dense, _), difference) in enumerate(zip(outcome.runs, outcome.differences, strict=True)):
        fell = dense.final < 0.98 * dense.losses[0]
        losses[i] = f"{dense.final:.4f}, {100 * difference:+.2f} %{'' if fell else ' (dense loss did not fall)'}"
    compiled = [""] * len(COMPILED)
    if outcome.runs:
        report = outcome.runs[-1][1].report
        quantized = [s for s in report.states if s.reason is None]
        own = sum(s.stored_bytes for s in quantized) / max(1, sum(s.dense_bytes for s in quantized))
        all_state = report.state_bytes / max(1, report.dense_state_bytes)
        compiled = [
            f"{own:.3f}, {all_state:.3f}" if quantized else "",
            f"{len(report.classes)}, {len(report.kernels)}, {report.graphs}",
            f"{outcome.runs[-1][1].compile_seconds:.1f}",
            proved(report),
        ]
    text = " ".join(f"{outcome.word}: {outcome.text}".split()) if outcome.text else outcome.word
    return [outcome.row.title, *losses, *compiled, text if len(text) < 160 else text[:157] + "..."]


def proved(report: qcompile.Report) -> str:
    """Ranges that state is proved to stay in, and how it enters the update."""
    found = []
    for fact in (fact for s in report.states if math.prod(s.shape) >= LARGE for fact in s.facts):
        first, kept, _ = fact.partition("\n")[0].partition(" is kept:")
        if kept or first.startswith("h("):
            text = first.replace(" in [0, inf)", " >= 0")
            found.append(f"`{text if len(text) < 100 else text[:97] + '...'}`")
    return "; ".join(dict.fromkeys(found))


def markdown(row: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def summary(outcomes: list[Outcome], tasks: list[Task]) -> str:
    counts = Counter(o.word for o in outcomes)
    others = [o for o in outcomes if o.row.family in PACKAGES and o.word in ("quantized", "partly")]
    own = [o for o in outcomes if o.row.family == "torch.optim"]
    found = [(abs(d), o.row.title, task.name) for o in own for d, task in zip(o.differences, tasks, strict=False)]
    difference, title, task = max(found, default=(0.0, "no row", "no task"))
    return (
        f"{len(outcomes)} rows: {', '.join(f'{counts[word]} {word}' for word in WORDS)}; "
        f"third-party optimizers with quantized state: {len(others)}; "
        f"largest difference of the loss among torch.optim rows: {100 * difference:.2f} % ({title}, {task})"
    )


def chosen_rows(args: argparse.Namespace) -> list[Row]:
    rows = torch_rows() + [row_of("by hand", cls, {}) for cls in HANDWRITTEN]
    rows += [row for package in PACKAGES if args.all or args.only for row in rows_of(package)]
    return [row for row in rows if re.search(args.only or "", row.title)]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="optimizers of other packages too, and both tasks")
    parser.add_argument("--only", metavar="REGEX", help="rows of any package in whose first cell this is found")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipe", default="8bit", choices=[r for r in qcompile.RECIPES if r != "dense"])
    parser.add_argument("--out", metavar="FILE", type=Path, help="save the table, after each row")
    parser.add_argument("--verbose", action="store_true", help="first and last dense losses, and tracebacks")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    tasks = [REGRESSION, LANGUAGE] if args.all else [REGRESSION]
    headers = ["optimizer", *(f"{task.name}: dense loss, difference" for task in tasks), *COMPILED, "state"]
    lines = [markdown(headers), "|" + "---|" * len(headers)]
    print("\n".join(lines))
    outcomes = []
    for row in (progress := tqdm(chosen_rows(args), unit="row")):
        progress.set_postfix_str(row.title)
        outcomes.append(outcome := attempt(row, tasks, args))
        lines.append(markdown(cells(outcome, tasks)))
        tqdm.write(lines[-1])
        for task, (dense, _) in zip(tasks, outcome.runs, strict=False) if args.verbose else ():
            tqdm.write(f"{task.name}: dense {dense.losses[0]:.4f} to {dense.final:.4f}", file=sys.stderr)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")
    print(summary(outcomes, tasks))
    own = [o for o in outcomes if o.row.family == "torch.optim"]
    return int(any(o.word == "failed" or (o.word == "eager fails" and not o.row.refused) for o in own))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # small models: threads that wait for each other cost more than they save
    sys.exit(main())
