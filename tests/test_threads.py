"""Compiled steps in threads, in processes that fork from one that has compiled, and in spawned ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.multiprocessing as mp
from small_runs import OPTIONS, Training, train_and_save, trained
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qcompile._compat_dynamo import dynamo_settings


def test_threads_that_compile_in_turn_give_what_each_gives_alone() -> None:
    """They take turns for the steps that compile, and no optimizer goes while another thread steps.

    Neither is a choice of this test: in torch 2.13 Dynamo walks a frame's cache while it evaluates guards, without a
    lock (pytorch#193697), so another thread's new or dropped entry is a crash, with any backend.
    """
    work = [(seed, kind) for seed, kind in enumerate(("AdamW", "NAdam", "AdamW"))]
    trainings: dict[int, Training] = {}
    errors: list[BaseException] = []
    turn = threading.Lock()
    barrier = threading.Barrier(len(work))

    def run(seed: int, kind: str) -> None:
        try:
            with turn:
                trainings[seed] = Training(seed, kind)
                trainings[seed].advance(3)
            barrier.wait()
            trainings[seed].advance(17)
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    before = dynamo_config.capture_scalar_outputs
    threads = [threading.Thread(target=run, args=item) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert dynamo_config.capture_scalar_outputs is before
    for seed, kind in work:
        for ours, alone in zip(trainings[seed].left(), trained(seed, 20, kind), strict=True):
            assert torch.equal(ours, alone)


def test_settings_are_put_back_by_the_last_of_several_holders() -> None:
    first, second = (dynamo_settings({"minimum_call_count": 3}, verbose=True) for _ in range(2))  # no step sets these
    with dynamo_config.patch(verbose=False, minimum_call_count=1):
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert (dynamo_config.verbose, dynamo_config.minimum_call_count) == (True, 3)
        second.__exit__(None, None, None)
        assert (dynamo_config.verbose, dynamo_config.minimum_call_count) == (False, 1)


def test_data_loader_workers_fork_after_compilation() -> None:
    p = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    step = torch.compile(optimizer.step, backend="qstate", options=OPTIONS)
    p.grad = torch.randn(64, 64)
    step()
    data = TensorDataset(torch.randn(32, 64))
    seen = 0
    for _ in range(2):  # each epoch forks anew
        for (x,) in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"):
            p.grad = x.t() @ x @ p.detach()
            step()
            seen += 1
    assert seen == 8
    assert float(optimizer.state[p]["step"]) == 9
    assert p.isfinite().all()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_give_the_same_bits(method: str, tmp_path: Path) -> None:
    """A forked one goes on with the kernels of its parent. Threads of OpenMP do not survive a fork, so there is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = trained(5, 3)
        mp.start_processes(train_and_save, (str(tmp_path),), nprocs=2, start_method=method)
    finally:
        torch.set_num_threads(threads)
    for rank in range(2):
        for ours, theirs in zip(expected, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert torch.equal(ours, theirs)
