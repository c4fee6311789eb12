"""What happens to an optimizer around a compiled step, before any graph reaches the backend.

`torch.optim`'s global step hooks are public. Dynamo traces them; where it traces for our backend they call functions it
is told to leave alone, so that these run as plain Python in front of and behind every compiled step:

- `fused` and `foreach` implementations are switched to the per-tensor one for the duration of the step: torch keeps
  Dynamo out of fused functions, and one implementation gives one update class. The flags are put back after the step.
- State that does not exist yet is created and quantized parameter by parameter, so that dense state never exists for
  more than one of them.

A step that runs eagerly although a function compiled with our backend called it is reported once, with the reason.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from qcompile import _compat, monitoring
from qcompile._compat_dynamo import break_behind, keep_attributes, trace_out
from qcompile.dense_step import activity, begin_step, breaks, end_step, note_eager_step
from qcompile.exc import NotOneGraphError
from qcompile.first_step import give_gradients_back, hide_gradients, run_apart, undecorated
from qcompile.new_state import SAVED, create_state, quantize_new_state
from qcompile.options import Options
from qcompile.passes.find_state import note_optimizer
from qcompile.ranks import require_agreement

FLAGS = ("fused", "foreach")

_saved: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # put their flags back before they are saved
_backend: Callable[..., Any] | None = None
_tokens: list[Options] = []


@dataclass(slots=True)
class Watch:
    """What happened inside a `train_step` function: optimizers that stepped, graphs compiled, ids of parameters in them.

    `whole` while a step is traced as one graph.
    """

    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    graphs: int = 0
    params: set[int] = field(default_factory=set)
    whole: bool = False


_watch: ContextVar[Watch | None] = ContextVar("qstate_watch", default=None)


def install(backend: Callable[..., Any]) -> None:
    """Register the hooks, once per process."""
    global _backend
    if _backend is None:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _backend = backend


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Note what happens in this context in `watch`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def note_graph(gm: fx.GraphModule, example_inputs: Sequence[object]) -> None:
    """Called whenever our backend compiles a graph."""
    activity.compiled += 1
    if (reason := break_behind(gm)) is not None:
        breaks[reason] += 1
    if (watch := _watch.get()) is not None:
        held = (getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr")
        if watch.whole and any(isinstance(value, nn.Parameter) and value.requires_grad for value in held):
            raise NotOneGraphError("a parameter is an attribute of the graph, where backward() does not reach it")
        watch.graphs += 1
        watch.params.update(id(value) for value in example_inputs if isinstance(value, nn.Parameter))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        token = _trace_token()
        if token >= 0:
            _prepare(optimizer, token)
    else:
        _note_step(optimizer)
        note_eager_step(optimizer, _backend)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        token = _trace_token()
        if token >= 0:
            _finish(optimizer, token)
    else:
        restore_flags(optimizer)


@torch.compiler.assume_constant_result
def _trace_token() -> int:
    """Which of `_tokens` are the options of the backend that is being traced for; -1 for other backends."""
    backend, keywords = _compat.tracing_backend()
    if backend is None or backend is not _backend:
        return -1
    _compat.trace_math_pow(backend)
    keep_attributes(backend)
    trace_out(backend)
    options = Options.parse(keywords.get("options"))
    if options not in _tokens:
        _tokens.append(options)
    return _tokens.index(options)


@torch.compiler.disable
def _prepare(optimizer: Optimizer, token: int) -> None:
    options = _tokens[token]
    require_agreement(optimizer, options)
    _note_step(optimizer)
    monitoring.begin_step(optimizer)
    begin_step(optimizer, options)
    _compat.always_trace(undecorated(type(optimizer).step))
    give_gradients_back(optimizer)  # of a step that failed
    _unscale(optimizer)
    if options.quantizes and not run_apart(optimizer, options, quantize_new_state):
        create_state(optimizer, options)
    set_flags(optimizer)
    if optimizer not in _saved:
        _saved.add(optimizer)
        optimizer.register_state_dict_pre_hook(restore_flags)  # a step that was interrupted has not put them back


def _unscale(optimizer: Optimizer) -> None:
    """Do what a fused step does for `torch.amp.GradScaler`, once: from now on the scaler does it, as for every other step.

    The scaler hands an optimizer that was made with `fused=True` the scale and whether a gradient is not finite, and leaves
    it to the step, which is no longer the fused one, to divide by it, or not to happen.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found_inf is None:
        return
    changes: Any = optimizer
    changes._step_supports_amp_scaling = False
    changes.grad_scale = changes.found_inf = None
    given = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if found_inf is not None and bool(found_inf):
        hide_gradients(optimizer, given)
    elif scale is not None:
        for _, gradient in given:
            gradient.div_(float(scale))


def _note_step(optimizer: Optimizer) -> None:
    note_optimizer(optimizer)
    if (watch := _watch.get()) is not None:
        watch.optimizers.add(optimizer)


@torch.compiler.disable
def _finish(optimizer: Optimizer, token: int) -> None:
    restore_flags(optimizer)
    give_gradients_back(optimizer)
    monitoring.end_step(optimizer)
    if end_step(optimizer, _tokens[token]):
        gc.collect()  # tracing leaves cycles, and they hold the dense state that was converted


def set_flags(optimizer: Optimizer, **others: bool) -> None:
    """Choose the per-tensor implementation in every group, and set `others` where a group has them."""
    for group in optimizer.param_groups:
        wanted = {**dict.fromkeys(FLAGS, False), **others}
        flags = {name: group[name] for name in wanted if name in group}
        if flags and SAVED not in group:
            group[SAVED] = flags
            group.update({name: wanted[name] for name in flags})


def own_hooks(optimizer: Optimizer) -> bool:
    """Whether step hooks other than ours would run."""
    ours = {_before_step, _after_step}
    everywhere = {*_compat.global_step_hooks()} - ours
    return bool(everywhere or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def restore_flags(optimizer: Optimizer) -> None:
    """Give every group its own `fused` and `foreach` back; what is stopped on the way can be done again."""
    for group in optimizer.param_groups:
        group.update(group.get(SAVED, {}))
        group.pop(SAVED, None)
