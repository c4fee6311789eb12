"""Updates that mix elements, and an optimizer that runs a different one for each of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Update = Callable[..., object]
SHAPE = (128, 64)
RATE = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """An update, and the state that it begins with; a name gets zeros of the parameter's shape.

    Attributes:
        error: how far 8-bit state may put the parameter, in parts of the farthest that an element moved.
        why: where that number comes from.
    """

    update: Update
    states: tuple[str | tuple[str, tuple[int, ...]], ...]
    error: float = 0.0
    why: str = ""


class EachItsOwn(Optimizer):
    """Parameter i is updated by `cases[i]`; what the updates return, the step returns."""

    def __init__(self, params: Sequence[nn.Parameter], cases: Sequence[Case]) -> None:
        super().__init__(params, {"lr": RATE})
        self.updates = [case.update for case in cases]
        for p, case in zip(params, cases, strict=True):
            named = [(s, tuple(p.shape)) if isinstance(s, str) else s for s in case.states]
            self.state[p] = {key: begin(key, shape) for key, shape in named}

    def step(self) -> list[object]:
        with torch.no_grad():  # named here: Dynamo skips a frame in which it sees no tensor and no torch
            params = self.param_groups[0]["params"]
            return [self.updates[i](p, p.grad, **self.state[p]) for i, p in enumerate(params)]


def begin(key: str, shape: tuple[int, ...]) -> Tensor:
    """Zeros, or an orthogonal matrix for `q`, the identity for `stat` and 0 for `step`."""
    if key == "q":
        return torch.linalg.qr(torch.randn(shape, generator=torch.Generator().manual_seed(7))).Q.contiguous()
    return torch.eye(*shape) if key == "stat" else torch.zeros(() if key == "step" else shape)


def lamb(p: Tensor, g: Tensor, step: Tensor, m: Tensor, v: Tensor) -> None:
    step.add_(1)
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    ratio = (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-6)
    p.sub_(ratio * (RATE * p.norm() / ratio.norm().clamp(min=1e-6)))


def soap(p: Tensor, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, stat: Tensor, q: Tensor) -> None:
    """One-sided: Adam in the basis q, which follows the eigenvectors of `stat` by power iteration.

    Slowly, so that the iteration is well conditioned and two runs can be compared.
    """
    rotated = g @ q
    exp_avg.lerp_(g, 0.1)
    exp_avg_sq.mul_(0.95).addcmul_(rotated, rotated, value=0.05)
    p.sub_(((exp_avg @ q) / (exp_avg_sq.sqrt() + 1e-8)) @ q.T, alpha=RATE)
    stat.lerp_(g.T @ g, 1e-3)
    q.copy_(torch.linalg.qr(stat @ q).Q)


def shampoo(p: Tensor, g: Tensor, stat: Tensor) -> None:
    stat.lerp_(g @ g.T, 0.1)
    values, vectors = torch.linalg.eigh(stat)
    p.sub_((vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.T @ g, alpha=RATE)


def two_levels(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g / (1 + m.norm()))
    p.sub_(m, alpha=RATE)


def previous(p: Tensor, g: Tensor, last: Tensor) -> None:
    """The step is longer while gradients agree with the one before."""
    agreement = (g * last).sum() / (g.norm() * last.norm() + 1e-6)
    p.sub_(g * (RATE * (1 + agreement)))
    last.copy_(g)


def read_before(p: Tensor, g: Tensor, m: Tensor, w: Tensor) -> None:
    """The old parameter goes into `w`; the new one is made one level earlier than that is read."""
    products = p.T @ g
    p.sub_(m.lerp_(g, 0.1), alpha=RATE)
    w.lerp_(products.T @ products, 0.1)
    p.sub_(p @ (1e-6 * w))


def counted(p: Tensor, g: Tensor, step: Tensor, m: Tensor) -> None:
    """The step counter is read before and after it is written, at both levels."""
    m.mul_(1 - 1 / (step + 2)).add_(g)
    step.add_(1)
    p.sub_(m / m.norm() * (RATE * step**0.5))


def drawn(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g * (torch.rand_like(g) < 0.5))
    p.sub_(m, alpha=RATE)


def constants(p: Tensor, g: Tensor, m: Tensor) -> None:
    weights = torch.tensor([0.5, 2.0])
    m.mul_(torch.tensor(0.9)).add_(g)
    p.sub_(m * (RATE * weights.sum() / m.norm() * torch.tensor(0.5)))


def two_results(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    m.mul_(0.9).add_(g)
    ahead = 0.9 * m + g
    p.sub_(ahead @ (m.T @ m), alpha=1e-4 * RATE)
    return m.mean(), ahead.sum()


HALF_CELL = 0.0071  # of a block's largest, in the signed 8-bit map
STORES = 3  # whose error a later step reads, in 4 steps
FADING = HALF_CELL * STORES
NORMALIZED = "the error of three stores, once in the momentum and once in its norm"

CASES: dict[str, Case] = {
    "lamb": Case(lamb, ("step", "m", "v"), 2 * FADING, NORMALIZED),
    "soap": Case(
        soap,
        ("exp_avg", "exp_avg_sq", ("stat", (64, 64)), ("q", (64, 64))),
        9 * FADING,
        "exp_avg, exp_avg_sq and q, which is read three times and orthogonalized again; the root is as small as its state",
    ),
    "shampoo": Case(
        shampoo, (("stat", (128, 128)),), 1e-4, "nothing is quantized: the root is of an ill-conditioned matrix"
    ),
    "two_levels": Case(two_levels, ("m",), 2 * FADING, NORMALIZED),
    "previous": Case(previous, ("last",), FADING, "one store per step, in a factor that is at most 2"),
    "read_before": Case(read_before, ("m", ("w", (64, 64))), FADING, "the error of three stores"),
    "counted": Case(counted, ("step", "m"), 2 * FADING, NORMALIZED),
    "drawn": Case(drawn, ("m",), FADING, "the error of three stores"),
    "constants": Case(constants, ("m",), 2 * FADING, NORMALIZED),
    "two_results": Case(two_results, ("m",), 3 * FADING, "m is in the product three times"),
}
