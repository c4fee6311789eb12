"""State of a step that has no optimizer object: `mark_state` and `state_like`."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from qcompile.exc import MarkedStateError
from qcompile.options import Choices, Options
from qcompile.passes.find_state import Slot, is_state_buffer
from qcompile.passes.plan_storage import new_state_format
from qcompile.plan import buffer_key
from qcompile.runtime.formats import Format
from qcompile.runtime.layout import is_flat
from qcompile.runtime.marks import MARKS, mark
from qcompile.runtime.state import QuantizedState


def state_like(param: Tensor, *, name: str | None = None, recipe: str = "8bit", min_numel: int = 4096) -> Tensor:
    """Quantized state of zeros for a parameter, for a step `f(param, grad, state, ...)` that is compiled with our backend.

    The step must write the state in place (`state.lerp_(grad, 0.1)`). When it is compiled, the state is given the format
    that the compiler's analysis and the backend's recipe ask for; until then it is stored as signed state of `recipe`.

    Args:
        param: any shape; the state has its shape, strides, dtype and device. No dense tensor is made.
        name: what `explain` calls the state.
        recipe, min_numel: as in `qcompile.options.Options`.

    Returns:
        A `QuantizedState`, or a plain tensor of zeros where `param` has fewer elements than `min_numel` or than a block.
    """
    return _quantized(param, param, name, recipe, min_numel, zeros=True)


def mark_state(
    state: Tensor,
    param: Tensor | None = None,
    *,
    name: str | None = None,
    recipe: str = "8bit",
    min_numel: int = 4096,
) -> Tensor:
    """Quantize a tensor that a compiled step keeps as state. Use what it returns in the place of `state`.

    Args:
        state: a floating-point tensor of any shape; it is not changed.
        param: the parameter that it is state of, if it is of one.
        name, recipe, min_numel: as for `state_like`.

    Raises:
        MarkedStateError: `state` is not a strided floating-point tensor without gaps.
    """
    if not is_state_buffer(state) or not state.is_floating_point() or not is_flat(state):
        what = f"a {state.layout} tensor of {state.dtype} with shape {tuple(state.shape)}"
        raise MarkedStateError(what, "it is not a floating-point tensor whose elements lie in memory without gaps")
    return _quantized(state, param, name, recipe, min_numel, zeros=False)


def _quantized(
    model: Tensor, param: Tensor | None, name: str | None, recipe: str, min_numel: int, zeros: bool
) -> Tensor:
    options = Options(recipe=recipe, min_numel=min_numel)
    slot = Slot(weakref.ref(MARKS), None, (name or "state",))  # type: ignore[arg-type]
    dense = model.detach()
    fmt: Format | None = new_state_format(slot, dense, Choices(options), fresh=zeros)
    if fmt is None or dense.numel() < max(min_numel, fmt.block_size):
        return torch.zeros_like(dense) if zeros else model
    make = QuantizedState.zeros_like if zeros else QuantizedState.quantize
    state = make(dense, fmt, buffer_key(slot, options.seed, fmt))
    mark(state, param, name)
    return state
