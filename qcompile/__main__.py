"""`python -m qcompile`: commands that look at the package and what it generates, not at a training run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from qcompile import bench_command
from qcompile.explain import note_of
from qcompile.recipes import RECIPES, Recipe


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; argparse reports what is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m qcompile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("recipes", help="formats and bytes per parameter of every recipe")
    bench = commands.add_parser("bench", help="time an optimizer step of every recipe, of torch and of other packages")
    bench_command.add_arguments(bench)
    chosen = parser.parse_args(arguments)
    if chosen.command == "bench":
        bench_command.run(chosen, bench)
    else:
        print(recipe_table())


def recipe_table() -> str:
    """One row per recipe: bytes per parameter for AdamW, formats, source, and what a format does not promise."""
    rows: list[tuple[str, ...]] = [
        ("recipe", "B/param", "first moment", "second moment", "other signed state", "source")
    ]
    notes = []
    for recipe in RECIPES.values():
        formats = (str(fmt) if fmt is not None else "dense" for fmt in (recipe.first, recipe.second, recipe.signed))
        rows.append((recipe.name, f"{recipe.bytes_per_parameter():.4f}", *formats, recipe.source))
        notes += [f"{recipe.name}: {mark}" for mark in marks(recipe)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([*lines, "", *notes])


def marks(recipe: Recipe) -> list[str]:
    """What the formats of a recipe do that a careful user should know."""
    pairs = ((recipe.first, "first moment"), (recipe.second, "second moment"))
    return [f"{name}: {note}" for fmt, name in pairs if fmt is not None and (note := note_of(fmt)) is not None]


if __name__ == "__main__":
    main()
