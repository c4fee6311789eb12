"""Find out that a step which was compiled with our backend nevertheless ran dense, and say so once.

Dynamo runs what it cannot or may not trace as eager Python, without a word: `LBFGS.step`, a sparse gradient, a step that
was recompiled too often. The user asked for quantized state, so silence would be wrong.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from qcompile import _compat
from qcompile._compat_dynamo import dead_entries, dynamo_settings, trace_next_time
from qcompile.exc import NotQuantizedError
from qcompile.first_step import undecorated
from qcompile.options import Options
from qcompile.passes.find_state import is_state_buffer, state_of
from qcompile.plan import record_of
from qcompile.runtime.state import QuantizedState

log = logging.getLogger("qcompile")
_reported: WeakSet[Optimizer] = WeakSet()
_reached: WeakSet[Optimizer] = WeakSet()


@dataclass(slots=True)
class Activity:
    """How many graphs our backend has compiled, and how often a graph that updates state has run."""

    compiled: int = 0
    ran: int = 0


class _Running(threading.local):
    """The optimizers whose steps run in this thread, innermost last, with what had happened when they began, whether there
    was state that a graph could have updated, and Dynamo's settings."""

    def __init__(self) -> None:
        self.steps: list[tuple[weakref.ref[Optimizer], Activity, bool, AbstractContextManager[None]]] = []


activity = Activity()
breaks: Counter[str] = Counter()  # what ended graphs of ours before their function did, since the process began
_running = _Running()
# While a step runs: step counters that are tensors are read by `item()`, which would cut the step in two; a function that
# is called for each parameter is compiled for each shape, and there are more than 8.
SETTINGS = {"capture_scalar_outputs": True}
LIMITS = {"recompile_limit": 24, "accumulated_recompile_limit": 1024}


def limits_of(function: Callable[..., Any]) -> dict[str, int]:
    """`LIMITS`, of which what was compiled for state that has been replaced since (by a reload) takes nothing away."""
    return LIMITS | {"recompile_limit": LIMITS["recompile_limit"] + dead_entries(function)}


def begin_step(optimizer: Optimizer, options: Options) -> None:
    """Called in front of every step that Dynamo runs for our backend."""
    had_state = optimizer in _reached or _has_large_state(optimizer, options)
    settings = dynamo_settings(limits_of(undecorated(type(optimizer).step)), **SETTINGS)
    settings.__enter__()
    _running.steps.append((weakref.ref(optimizer), dataclasses.replace(activity), had_state, settings))


def end_step(optimizer: Optimizer, options: Options) -> bool:
    """Called behind every step for which `begin_step` was. Whether anything was compiled in it.

    A step that made its state while graphs were compiled is not judged: it may have made it in one of them; the next tells.
    """
    began, had_state = dataclasses.replace(activity), True
    while _running.steps:  # those that ended with an exception are still here
        reference, then, had, settings = _running.steps.pop()
        settings.__exit__(None, None, None)
        if reference() is optimizer:
            began, had_state = then, had
            break
    if not _has_gradient(optimizer):
        # It did nothing, perhaps. Dynamo would never look again at a function that it has seen do nothing.
        trace_next_time(undecorated(type(optimizer).step))
    elif _has_sparse_gradient(optimizer):
        _report(optimizer, options)
    elif activity.ran != began.ran or (activity != began and not _has_large_state(optimizer, options)):
        _reached.add(optimizer)
    elif (activity == began or had_state) and (optimizer not in _reached or _holds_quantized(optimizer)):
        _report(optimizer, options)  # perhaps graphs were compiled, but of functions that the step calls
    return activity.compiled != began.compiled


def note_eager_step(optimizer: Optimizer, backend: Callable[..., Any] | None) -> None:
    """Called in front of every eager step: it is one that should not be, if a function compiled for us called it."""
    for found, keywords in _compat.enclosing_backends():
        if found is backend and backend is not None:
            _report(optimizer, Options.parse(keywords.get("options")))


def _report(optimizer: Optimizer, options: Options) -> None:
    if not options.quantizes or not _has_gradient(optimizer):
        return
    reason = dense_reason(optimizer)
    record_of(optimizer).dense_reason = reason
    _make_dense(optimizer)
    name = type(optimizer).__name__
    if options.strict:
        raise NotQuantizedError([f"all state of {name}: {reason}"])
    if optimizer not in _reported:
        _reported.add(optimizer)
        log.warning("%s.step was compiled with backend='qstate' but runs dense: %s", name, reason)


def _make_dense(optimizer: Optimizer) -> None:
    """State in a format that no graph was compiled for, but its first values or a checkpoint chose: Python would round it in
    each step, without what the plan of a graph knows about it.
    """
    plans = record_of(optimizer).plans
    for slot in list(state_of(optimizer).values()):
        value = slot.get()
        if isinstance(value, QuantizedState) and slot.place not in plans:
            slot.set(value.dequantize())


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _has_sparse_gradient(optimizer: Optimizer) -> bool:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return any(g is not None and g.layout != torch.strided for g in gradients)


def _has_large_state(optimizer: Optimizer, options: Options) -> bool:
    values = [slot.raw() for slot in state_of(optimizer).values()]
    return any(is_state_buffer(value) and value.numel() >= options.min_numel for value in values)


def _holds_quantized(optimizer: Optimizer) -> bool:
    return any(isinstance(slot.get(), QuantizedState) for slot in state_of(optimizer).values())


def dense_reason(optimizer: Optimizer) -> str:
    """Why an optimizer's step did not reach the compiler, as far as can be told."""
    if _has_sparse_gradient(optimizer):
        return "a gradient is sparse, and torch does not compile sparse updates"
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        return f"torch does not compile {type(optimizer).__name__}.step"
    return "torch ran the step as eager Python; TORCH_LOGS='graph_breaks,recompiles' shows why"
