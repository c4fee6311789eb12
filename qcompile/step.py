"""The `train_step` decorator."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import logging
import textwrap
import types
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch.optim import Optimizer

from qcompile import hooks, monitoring
from qcompile._compat import compiling_errors
from qcompile._compat_dynamo import dynamo_settings, tracing_backward
from qcompile.dense_step import LIMITS, SETTINGS
from qcompile.exc import NotOneGraphError, QCompileError, cause_of, reason_of
from qcompile.explain import Report, explain
from qcompile.first_step import makes_state_in_step, undecorated
from qcompile.new_state import create_all_state
from qcompile.one_graph import as_plain_objects, detached, reached, why_not
from qcompile.options import Options
from qcompile.passes.find_state import note_optimizer

log = logging.getLogger("qcompile")

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class TrainStep(Protocol[P, R]):
    """A compiled training step: call it like the function it was made from."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def explain(self) -> Report:
        """`qcompile.explain` of every optimizer that stepped inside this function."""
        ...


@overload
def train_step(function: Callable[P, R], /) -> TrainStep[P, R]: ...
@overload
def train_step(
    *,
    recipe: str = ...,
    block_size: int | None = ...,
    min_numel: int = ...,
    strict: bool = ...,
    inductor: dict[str, object] | None = ...,
    mode: str | None = ...,
    dynamic: bool | None = ...,
    fullgraph: bool = ...,
    one_graph: bool = ...,
) -> Callable[[Callable[P, R]], TrainStep[P, R]]: ...
def train_step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    one_graph: bool = True,
    **options: Any,
) -> Any:
    """Compile a training step so that the optimizers in it keep quantized state.

    `@qcompile.train_step` or `@qcompile.train_step(recipe="8bit", ...)`. Does what
    `torch.compile(function, backend="qstate", options={...})` does, and adds `.explain()`. Where torch can trace all of it,
    forward, backward and update become one graph, in which each gradient is freed as soon as its update has run; the loss
    that is returned is then detached. Elsewhere the step is several graphs, with the same numbers; `explain` says why.

    Args:
        mode, dynamic: as in `torch.compile`.
        fullgraph: raise, with torch's reason, where the step cannot be one graph.
        one_graph: False compiles several graphs from the start. Each update of one graph is launched alone, which takes more
            host time than all updates of a class together, and saves no memory where clipping keeps all gradients alive.
        options: see `qcompile.options.Options`.

    Raises:
        UnknownRecipeError, UnknownOptionError, InvalidOptionError: at decoration, when `options` is wrong.
    """
    chosen = Options.parse(options)

    def decorate(function: Callable[..., Any]) -> Any:
        step = _Step(function, chosen, {"options": options or None, "mode": mode, "dynamic": dynamic}, fullgraph)
        step.reason = None if one_graph else "one_graph=False"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        cast(Any, call).explain = step.explain
        return call

    return decorate if function is None else decorate(function)


def _begins_with_closure(step: Callable[..., Any]) -> bool:
    """Whether a step, by its source, calls its closure once, before anything else: `if closure is not None: ... closure()`."""
    try:
        function = cast(Any, ast.parse(textwrap.dedent(inspect.getsource(undecorated(step)))).body[0])
    except (OSError, TypeError, SyntaxError):
        return False
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == "closure"]
    first = next((n for n in function.body if isinstance(n, ast.If)), None)
    if first is None or not isinstance(first.test, ast.Compare):
        return False
    before = function.body[: function.body.index(first)]
    simple = all(isinstance(n, ast.Expr | ast.Assign | ast.AnnAssign) for n in before)
    inside = [n for n in ast.walk(first) if isinstance(n, ast.Name) and n.id == "closure"]
    called = [n for n in ast.walk(first) if isinstance(n, ast.Call) and n.func in inside]
    return simple and len(called) == 1 and len(inside) == len(uses) == 2


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def compile_step(
    optimizer: AnyOptimizer, *, mode: str | None = None, dynamic: bool | None = None, **options: Any
) -> AnyOptimizer:
    """Let `optimizer.step()` be compiled from now on, for trainers that call it themselves; gives the optimizer back.

    What `optimizer.step = torch.compile(optimizer.step, backend="qstate")` would do, but `step` stays a method, which
    learning-rate schedulers ask for, and a closure is called before it, as it is, where the step begins with that: it may be
    all of a trainer's training step. The class of the optimizer, and other optimizers of that class, are not changed.

    Args:
        mode, dynamic: as in `torch.compile`.
        options: see `qcompile.options.Options`.

    Raises:
        UnknownRecipeError, UnknownOptionError, InvalidOptionError: `options` is wrong.
    """
    Options.parse(options)
    compiled: Any = torch.compile(optimizer.step, backend="qstate", options=options or None, mode=mode, dynamic=dynamic)

    is_apart = _begins_with_closure(type(optimizer).step)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is None or not is_apart:
            return compiled(*([] if closure is None else [closure]), **kwargs)
        with torch.enable_grad():
            loss = closure()
        compiled(**kwargs)
        return loss

    changed: Any = optimizer
    changed.step = types.MethodType(step, optimizer)
    return optimizer


class _Step:
    """Runs a step as one graph where that is possible, else as `torch.compile` does."""

    def __init__(
        self, function: Callable[..., Any], options: Options, settings: dict[str, Any], fullgraph: bool
    ) -> None:
        self.function, self.options, self.fullgraph = function, options, fullgraph
        self.several = torch.compile(function, backend="qstate", **settings)
        self.one = torch.compile(detached(function), backend="qstate", fullgraph=True, **settings)
        self.watch = hooks.Watch()
        self.optimizers: list[Optimizer] | None = None
        self.reason: str | None = None  # why it is not one graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with hooks.watching(self.watch):
            if self.reason is None and (done := self._as_one(args, kwargs)):
                return done[0]
            return self.several(*args, **kwargs)

    def explain(self) -> Report:
        """`qcompile.explain` of every optimizer that stepped here."""
        report = explain(*self.watch.optimizers)
        return dataclasses.replace(report, graphs=self.watch.graphs, not_one_graph=self.reason)

    def _as_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """The result in a tuple, or None where it has to be several graphs."""
        if self.optimizers is None:
            self.optimizers, modules = reached(self.function)
            for optimizer in self.optimizers:
                note_optimizer(optimizer)
            self.reason = why_not(self.optimizers, modules)
            if self.reason is not None:
                self._give_up()
                return None
            if any(makes_state_in_step(optimizer) for optimizer in self.optimizers):
                return None  # only a step makes this state; the next call is one graph
        for optimizer in self.optimizers:
            monitoring.begin_step(optimizer)
        created = create_all_state(self.optimizers, self.options)
        before = self.watch.graphs
        try:
            self.watch.whole = True
            with as_plain_objects(self.optimizers), tracing_backward(), dynamo_settings(LIMITS, **SETTINGS):
                result = self.one(*args, **kwargs)
        except compiling_errors() as error:
            for optimizer, param in created:
                optimizer.state.pop(param, None)
            cause = cause_of(error)
            if isinstance(cause, QCompileError) and not isinstance(cause, NotOneGraphError):
                raise
            self.watch.graphs = before
            self.reason = reason_of(error)
            if self.fullgraph:
                raise NotOneGraphError(self.reason) from error
            self._give_up()
            return None
        finally:
            self.watch.whole = False
        self.watch.optimizers.update(self.optimizers)
        for optimizer in self.optimizers:
            monitoring.end_step(optimizer)
        for optimizer, param in created:  # an eager optimizer has no state for what is not part of the step
            if id(param) not in self.watch.params:
                optimizer.state.pop(param, None)
        return (result,)

    def _give_up(self) -> None:
        if self.fullgraph:
            raise NotOneGraphError(str(self.reason))
        log.info("%s is compiled as several graphs: %s", self.function.__qualname__, self.reason)
