"""Shapes of the parameters of real models, made from the numbers of their architectures. Nothing is downloaded.

A scale below 1 multiplies every extent (widths, vocabulary, positions) and keeps the structure: layers, tensors per layer
and which of them are matrices. So the share of the embedding stays about what it is, and the number of parameters falls
with the square of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

Shape = tuple[int, ...]
LEAST_SCALE = 0.02


def gpt2_shapes(width: int, layers: int, scale: float = 1.0) -> list[Shape]:
    """Parameters of GPT-2 in the order of its modules; the head shares the token embedding's."""
    d = extent(width, scale)
    layer: list[Shape] = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    layer += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(extent(50257, scale), d), (extent(1024, scale), d), *layer * layers, (d,), (d,)]


def llama_shapes(
    width: int, hidden: int, layers: int, vocabulary: int, scale: float = 1.0, keys: int | None = None
) -> list[Shape]:
    """Parameters of LLaMA in the order of its modules: q, k, v, o, gate, up, down and two norms per layer; an own head.

    `keys`: the width of keys and values, where fewer heads have their own.
    """
    d, h, words, k = (extent(n, scale) for n in (width, hidden, vocabulary, keys or width))
    layer: list[Shape] = [(d, d), (k, d), (k, d), (d, d), (h, d), (h, d), (d, h), (d,), (d,)]
    return [(words, d), *layer * layers, (d,), (words, d)]


MODELS: dict[str, Callable[[float], list[Shape]]] = {
    "gpt2": lambda scale: gpt2_shapes(768, 12, scale),
    "gpt2-xl": lambda scale: gpt2_shapes(1600, 48, scale),
    "llama-7b": lambda scale: llama_shapes(4096, 11008, 32, 32000, scale),
    "llama-70b": lambda scale: llama_shapes(8192, 28672, 80, 32000, scale, keys=1024),
    "many-small": lambda scale: [(extent(4, scale), extent(4, scale))] * 300,
}


def extent(size: int, scale: float) -> int:
    """`size` times `scale`: a multiple of 8 where it was 8 or more, at least 1; `size` itself at scale 1."""
    if scale == 1.0:
        return size
    return max(8, 8 * round(size * scale / 8)) if size >= 8 else max(1, round(size * scale))


def model_shapes(name: str, scale: float = 1.0) -> list[Shape]:
    """Shapes of the parameters of a model of `MODELS`."""
    return MODELS[name](scale)


def parse_shapes(text: str, scale: float = 1.0) -> list[Shape]:
    """`8x1024x4096` is eight parameters of 1024x4096; several, with commas between, are one list.

    Raises:
        ValueError: a part is not a count and at least one extent, all positive; the message says which.
    """
    shapes: list[Shape] = []
    for part in text.split(","):
        numbers = part.strip().lower().split("x")
        if len(numbers) < 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise ValueError(
                f"{part!r} is no shape: it takes a count and at least one extent, positive whole numbers with 'x' "
                "between, as in 8x1024x4096 (eight parameters of 1024x4096)"
            )
        count, *dims = map(int, numbers)
        shapes += [tuple(extent(n, scale) for n in dims)] * count
    return shapes


def parameter_count(shapes: Iterable[Shape]) -> int:
    """Elements of all parameters."""
    return sum(map(math.prod, shapes))


def fitted_scale(shapes_at: Callable[[float], list[Shape]], most: float) -> float | None:
    """The largest scale, in steps of 0.02 from 1 down, at which there are at most `most` parameters; None if there is none."""
    steps = round(1 / LEAST_SCALE)
    scales = (step / steps for step in range(steps, 0, -1))
    return next((scale for scale in scales if parameter_count(shapes_at(scale)) <= most), None)
