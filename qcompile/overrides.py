"""Which parameters get another format than the recipe's.

Names are looked up when a graph is compiled, in the modules that are alive then. So it does not matter whether options,
model or optimizer was made first.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from qcompile.exc import InvalidOptionError, UnmatchedOverrideError
from qcompile.names import Named
from qcompile.recipes import RECIPES
from qcompile.runtime.formats import Format

Selector = str | re.Pattern[str] | type[nn.Module] | Callable[[str, Tensor], bool]
LAST_LINEAR = "last linear layer"


@dataclass(frozen=True, slots=True)
class Override:
    """Another format for some state.

    Attributes:
        params: which parameters: a glob over names (`"*.norm.*"`), a compiled regular expression (searched), a module
            type (parameters that are its attributes), or a function of (name, parameter).
        format: a `Format`, the name of a recipe, or `"dense"`.
        state: which of their state: a glob over the keys of `optimizer.state[param]`.
    """

    params: Selector
    format: Format | str
    state: str = "*"

    def __post_init__(self) -> None:
        check_selector("overrides", self.params)
        if not isinstance(self.format, Format) and self.format not in RECIPES:
            raise InvalidOptionError("overrides", self.format, f"a Format or one of {', '.join(map(repr, RECIPES))}")
        if not isinstance(self.state, str):
            raise InvalidOptionError("overrides", self.state, "a glob over keys of optimizer.state[param]")

    def __str__(self) -> str:
        return f"{_shown(self.params)} (state {self.state!r})"


def parse_overrides(given: object) -> tuple[Override, ...]:
    """Overrides from a mapping of selectors to formats, or from a sequence of `Override`."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(Override(params, fmt) for params, fmt in given.items())
    if isinstance(given, Sequence) and all(isinstance(o, Override) for o in given):
        return tuple(given)
    raise InvalidOptionError("overrides", given, "a dict from parameters to formats, or a list of qcompile.Override")


def check_selector(option: str, selector: object) -> None:
    """Raise `InvalidOptionError` unless `selector` can choose parameters."""
    is_module = isinstance(selector, type) and issubclass(selector, nn.Module)
    if not (
        isinstance(selector, str | re.Pattern) or is_module or (callable(selector) and not isinstance(selector, type))
    ):
        rule = "a glob, a compiled regular expression, a module type or a function of (name, parameter)"
        raise InvalidOptionError(option, selector, rule)


def selects(selector: Selector, named: Named, param: Tensor) -> bool:
    """Whether `selector` chooses this parameter."""
    if selector == LAST_LINEAR:
        return named.in_last_linear
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(named.name, selector)
    if isinstance(selector, re.Pattern):
        return selector.search(named.name) is not None
    if isinstance(selector, type):
        return named.owner is not None and issubclass(named.owner, selector)
    return bool(selector(named.name, param))


def require_match(override: Override, params: Iterable[tuple[Named, Tensor, Iterable[str]]]) -> None:
    """Raise `UnmatchedOverrideError` where an override matches none of the parameters, or none of their state."""
    params = list(params)
    matched = [(named, keys) for named, param, keys in params if selects(override.params, named, param)]
    if not matched:
        names = [named.name for named, _, _ in params]
        owners = sorted({named.owner.__name__ for named, _, _ in params if named.owner is not None})
        choices = owners if isinstance(override.params, type) else names
        raise UnmatchedOverrideError(str(override), "parameter", _close(_shown(override.params), choices))
    keys = sorted({key for _, own in matched for key in own})
    if keys and not any(fnmatch.fnmatchcase(key, override.state) for key in keys):
        raise UnmatchedOverrideError(str(override), "state", keys)


def _close(wanted: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(wanted.strip("*"), names, n=5, cutoff=0.3) or list(names)[:5]


def _shown(selector: Selector) -> str:
    if isinstance(selector, str):
        return selector
    return selector.pattern if isinstance(selector, re.Pattern) else getattr(selector, "__name__", repr(selector))
