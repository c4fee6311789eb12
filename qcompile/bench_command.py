"""The arguments of `python -m qcompile bench`, and the run that they ask for."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from qcompile._compat_inductor import fresh_cache
from qcompile.bench import Workload, free_bytes, run_workload
from qcompile.bench_candidates import LR, OPTIMIZERS, Candidate, bytes_needed, find_candidates
from qcompile.bench_peers import PEERS, find_peers
from qcompile.bench_report import Result, plot, table, write_json
from qcompile.bench_shapes import MODELS, Shape, fitted_scale, model_shapes, parse_shapes
from qcompile.recipes import RECIPES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_SHAPES = "8x1024x4096"
DEFAULT_MODELS = ("gpt2", "gpt2-xl", "llama-7b")
# What all candidates together may take of the memory that is free, where they are scaled to fit.
SHARE_FOR_ALL = 0.8
# Larger than caches, and on a GPU so large that starting it does not count.
COPY_MB = {"cpu": 256, "cuda": 1024}

ShapesAt = Callable[[float], list[Shape]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the command."""
    parser.description = (
        "Time one optimizer step of torch (fused, foreach, for-loop), of stock torch.compile, of our recipes and, with "
        "--peers, of other packages: alternately, in one process, on the same parameters and gradients."
    )
    add = parser.add_argument
    add("--shapes", type=_shapes, action="append", metavar="8x1024x4096,..", help="count x extents of parameters")
    add("--model", choices=MODELS, action="append", help="the parameters of a model; may be given several times")
    add("--scale", type=_scale, metavar="F", help="multiply every width by F, 0 < F <= 1; default: 1, or what fits")
    add("--dtype", choices=DTYPES, default="float32", help="of parameters and gradients")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--recipe", choices=RECIPES, action="append", help="may be given several times; default: all but dense")
    add("--skip", action="append", default=[], metavar="NAME", help="leave a row out, by its name in the table")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--peers", action="store_true", help="also " + ", ".join(dict.fromkeys(p.package for p in PEERS)))
    add("--repeats", type=_count, default=20, metavar="N", help="timed steps of each (default 20)")
    add("--copy-mb", type=_count, metavar="MB", help="size of the copy whose bandwidth is compared with")
    add("--cold", action="store_true", help="compile with an empty cache, which is deleted at the end")
    add("--json", type=_file, metavar="FILE", help="write everything, with raw times")
    add("--plot", type=_file, metavar="FILE", help="draw the ratios (.png, .svg, .pdf); needs matplotlib")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Measure, and print one table for each list of parameters. The JSON file is written anew after each."""
    _check(arguments, parser)
    is_cuda = arguments.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    dtype = DTYPES[arguments.dtype]
    recipes = list(dict.fromkeys(arguments.recipe or [name for name, recipe in RECIPES.items() if recipe.quantized]))
    peers, missing = find_peers(device) if arguments.peers else ([], [])
    for line in missing:
        print(line, file=sys.stderr)
    candidates = find_candidates(arguments.optimizer, recipes, peers, dtype)
    names = [c.name for c in candidates]
    if unknown := [name for name in arguments.skip if name not in names]:
        parser.error(f"--skip {unknown[0]!r}: there is no such row; rows are {', '.join(map(repr, names))}")
    candidates = [c for c in candidates if c.name not in arguments.skip]
    if not candidates:
        parser.error("--skip leaves nothing to measure")
    copy_bytes = (arguments.copy_mb or COPY_MB[device.type]) << 20
    compiler = "C++" if device.type == "cpu" else "ptxas"
    results: list[Result] = []
    with fresh_cache() if arguments.cold else contextlib.nullcontext():
        started = _start_compiler(device)
        environment = {**_environment(arguments, device), "compiler_start_seconds": started}
        for name, shapes_at in _wanted(arguments, device):
            workload = _sized(name, shapes_at, arguments.scale, candidates, dtype, device, copy_bytes)
            with tqdm(total=len(candidates) + arguments.repeats, file=sys.stderr, leave=False) as progress:
                result = run_workload(workload, candidates, dtype, device, arguments.repeats, copy_bytes, progress)
            results.append(result)
            print(table(result, compiler), end="\n\n", flush=True)
            if arguments.json is not None:
                write_json(arguments.json, environment, results)
    print(_footer(environment, arguments))
    if arguments.plot is not None:
        plot(arguments.plot, results)


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with an error before anything is measured that cannot be finished."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU here; use --device cpu")
    if arguments.peers and arguments.optimizer != "adamw":
        parser.error(
            f"--peers with --optimizer {arguments.optimizer}: all peers have AdamW alone; use --optimizer adamw"
        )
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib, or leave out --plot")


def _wanted(arguments: argparse.Namespace, device: torch.device) -> list[tuple[str, ShapesAt]]:
    """Names, and shapes by scale, of the lists of parameters that were asked for."""
    shapes, models = arguments.shapes or [], arguments.model or []
    if not shapes and not models:
        shapes, models = ([], DEFAULT_MODELS) if device.type == "cuda" else ([DEFAULT_SHAPES], [])
    found: list[tuple[str, ShapesAt]] = [(text, functools.partial(parse_shapes, text)) for text in shapes]
    return found + [(name, functools.partial(model_shapes, name)) for name in models]


def _sized(
    name: str,
    shapes_at: ShapesAt,
    scale: float | None,
    candidates: Sequence[Candidate],
    dtype: torch.dtype,
    device: torch.device,
    copy_bytes: int,
) -> Workload:
    """At the scale that was asked for; else the largest at which all candidates fit the free memory at once."""
    free = free_bytes(device)
    if scale is None and free is not None:
        most = max(0.0, SHARE_FOR_ALL * free - 2 * copy_bytes) / bytes_needed(candidates, dtype)
        scale = fitted_scale(shapes_at, most)
        if scale is None:
            raise SystemExit(
                f"{name}: {free / 2**30:.2f} GiB of memory are free on {device}, too little for all candidates at any "
                "scale; measure fewer (--recipe, --skip)"
            )
        if scale < 1.0:
            print(
                f"{name}: scaled by {scale:g} so that all candidates fit {free / 2**30:.1f} GiB at once; "
                "fewer candidates (--recipe, --skip) fit at a larger scale",
                file=sys.stderr,
            )
    scale = 1.0 if scale is None else scale
    return Workload(name, scale, tuple(shapes_at(scale)))


def _start_compiler(device: torch.device) -> float:
    """Compile something small, so that what is done once per process is no part of anybody's first step. Seconds."""
    begin = time.perf_counter()
    torch.compile(lambda x: (x * 2 + 1).sum())(torch.ones(1 << 14, device=device))
    return time.perf_counter() - begin


def _environment(arguments: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """What the numbers depend on."""
    packages = ("torch-qcompile", "torch", "triton", *dict.fromkeys(p.package for p in PEERS))
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if k != "command"}
    return {
        "versions": {name: _version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda,
        "free_bytes": free_bytes(device),
        "lr": LR,
        "arguments": asked,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _footer(environment: dict[str, object], arguments: argparse.Namespace) -> str:
    where = environment["cpu"] if arguments.device == "cpu" else environment["device"]
    cache = "an empty cache" if arguments.cold else "Inductor's cache as it was; --cold empties it"
    return (
        f"{arguments.optimizer}, {arguments.dtype}, {where}, {environment['threads']} threads, torch {torch.__version__}, "
        f"{arguments.repeats} repeats; starting the compiler took {environment['compiler_start_seconds']:.1f} s; {cache}"
    )


def _shapes(text: str) -> str:
    try:
        parse_shapes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _scale(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no scale: it takes a number above 0 and up to 1")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: it takes a whole number, 1 or more")


def _file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.absolute().parent)!r}; make it first")
    return path
