"""Recipes: which format each kind of state gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats by name.

    Attributes:
        name: what the user writes.
        quantized: False for the recipe that keeps every state dense.
        block_size: default block size.
        source: where the method is from.
    """

    name: str
    quantized: bool
    block_size: int
    source: str


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("8bit", True, 256, "dynamic map, one fp32 scale per block: Dettmers et al., arXiv 2110.02861"),
        Recipe("dense", False, 256, "every state as the optimizer made it; compiled the same way, for comparison"),
    )
}
