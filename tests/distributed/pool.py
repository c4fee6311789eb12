"""Processes that train together, kept from test to test: starting one costs more than most tests."""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# After this a collective gives up, and so does whoever waits for a job.
COLLECTIVE, JOB = datetime.timedelta(seconds=60), 300.0


class RankError(AssertionError):
    """A job failed; the message has the traceback of every rank."""


class Ranks:
    """`count` processes with a gloo process group; started when first used, and again after a failure."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, job: str, **kwargs: Any) -> list[Any]:
        """Call `jobs.<job>(**kwargs)` on every rank; what each returned, by rank."""
        answers = self.outcomes(job, **kwargs)
        if failed := [f"rank {i}: {text}" for i, (ok, text) in enumerate(answers) if not ok]:
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def outcomes(self, job: str, **kwargs: Any) -> list[tuple[bool, Any]]:
        """The same, with (False, traceback) of a rank that failed."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, kwargs))
        deadline, answers = time.monotonic() + JOB, []
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                answers.append((False, f"no answer within {JOB:.0f} s"))
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                process.join()
                answers.append((False, f"ended with {process.exitcode}"))
        if not all(ok for ok, _ in answers):
            self.close()
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, str(meeting), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, count: int, meeting: str, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=COLLECTIVE)
    jobs = importlib.import_module("jobs")
    while True:
        try:
            job, kwargs = pipe.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            pipe.send((True, getattr(jobs, job)(**kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
