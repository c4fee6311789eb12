"""Options of the backend: `torch.compile(..., backend="qstate", options={...})` or keywords of `train_step`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from qcompile.exc import InvalidOptionError, UnknownOptionError, UnknownRecipeError
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
        inductor: options for Inductor itself, used for every graph and kernel.
    """

    recipe: str = "8bit"
    block_size: int | None = None
    min_numel: int = 4096
    strict: bool = False
    inductor: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise UnknownRecipeError(self.recipe, RECIPES)
        if self.block_size is not None and not is_block_size(self.block_size):
            rule = f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
            raise InvalidOptionError("block_size", self.block_size, rule)
        if not isinstance(self.min_numel, int) or isinstance(self.min_numel, bool) or self.min_numel < 0:
            raise InvalidOptionError("min_numel", self.min_numel, "a whole number of elements, 0 or more")
        if not isinstance(self.strict, bool):
            raise InvalidOptionError("strict", self.strict, "True or False")
        if self.inductor is not None and not isinstance(self.inductor, Mapping):
            raise InvalidOptionError("inductor", self.inductor, "a dict of Inductor options")

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

    def format(self, signed: bool) -> Format | None:
        """Storage for a state of this sign, or None where the recipe keeps it dense."""
        recipe = self.chosen
        return Format(signed, self.block_size or recipe.block_size) if recipe.quantized else None
