"""What quantization does to updates and to networks, in figures.

`update_error`, `max_to_median`, `kurtosis`, `error_parts` and `gain_parts` measure tensors. `Moments` keeps AdamW's two moments of one block matrix as a pair of formats stores them, in eager torch with the codecs
that the kernels are made of. `shadow` feeds such copies with the gradients of a real training run that itself is exact,
and compares the update they would make with the exact one (papers.md section 9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from qcompile.exc import InvalidOptionError
from qcompile.recipes import RECIPES, Recipe
from qcompile.runtime.codecs import (
    Context,
    dequantize,
    finish_scales,
    load_scales,
    quantize,
    update_denominator,
)
from qcompile.runtime.formats import Format, row_block_size
from qcompile.runtime.rounding import Draw, key_of


def stored(x: Tensor, fmt: Format, context: Context | None = None) -> Tensor:
    """What is read back of x, [n_blocks, block_size] fp32, once it was stored in `fmt`. Packing loses nothing and is left out."""
    indices, reduced = quantize([x], fmt, context or Context())
    return dequantize(indices, load_scales(finish_scales(reduced, fmt), fmt), fmt, context or Context())[0]


def update_error(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact|| over all elements of two updates of one shape, summed in fp64 (papers.md section 3.8)."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def max_to_median(h: Tensor) -> Tensor:
    """max |h| / median |h| of each row, [..., n] to [...]: how far outliers stand out (MMR, arXiv 2509.23500).

    The median of an even number of values is the mean of the two in the middle. Infinite where more than half of a row is 0.
    """
    ordered = h.abs().sort(-1).values
    n = h.shape[-1]
    return ordered[..., -1] / ((ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2)


def kurtosis(h: Tensor) -> float:
    """E[(h - mean)^4] / variance^2 over all elements, in fp64; 3 for a normal distribution (arXiv 2509.23500)."""
    centred = h.double() - h.double().mean()
    return (centred.pow(4).mean() / centred.square().mean().square()).item()


@dataclass(frozen=True, slots=True)
class ErrorParts:
    """How the error of a layer's output comes about, relative to the squared norm of the exact output.

    Attributes:
        total: R = ||h_q - h||^2 / ||h||^2 of the output; the sum of the next three.
        propagated: A, from the error of the input.
        local: B, from the quantization of the layer itself.
        cross: C, twice the product of the two.
        gain: A over the R of the input; nan where that is 0.
    """

    total: float
    propagated: float
    local: float
    cross: float
    gain: float


Layer = Callable[[Tensor], Tensor]


def error_parts(layer: Layer, quantized: Layer, h: Tensor, h_q: Tensor) -> ErrorParts:
    """Split the error of a layer's output, R = A + B + C (arXiv 2509.23500; the split is Shapley's average).

    Args:
        layer, quantized: the exact and the quantized function; each is called on both inputs.
        h, h_q: input of the layer in the exact network, and in the quantized one.
    """
    exact, moved = layer(h).double(), layer(h_q).double()
    exact_q, moved_q = quantized(h).double(), quantized(h_q).double()
    a = ((moved_q - exact_q) + (moved - exact)) / 2
    b = ((moved_q - moved) + (exact_q - exact)) / 2
    size = exact.square().sum()
    propagated = (a.square().sum() / size).item()
    before = ((h_q - h).double().square().sum() / h.double().square().sum()).item()
    return ErrorParts(
        total=((moved_q - exact).square().sum() / size).item(),
        propagated=propagated,
        local=(b.square().sum() / size).item(),
        cross=(2 * (a * b).sum() / size).item(),
        gain=propagated / before if before else float("nan"),
    )


def gain_parts(weight: Tensor, weight_error: Tensor, h: Tensor, h_q: Tensor) -> tuple[float, float]:
    """The gain of a linear layer without bias as G1 * G2: what its spectral norm does, and the alignment (arXiv 2509.23500).

    G1 = (||W + E/2|| / ||W||)^2 in spectral norms, near 1. G2 = (cos phi / cos psi)^2, where cos phi is how much of that norm
    the error of the input meets, cos psi how much of it the input itself. The product is `ErrorParts.gain` where weights alone
    are quantized.

    Args:
        weight, weight_error: W and E = W_q - W, [out, in].
        h, h_q: exact and quantized input, [..., in].
    """
    w, half, error = weight.double(), (weight + weight_error / 2).double(), (h_q - h).double()
    norm, norm_half = torch.linalg.matrix_norm(w, 2), torch.linalg.matrix_norm(half, 2)
    phi = (error @ half.T).norm() / (norm_half * error.norm())
    psi = (h.double() @ w.T).norm() / (norm * h.double().norm())
    return ((norm_half / norm) ** 2).item(), ((phi / psi) ** 2).item()


class Moments:
    """AdamW's moments of a block matrix, as two formats store them.

    The update of a step uses the exact new moments; they are quantized when they are stored.

    Attributes:
        m, v: [n_blocks, block_size] fp32, what the next step reads.
    """

    def __init__(
        self,
        like: Tensor,
        first: Format | None,
        second: Format | None,
        beta1: float,
        beta2: float,
        eps: float,
        seed: int = 0,
    ) -> None:
        """`like` is [n_blocks, block_size]; None keeps a moment exact."""
        self.m, self.v = torch.zeros_like(like), torch.zeros_like(like)
        self.first, self.second = first, second
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.keys = [torch.tensor(key_of(seed, name), dtype=torch.int32) for name in ("exp_avg", "exp_avg_sq")]
        self.step = 0

    def update(self, gradient: Tensor) -> Tensor:
        """The update without learning rate and weight decay, m^ / (sqrt(v^) + eps); then stores both moments."""
        self.step += 1
        m = self.m.lerp(gradient, 1 - self.beta1)
        v = self.v * self.beta2 + gradient * gradient * (1 - self.beta2)
        correction = 1 - self.beta2**self.step
        update = m / (1 - self.beta1**self.step) / ((v / correction).sqrt() + self.eps)
        self.m, self.v = m, v
        if self.second is not None:
            h = lambda value: 1.0 / ((value / correction).sqrt() + self.eps)  # noqa: E731
            self.v = stored(v, self.second, Context(None, h, self._draw(1, self.second)))
        if self.first is not None:
            denominator = update_denominator([self.v], self.eps) if self.first.coordinate == "update" else None
            self.m = stored(m, self.first, Context(denominator, None, self._draw(0, self.first)))
        return update

    def _draw(self, which: int, fmt: Format) -> Draw | None:
        if not fmt.random:
            return None
        store = torch.tensor(self.step - 1, dtype=torch.int32)
        return Draw(self.keys[which], store, 0, self.m.shape[0], self.m.shape[1])


def closed_loop(
    gradients: Iterable[Tensor],
    first: Format | None,
    second: Format | None,
    beta1: float,
    beta2: float,
    eps: float = 1e-8,
) -> float:
    """||u - u32|| / ||u32|| of the last update, for gradients of one shape [n] given step by step (papers.md section 3.8)."""
    block = next((f.block_size for f in (second, first) if f is not None), 1)
    exact = found = None
    pair: list[Moments] = []
    for gradient in gradients:
        blocks = gradient.view(-1, block)
        if not pair:
            pair = [Moments(blocks, None, None, beta1, beta2, eps), Moments(blocks, first, second, beta1, beta2, eps)]
        exact, found = (moments.update(blocks) for moments in pair)
    if exact is None or found is None:
        raise ValueError("closed_loop needs the gradients of at least one step")
    return update_error(found, exact)


@dataclass(slots=True)
class _Copy:
    """The moments of some parameters that share a block size, under one recipe, and their summed errors per parameter."""

    moments: Moments
    members: list[tuple[str, nn.Parameter]]
    block_size: int
    squares: dict[str, Tensor]


class Shadow:
    """Quantized copies of the moments of an exact `AdamW`, one set per recipe.

    Only parameters of two or more dimensions that fill whole blocks are followed. `observe` is called with gradients in
    place, before `optimizer.step()`.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW, recipes: Sequence[str | Recipe], seed: int = 0) -> None:
        group = optimizer.param_groups[0]
        self.settings: tuple[float, float, float] = (*group["betas"], group["eps"])
        self.params = [(n, p) for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad]
        self.exact = {name: Moments(p.detach().flatten()[None], None, None, *self.settings) for name, p in self.params}
        self.squares = {name: torch.zeros(()) for name, _ in self.params}
        self.copies = {
            r.name: self._copies(r, seed) for r in (RECIPES[r] if isinstance(r, str) else r for r in recipes)
        }

    def _copies(self, recipe: Recipe, seed: int) -> list[_Copy]:
        by_block: dict[int, list[tuple[str, nn.Parameter]]] = {}
        if recipe.first is None or recipe.second is None:
            raise InvalidOptionError("recipes", recipe.name, "recipes that quantize both moments")
        for name, p in self.params:
            block = recipe.first.block_size
            if recipe.rows:
                block = row_block_size(p.numel() // p.shape[0], block)
            by_block.setdefault(block, []).append((name, p))
        return [
            _Copy(
                Moments(
                    torch.cat([_blocks(p, block) for _, p in members]),
                    dataclasses.replace(recipe.first, block_size=block),
                    dataclasses.replace(recipe.second, block_size=block),
                    *self.settings,
                    seed=seed,
                ),
                members,
                block,
                {name: torch.zeros(()) for name, _ in members},
            )
            for block, members in by_block.items()
        ]

    @torch.no_grad()
    def observe(self, measure: bool = True) -> None:
        """Take the gradients of this step; add its errors to the sums if `measure`."""
        gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in self.params}
        exact = {name: self.exact[name].update(g.flatten()[None])[0] for name, g in gradients.items()}
        if measure:
            for name, update in exact.items():
                self.squares[name] += update.square().sum()
        for copies in self.copies.values():
            for copy in copies:
                updates = copy.moments.update(
                    torch.cat([_blocks(gradients[n], copy.block_size) for n, _ in copy.members])
                )
                rows = [p.numel() // copy.block_size for _, p in copy.members]
                for (name, _), update in zip(copy.members, updates.split(rows), strict=True):
                    if measure:
                        copy.squares[name] += (update.flatten() - exact[name][: update.numel()]).square().sum()

    def errors(self, part_of: Callable[[str], str]) -> dict[str, dict[str, float]]:
        """sqrt(sum (u_q - u)^2 / sum u^2) by recipe and by the part of the model that `part_of` gives a parameter's name."""
        table: dict[str, dict[str, float]] = {}
        parts = list(dict.fromkeys(part_of(name) for name, _ in self.params))
        for recipe, copies in self.copies.items():
            found = {name: value for copy in copies for name, value in copy.squares.items()}
            table[recipe] = {
                part: (
                    sum(float(found[n]) for n in found if part_of(n) == part)
                    / sum(float(self.squares[n]) for n in found if part_of(n) == part)
                )
                ** 0.5
                for part in parts
            }
        return table

    def bytes_per_parameter(self, recipe: str) -> float:
        """Stored bytes of both moments per parameter followed: codes and scales at the blocks that they got here."""
        total = count = 0.0
        for copy in self.copies[recipe]:
            numel = sum(p.numel() for _, p in copy.members)
            formats = (copy.moments.first, copy.moments.second)
            total += numel * sum(f.bytes_per_element for f in formats if f is not None)
            count += numel
        return total / count


def shadow(model: nn.Module, optimizer: AdamW, recipes: Sequence[str | Recipe], seed: int = 0) -> Shadow:
    """Follow an exact training run with quantized copies of its moments.

    Args:
        model: gives names to parameters.
        optimizer: a `torch.optim.AdamW` with one set of betas and eps; it stays exact.
        recipes: names or recipes whose formats are tried.
        seed: of the random bits of rounding.
    """
    return Shadow(model, optimizer, recipes, seed)


def _blocks(x: Tensor, block: int) -> Tensor:
    elements = x.detach().flatten()
    return elements[: elements.numel() // block * block].view(-1, block)
