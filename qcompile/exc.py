"""Errors. Each says what was found, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast


class QCompileError(RuntimeError):
    """Base of every error that qcompile raises."""


class UnsupportedTorchError(QCompileError):
    """An API that the backend needs is missing from the installed torch."""

    def __init__(self, missing: Iterable[str], version: str) -> None:
        super().__init__(
            f"torch {version} lacks what the qstate backend needs: {', '.join(sorted(missing))}. "
            "torch 2.11 or newer is supported; install one, or compile with backend='inductor'."
        )


class UnknownRecipeError(QCompileError, ValueError):
    """The recipe does not exist."""

    def __init__(self, found: object, allowed: Iterable[str]) -> None:
        super().__init__(f"unknown recipe {found!r}; recipes are {', '.join(map(repr, allowed))}")


class UnknownOptionError(QCompileError, ValueError):
    """An option does not exist."""

    def __init__(self, found: Iterable[str], allowed: Iterable[str]) -> None:
        super().__init__(
            f"unknown option {', '.join(map(repr, sorted(found)))}; options are {', '.join(sorted(allowed))}"
        )


class InvalidOptionError(QCompileError, ValueError):
    """An option has a value that it cannot take."""

    def __init__(self, name: str, found: object, allowed: str) -> None:
        super().__init__(f"option {name}={found!r}: {name} must be {allowed}")


class InvalidFormatError(QCompileError, ValueError):
    """A `Format` whose choices have no meaning together."""

    def __init__(self, field: str, found: object, rule: str) -> None:
        super().__init__(f"Format({field}={found!r}): {rule}")


class UnmatchedOverrideError(QCompileError, ValueError):
    """An override matches no parameter, or none of its state."""

    def __init__(self, override: str, what: str, near: Iterable[str]) -> None:
        super().__init__(
            f"override {override} matches no {what}; there are {', '.join(map(repr, near)) or 'none'}. "
            "Names of parameters are those in the largest live module that holds them."
        )


class FormatMismatchError(QCompileError, ValueError):
    """A format that this state cannot take."""

    def __init__(self, key: str, shape: tuple[int, ...], fmt: str, found: str) -> None:
        super().__init__(
            f"state {key!r} of a parameter of shape {shape} cannot be stored as {fmt}: {found}. "
            "Give it a signed format in state space, or 'dense', in overrides."
        )


class OverlappingMemoryError(QCompileError):
    """A parameter with several elements in one place of memory."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        super().__init__(
            f"a parameter of shape {shape} with strides {stride} may have several elements in one place in memory, so that "
            "one update would overwrite another; make it a parameter of its own: nn.Parameter(view.clone())"
        )


class ChangedTensorError(QCompileError):
    """Memory of another kind was put under a tensor that a compiled step updates. Nothing was written."""

    def __init__(self, before: tuple[object, ...], now: tuple[object, ...], is_param: bool) -> None:
        what = "a parameter" if is_param else "optimizer state"
        super().__init__(
            f"{what} was {_kind(before)} when the step was compiled, and its data is {_kind(now)} now. "
            "Put a new tensor in its place (optimizer.state[p][key] = ...) instead of new data under it, "
            "or call torch.compiler.reset() before the next step."
        )


def _kind(kind: tuple[object, ...]) -> str:
    dtype, shape, device = kind
    return f"{dtype} of shape {tuple(cast(Iterable[int], shape))} on {device}"


class LostPartnerError(QCompileError):
    """A first moment in update space whose second moment is not at hand."""

    def __init__(self, partner: str) -> None:
        super().__init__(
            f"this state is stored relative to {partner!r} of the same parameter, and does not know where that is; "
            f"attach it with state.attach_(optimizer.state[param][{partner!r}])"
        )


class CheckpointError(QCompileError, ValueError):
    """Saved state that cannot be read. Nothing was loaded."""

    def __init__(self, found: str, allowed: str) -> None:
        super().__init__(
            f"{found}; this version of qcompile reads {allowed}. If the file is whole, load it with the version that wrote "
            "it, and save qcompile.dense_state_dict(optimizer), which every version and torch.optim read."
        )


class NotQuantizedError(QCompileError):
    """`strict=True`, and some optimizer state stays dense."""

    def __init__(self, refusals: Iterable[str]) -> None:
        lines = list(refusals)
        shown = "\n  ".join(lines[:20]) + (f"\n  ... and {len(lines) - 20} more" if len(lines) > 20 else "")
        super().__init__(
            f"strict=True, and {len(lines)} state buffer(s) would stay dense:\n  {shown}\n"
            "Drop strict=True to train with these dense; print(qcompile.explain(optimizer)) then shows all of them."
        )


class MarkedStateError(QCompileError):
    """A tensor that the user marked as state cannot be quantized."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"{name} was marked as state and cannot be quantized: {reason}. Marked state is quantized from the start; "
            "keep this one in a plain tensor, without mark_state or state_like."
        )


class NoStateYetError(QCompileError):
    """State was asked for that only a step of its optimizer creates."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"only a step of {name} creates its state: it has no _init_group and no state yet. "
            "Run one compiled step before the checkpoint is loaded."
        )


class RanksDifferError(QCompileError):
    """Processes that train together were told to compile different things."""

    def __init__(self, differing: Mapping[str, Mapping[int, object]]) -> None:
        lines = []
        for name, values in differing.items():
            ranks: dict[str, list[str]] = {}
            for rank, value in values.items():
                ranks.setdefault(repr(value), []).append(str(rank))
            lines.append(f"{name}: " + "; ".join(f"{value} on rank {', '.join(r)}" for value, r in ranks.items()))
        shown = "\n  ".join(lines)
        super().__init__(
            f"ranks that train together differ in what they compile:\n  {shown}\n"
            "All must have the same options and the same torch. No parameter has moved."
        )


class NoTritonCompilerError(QCompileError):
    """Triton kernels cannot be compiled in this process."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"kernel statistics need Triton's compiler, and {found}; {remedy}")


class NotOneGraphError(QCompileError):
    """A whole step cannot be one graph. `train_step` then takes several, unless `fullgraph=True`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the step cannot be one graph: {reason}")


class GraphSpecError(QCompileError):
    """A pass broke the specification of its stage: a fault of qcompile. Please report it with the message."""

    def __init__(self, stage: str, fault: str) -> None:
        super().__init__(f"after {stage}: {fault}")


def cause_of(error: BaseException) -> BaseException:
    """The error of a backend inside Dynamo's own, or the error itself."""
    return getattr(error, "inner_exception", error)


def reason_of(error: BaseException) -> str:
    """What Dynamo found, on one line; its "Hard failure due to fullgraph=True" hides that one error further down."""
    while str(error).startswith("Hard failure") and (error.__cause__ or error.__context__) is not None:
        error = cast(BaseException, error.__cause__ or error.__context__)
    return " ".join(str(cause_of(error)).split()[:60])
