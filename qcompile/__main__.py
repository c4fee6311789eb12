"""`python -m qcompile`: commands that look at the package and what it generates, not at a training run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from qcompile import bench_command
from qcompile.bench_shapes import MODELS, model_shapes
from qcompile.convert import ONE_STATE, TARGETS, convert_file
from qcompile.doctor import examine
from qcompile.exc import CheckpointError
from qcompile.explain import note_of
from qcompile.kernels import ARCHITECTURES, KernelStats, Statistics, stats
from qcompile.memory_plan import OPTIMIZERS, plan_memory, table
from qcompile.recipes import RECIPES, Recipe

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; argparse reports what is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m qcompile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("recipes", help="formats and bytes per parameter of every recipe")
    bench = commands.add_parser("bench", help="time an optimizer step of every recipe, of torch and of other packages")
    bench_command.add_arguments(bench)
    kernels = commands.add_parser(
        "kernels", help="registers, spills and accesses of generated Triton kernels, without a GPU"
    )
    kernels.add_argument("--arch", nargs="+", default=ARCHITECTURES, metavar="sm_90")
    kernels.add_argument("--optimizer", default="AdamW", help="a class in torch.optim")
    kernels.add_argument(
        "--recipe", nargs="+", choices=RECIPES, default=[r.name for r in RECIPES.values() if r.quantized]
    )
    kernels.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and gradients")
    kernels.add_argument("--block-size", type=int, help="elements per scale; the recipe's own by default")
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write every number there, too")
    conversion = commands.add_parser(
        "convert", help="optimizer checkpoints of torch.optim, bitsandbytes, TorchAO and qcompile into each other"
    )
    conversion.add_argument("source", type=Path, metavar="IN", help="a file of torch.save")
    conversion.add_argument("target", type=Path, metavar="OUT")
    conversion.add_argument("--to", required=True, choices=TARGETS, metavar="FORMAT", help=", ".join(TARGETS))
    conversion.add_argument("--key", help="where in the file the optimizer's state dict is; default: it is the file")
    conversion.add_argument("--optimizer", choices=ONE_STATE, help="for files of bitsandbytes with one state")
    commands.add_parser("doctor", help="whether everything that is needed is there and works")
    planned = commands.add_parser("plan", help="bytes per rank and per checkpoint under DDP, ZeRO-1 and FSDP2")
    planned.add_argument("--model", choices=MODELS, default="llama-7b")
    planned.add_argument("--scale", type=float, default=1.0, help="of every extent of the model")
    planned.add_argument("--ranks", type=int, default=8)
    planned.add_argument("--recipe", choices=RECIPES, default="8bit")
    planned.add_argument("--block-size", type=int, help="elements per scale; the recipe's own by default")
    planned.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    planned.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and gradients")
    planned.add_argument("--bandwidth", type=float, default=2.0, help="to where checkpoints are written, GB/s")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        raise SystemExit(doctor())
    if given.command == "plan":
        if given.ranks < 1 or given.bandwidth <= 0 or given.scale <= 0:
            parser.error(
                f"--ranks {given.ranks} --scale {given.scale:g} --bandwidth {given.bandwidth:g}: all are above 0"
            )
        shapes = model_shapes(given.model, given.scale)
        dtype = getattr(torch, given.dtype)
        plan = plan_memory(shapes, given.ranks, given.recipe, given.optimizer, dtype, given.block_size)
        print(
            f"{given.model}: {plan.count:,} parameters in {given.dtype}, {given.optimizer}, {given.recipe}, {given.ranks} rank(s)"
        )
        print(table(plan, given.bandwidth))
    elif given.command == "bench":
        bench_command.run(given, bench)
    elif given.command == "convert":
        try:
            convert_file(given.source, given.target, given.to, given.key, given.optimizer)
        except CheckpointError as error:
            parser.error(str(error))
    else:
        print(recipe_table() if given.command == "recipes" else kernel_table(given))


def doctor() -> int:
    """Print every finding of `qcompile.doctor`; gives 1 if any is a fault."""
    found = []
    for finding in examine():
        found.append(finding)
        print(finding, flush=True)
    faults = [finding.what for finding in found if finding.state == "fault"]
    print(f"not ready: {', '.join(faults)}" if faults else "ready")
    return int(bool(faults))


def kernel_table(given: argparse.Namespace) -> str:
    """What `qcompile.kernels.stats` finds, for one recipe after the other."""
    rows: list[KernelStats] = []
    for recipe in (progress := tqdm(given.recipe, leave=False)):
        progress.set_description(recipe)
        rows += stats(given.arch, given.optimizer, recipe, getattr(torch, given.dtype), given.block_size).rows
    if given.json is not None:
        given.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return str(Statistics(tuple(rows)))


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
