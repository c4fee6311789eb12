"""Which optimizers keep their state in 8 bits, and what that does to the loss.

    python examples/optimizers.py
    python examples/optimizers.py --all --jobs 2 --out optimizers.md
    python examples/optimizers.py --only 'Adam|heavyball' --verbose

Trains a small model with every optimizer of torch.optim, with each of its switches, and with five written by hand
(`handwritten.py`); `--all` adds those of other packages, as far as they are installed, and a second task. Each is trained
twice from the same weights on the same batches: as it is, eagerly, and with `torch.compile(optimizer.step,
backend="qstate")`; where the losses are more than 1 % apart, eagerly once more from weights that differ by a millionth, which
shows how far apart two dense runs end. One row of Markdown each: the dense loss (mean of the last ten steps) and how far the other is from it,
stored over dense bytes of quantized buffers and of all state, and, of the last task, what was compiled and proved.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import math
import multiprocessing
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from handwritten import HANDWRITTEN
from optimizer_rows import PACKAGES, Row, row_of, rows_of, torch_rows
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from tqdm import tqdm
from train_gpt import GPT, loss_of

import qcompile

NOTABLE, APART = 0.01, 1e-6  # a difference of losses, of weights
LARGE = 4096  # `min_numel`: smaller state stays dense
COMPILED = ("bytes: quantized, all", "classes, kernels, graphs", "compile s", "proved")
WORDS = ("quantized", "partly", "dense", "no state", "eager fails", "failed")
Batches = Iterator[tuple[Tensor, Tensor]]


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
    """What a row came to: one of `WORDS`, why, per task the dense and the quantized run, and the relative difference of a dense
    run from other weights, or None."""

    row: Row
    word: str
    text: str
    runs: tuple[tuple[Run, Run], ...] = ()
    again: tuple[float | None, ...] = ()

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


def train(row: Row, task: Task, steps: int, recipe: str | None, apart: float = 0.0) -> Run:
    """Train with the optimizer as it is (no recipe), or with its step compiled by `qstate`; from weights that are `apart`."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = task.model()
    if apart:
        generator = torch.Generator().manual_seed(3)
        for p in model.parameters():
            p.data.mul_(1 + apart * torch.randn(p.shape, generator=generator))
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

        def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            return backward(*batch)

        start = time.perf_counter()
        step(closure) if row.closure else step()
        seconds.append(time.perf_counter() - start)
    return Run(losses, qcompile.explain(optimizer), seconds)


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise where the body takes longer than that."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"given up after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tasks_of(args: argparse.Namespace) -> list[Task]:
    return [REGRESSION, LANGUAGE] if args.all else [REGRESSION]


def quiet() -> None:
    """How a process trains small models: threads that wait for each other cost more than they save."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def attempts(rows: list[Row], args: argparse.Namespace) -> Iterator[Outcome]:
    """`attempt` on every row, in their order, in as many processes as there are jobs."""
    if args.jobs == 1:
        yield from (attempt(row, args) for row in rows)
        return
    spawned = multiprocessing.get_context("spawn")
    with spawned.Pool(args.jobs, quiet, maxtasksperchild=20) as pool:
        yield from pool.imap(functools.partial(attempt, args=args), rows)


def attempt(row: Row, args: argparse.Namespace) -> Outcome:
    """Train on each task, dense and quantized; an exception becomes the row's text."""
    runs: list[tuple[Run, Run]] = []
    again: list[float | None] = []
    try:
        silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with silent[0], silent[1], at_most(args.limit):
            for task in tasks_of(args):
                word = "eager fails"
                dense = train(row, task, args.steps, None)
                word = "failed"
                runs.append((dense, train(row, task, args.steps, args.recipe)))
                is_far = abs(runs[-1][1].final / dense.final - 1) > NOTABLE
                again.append(train(row, task, args.steps, None, APART).final / dense.final - 1 if is_far else None)
    except Exception as error:
        if args.verbose:
            tqdm.write(traceback.format_exc(), file=sys.stderr)
        cause = getattr(error, "inner_exception", error)  # what a backend raised
        return Outcome(row, word, f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0], tuple(runs))
    return Outcome(row, *verdict(runs[-1][1].report), tuple(runs), tuple(again))


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
        if i < len(outcome.again) and (other := outcome.again[i]) is not None:
            losses[i] += f" ({100 * other:+.2f} % dense, from weights {APART:g} apart)"
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
    own = [o for o in outcomes if o.row.family == "torch.optim" and o.word in ("quantized", "partly")]
    found = [(abs(d), o.row.title, task.name) for o in own for d, task in zip(o.differences, tasks, strict=False)]
    difference, title, task = max(found, default=(0.0, "no row", "no task"))
    return (
        f"{len(outcomes)} rows: {', '.join(f'{counts[word]} {word}' for word in WORDS)}; "
        f"third-party optimizers with quantized state: {len(others)}; "
        f"largest difference of the loss among torch.optim rows with quantized state: {100 * difference:.2f} % ({title}, {task})"
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
    parser.add_argument("--limit", type=int, default=900, metavar="S", help="give a row up after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that rows are shared out to")
    parser.add_argument("--recipe", default="8bit", choices=[r for r in qcompile.RECIPES if r != "dense"])
    parser.add_argument("--out", metavar="FILE", type=Path, help="save the table, after each row")
    parser.add_argument("--verbose", action="store_true", help="first and last dense losses, and tracebacks")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    tasks, rows = tasks_of(args), chosen_rows(args)
    headers = ["optimizer", *(f"{task.name}: dense loss, difference" for task in tasks), *COMPILED, "state"]
    lines = [markdown(headers), "|" + "---|" * len(headers)]
    print("\n".join(lines))
    outcomes = []
    for outcome in (progress := tqdm(attempts(rows, args), unit="row", total=len(rows))):
        outcomes.append(outcome)
        progress.set_postfix_str(outcome.row.title)
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
    quiet()
    sys.exit(main())
