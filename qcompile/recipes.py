"""Recipes: which format each kind of state gets. `python -m qcompile recipes` prints them.

A state is a first moment if the update divides it by the root of another state, a second moment if it is that other
state or is proved non-negative, and plain signed state otherwise (momentum of SGD or Lion, say).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qcompile.runtime.formats import Format

BITS_8 = "arXiv 2110.02861"
ZIP = "arXiv 2610.12444"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats by the part a state plays.

    Attributes:
        name: what the user writes.
        first, second, signed: formats of first moments, second moments and other signed state; None keeps all dense.
        rows: whether no block straddles a row of a matrix, where a power of two from 32 up divides the row.
        late: whether the last linear layer's first moment is rounded stochastically for the last tenth of `train_steps`.
        source: where the method is from.
    """

    name: str
    first: Format | None
    second: Format | None
    signed: Format | None
    rows: bool
    late: bool
    source: str

    @property
    def quantized(self) -> bool:
        return self.signed is not None

    def bytes_per_parameter(self, block_size: int | None = None) -> float:
        """Stored bytes per parameter for AdamW: codes and scales of two moments, fp32 for the dense recipe."""
        if self.first is None or self.second is None:
            return 8.0
        formats = (self.first, self.second)
        return sum((replace(f, block_size=block_size) if block_size else f).bytes_per_element for f in formats)


def _update(bits: int, codebook: str, block_size: int) -> Format:
    # a scale of updates fits a short float, and rounding it makes what is stored unchanged bit-identical
    short = torch.float16
    return Format(
        True, bits, codebook, "update", block_size=block_size, scale_dtype=short, partner="exp_avg_sq", eps=1e-8
    )


def _pseudo_log(bits: int, block_size: int, rounding: str = "coordinate") -> Format:
    return Format(False, bits, "linear", "pseudo-log", "minmax", rounding, block_size)


_DYNAMIC = Format(True, 8, "dynamic", block_size=256)
_AFFINE = Format(True, 8, "linear", "identity", "minmax", "stochastic", 2048)
_NF4 = Format(True, 4, "nf4", block_size=128)
_SDYN4 = Format(True, 4, "sdyn4", block_size=128)
_SOFTSIGN = Format(True, 8, "softsign", block_size=32, scale_dtype=torch.float16)
_E4M3 = Format(True, 8, "e4m3", block_size=256)
_DITHER = Format(True, 4, "linear", rounding="block-dither", block_size=128)


def _plain(name: str, signed: Format, second: Format, source: str, late: bool = False) -> Recipe:
    return Recipe(name, signed, second, signed, False, late, source)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "8bit",
            _update(8, "linear", 256),
            _pseudo_log(8, 256),
            _DYNAMIC,
            True,
            False,
            "update space and pseudo-log, this project; other signed state: " + BITS_8,
        ),
        Recipe(
            "5bit",
            _update(5, "fitted", 128),
            _pseudo_log(5, 128),
            Format(True, 5, "fitted", block_size=128),
            True,
            False,
            "update space and pseudo-log, this project",
        ),
        Recipe(
            "4bit",
            _update(4, "nf4", 128),
            _pseudo_log(4, 128),
            _NF4,
            True,
            False,
            "update space and pseudo-log, this project; other signed state: NF4, arXiv 2305.14314",
        ),
        _plain(
            "dettmers-8bit",
            replace(_DYNAMIC, block_size=2048),
            Format(False, 8, "dynamic", block_size=2048),
            f"8-bit optimizers, {BITS_8}, section 2",
        ),
        _plain(
            "unbiased-8bit",
            _AFFINE,
            replace(_AFFINE, signed=False, coordinate="log", rounding="coordinate"),
            "block-wise affine, stochastic rounding; second moment in log space (SOLO, arXiv 2505.00347)",
        ),
        _plain(
            "unbiased-8bit-literal",
            replace(_AFFINE, codebook="affine"),
            replace(_AFFINE, codebook="affine", signed=False),
            "block-wise affine, stochastic rounding, as written; for comparison: it diverges",
        ),
        _plain(
            "zip-sr",
            _NF4,
            Format(False, 4, "dyn4", rounding="preconditioner", block_size=128, eps=1e-8),
            f"ZIP-SR, {ZIP}, definition 5 and section 4",
            late=True,
        ),
        _plain(
            "ze-eden",
            _NF4,
            Format(False, 4, "dyn4-nz", scaling="eden", block_size=128),
            f"ZE-EDEN, {ZIP}, sections 3.2 and 4",
            late=True,
        ),
        _plain("torchao-8bit", _DYNAMIC, Format(False, 8, "dynamic", block_size=256), "TorchAO OptimState8bit"),
        _plain("torchao-4bit", _SDYN4, Format(False, 4, "lin4-nz", block_size=128), "TorchAO OptimState4bit"),
        _plain(
            "flashoptim",
            _SOFTSIGN,
            Format(False, 8, "linear", "sqrt", block_size=32, scale_dtype=torch.float16),
            "FlashOptim, arXiv 2602.23349",
        ),
        _plain("fp8", _E4M3, replace(_E4M3, signed=False), "TorchAO OptimStateFp8"),
        _plain(
            "bred-4bit",
            _DITHER,
            _pseudo_log(4, 128, "block-dither"),
            "BReD, HiLD 2026, from its abstract; the coordinate of the second moment is ours",
        ),
        Recipe("dense", None, None, None, False, False, "every state as the optimizer made it, for comparison"),
    )
}
