"""A long run in which everything happens: two trainings in step, one of which is saved and loaded again and again.

    python tests/soak.py --minutes 5
    python tests/soak.py --steps 20000 --seed 3 --recipe 4bit

Both get the same gradients, learning rates, frozen parameters, changes of dtype, Inf and NaN, drawn from a seed. They must stay
equal, bit for bit. After the warm-up, in which each kind of event happens once, no kernel may be compiled, and no graph but those
for tensors that a reload or a change of dtype has put in place, and for other parameters with a gradient. The process may grow by
what Dynamo keeps of these graphs. Prints what it did; the exit status is 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qcompile import explain
from qcompile.dense_step import activity
from qcompile.passes.pipeline import _KERNELS
from qcompile.runtime.state import QuantizedState

SHAPES = ((64, 256), (5000,), (40, 103), (7,))
MOMENTS = {"exp_avg", "exp_avg_sq"}
# MiB by which the process may grow after the warm-up: fragmentation, and what Dynamo keeps of every graph that it has compiled.
GROWTH, PER_GRAPH = 32, 1


class SoakError(Exception):
    """Something that must not happen, with the step."""


class Training:
    """Parameters, an unmodified AdamW with a schedule, and its compiled step."""

    def __init__(self, recipe: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = torch.optim.AdamW(self.params, lr=torch.tensor(1e-3), foreach=False)
        options = {"recipe": recipe, "min_numel": 64}
        self.step = torch.compile(self.optimizer.step, backend="qstate", options=options)

    def reload(self) -> None:
        """Into the same optimizer, through a file."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))

    def to(self, dtype: torch.dtype) -> None:
        for p in self.params:
            p.grad = None
            p.data = p.data.to(dtype)
            state = self.optimizer.state[p]
            for key in state.keys() & MOMENTS:
                state[key] = state[key].to(dtype)

    def stored(self) -> list[Tensor]:
        states = [v for p in self.params for v in self.optimizer.state[p].values()]
        return [*self.params, *(t for v in states for t in (v.stored if isinstance(v, QuantizedState) else (v,)))]


class Soak:
    """Both trainings and what has happened to them."""

    def __init__(self, recipe: str, seed: int) -> None:
        self.whole, self.cut = Training(recipe), Training(recipe)
        self.events, self.reloads = random.Random(seed), random.Random(seed + 1)
        self.frozen: int | None = None
        self.counts: Counter[str] = Counter()
        self.step = 0

    def advance(self, event: str | None, reload: bool) -> None:
        """One step of both, with an event before it."""
        bad: tuple[int, int, float] | None = None
        if event is not None:
            self.counts[event] += 1
        if event == "freeze":
            self.frozen = self.events.randrange(len(SHAPES))
        elif event == "thaw":
            self.frozen = None
        elif event in ("bfloat16", "float32"):
            for training in (self.whole, self.cut):
                training.to(getattr(torch, event))
        elif event == "learning rate":
            rate = 10 ** self.events.uniform(-4, -2)
            for training in (self.whole, self.cut):
                training.optimizer.param_groups[0]["lr"].fill_(rate)
        elif event == "bad gradient":
            which = self.events.randrange(len(SHAPES))
            place = self.events.randrange(self.whole.params[which].numel())
            bad = which, place, self.events.choice([float("inf"), -float("inf"), float("nan"), 1e38])
        if reload:
            self.counts["reload"] += 1
            self.cut.reload()
        for training in (self.whole, self.cut):
            self._update(training, bad)
        self.step += 1

    def _update(self, training: Training, bad: tuple[int, int, float] | None) -> None:
        generator = torch.Generator().manual_seed(self.step)
        for i, p in enumerate(training.params):
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if i == self.frozen else gradient
        if bad is None:
            training.step()
            return
        which, place, value = bad
        p = training.params[which]
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.view(-1)[place] = value
        before = p.detach().view(-1)[place].clone()
        training.step()
        with torch.no_grad():
            p.view(-1)[place] = before
            for state in training.optimizer.state[p].values():  # what is dense keeps Inf and NaN, as in fp32
                if state.dim():
                    (state.tail if isinstance(state, QuantizedState) else state).nan_to_num_(0.0, 0.0, 0.0)

    def check(self) -> None:
        """Equal bit for bit; everything decodes to finite numbers, and is quantized."""
        for ours, theirs in zip(self.cut.stored(), self.whole.stored(), strict=True):
            if not torch.equal(ours, theirs):
                raise SoakError(f"step {self.step}: the training that was reloaded differs")
        for p in self.cut.params:
            for key in sorted(MOMENTS):
                state = self.cut.optimizer.state[p][key]
                if not state.float().isfinite().all() or not p.isfinite().all():
                    raise SoakError(f"step {self.step}: {key} of {tuple(p.shape)} is not finite")
                if p.numel() >= 64 and not isinstance(state, QuantizedState):
                    raise SoakError(f"step {self.step}: {key} of {tuple(p.shape)} is dense")
                if key == "exp_avg_sq" and bool((state.float() < 0).any()):
                    raise SoakError(f"step {self.step}: {key} of {tuple(p.shape)} is negative")

    def warm_up(self) -> None:
        """Every event once, in both dtypes and with each parameter frozen."""
        for dtype in ("float32", "bfloat16", "float32"):
            self.advance(dtype, False)
            for event in ("learning rate", "bad gradient", None):
                self.advance(event, False)
            for i in range(len(SHAPES)):
                self.frozen = i
                self.advance(None, False)
                self.advance(None, True)
            self.frozen = None
            self.advance(None, True)
            self.advance(None, False)
        self.check()

    def draw(self) -> tuple[str | None, bool]:
        """What happens before the next step."""
        is_half = self.whole.params[0].dtype == torch.bfloat16
        switch = "float32" if is_half else "bfloat16"
        kinds = {"freeze": 0.004, "thaw": 0.01, "learning rate": 0.05, "bad gradient": 0.01, switch: 0.001}
        kind = self.events.choices([*kinds, None], [*kinds.values(), 1 - sum(kinds.values())])[0]
        if kind == "freeze" and self.frozen is not None:
            kind = "thaw"
        return kind, self.reloads.random() < 0.002


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(given: argparse.Namespace) -> str:
    """Run until the steps or the minutes are over; what happened, in a line.

    Raises:
        SoakError: where something was wrong.
    """
    started = time.monotonic()
    run = Soak(given.recipe, given.seed)
    run.warm_up()
    run.counts.clear()
    kernels, graphs, memory, most = set(_KERNELS), activity.compiled, resident(), 0.0
    begun, at_start = run.step, time.monotonic()
    with tqdm(total=given.steps, unit="step", disable=None) as progress:
        while run.step - begun < given.steps and time.monotonic() - started < 60 * given.minutes:
            event, reload = run.draw()
            before = activity.compiled
            run.advance(event, reload)
            if activity.compiled != before and not reload and event in (None, "learning rate"):
                raise SoakError(
                    f"step {run.step}: {activity.compiled - before} graphs were compiled, and nothing had happened"
                )
            if set(_KERNELS) != kernels:
                raise SoakError(f"step {run.step}: a kernel was compiled after the warm-up")
            if run.step % 100 == 0:
                run.check()
                most = max(most, (resident() - memory) / 2**20)
                if most > GROWTH + PER_GRAPH * (activity.compiled - graphs):
                    raise SoakError(f"step {run.step}: the process has grown by {most:.0f} MiB")
            progress.update()
    run.check()
    seconds = time.monotonic() - at_start
    report = explain(run.cut.optimizer)
    counted = ", ".join(f"{count} x {event}" for event, count in sorted(run.counts.items()))
    return (
        f"{run.step - begun} steps in {seconds:.0f} s ({given.recipe}, seed {given.seed}): {counted}; equal bit for bit; "
        f"{activity.compiled - graphs} graphs after events, 0 kernels compiled; at most {most:+.1f} MiB; "
        f"state {report.state_bytes / report.dense_state_bytes:.3f} of dense"
    )


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="8bit")
    try:
        print(soak(parser.parse_args(arguments)))
    except SoakError as failure:
        print(f"failed: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
