"""Options of the backend: `torch.compile(..., backend="qstate", options={...})` or keywords of `train_step`."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from qcompile.exc import InvalidOptionError, UnknownOptionError, UnknownRecipeError
from qcompile.names import Named, named
from qcompile.nn import is_stable_embedding
from qcompile.overrides import LAST_LINEAR, Override, Selector, check_selector, parse_overrides, require_match, selects
from qcompile.recipes import RECIPES, Recipe
from qcompile.runtime.formats import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE, Format, is_block_size


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose.

    Attributes:
        recipe: a name from `qcompile.recipes.RECIPES`.
        block_size: elements per scale; None is the recipe's own.
        min_numel: state of fewer elements stays dense.
        strict: raise `NotQuantizedError` when a state that is large enough stays dense.
        overrides: other formats for some parameters or state; where several match, the last one counts.
        seed: of the random bits of stochastic rounding.
        train_steps: how many steps the training takes. Recipes that round the first moment of `late_params`
            stochastically at the end do so from step `round(0.9 * train_steps)` on; None is never.
        late_params: which parameters that is: a selector as in `Override`, or "last linear layer".
        inductor: options for Inductor itself, used for every graph and kernel.
    """

    recipe: str = "8bit"
    block_size: int | None = None
    min_numel: int = 4096
    strict: bool = False
    overrides: tuple[Override, ...] = ()
    seed: int = 0
    train_steps: int | None = None
    late_params: Selector = LAST_LINEAR
    inductor: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise UnknownRecipeError(self.recipe, RECIPES)
        object.__setattr__(self, "overrides", parse_overrides(self.overrides))
        rule = f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
        _check("block_size", self.block_size, self.block_size is None or is_block_size(self.block_size), rule)
        _check("min_numel", self.min_numel, _is_count(self.min_numel), "a whole number of elements, 0 or more")
        _check("strict", self.strict, isinstance(self.strict, bool), "True or False")
        _check("seed", self.seed, isinstance(self.seed, int), "a whole number")
        is_steps = self.train_steps is None or (_is_count(self.train_steps) and self.train_steps > 0)
        _check("train_steps", self.train_steps, is_steps, "a whole number of steps, 1 or more")
        check_selector("late_params", self.late_params)
        _check(
            "inductor",
            self.inductor,
            self.inductor is None or isinstance(self.inductor, Mapping),
            "a dict of Inductor options",
        )

    @classmethod
    def parse(cls, given: Mapping[str, object] | None) -> Options:
        """Options from a mapping; unknown names raise `UnknownOptionError`, bad values `InvalidOptionError`."""
        names = {field.name for field in dataclasses.fields(cls)}
        given = given or {}
        if unknown := set(given) - names:
            raise UnknownOptionError(map(str, unknown), names)
        return cls(**given)  # type: ignore[arg-type]

    @property
    def chosen(self) -> Recipe:
        return RECIPES[self.recipe]

    @property
    def quantizes(self) -> bool:
        """Whether any state may be quantized."""
        return self.chosen.quantized or any(o.format != "dense" for o in self.overrides)


@dataclass(frozen=True, slots=True)
class Choices:
    """Options, applied to parameters: overrides and late rounding need their names, which are looked up once."""

    options: Options
    named: dict[int, Named] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options, params: Iterable[Tensor]) -> Choices:
        """For these parameters."""
        late = options.chosen.late and options.train_steps is not None
        return cls(options, named(params) if options.overrides or late else {})

    def recipe_for(self, param: Tensor | None, key: str) -> Recipe | Format:
        """The recipe or the very format that `optimizer.state[param][key]` gets."""
        known = self.named.get(id(param))
        chosen: Recipe | Format = RECIPES["dense"] if is_stable_embedding(param) else self.options.chosen
        for override in self.options.overrides:
            if param is None or known is None or not fnmatch.fnmatchcase(key, override.state):
                continue
            if selects(override.params, known, param):
                chosen = override.format if isinstance(override.format, Format) else RECIPES[override.format]
        return chosen

    def why_dense(self, param: Tensor | None, given: Recipe) -> str:
        """Why a state is dense that `recipe_for` gave a dense recipe."""
        if given is self.options.chosen:
            return f"recipe {given.name!r} keeps state dense"
        by_layer = is_stable_embedding(param) and not any(o.format == given.name for o in self.options.overrides)
        return "its layer is a StableEmbedding" if by_layer else "an override keeps it dense"

    def late_start(self, param: Tensor | None) -> int | None:
        """From which store on the parameter's first moment is rounded stochastically, if it is to be."""
        steps, known = self.options.train_steps, self.named.get(id(param))
        if param is None or steps is None or known is None or not selects(self.options.late_params, known, param):
            return None
        return round(0.9 * steps)

    def require_matches(self, params: Iterable[tuple[Tensor, Iterable[str]]]) -> None:
        """Raise `UnmatchedOverrideError` where an override matches none of (parameter, keys of its state)."""
        known = [(self.named[id(p)], p, keys) for p, keys in params if id(p) in self.named]
        for override in self.options.overrides:
            require_match(override, known)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise InvalidOptionError(name, value, rule)
