"""Optimizers written in a test, and the program of an optimizer's only update with the names of its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from qcompile.passes.functionalize import UpdateProgram


class Handmade(Optimizer):
    """`update(param, gradient, **state)` in place; states are created as zeros, or as 0-d zeros where called `step`."""

    def __init__(self, params: list[torch.nn.Parameter], update: Callable[..., None], *keys: str) -> None:
        super().__init__(params, {})
        self.update = update
        for p in self.param_groups[0]["params"]:
            self.state[p] = {key: torch.zeros(() if key == "step" else p.shape) for key in keys}

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, **self.state[p])


def step_once(optimizer: Optimizer) -> None:
    """Make the state that the optimizer creates in its first step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()


def only_program(capture: Any, analyse: Any, optimizer: Optimizer) -> tuple[UpdateProgram, list[str]]:
    """The program of the only region, and what its operands are called: keys of state, param, grad."""
    step_once(optimizer)
    compiled = analyse(*capture(optimizer.step), min_numel=0, block_size=32)
    ((item,),) = (group.regions for group in compiled.classes)
    nodes = [item.region.inputs[operand.index] for operand in item.program.operands]
    slots = compiled.inputs.state
    others = {"param": "param", "input": "grad"}
    return item.program, [
        slots[n].key if n in slots else others[o.role] for n, o in zip(nodes, item.program.operands, strict=True)
    ]
