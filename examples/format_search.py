"""Where the formats of `4bit` and `8bit` come from: each choice changed alone, in a shadow of a real training run.

    python examples/format_search.py > examples/results/format_search.md    # about an hour of one core
    python examples/format_search.py --size "0.14 M" --steps 20             # a quick look

A byte-level GPT is trained exactly, and copies of AdamW's moments in each variant are fed with its gradients
(`qcompile.analysis.shadow`); what counts is how far the update they would give is from the exact one. Choices are changed in
the order of what hurts: coordinate and levels of the first moment, its rounding and scale, blocks and rows, the second moment.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from quantization_error import SIZES, follow, part_of, table

from qcompile.recipes import RECIPES, Recipe
from qcompile.runtime.formats import Format

PARTS = ("body", "head", "embeddings")
VALUES: dict[str, Any] = {"coordinate": "identity", "partner": None, "eps": 0.0, "scale_dtype": torch.float32}
DYN4_NZ = Format(False, 4, "dyn4-nz", block_size=128)
# By recipe: what is changed, and in which of its formats ("first", "second" or "both"; "rows" is the recipe's own).
VARIANTS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "4bit": [
        ("first moment as it is, NF4", "first", VALUES),
        ("first moment as it is, signed dynamic", "first", {**VALUES, "codebook": "sdyn4"}),
        ("levels: evenly spaced", "first", {"codebook": "linear"}),
        ("levels: softsign", "first", {"codebook": "softsign"}),
        ("levels: fitted", "first", {"codebook": "fitted"}),
        ("levels: signed dynamic", "first", {"codebook": "sdyn4"}),
        ("first moment rounded stochastically", "first", {"rounding": "stochastic"}),
        ("scale of the first moment by EDEN", "first", {"scaling": "eden"}),
        ("scale of the first moment in fp32", "first", {"scale_dtype": torch.float32}),
        ("rows ignored, blocks of 128", "rows", {"block_size": 128}),
        ("rows ignored, blocks of 64", "rows", {"block_size": 64}),
        ("rows ignored, blocks of 32", "rows", {"block_size": 32}),
        ("rows ignored, blocks of 2,048", "rows", {"block_size": 2048}),
        ("second moment rounded to nearest", "second", {"rounding": "nearest"}),
        ("second moment with a dither per element", "second", {"rounding": "dither"}),
        ("second moment unbiased in 1/sqrt(v)", "second", {"rounding": "preconditioner"}),
        ("second moment in exact logarithms", "second", {"coordinate": "log"}),
        ("root of the second moment", "second", {"coordinate": "sqrt"}),
        ("second moment dynamic without zero, unbiased in 1/sqrt(v)", "second", {"format": DYN4_NZ, "rounding": "preconditioner", "eps": 1e-8}),
        ("second moment dynamic without zero, EDEN", "second", {"format": DYN4_NZ, "scaling": "eden"}),
    ],
    "8bit": [
        ("first moment as it is, dynamic", "first", {**VALUES, "codebook": "dynamic"}),
        ("first moment as it is, evenly spaced", "first", VALUES),
        ("levels: dynamic", "first", {"codebook": "dynamic"}),
        ("levels: softsign", "first", {"codebook": "softsign"}),
        ("first moment rounded stochastically", "first", {"rounding": "stochastic"}),
        ("scale of the first moment in fp32", "first", {"scale_dtype": torch.float32}),
        ("rows ignored, blocks of 256", "rows", {"block_size": 256}),
        ("rows ignored, blocks of 64", "rows", {"block_size": 64}),
        ("rows ignored, blocks of 2,048", "rows", {"block_size": 2048}),
        ("second moment rounded to nearest", "second", {"rounding": "nearest"}),
        ("second moment with a dither per element", "second", {"rounding": "dither"}),
        ("second moment unbiased in 1/sqrt(v)", "second", {"rounding": "preconditioner"}),
        ("second moment in exact logarithms", "second", {"coordinate": "log"}),
        ("root of the second moment", "second", {"coordinate": "sqrt"}),
        ("second moment dynamic", "second", {"format": Format(False, 8, "dynamic", block_size=256)}),
    ],
}  # fmt: skip


def variant(name: str, what: str, which: str, change: dict[str, Any]) -> Recipe:
    """A recipe with one choice changed."""
    recipe = RECIPES[name]
    assert recipe.first is not None
    assert recipe.second is not None
    first, second = recipe.first, recipe.second
    changed = dict(change)
    if which == "first":
        first = replace(first, **changed)
    elif which == "second":
        second = replace(changed.pop("format", second), **changed)
    else:
        first, second = replace(first, **changed), replace(second, **changed)
    return replace(recipe, name=what, first=first, second=second, rows=recipe.rows and which != "rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="0.39 M", help="parameters of the model")
    parser.add_argument("--steps", type=int, default=250, help="errors are summed over the last 60")
    args = parser.parse_args()
    print(
        f"Made by `python examples/format_search.py --size '{args.size}' --steps {args.steps}`. Relative error of the update."
    )
    for name, variants in VARIANTS.items():
        recipes: list[str | Recipe] = [name, *(variant(name, *v) for v in variants)]
        found = {}
        for beta2 in (0.95, 0.999):
            copies = follow(recipes, beta2, args.steps, size=SIZES[args.size])
            found[beta2] = copies.errors(part_of)
        rows = [
            [
                what,
                f"{copies.bytes_per_parameter(what):.3f}",
                *(f"{found[b][what][p]:.4f}" for b in found for p in PARTS),
            ]
            for what in found[0.95]
        ]
        header = ["variant", "B/param here", *(f"{p}, β2 {b}" for b in found for p in PARTS)]
        table(f"`{name}`, and what happens when one of its choices is another", header, rows)


if __name__ == "__main__":
    main()
