"""A process that is killed, a user who stops a step, a file that is not whole, a compiler or memory that fails."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcompile.__main__ import main
from qcompile.runtime.state import QuantizedState

OPTIONS = {"recipe": "zip-sr", "min_numel": 0, "block_size": 64}  # rounds at random, so a lost position would show
SHAPES = ((64, 96), (100,), (7, 64))
STEPS, EVERY = 24, 4


class Training:
    """Parameters and an optimizer; step `i` has the same gradients in every process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-2)
        self.step = torch.compile(self.optimizer.step, backend="qstate", options=OPTIONS)
        self.done = 0

    def advance(self) -> None:
        generator = torch.Generator().manual_seed(1 + self.done)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=generator)
        self.step()
        self.done += 1

    def save(self, path: Path) -> None:
        saved = {"params": self.params, "optimizer": self.optimizer.state_dict(), "done": self.done}
        half = path.with_suffix(".half")
        torch.save(saved, half)
        os.replace(half, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        with torch.no_grad():
            for p, value in zip(self.params, saved["params"], strict=True):
                p.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.done = saved["done"]

    def tensors(self) -> list[Tensor]:
        states = [v for p in self.params for v in self.optimizer.state[p].values()]
        parts = [t for v in states for t in (v.stored if isinstance(v, QuantizedState) else [v])]
        return [p.detach().clone() for p in self.params] + [t.clone() for t in parts]


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads of OpenMP do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def child(training: Training, path: Path) -> int:
    """Fork a process that goes on from the last checkpoint to the end, saving on the way; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            if path.exists():
                training.load(path)
            while training.done < STEPS:
                training.advance()
                if training.done % EVERY == 0:
                    training.save(path)
            os._exit(0)
        finally:  # nothing of pytest may run here
            os._exit(1)
    return pid


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_any_moment_nothing_is_lost(kills: int, tmp_path: Path) -> None:
    with one_thread():
        whole = Training()
        while whole.done < STEPS:
            whole.advance()
        expected = whole.tensors()
        path, at, killed, moments = tmp_path / "last.pt", random.Random(0), 0, set()
        started = Training()  # compiled by the parent, so that most of a child's time is steps and saves
        before = started.tensors()[: len(SHAPES)]
        started.advance()
        with torch.no_grad():
            for p, value in zip(started.params, before, strict=True):
                p.copy_(value)
        started.optimizer.state.clear()
        started.done = 0
        while killed < kills:
            begin = time.monotonic()
            pid = child(started, path)
            time.sleep(at.uniform(0, 2.5))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                killed += 1
                moments.add(round(time.monotonic() - begin, 2))
            else:
                assert os.WEXITSTATUS(status) == 0, "a process failed by itself"
            if not path.exists():
                continue
            resumed = Training()
            resumed.load(path)  # whatever was killed, the last checkpoint is whole
            if resumed.done == STEPS:
                for found, value in zip(resumed.tensors(), expected, strict=True):
                    assert torch.equal(found, value)
                path.unlink()
        assert len(moments) > kills // 2
        _, status = os.waitpid(child(started, path), 0)  # to the end, without being killed
        assert status == 0
        resumed = Training()
        resumed.load(path)
        for found, value in zip(resumed.tensors(), expected, strict=True):
            assert torch.equal(found, value)


def stopped_after(seconds: float, call: Callable[[], Any]) -> bool:
    """Call, and interrupt it as Ctrl-C would; whether that came before the end."""

    running = True

    def stop(signum: int, frame: object) -> None:
        if running:  # else it came too late, and nothing here expects it any more
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        running = False
        return False
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupted_steps_leave_an_optimizer_that_goes_on() -> None:
    """Each parameter and its state are those from before the step or those from behind it, never some of both."""
    training, at, stopped = Training(), random.Random(1), 0
    for _ in range(2):
        training.advance()
    timed = time.perf_counter()
    training.advance()
    length = time.perf_counter() - timed
    for _ in range(200):
        before = training.tensors()
        twin = copy.deepcopy(training.optimizer)
        if not stopped_after(at.uniform(0.05, 1.2) * length, training.advance):
            continue
        stopped += 1
        saved = training.optimizer.state_dict()
        assert "_qstate_flags" not in saved["param_groups"][0]
        assert saved["param_groups"][0]["foreach"] is None
        for i, (p, was) in enumerate(zip(training.params, before, strict=False)):
            moved = not torch.equal(p, was)
            for key in ("exp_avg", "exp_avg_sq"):
                now, old = training.optimizer.state[p][key], twin.state[twin.param_groups[0]["params"][i]][key]
                pairs = [(now.codes, old.codes), (now.scale, old.scale), (now.tail, old.tail)]
                assert any(not torch.equal(a, b) for a, b in pairs) is moved, (i, key)
                assert now.dequantize().isfinite().all()
    assert stopped >= 20
    done = training.done
    training.advance()
    assert training.done == done + 1


def test_interrupted_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step again, stopped at each of its stages, ends as if it had not been stopped."""
    from qcompile import backend
    from qcompile.passes import pipeline

    undisturbed = Training()
    for _ in range(3):
        undisturbed.advance()
    for module, name in ((pipeline, "plan_storage"), (pipeline, "_kernel"), (backend, "apply_plans")):
        torch._dynamo.reset()
        training = Training()
        with pytest.MonkeyPatch.context() as patch:
            original = getattr(module, name)

            def stop(*args: Any, original: Callable[..., Any] = original, name: str = name) -> Any:
                if name == "apply_plans":  # in the middle of the conversion: behind it, and before anything uses it
                    original(*args)
                raise KeyboardInterrupt

            patch.setattr(module, name, stop)
            with pytest.raises(KeyboardInterrupt):
                training.advance()
        for _ in range(3):
            training.advance()
        for found, value in zip(training.tensors(), undisturbed.tensors(), strict=True):
            assert torch.equal(found, value), name


def test_out_of_memory_while_state_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = Training()
    undisturbed.advance()
    torch._dynamo.reset()
    training, made = Training(), 0
    original = QuantizedState.zeros_like.__func__  # type: ignore[attr-defined]

    def full(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3:
            raise torch.OutOfMemoryError("out of memory")
        return original(cls, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedState, "zeros_like", classmethod(full))
        with pytest.raises(torch.OutOfMemoryError):
            training.advance()
    training.advance()
    # The codes are rounded with other random bits: what is dense when the step begins is quantized by it.
    for found, value in zip(training.params, undisturbed.params, strict=True):
        assert torch.equal(found, value)
    assert float(training.optimizer.state[training.params[2]]["step"]) == 1
    assert all(isinstance(training.optimizer.state[p]["exp_avg"], QuantizedState) for p in training.params)


def test_a_file_that_is_not_whole_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    training.advance()
    buffer = io.BytesIO()
    torch.save(training.optimizer.state_dict(), buffer)
    whole, at = buffer.getvalue(), random.Random(2)
    lengths = sorted({0, 1, len(whole) - 1, *(at.randrange(len(whole)) for _ in range(60))})
    for length in lengths:
        with pytest.raises((RuntimeError, ValueError, EOFError, pickle.UnpicklingError)):  # torch's own
            torch.load(io.BytesIO(whole[:length]), weights_only=True)
    half = tmp_path / "half.pt"
    for length in (0, len(whole) // 2, len(whole) - 1):
        half.write_bytes(whole[:length])
        with pytest.raises(SystemExit):
            main(["convert", str(half), str(tmp_path / "out.pt"), "--to", "torch"])
        assert f"{half} cannot be read, or not to its end" in capsys.readouterr().err
        assert [f.name for f in tmp_path.iterdir()] == ["half.pt"]


FAILING = """
import resource, sys, torch, qcompile
from torch import nn
p = nn.Parameter(torch.randn(64, 64))
optimizer = torch.optim.AdamW([p], lr=1e-3)
step = torch.compile(optimizer.step, backend="qstate", options={"min_numel": 0})
p.grad = torch.randn(64, 64)
if sys.argv[1] == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
before = p.detach().clone()
try:
    step()
except Exception as error:
    print(error)
else:
    sys.exit("it was compiled")
assert torch.equal(p, before)
optimizer.step()
assert not torch.equal(p, before)
saved = optimizer.state_dict()
assert saved["state"][0]["step"] == 1 and saved["param_groups"][0]["foreach"] is None
print(type(saved["state"][0]["exp_avg"]).__name__)
"""


@pytest.mark.parametrize(
    ("fault", "environment", "message"),
    [
        ("no compiler", {"CXX": "/nonexistent/g++"}, "No working C++ compiler found"),
        ("full disk", {}, "File too large"),
    ],
)
def test_a_compiler_that_cannot_work(fault: str, environment: dict[str, str], message: str, tmp_path: Path) -> None:
    """A clear error, nothing moved, and the optimizer goes on by itself from the state that it has."""
    run = subprocess.run(
        [sys.executable, "-c", FAILING, fault],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert message in run.stdout
    assert run.stdout.splitlines()[-1] == "QuantizedState"
