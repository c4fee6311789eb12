"""How one state buffer is stored.

A `Format` is a frozen record of independent choices. It decides nothing and holds no tensor; `codecs` reads it.

    value x -> coordinate y(x) -> scaled by the block's scale -> index of a codebook level -> packed code

What has no meaning is refused where the record is made, with the rule (`InvalidFormatError`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from qcompile.exc import InvalidFormatError
from qcompile.runtime.codebooks import BITS, BOTH_SIGNS, FLOATS, NO_ZERO, NON_NEGATIVE, TABLES, TO_ZERO

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 4096

CHOICES: dict[str, Collection[object]] = {
    "codebook": BITS,
    "coordinate": ("identity", "sqrt", "log", "pseudo-log", "update"),
    "scaling": ("absmax", "minmax", "eden"),
    "rounding": ("nearest", "stochastic", "coordinate", "preconditioner", "dither", "block-dither"),
    "scale_dtype": (torch.float32, torch.float16, torch.bfloat16),
}
LOGARITHMIC = ("log", "pseudo-log")


@dataclass(frozen=True, slots=True)
class Format:
    """Block-wise storage of one state buffer.

    Attributes:
        signed: whether the state may be negative.
        bits: per code, 2 to 8; packed so that all parts of a byte belong to one row.
        codebook: levels in [-1, 1] or [0, 1]; `qcompile.runtime.codebooks` lists them with their sources.
        coordinate: what the levels divide: the value, its root, its logarithm, the bits of its float ("pseudo-log",
            papers.md section 8), or "update": m / (sqrt(v) + eps), with v the stored second moment (section 9); where that
            is 0, the first moment is 0.
        scaling: "absmax"; "minmax", two numbers per block (seed 000: scale and zero point); "eden", absmax times
            <x, x> / <x, Q(x)> (ZE-EDEN, arXiv 2610.12444, section 3.2).
        rounding: "nearest"; "stochastic", unbiased in the value; "coordinate", unbiased in the coordinate;
            "preconditioner", unbiased in 1 / (sqrt(v / correction) + eps) (arXiv 2610.12444, definition 5); "dither" and
            "block-dither", subtractive dither with an offset per element or per block.
        block_size: elements that share a scale; a power of two between 32 and 4096.
        scale_dtype: how the scale is stored.
        late: for "stochastic", nearest rounding until the store of this number, counted from 0.
        partner: for "update", the key of the second moment in the same parameter's state.
        eps: for "update", what keeps the coordinate bounded where the second moment is 0; the optimizer's own.
    """

    signed: bool = True
    bits: int = 8
    codebook: str = "dynamic"
    coordinate: str = "identity"
    scaling: str = "absmax"
    rounding: str = "nearest"
    block_size: int = 256
    scale_dtype: torch.dtype = torch.float32
    late: int = 0
    partner: str | None = None
    eps: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def code_dtype(self) -> torch.dtype:
        """int8 for signed levels of 8 bits, an 8-bit float where the codebook is one, else bytes."""
        if self.codebook in FLOATS:
            return FLOATS[self.codebook][0]
        return torch.int8 if self.bits == 8 and self.mirrored else torch.uint8

    @property
    def mirrored(self) -> bool:
        """Whether indices run from -L to L, or from below 0 in an asymmetric table."""
        return self.signed and (self.logarithmic or not self.two_scales)

    @property
    def equal_steps(self) -> bool:
        return self.codebook in ("linear", "affine")

    @property
    def zero_code(self) -> bool:
        """Whether code 0 stands for the value 0 beside the levels of a range."""
        return self.two_scales and self.codebook == "linear"

    @property
    def two_scales(self) -> bool:
        """Whether a block has a least and a largest value instead of one scale."""
        return self.scaling == "minmax"

    @property
    def scale_count(self) -> int:
        return 2 if self.two_scales else 1

    @property
    def reductions(self) -> int:
        """How many numbers per block `quantize` reduces to."""
        return 3 if self.scaling == "eden" else self.scale_count

    @property
    def parts(self) -> int:
        """Into how many equal parts a block falls so that one element of each fills whole bytes: 1, 2, 4 or 8."""
        return 8 // math.gcd(8, self.bits)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one block."""
        return self.block_size * self.bits // 8

    def inputs(self, parts: int) -> int:
        """How many inputs of an update kernel a state is: its codes and scales, in parts, and key and store number."""
        return parts * self.bits // 8 + self.scale_count + 2 * self.random

    @property
    def random(self) -> bool:
        """Whether storing draws random bits."""
        return self.rounding != "nearest"

    @property
    def dithered(self) -> bool:
        """Whether reading replays random bits."""
        return self.rounding in ("dither", "block-dither")

    @property
    def logarithmic(self) -> bool:
        return self.coordinate in LOGARITHMIC

    @property
    def bytes_per_element(self) -> float:
        """Stored bytes per element: codes and scales."""
        return (self.code_bytes + self.scale_count * self.scale_dtype.itemsize) / self.block_size

    @property
    def positive_to_zero(self) -> bool:
        """Whether a positive value of a non-negative state can decode to 0, where an update divides by its root."""
        if self.signed or self.logarithmic:
            return False
        return self.codebook in TO_ZERO or (self.codebook == "linear" and not self.two_scales)

    @property
    def moves_zero(self) -> bool:
        """Whether a value that is exactly 0 can decode to something else."""
        return self.codebook == "lin4-nz" or (self.codebook == "affine" and self.signed)

    def __str__(self) -> str:
        name = "" if self.coordinate == "identity" else f"{self.coordinate}-"
        name += f"{self.codebook}{self.bits if len(BITS[self.codebook]) > 1 or self.codebook == 'dynamic' else ''}"
        name += "-signed" if self.signed else "-unsigned"
        name += "" if self.scaling == "absmax" or self.logarithmic else f"-{self.scaling}"
        if self.rounding != "nearest":
            name += f"-{self.rounding}" + (f"-from-{self.late}" if self.late else "")
        return f"{name}/{self.block_size}"


def is_block_size(value: object) -> bool:
    """Whether `value` is an int that `Format.block_size` allows."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and MIN_BLOCK_SIZE <= value <= MAX_BLOCK_SIZE and value & (value - 1) == 0  # type: ignore[operator]


def row_block_size(row: int, block_size: int) -> int:
    """The largest block size up to `block_size` that no row of `row` elements is straddled by, if a power of two from
    32 up divides the row; else `block_size`."""
    divisor = row & -row
    return min(block_size, divisor) if divisor >= MIN_BLOCK_SIZE else block_size


def _check(fmt: Format) -> None:
    for field, allowed in CHOICES.items():
        _require(fmt, field, getattr(fmt, field) in allowed, "one of " + _listed(allowed))
    _require(
        fmt, "bits", fmt.bits in BITS[fmt.codebook], f"codebook {fmt.codebook!r} has {_listed(BITS[fmt.codebook])}"
    )
    sizes = f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
    _require(fmt, "block_size", is_block_size(fmt.block_size), sizes)
    _require(fmt, "eps", fmt.eps >= 0 and math.isfinite(fmt.eps), "a finite number, 0 or more")
    for field, holds, rule in RULES:
        _require(fmt, field, holds(fmt), rule)


# Field to name, what must hold, and the rule in words.
RULES: tuple[tuple[str, Callable[[Format], bool], str], ...] = (
    ("signed", lambda f: f.signed or f.codebook in NON_NEGATIVE, "this codebook is for signed state alone"),
    ("signed", lambda f: not f.signed or f.codebook in BOTH_SIGNS, "this codebook has no negative values"),
    ("coordinate", lambda f: not f.signed or f.coordinate not in ("sqrt", "log"), "roots and logarithms are for non-negative state"),
    ("coordinate", lambda f: f.signed or f.coordinate != "update", "update space is for the first moment, which has a sign"),
    ("partner", lambda f: (f.partner is not None) == (f.coordinate == "update"), "the key of the second moment for coordinate 'update', else None"),
    ("scaling", lambda f: not f.two_scales or f.equal_steps, "'minmax' needs codebook 'linear' or 'affine', which have no levels of their own"),
    ("scaling", lambda f: f.two_scales or not f.logarithmic, "a logarithm has no largest magnitude: it needs 'minmax'"),
    ("scaling", lambda f: not f.two_scales or f.coordinate != "update", "update space is symmetric about 0: 'absmax' or 'eden'"),
    ("scaling", lambda f: f.scaling != "eden" or f.codebook in TABLES, "'eden' calibrates a table: " + ", ".join(TABLES)),
    ("codebook", lambda f: f.codebook != "affine" or (f.two_scales and not f.logarithmic), "'affine' needs scaling 'minmax', and no logarithm"),
    ("rounding", lambda f: not f.random or f.codebook not in FLOATS, "8-bit floats are rounded to nearest"),
    ("rounding", lambda f: not f.random or f.scaling != "eden", "'eden' calibrates nearest rounding"),
    ("rounding", lambda f: not f.signed or f.rounding != "preconditioner", "'preconditioner' is for the second moment, which is not negative"),
    ("rounding", lambda f: not f.dithered or f.codebook == "linear", "a dither needs equal steps: codebook 'linear'"),
    ("scaling", lambda f: f.scaling != "eden" or f.coordinate != "sqrt", "'eden' calibrates values, not their roots"),
    ("bits", lambda f: f.bits > 2 or not f.mirrored or not f.two_scales, "a signed logarithm needs 3 bits: sign, zero and two levels"),
    ("rounding", lambda f: f.rounding != "coordinate" or f.equal_steps, "'coordinate' needs equal steps: codebook 'linear' or 'affine'"),
    ("rounding", lambda f: not f.dithered or f.signed or f.logarithmic, "a dither of non-negative state needs a logarithm: else it makes it negative"),
    ("late", lambda f: f.late == 0 or (f.late > 0 and f.rounding == "stochastic"), "a number of stores, for rounding 'stochastic'"),
    ("late", lambda f: f.late == 0 or f.coordinate in ("identity", "update"), "a late start is for coordinates 'identity' and 'update'"),
    ("scale_dtype", lambda f: f.scale_dtype == torch.float32 or f.codebook not in NO_ZERO, "a codebook without 0 needs float32: a scale of 0 is the value 0"),
    ("scale_dtype", lambda f: not f.two_scales or f.scale_dtype == torch.float32, "'minmax' stores both ends exactly, in float32"),
)  # fmt: skip


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _require(fmt: Format, field: str, holds: bool, rule: str) -> None:
    if not holds:
        raise InvalidFormatError(field, getattr(fmt, field), rule)
