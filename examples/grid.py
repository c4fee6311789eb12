"""Training runs that are made in parts: each finished run is a line of JSON in a file, and a second start continues."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm

Run = dict[str, Any]


class Spec(Protocol):
    """What a run is known by: a frozen dataclass whose fields the run has too, and what the run costs, in any unit."""

    @property
    def cost(self) -> float: ...


S = TypeVar("S", bound=Spec)


def finished(path: Path, kind: type[S]) -> dict[S, Run]:
    """The runs of a file. A line that was cut off by a crash is no run."""
    runs: dict[S, Run] = {}
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            print(f"{path}: a line that is not whole is left out: {line[:60]}", file=sys.stderr)
            continue
        runs[kind(*(run[name] for name in names))] = run
    return runs


def one_thread() -> None:
    """How a process trains: two processes share two cores better than the threads of small products do."""
    torch.set_num_threads(1)


def run_missing(
    specs: Sequence[S], train: Callable[[S], Run], path: Path, jobs: int, describe: Callable[[Run], str]
) -> None:
    """Make the runs that the file has not, in order, in as many processes as there are jobs."""
    done = finished(path, type(specs[0])) if specs else {}
    missing = [spec for spec in specs if spec not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    _end_line(path)
    total = sum(spec.cost for spec in missing) or 1.0
    with tqdm(
        total=100.0, unit="%", smoothing=0, bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    ) as progress:
        for spec, run in _runs(missing, train, jobs):
            with path.open("a") as file:
                file.write(json.dumps({**dataclasses.asdict(spec), **run}) + "\n")  # type: ignore[call-overload]
                file.flush()
                os.fsync(file.fileno())
            progress.set_postfix_str(f"{', '.join(map(str, dataclasses.astuple(spec)))}: {describe(run)}")  # type: ignore[call-overload]
            progress.update(100 * spec.cost / total)


def _end_line(path: Path) -> None:
    """What is written next begins a line, whatever a crash has left."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def _runs(specs: Sequence[S], train: Callable[[S], Run], jobs: int) -> Iterator[tuple[S, Run]]:
    if jobs == 1:
        yield from ((spec, train(spec)) for spec in specs)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, one_thread, maxtasksperchild=10) as pool:
        yield from pool.imap_unordered(_Named(train), specs)


@dataclasses.dataclass(frozen=True)
class _Named:
    """Gives the spec with its run, since runs end in any order."""

    train: Callable[[Any], Run]

    def __call__(self, spec: Any) -> tuple[Any, Run]:
        return spec, self.train(spec)
