"""Find out that a step which was compiled with our backend nevertheless ran dense, and say so once.

Dynamo runs what it cannot or may not trace as eager Python, without a word: `LBFGS.step`, a sparse gradient, a step that
was recompiled too often. The user asked for quantized state, so silence would be wrong.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from qcompile import _compat
from qcompile.exc import NotQuantizedError
from qcompile.options import Options
from qcompile.plan import record_of
from qcompile.runtime.state import QuantizedState

log = logging.getLogger("qcompile")
_reported: WeakSet[Optimizer] = WeakSet()
# Optimizers whose step is running, with how often our backend had compiled or run anything when it began.
_running: list[tuple[weakref.ref[Optimizer], int]] = []
_reached: WeakSet[Optimizer] = WeakSet()
_activity = 0


def note_activity() -> None:
    """Called whenever our backend compiles a graph, and whenever a graph that updates state runs."""
    global _activity
    _activity += 1


def begin_step(optimizer: Optimizer) -> None:
    """Called in front of every step that Dynamo runs for our backend."""
    _running.append((weakref.ref(optimizer), _activity))


def end_step(optimizer: Optimizer, options: Options) -> None:
    """Called behind every step for which `begin_step` was."""
    before = next((count for reference, count in reversed(_running) if reference() is optimizer), _activity)
    del _running[:]
    if _has_sparse_gradient(optimizer):
        _report(optimizer, options)
    elif _activity != before:
        _reached.add(optimizer)
    elif optimizer not in _reached or _holds_quantized(optimizer):
        _report(optimizer, options)


def note_eager_step(optimizer: Optimizer, backend: Callable[..., Any] | None) -> None:
    """Called in front of every eager step: it is one that should not be, if a function compiled for us called it."""
    for found, keywords in _compat.enclosing_backends():
        if found is backend and backend is not None:
            _report(optimizer, Options.parse(keywords.get("options")))


def _report(optimizer: Optimizer, options: Options) -> None:
    if not options.chosen.quantized or not any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
        return
    reason = dense_reason(optimizer)
    record_of(optimizer).dense_reason = reason
    name = type(optimizer).__name__
    if options.strict:
        raise NotQuantizedError([f"all state of {name}: {reason}"])
    if optimizer not in _reported:
        _reported.add(optimizer)
        log.warning("%s.step was compiled with backend='qstate' but runs dense: %s", name, reason)


def _has_sparse_gradient(optimizer: Optimizer) -> bool:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return any(g is not None and g.layout != torch.strided for g in gradients)


def _holds_quantized(optimizer: Optimizer) -> bool:
    buffers = (b for values in optimizer.state.values() if isinstance(values, dict) for b in values.values())
    return any(isinstance(b, QuantizedState) for b in buffers)


def dense_reason(optimizer: Optimizer) -> str:
    """Why an optimizer's step did not reach the compiler, as far as can be told."""
    if _has_sparse_gradient(optimizer):
        return "a gradient is sparse, and torch does not compile sparse updates"
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        return f"torch does not compile {type(optimizer).__name__}.step"
    return "torch ran the step as eager Python; TORCH_LOGS='graph_breaks,recompiles' shows why"
