"""How much each format changes what it stores, and the update that is made of it: the papers' tables beside ours.

    python examples/quantization_error.py                 # everything, about 8 minutes on two cores
    python examples/quantization_error.py codebooks loop  # some sections: ratios codebooks loop danger shadow
    python examples/quantization_error.py shadow --steps 600 --plot error.png
    python examples/quantization_error.py --fit           # the constant of codebook "fitted", on real gradients

Nothing is trained with quantized state here: `ratios` and `codebooks` quantize random numbers, `loop` and `danger` run
AdamW's moments on synthetic gradients, `shadow` follows an exact training run of a byte-level GPT with quantized copies.
Published figures stand in brackets. Sections of papers are those of arXiv 2110.02861 (8-bit optimizers), arXiv 2610.12444
(ZIP-SR and ZE-EDEN) and of the block-wise affine method ("unbiased-8bit").
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from tqdm import tqdm
from train_gpt import GPT, batch_of, loss_of, standard_library

from qcompile.analysis import Moments, Shadow, closed_loop, shadow, stored
from qcompile.recipes import RECIPES, Recipe
from qcompile.runtime import codebooks
from qcompile.runtime.codecs import Context
from qcompile.runtime.formats import Format
from qcompile.runtime.rounding import Draw

QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]
EPS = 1e-8


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n## {title}\n")
    for row in [header, ["-" * w for w in widths], *rows]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")


def random_bits(rows: int, block_size: int, store: int = 0) -> Context:
    key, count = (torch.tensor(number, dtype=torch.int32) for number in (1, store))
    return Context(draw=Draw(key, count, 0, rows, block_size))


# -- Block-wise affine quantization against one range for all --------------------------------------------------------

AFFINE = Format(True, 8, "affine", "identity", "minmax", "stochastic", 2048)


def with_outliers(count: int, magnitude: float = 50.0, size: int = 1 << 16) -> Tensor:
    x = torch.randn(size)
    for i, place in enumerate(torch.randperm(size)[:count].tolist()):
        x[place] = magnitude * (-1) ** i
    return x


def affine_error(x: Tensor, block_size: int, store: int = 0) -> float:
    blocks = x.view(-1, block_size)
    return (stored(blocks, AFFINE, random_bits(len(blocks), block_size, store)) - blocks).square().mean().item()


def ratios() -> None:
    size = 1 << 16
    cases: list[tuple[str, Callable[[], Tensor], str]] = [
        ("normal", lambda: torch.randn(size), "1.57 ± .12 [1.7]"),
        ("uniform", lambda: torch.rand(size) * 2 - 1, "1.00 ± .01 [1.0]"),
        ("Laplace", lambda: torch.distributions.Laplace(0.0, 1.0).sample((size,)), "2.11 ± .28 [1.8]"),
        ("normal, 3 outliers of ±50", lambda: with_outliers(3), "32 to 33 [32.8]"),
        ("normal, 2 outliers of ±50", lambda: with_outliers(2), "44.96 ± .66 [6.7 squared]"),
    ]
    rows = []
    for name, make, expected in cases:
        found = []
        for seed in range(20):
            torch.manual_seed(seed)
            x = make()
            found.append(affine_error(x, size, seed) / affine_error(x, 2048, seed))
        rows.append([name, f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}", expected])
    torch.manual_seed(0)
    x = with_outliers(1, 500.0, 1 << 20)
    rows.append(
        [
            "2^20 normal, one outlier of 500",
            f"{affine_error(x, 1 << 20) / affine_error(x, 2048):.0f}",
            "487 [up to 500]",
        ]
    )
    table(
        "Error of one range over error of blocks of 2048 (20 seeds, 65,536 values)",
        ["values", "ratio", "expected"],
        rows,
    )

    torch.manual_seed(0)
    x, size = with_outliers(10, size=1 << 20), 1 << 20
    whole = affine_error(x, size)
    sweep = [2**i for i in range(6, 14)]
    rows = [[str(b), f"{whole / affine_error(x, b):.0f}", f"{4 * b / (b + 8):.4f}"] for b in sweep]
    table("Block size, 10 outliers of ±50 in 2^20 values", ["block", "ratio", "compression 4B/(B+8)"], rows)

    x = with_outliers(2).view(32, 2048)
    errors = [
        sum(stored(b, AFFINE, random_bits(len(b), b.shape[1], i)) - b for i in range(400)).abs().mean().item() / 400
        for b in (x.view(1, -1), x)
    ]
    print(
        f"\nmean over elements of |mean error of 400 draws|: {errors[0]:.1e} one range, {errors[1]:.1e} blocks", end=" "
    )
    print("(2 outliers of ±50; expected 6.1e-3 and 6.0e-4)")


# -- Codebooks -------------------------------------------------------------------------------------------------------


def codebook_errors() -> None:
    formats = {
        "SDyn4": (Format(True, 4, "sdyn4", block_size=128), "2.745", "1.873"),
        "FP4": (Format(True, 4, "fp4", block_size=128), "1.888", "1.538"),
        "NF4": (Format(True, 4, "nf4", block_size=128), "1.171", "0.888"),
        "NF4, stochastic": (Format(True, 4, "nf4", rounding="stochastic", block_size=128), "2.363", "1.793"),
        "fitted": (Format(True, 4, "fitted", block_size=128), "", ""),
        "softsign": (Format(True, 4, "softsign", block_size=128), "", ""),
        "linear": (Format(True, 4, "linear", block_size=128), "", ""),
    }
    torch.manual_seed(0)
    sources = [torch.randn(1 << 20), torch.distributions.Laplace(0.0, 1.0).sample((1 << 20,))]
    rows = []
    for name, (fmt, *expected) in formats.items():
        cells = [name]
        for x, published in zip(sources, expected, strict=True):
            u = x.view(-1, 128) / x.view(-1, 128).abs().amax(1, keepdim=True)
            error = stored(u, fmt, random_bits(len(u), 128)) - u
            cells += [f"{1e3 * error.square().mean():.3f}", published, f"{(error * u).sum() / u.square().sum():+.4f}"]
        rows.append(cells)
    header = ["codebook", "normal", "expected", "radial bias", "Laplace", "expected", "radial bias"]
    table("Mean squared error x 1000 of a first moment relative to its block's maximum, blocks of 128", header, rows)


# -- Closed loop -----------------------------------------------------------------------------------------------------


def gradients(rows: bool, steps: int, size: int, seed: int = 0) -> Iterator[Tensor]:
    """Gradients of stationary scale, 1e-4 lognormal: within blocks, or between rows of 512 and a little within."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.randn(size, generator=g).exp()
    if rows:
        scale = scale.sqrt() * torch.randn(size // 512, generator=g).exp().repeat_interleave(512)
    for _ in range(steps):
        yield 1e-4 * scale * torch.randn(size, generator=g)


def _log8(coordinate: str, rounding: str, block_size: int, bits: int = 8) -> Format:
    return Format(False, bits, "linear", coordinate, "minmax", rounding, block_size)


LOOP: dict[str, tuple[Format, str]] = {
    "Dyn4, nearest, with zero": (Format(False, 4, "dyn4", block_size=128), "138 | 6.8 | 62 | 1.05"),
    "Dyn4, stochastic, with zero": (Format(False, 4, "dyn4", rounding="stochastic", block_size=128), "133 | 22.7 | 56 | 3.6"),
    "ZIP-SR": (RECIPES["zip-sr"].second, ".440 | .275 | .419 | .235"),  # type: ignore[dict-item]
    "Dyn4-NZ, nearest": (Format(False, 4, "dyn4-nz", block_size=128), ".427 | .317 | .382 | .203"),
    "ZE-EDEN": (RECIPES["ze-eden"].second, ".422 | .302 | .381 | .196"),  # type: ignore[dict-item]
    "Lin4-NZ (TorchAO)": (RECIPES["torchao-4bit"].second, ".679 | .293 | .669 | .267"),  # type: ignore[dict-item]
    "Lin4-NZ, EDEN": (Format(False, 4, "lin4-nz", scaling="eden", block_size=128), ".659 | .280 | .653 | .259"),
    "affine v, 2048": (dataclasses.replace(AFFINE, signed=False), "112 | 48 | 69 | 26"),
    "affine v, 256": (dataclasses.replace(AFFINE, signed=False, block_size=256), "26 | .48 | 13.9 | .36"),
    "affine sqrt v, 2048": (dataclasses.replace(AFFINE, signed=False, coordinate="sqrt", rounding="coordinate"), "1.17 | .291 | .92 | .286"),
    "affine sqrt v, 256": (dataclasses.replace(AFFINE, signed=False, coordinate="sqrt", rounding="coordinate", block_size=256), ".262 | .060 | .200 | .025"),
    "affine log v, 2048": (_log8("log", "coordinate", 2048), ".078 | .064 | .034 | .025"),
    "affine log v, 256": (_log8("log", "coordinate", 256), ".069 | .042 | .028 | .014"),
    "affine log v, nearest, 2048": (_log8("log", "nearest", 2048), ".090 | .082 | .024 | .018"),
    "dynamic, 2048, never to zero": (Format(False, 8, "dynamic", block_size=2048), "2.26 | .125 | .095 | .051 with zero"),
    "dynamic, 256, never to zero": (Format(False, 8, "dynamic", block_size=256), ".151 | .059 | .051 | .021 with zero"),
    "FlashOptim": (RECIPES["flashoptim"].second, "1.77 | .034 | .27 | .013"),  # type: ignore[dict-item]
    "pseudo-log 8, 256": (_log8("pseudo-log", "coordinate", 256), ".070 | .044 | .029 | .015"),
    "pseudo-log 8, 2048": (_log8("pseudo-log", "coordinate", 2048), ".081 | .065 | .035 | .026"),
    "pseudo-log 8, nearest, 256": (_log8("pseudo-log", "nearest", 256), ".084 | .056 | .021 | .011"),
    "pseudo-log 4, 128": (_log8("pseudo-log", "coordinate", 128, 4), ".316 | .229 | .285 | .182"),
    "pseudo-log 4, nearest, 128": (_log8("pseudo-log", "nearest", 128, 4), ".288 | .233 | .273 | .218"),
}  # fmt: skip


def loop(size: int) -> None:
    settings = [(beta2, rows) for beta2 in (0.999, 0.95) for rows in (False, True)]

    def errors(first: Format | None, second: Format | None) -> list[str]:
        steps = {0.999: 400, 0.95: 200}
        return [f"{closed_loop(gradients(rows, steps[b], size), first, second, 0.9, b):.3f}" for b, rows in settings]

    header = ["stored as", "β2 .999 iid", ".999 row", ".95 iid", ".95 row", "expected"]
    found = [
        [name, *errors(None, fmt), expected] for name, (fmt, expected) in tqdm(LOOP.items(), desc="loop", leave=False)
    ]
    table("Closed loop: relative error of the update, only the second moment quantized", header, found)
    both = [
        [name, *errors(RECIPES[name].first, RECIPES[name].second), f"{RECIPES[name].bytes_per_parameter():.4f}"]
        for name in tqdm(QUANTIZED, desc="recipes", leave=False)
    ]
    table("Closed loop, both moments quantized", [*header[:-1], "B/param"], both)


# -- A small gradient among large ones ---------------------------------------------------------------------------------


def danger() -> None:
    """4,096 values, every 128th gradient 1, the others r; after 600 steps those become 0 (field report: v -> 0, m != 0)."""
    rows = []
    for name in tqdm([*QUANTIZED], desc="danger", leave=False):
        first, second = RECIPES[name].first, RECIPES[name].second
        assert first is not None
        assert second is not None
        cells = [name]
        for small in (1e-2, 3e-4, 1e-6):
            gradient = torch.full((4096,), small)
            gradient[::128] = 1.0
            is_small = (gradient != 1.0).view(-1, first.block_size)
            moments = Moments(is_small.float(), first, second, 0.9, 0.999, EPS)
            during = max(float(moments.update(gradient.view_as(is_small))[is_small].abs().max()) for _ in range(600))
            gradient[gradient != 1.0] = 0.0
            after = max(float(moments.update(gradient.view_as(is_small))[is_small].abs().max()) for _ in range(200))
            cells.append(f"{during:.2f} | {after:.2f}")
        rows.append(cells)
    header = ["recipe", "r = 1e-2", "r = 3e-4", "r = 1e-6"]
    table("Largest step of the small elements, in lr: while their gradient is r | after it became 0", header, rows)


# -- Real gradients ----------------------------------------------------------------------------------------------------


def part_of(name: str) -> str:
    return "head" if name.startswith("head") else "embeddings" if name.startswith(("token", "position")) else "body"


SIZES = {"0.14 M": (2, 64), "0.39 M": (3, 96), "1.26 M": (6, 128)}  # layers and width


def follow(
    recipes: list[str | Recipe],
    beta2: float,
    steps: int,
    seed: int = 0,
    size: tuple[int, int] = SIZES["0.39 M"],
    tied: bool = False,
    quiet: bool = False,
) -> Shadow:
    """Train a GPT exactly, with quantized copies beside it; measure over the last 60 steps."""
    torch.manual_seed(seed)
    text, _ = standard_library()
    model = GPT(*size, context=128, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, beta2), weight_decay=0.1)
    tenth = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / tenth) * (1 - max(0.0, (t - steps + tenth) / tenth) ** 0.5)
    )
    copies = shadow(model, optimizer, recipes)
    generator = torch.Generator().manual_seed(seed)
    for t in tqdm(range(steps), desc=f"shadow, β2 {beta2}", leave=False, disable=quiet):
        loss_of(model, *batch_of(text, generator, 32, 128)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        copies.observe(measure=t >= steps - 60)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return copies


def shadow_table(recipes: list[str | Recipe], steps: int) -> dict[float, dict[str, dict[str, float]]]:
    found = {}
    for beta2 in (0.95, 0.999):
        copies = follow(recipes, beta2, steps)
        found[beta2] = copies.errors(part_of)
        rows = [
            [name, f"{copies.bytes_per_parameter(name):.3f}", *(f"{e[p]:.4f}" for p in ("body", "head", "embeddings"))]
            for name, e in found[beta2].items()
        ]
        header = ["recipe", "B/param here", "body", "head", "embeddings"]
        table(f"Shadow of a real run, {steps} steps, β2 {beta2}: relative error of the update", header, rows)
    return found


def fit(steps: int) -> None:
    """Try constants for the companding of the first moment in update space."""
    constants = (1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 2.0)
    recipes: list[str | Recipe] = []
    for c in constants:
        codebooks.COMPANDED[f"c={c}"] = c
        codebooks.BITS[f"c={c}"] = (4, 5)
        for name in ("4bit", "5bit"):
            recipe = RECIPES[name]
            assert recipe.first is not None
            first = dataclasses.replace(recipe.first, codebook=f"c={c}")
            recipes.append(dataclasses.replace(recipe, name=f"{name}, c = {c}", first=first))
    shadow_table(recipes, steps)


def plot(path: str, found: dict[float, dict[str, dict[str, float]]]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no figure: it needs matplotlib, pip install -e '.[examples]'")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(6 * len(found), 5), sharey=True)
    for axis, (beta2, errors) in zip(axes, found.items(), strict=True):
        for i, part in enumerate(("body", "head", "embeddings")):
            axis.scatter([e[part] for e in errors.values()], list(errors), marker="osD"[i], label=part)
        axis.set(xscale="log", xlabel="relative error of the update", title=f"β2 = {beta2}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


SECTIONS = ("ratios", "codebooks", "loop", "danger", "shadow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which tables; by default all")
    parser.add_argument("--steps", type=int, default=250, help="of the shadow run")
    parser.add_argument("--size", type=int, default=1 << 16, help="elements of the closed loop")
    parser.add_argument("--fit", action="store_true", help="try constants of codebook 'fitted' instead")
    parser.add_argument("--plot", default="quantization_error.png", help="file for the figure of the shadow run")
    args = parser.parse_args()
    if args.fit:
        return fit(args.steps)
    sections = args.sections or SECTIONS
    if "ratios" in sections:
        ratios()
    if "codebooks" in sections:
        codebook_errors()
    if "loop" in sections:
        loop(args.size)
    if "danger" in sections:
        danger()
    if "shadow" in sections:
        plain = [
            dataclasses.replace(RECIPES[name], name=f"{name}, rows ignored", rows=False)
            for name in ("8bit", "5bit", "4bit")
        ]
        plot(args.plot, shadow_table([*QUANTIZED, *plain], args.steps))
    return None


if __name__ == "__main__":
    main()
