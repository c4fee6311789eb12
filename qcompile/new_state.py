"""State that does not exist yet: created and quantized one parameter at a time, so that dense state exists for one only.

Works where an optimizer creates state in `_init_group(group, *lists)`, as torch's do; for others see `first_step`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qcompile._compat_distributed import local_of
from qcompile.exc import NoStateYetError
from qcompile.first_step import makes_state_in_step
from qcompile.options import Choices, Options
from qcompile.passes.find_state import is_state_buffer, state_of
from qcompile.passes.plan_storage import is_copy, new_state_format
from qcompile.plan import buffer_key
from qcompile.runtime.layout import is_flat
from qcompile.runtime.state import QuantizedState

# Key in a parameter group under which its own flags (`hooks.FLAGS`) are kept while a step runs.
SAVED = "_qstate_flags"


def init_state(optimizer: Optimizer, **options: Any) -> None:
    """Create the state that the first step would create, quantized, for a checkpoint to be loaded into.

    `torch.distributed.checkpoint` reads into state that exists; by itself it creates it with an eager step, all dense at once.
    State that exists already is left alone. The formats are provisional: a state that is loaded brings its own, and the
    next compiled step gives each the one of its recipe.

    Args:
        optimizer: any that creates state as torch.optim's do.
        options: `recipe` and the others of `qcompile.options.Options`, as the step is compiled with.

    Raises:
        NoStateYetError: only a step of this optimizer creates its state.
        UnknownRecipeError, UnknownOptionError, InvalidOptionError: `options` is wrong.
    """
    chosen = Options.parse(options)
    if makes_state_in_step(optimizer):
        raise NoStateYetError(type(optimizer).__name__)
    create_all_state([optimizer], chosen)


def create_all_state(optimizers: list[Optimizer], options: Options) -> list[tuple[Optimizer, Tensor]]:
    """Create and quantize missing state before there is a gradient; gives what was created."""
    created = []
    for optimizer in optimizers:
        missing = [
            p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and not optimizer.state.get(p)
        ]
        without = [p for p in missing if p.grad is None]
        try:
            for param in without:
                param.grad = param.detach()  # only its presence is asked for
            create_state(optimizer, options)
        finally:
            for param in without:
                param.grad = None
        created += [(optimizer, p) for p in missing if optimizer.state.get(p)]
    return created


def create_state(optimizer: Optimizer, options: Options) -> None:
    """Create missing state of parameters that have a gradient, and quantize it."""
    if not hasattr(optimizer, "_init_group"):
        return
    wanted: Choices | None = None
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.layout == torch.strided and not optimizer.state.get(param):
                wanted = wanted or Choices.of(options, [p for g in optimizer.param_groups for p in g["params"]])
                alone = {**group, **group.get(SAVED, {}), "params": [param]}
                optimizer._init_group(alone, *([] for _ in range(_lists_of(type(optimizer)))))  # type: ignore[arg-type]
                if type(optimizer) is torch.optim.SGD and group["momentum"] != 0 and group["dampening"] == 0:
                    # SGD begins with momentum = gradient, which is what 0 * momentum + gradient gives, bit for bit.
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
                quantize_new_state(optimizer, param, wanted)


@functools.cache
def _lists_of(kind: type[Optimizer]) -> int:
    """How many lists `_init_group` takes after the group."""
    parameters = list(inspect.signature(kind._init_group).parameters.values())[2:]  # type: ignore[attr-defined]
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def quantize_new_state(optimizer: Optimizer, param: Tensor, wanted: Choices) -> None:
    """Quantize the state of one parameter by what its values are, as long as nothing else is known about it.

    The plan, made from the graph, gives it its final format.
    """
    own = local_of(param)
    for slot in [s for s in state_of(optimizer, [param]).values() if s.param is param]:
        value = slot.get()
        fits = is_state_buffer(value) and value.is_floating_point() and value.shape == own.shape and is_flat(value)
        fmt = new_state_format(slot, value, wanted) if fits and not is_copy(value, own) else None
        if fmt is not None and param.numel() >= wanted.options.min_numel and value.numel() >= fmt.block_size:
            quantize = QuantizedState.quantize if value.any() else QuantizedState.zeros_like
            slot.set(quantize(value, fmt, buffer_key(slot, wanted.options.seed, fmt)))
