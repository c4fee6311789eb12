"""What quantization does to the state of a running training: errors, dead and saturated codes, now and then.

On a step that is looked at, the exact update of the first elements of each quantized buffer is computed once more, eagerly, from
the program that its kernel was made from, and compared with what the kernel has stored. It works for any optimizer whose
update the compiler knows. On all other steps nothing happens, and nothing of it is ever in a graph.
"""

from __future__ import annotations

import csv
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from qcompile._compat_distributed import local_of
from qcompile.exc import InvalidOptionError
from qcompile.names import named
from qcompile.passes.find_state import owner_of, state_of
from qcompile.runtime.launch import Region, UpdateClass, observers
from qcompile.runtime.layout import flat
from qcompile.runtime.state import QuantizedState
from qcompile.runtime.views import dense_of, stored_of, tensor_of

log = logging.getLogger("qcompile")
# Half decades from 1e-5 to 10.
ERROR_EDGES = tuple(10 ** (half / 2) for half in range(-10, 3))
# From here on a buffer is warned about: of the update's norm, and of the elements that changed.
MUCH_ERROR, MUCH_STALE, MUCH_EXTREME = 0.7, 0.95, 0.25


@dataclass(frozen=True, slots=True)
class Figures:
    """One buffer after one step, by its first `elements` elements.

    Attributes:
        step: which compiled step since `monitor` was called, from 1.
        param, key, format: which buffer, and how it is stored.
        storage_error: norm of what storing changed, over the norm of the exact new state.
        update_error: norm of what that changes in the next update of the parameter for the same gradient, over the norm of
            that update; None where the update writes no parameter.
        zero_share: of elements that are stored as 0 and are not.
        extreme_share: of codes that are the least or the greatest.
        stale_share: of elements that the update changed, those whose code stayed.
        non_finite: elements of the exact new state that are Inf or NaN.
        error_histogram: how many elements have a relative error of storage in each range that `ERROR_EDGES` bounds; the first
            range begins at 0, the last has no end. What is stored as 0 has an error of 1.
    """

    step: int
    param: str
    key: str
    format: str
    elements: int
    storage_error: float
    update_error: float | None
    zero_share: float
    extreme_share: float
    stale_share: float
    non_finite: int
    error_histogram: tuple[int, ...] = ()


class Writer(Protocol):
    """What TensorBoard's SummaryWriter offers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


Target = Callable[[list[Figures]], Any] | Writer | str | os.PathLike[str] | None


class Monitor:
    """Looks at an optimizer until `close()`; `figures` are those of the last step that was looked at."""

    def __init__(self, optimizer: Optimizer, every: int, target: Target, elements: int) -> None:
        self.optimizer, self.every, self.target, self.elements = weakref.ref(optimizer), every, target, elements
        self.figures: list[Figures] = []
        self.step = 0
        self._found: list[Figures] = []
        self._warned: set[tuple[str, str]] = set()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.names = {key: value.name for key, value in named(params).items()}

    @property
    def is_due(self) -> bool:
        return (self.step - 1) % self.every == 0

    def close(self) -> None:
        """Look no more."""
        optimizer = self.optimizer()
        if optimizer is not None:
            _monitors.pop(optimizer, None)
        if not _monitors and _observe in observers:
            observers.remove(_observe)

    def found(self, figures: Figures, is_random: bool) -> None:
        self._found.append(figures)
        place = (figures.param, figures.key)
        if (advice := _advice(figures, is_random)) and place not in self._warned:
            self._warned.add(place)
            log.warning("%s of %s (%s): %s", figures.key, figures.param, figures.format, advice)

    def end(self) -> None:
        """Hand on what was found in the step that is over."""
        if not self._found:
            return
        self.figures, self._found = self._found, []
        if callable(self.target):
            self.target(self.figures)
        elif isinstance(self.target, (str, os.PathLike)):
            _write_csv(Path(self.target), self.figures)
        elif self.target is not None:
            for figures in self.figures:
                for name in NUMBERS:
                    if (value := getattr(figures, name)) is not None:
                        self.target.add_scalar(f"qcompile/{figures.param}/{figures.key}/{name}", value, figures.step)


COLUMNS = [field.name for field in dataclasses.fields(Figures) if field.name != "error_histogram"]
NUMBERS = ("storage_error", "update_error", "zero_share", "extreme_share", "stale_share", "non_finite")
_monitors: weakref.WeakKeyDictionary[Optimizer, Monitor] = weakref.WeakKeyDictionary()


def monitor(optimizer: Optimizer, every: int = 100, to: Target = None, elements: int = 1 << 16) -> Monitor:
    """Look at the quantized state of an optimizer in its next compiled step and every `every` steps from there.

    Args:
        optimizer: its step is compiled with `backend="qstate"`, now or later.
        every: steps from one look to the next.
        to: a function of a list of `Figures`, the name of a CSV file (which is appended to), or a SummaryWriter of
            TensorBoard; None keeps them in `.figures` alone.
        elements: how many elements of each buffer to look at; bounds the time and the memory that a look takes.

    Raises:
        InvalidOptionError: `every` or `elements` is no positive whole number.
    """
    for name, value in (("every", every), ("elements", elements)):
        if not isinstance(value, int) or value < 1:
            raise InvalidOptionError(name, value, "a whole number, 1 or more")
    optimizer = owner_of(optimizer)
    if _observe not in observers:
        observers.append(_observe)
    _monitors[optimizer] = made = Monitor(optimizer, every, to, elements)
    return made


def last_figures(optimizer: Optimizer) -> tuple[Figures, ...]:
    """Those of the last step that was looked at; empty where nobody looks."""
    found = _monitors.get(optimizer)
    return () if found is None else tuple(found.figures)


def begin_step(optimizer: Optimizer) -> None:
    """Called in front of every compiled step."""
    if (found := _monitors.get(optimizer)) is not None:
        found.step += 1


def end_step(optimizer: Optimizer) -> None:
    """Called behind it."""
    if (found := _monitors.get(optimizer)) is not None:
        found.end()


def _observe(update: UpdateClass, args: Sequence[Any]) -> Callable[[], None] | None:
    """What `UpdateClass.run` calls before it runs; gives what it calls when it has run."""
    due = [found for found in _monitors.values() if found.is_due]
    if not due or update.layout.elements is None:
        return None
    looks = [look for found in due for look in _looks(found, update, args)]

    def after() -> None:
        for look in looks:
            look()

    return after


def _looks(found: Monitor, update: UpdateClass, args: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """One look per region of the class that updates state of the monitored optimizer."""
    optimizer = found.optimizer()
    states = {}
    for slot in () if optimizer is None else state_of(optimizer).values():
        if isinstance(state := slot.get(), QuantizedState):
            states[state.codes.data_ptr()] = (slot, state)
    params = {
        local_of(p).data_ptr(): p for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]
    }
    storage = update.layout.storage
    for region in update.regions:
        own = [
            None if fmt is None else states.get(stored_of(source, args)[0].data_ptr())
            for source, fmt in zip(region.operands, storage, strict=True)
        ]
        if any(own):
            yield _Look(found, update, region, args, own, params).compare


class _Look:
    """The exact update of a few elements of a region, made before it runs."""

    def __init__(
        self,
        found: Monitor,
        update: UpdateClass,
        region: Region,
        args: Sequence[Any],
        own: list[Any],
        params: dict[int, Tensor],
    ) -> None:
        self.found, self.layout, self.own = found, update.layout, own
        block = update.layout.block_size
        self.count = min(found.elements, region.model.numel()) // block * block
        self.values: list[Tensor] = []
        self.param: int | None = None
        self.name = ""
        for i, (source, state) in enumerate(zip(region.operands, own, strict=True)):
            if state is not None:
                self.values.append(state[1].head(self.count))
            else:
                tensor, values = dense_of(source, args, region.model)
                self.values.append(flat(values.detach())[: self.count].clone())
                if update.layout.written[i] and tensor.data_ptr() in params:
                    self.param = i
                    self.name = found.names.get(id(params[tensor.data_ptr()]), "?")
        self.codes = [None if state is None else self._codes(state[1]) for state in own]
        numbers = self.layout.scalars(*(tensor_of(source, args).clone() for source in region.numbers))
        self.numbers = list(numbers[: self.layout.scalar_count])
        self.exact = self._run(self.values)

    def _codes(self, state: QuantizedState) -> Tensor:
        return state.codes[: self.count // state.format.block_size].clone()

    def _run(self, values: list[Tensor]) -> dict[int, Tensor]:
        """New values of what the update writes, by operand."""
        assert self.layout.elements is not None
        with torch.no_grad():
            results = self.layout.elements(*values, *self.numbers)
        return dict(zip((i for i, written in enumerate(self.layout.written) if written), results, strict=True))

    def compare(self) -> None:
        """Called when the region has run."""
        stored = [None if state is None else state[1].head(self.count) for state in self.own]
        now = [self.exact.get(i, old) for i, old in enumerate(self.values)]
        exact_update = self._next_update(now)
        for i, state in enumerate(self.own):
            if state is None or i not in self.exact:
                continue
            slot, tensor = state
            exact, kept = self.exact[i].float(), stored[i]
            assert kept is not None
            codes, before = self._codes(tensor), self.codes[i]
            assert before is not None
            moved = exact != self.values[i].float()
            self.found.found(
                Figures(
                    step=self.found.step,
                    param=self.name or self.found.names.get(id(slot.param), "?"),
                    key=slot.key,
                    format=str(tensor.format),
                    elements=self.count,
                    storage_error=_relative(kept.float() - exact, exact),
                    update_error=self._update_error(exact_update, now, i, kept),
                    zero_share=_share((kept == 0) & (exact != 0)),
                    extreme_share=_share(_at_ends(codes, tensor.format.bits)),
                    stale_share=_stale(codes, before, moved, tensor.format.bits),
                    non_finite=int((~exact.isfinite()).sum()),
                    error_histogram=_histogram(kept.float() - exact, exact),
                ),
                tensor.format.random,
            )

    def _next_update(self, now: list[Tensor]) -> Tensor | None:
        """What the same gradient would do to the parameter next; None where none is updated."""
        return None if self.param is None else self._run(now)[self.param].float() - now[self.param].float()

    def _update_error(self, exact: Tensor | None, now: list[Tensor], i: int, kept: Tensor) -> float | None:
        """How far that is off because this buffer was stored."""
        found = self._next_update([kept.to(value.dtype) if j == i else value for j, value in enumerate(now)])
        return None if exact is None or found is None else _relative(found - exact, exact)


def _relative(error: Tensor, whole: Tensor) -> float:
    finite = error.isfinite() & whole.isfinite()
    norm = torch.linalg.vector_norm(whole[finite], dtype=torch.float64)  # of 1e38, too
    return float(torch.linalg.vector_norm(error[finite], dtype=torch.float64) / norm) if norm > 0 else 0.0


def _histogram(error: Tensor, whole: Tensor) -> tuple[int, ...]:
    """Finite elements by their relative error; an exact 0 that is stored as something else is as far off as can be."""
    finite = error.isfinite() & whole.isfinite()
    error, whole = error[finite].double().abs(), whole[finite].double().abs()
    relative = torch.where(error == 0, 0.0, error / whole)
    edges = torch.tensor(ERROR_EDGES, dtype=torch.float64, device=relative.device)
    return tuple(torch.bincount(torch.bucketize(relative, edges, right=True), minlength=len(edges) + 1).tolist())


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if mask.numel() else 0.0


def _unpacked(codes: Tensor, bits: int) -> Tensor | None:
    """One code per element, in no particular order; None where codes do not fill bytes or half bytes."""
    whole = codes.contiguous().view(torch.uint8)
    if bits == 8:
        return whole
    return torch.stack([whole & 15, whole >> 4]) if bits == 4 else None


def _at_ends(codes: Tensor, bits: int) -> Tensor:
    own = _unpacked(codes, bits)
    if own is None:
        return torch.zeros(0)
    return (own == own.min()) | (own == own.max()) if own.numel() else own.bool()


def _stale(codes: Tensor, before: Tensor, moved: Tensor, bits: int) -> float:
    """Where bytes hold one code each, by element; else by the share of all codes, as if those that moved were spread evenly."""
    now, then = _unpacked(codes, bits), _unpacked(before, bits)
    if now is None or then is None or not bool(moved.any()):
        return 0.0
    same = now == then
    return (
        _share(same.flatten()[moved.flatten()])
        if bits == 8
        else max(0.0, _share(same) - 1 + _share(moved)) / _share(moved)
    )


def _advice(figures: Figures, is_random: bool) -> str | None:
    """What is wrong with how a buffer is stored, and what to do; None where nothing is.

    Codes that are rounded randomly may stay: on the average they follow.
    """
    override = f'options={{"overrides": {{{figures.param!r}: "8bit"}}}} stores it in 8 bits, "dense" not at all'
    if figures.update_error is not None and figures.update_error > MUCH_ERROR:
        return f"storing it changes the next update by {figures.update_error:.2f} of its norm; {override}"
    if figures.stale_share > MUCH_STALE and not is_random:
        return f"{figures.stale_share:.0%} of the elements that changed kept their code; {override}"
    if figures.extreme_share > MUCH_EXTREME:
        return f"{figures.extreme_share:.0%} of its codes are at the ends of their range; a smaller block_size, or {override}"
    return None


def _write_csv(path: Path, figures: list[Figures]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerows([getattr(row, name) for name in COLUMNS] for row in figures)
