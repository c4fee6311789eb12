"""A whole training step as one Dynamo graph: forward, backward, clipping, update and `zero_grad`.

`Optimizer` breaks the graph on purpose. So while the step runs, each optimizer it reaches is an object of a plain twin
class, with the same attributes and the same methods less their decorators, which Dynamo traces like any other code. The
optimizer keeps its identity, state and groups, and is itself again when the step returns or fails.

What cannot be one graph raises in Dynamo before anything has run; the caller then takes the way of several graphs.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from qcompile._compat import as_plain_inputs, tree_map
from qcompile._compat_distributed import is_dtensor
from qcompile.first_step import undecorated
from qcompile.hooks import own_hooks, restore_flags, set_flags
from qcompile.passes.find_state import TWIN_MARK, state_of

# How deep to look for optimizers: through containers, attributes and the functions that a step calls.
DEPTH = 4


def reached(function: Callable[..., Any]) -> tuple[list[Optimizer], list[torch.nn.Module]]:
    """The optimizers and modules that a function can reach through its closure, defaults, the globals it names, its object
    and containers."""
    found: dict[int, Optimizer] = {}
    modules: list[torch.nn.Module] = []
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if id(value) in seen or depth > DEPTH or isinstance(value, (Tensor, types.ModuleType, type)):
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found[id(value)] = value
        elif isinstance(value, torch.nn.Module):
            modules.append(value)
        elif isinstance(value, (list, tuple, set)):
            for item in value:
                look(item, depth + 1)
        elif isinstance(value, dict):
            for item in value.values():
                look(item, depth + 1)
        elif isinstance(value, types.MethodType):
            look(value.__self__, depth)
            look(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # a cell that is still empty
                    look(cell.cell_contents, depth + 1)
            look([*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()], depth)
            for name in value.__code__.co_names:
                look(value.__globals__.get(name), depth + 1)
        elif hasattr(value, "__dict__"):
            look(vars(value), depth + 1)

    look(function, 0)
    return list(found.values()), modules


def why_not(optimizers: list[Optimizer], modules: Sequence[torch.nn.Module] = ()) -> str | None:
    """Why a step with these optimizers and modules cannot be one graph, as far as it can be told without trying."""
    if not optimizers:
        return "no optimizer was found in what the function refers to"
    for module in (inner for outer in modules for inner in outer.modules()):
        if isinstance(module, DistributedDataParallel):
            return "DistributedDataParallel reduces gradients in hooks of backward(), which one graph would not run"
    if any(is_dtensor(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        return "parameters are DTensors, which are gathered and reduced in hooks"
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
            return f"torch does not compile {name}.step"
        if optimizer.defaults.get("differentiable"):
            return f"{name} was made with differentiable=True"
        if own_hooks(optimizer):
            return f"{name} has step hooks, which run as eager Python"
    return None


@functools.cache
def plain_twin(kind: Any) -> type:
    """A class that is no Optimizer, with the methods of `kind` less their decorators."""
    body: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        body.update({k: undecorated(v) for k, v in vars(base).items() if k not in ("__dict__", "__weakref__")})
    step = body["step"]

    def without_grad(self: Any, closure: Any = None) -> Any:
        with torch.no_grad():
            return step(self) if closure is None else step(self, closure)

    body["step"] = without_grad
    body[TWIN_MARK] = True
    body["_cuda_graph_capture_health_check"] = body["_accelerator_graph_capture_health_check"] = lambda self: None
    return type(kind.__name__, (), body)


@contextlib.contextmanager
def as_plain_objects(optimizers: list[Optimizer]) -> Iterator[None]:
    """Let the optimizers be of their twin classes, with the flags of the per-tensor implementation, in this context."""
    changed: list[tuple[Any, type, Any]] = []
    params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    state = [slot.get() for o in optimizers for slot in state_of(o).values()]
    with as_plain_inputs([t for t in [*params, *state] if isinstance(t, Tensor)]):
        try:
            for optimizer in optimizers:
                set_flags(optimizer, capturable=True)
                kind = type(optimizer)
                # A scheduler hangs its own wrapper on `step`, to see that it was called before the scheduler.
                changed.append((optimizer, kind, vars(optimizer).pop("step", None)))
                twin: Any = plain_twin(cast(Any, kind))
                optimizer.__class__ = twin
            yield
        finally:
            for optimizer, kind, step in changed:
                optimizer.__class__ = kind
                if step is not None:
                    optimizer.step = step
                    optimizer._opt_called = True
                restore_flags(optimizer)


def detached(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with tensors it returns detached: their graph ends inside the step."""

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, function(*args, **kwargs))

    # Dynamo keeps what it compiled, and counts recompilations, by code object: each function needs its own.
    own: Any = step
    own.__code__ = own.__code__.replace()
    return step
