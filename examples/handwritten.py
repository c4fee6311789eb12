"""Five optimizers in the ways people write them: nothing in here knows of qcompile.

They keep state in the five usual ways: tensor step counters, Python step counters, state that is replaced by a new tensor
in each step, one flat buffer for all parameters, and bounded helper state. `optimizers.py` trains with each of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class AdaBelief(Optimizer):
    """AdaBelief (Zhuang et al. 2020): the second moment is of the gradient's distance to its mean. Step counters are tensors."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_var"] = torch.zeros_like(p)
                state["step"] += 1
                mean, var = state["exp_avg"], state["exp_avg_var"]
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                surprise = p.grad - mean
                var.mul_(beta2).addcmul_(surprise, surprise, value=1 - beta2).add_(group["eps"])
                correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                denominator = (var / correction2).sqrt_().add_(group["eps"])
                p.sub_(group["lr"] / correction1 * mean / denominator)


class Adan(Optimizer):
    """Adan (Xie et al. 2022, algorithm 1): Nesterov momentum from gradient differences. Step counters are Python numbers."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, grad: Tensor, group: dict) -> None:
        state = self.state[p]
        if len(state) == 0:
            state["step"] = 0
            for key in ("exp_avg", "exp_avg_diff", "exp_avg_sq"):
                state[key] = torch.zeros_like(p)
        if state["step"] == 0:
            state["previous_grad"] = grad.clone()
        state["step"] += 1
        (beta1, beta2, beta3), step = group["betas"], state["step"]
        diff = grad - state["previous_grad"]
        ahead = grad + beta2 * diff
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_diff"].mul_(beta2).add_(diff, alpha=1 - beta2)
        state["exp_avg_sq"].mul_(beta3).addcmul_(ahead, ahead, value=1 - beta3)
        state["previous_grad"].copy_(grad)
        denominator = (state["exp_avg_sq"] / (1 - beta3**step)).sqrt() + group["eps"]
        direction = state["exp_avg"] / (1 - beta1**step) + beta2 * state["exp_avg_diff"] / (1 - beta2**step)
        p.sub_(group["lr"] * direction / denominator).div_(1 + group["lr"] * group["weight_decay"])


class LaProp(Optimizer):
    """LaProp (Ziyin et al. 2020): momentum of normalized gradients. State is replaced by a new tensor in each step."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            lr, (b1, b2), eps = group["lr"], group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad, self.state[p]
                if not state:
                    state["t"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["t"] += 1
                state["v"] = b2 * state["v"] + (1 - b2) * g * g
                normalized = g / ((state["v"] / (1 - b2 ** state["t"])).sqrt() + eps)
                state["m"] = b1 * state["m"] + (1 - b1) * normalized
                p -= lr / (1 - b1 ** state["t"]) * state["m"]


class FlatAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2017) whose state is two flat buffers over all parameters, attributes of the optimizer."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.params = [p for group in self.param_groups for p in group["params"]]
        total = sum(p.numel() for p in self.params)
        self.exp_avg = torch.zeros(total)
        self.exp_avg_sq = torch.zeros(total)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        group["step"] = group.get("step", 0) + 1
        grad = torch.cat([p.grad.flatten() for p in self.params if p.grad is not None])
        self.exp_avg.lerp_(grad, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (self.exp_avg_sq / (1 - beta2 ** group["step"])).sqrt().add_(group["eps"])
        update = self.exp_avg / denominator * (group["lr"] / (1 - beta1 ** group["step"]))
        start = 0
        for p in self.params:
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(update[start : start + p.numel()].view_as(p))
            start += p.numel()


class DeltaBarDelta(Optimizer):
    """Sign momentum with a step size per element (Jacobs 1988): it grows while signs agree, shrinks when they turn, and is clamped."""

    def __init__(
        self, params: Iterable[Parameter], lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "gain" not in state:
                    state["gain"] = torch.ones_like(p)
                    state["velocity"] = torch.zeros_like(p)
                gain, velocity = state["gain"], state["velocity"]
                agree = velocity * p.grad > 0
                gain.copy_(torch.where(agree, gain + 0.05, gain * 0.8).clamp(0.1, 4.0))
                velocity.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * gain * velocity.sign())


HANDWRITTEN = (AdaBelief, Adan, LaProp, FlatAdamW, DeltaBarDelta)
