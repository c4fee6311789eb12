"""The `train_step` decorator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import torch

from qcompile import hooks
from qcompile.explain import Report, explain
from qcompile.options import Options

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
) -> Callable[[Callable[P, R]], TrainStep[P, R]]: ...
def train_step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """Compile a training step so that the optimizers in it keep quantized state.

    `@qcompile.train_step` or `@qcompile.train_step(recipe="8bit", ...)`. Does what
    `torch.compile(function, backend="qstate", options={...})` does, and adds `.explain()`.

    Args:
        mode, dynamic: as in `torch.compile`.
        options: see `qcompile.options.Options`.

    Raises:
        UnknownRecipeError, UnknownOptionError, InvalidOptionError: at decoration, when `options` is wrong.
    """
    Options.parse(options)

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = torch.compile(function, backend="qstate", options=options or None, mode=mode, dynamic=dynamic)
        watch = hooks.Watch()

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            with hooks.watching(watch):
                return compiled(*args, **kwargs)

        def report(alive: Any = compiled) -> Report:  # holds the function, and so its optimizers
            return dataclasses.replace(explain(*watch.optimizers), graphs=watch.graphs)

        cast(Any, step).explain = report
        return step

    return decorate if function is None else decorate(function)
