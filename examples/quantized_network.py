"""Networks whose linear layers compute in 4 bits: after training, or while training; and where their error comes from.

Every row of a weight and every token of an activation has a scale of its own, its largest value over 7; values are rounded
to the nearest of the 15 symmetric levels. Gradients pass straight through (QAT). `examples/optimizer_study.py` uses it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from qcompile.analysis import ErrorParts, error_parts, gain_parts, kurtosis, max_to_median

BITS = 4


def rounded(x: Tensor, bits: int = BITS) -> Tensor:
    """Symmetric levels, one scale per row, to nearest; a row of zeros stays so. Its gradient is that of x."""
    top = 2 ** (bits - 1) - 1
    scale = x.detach().abs().amax(-1, keepdim=True) / top
    levels = (x.detach() / scale.where(scale > 0, 1.0)).round() * scale
    return levels + (x - x.detach())  # the levels themselves, bit for bit


def hadamard(size: int) -> Tensor:
    """The orthonormal matrix [size, size] that spreads an outlier over a row; of blocks, where size is no power of two."""
    block = size & -size  # the largest power of two that divides it
    h = torch.ones(1, 1)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.block_diag(*[h / block**0.5] * (size // block))


class QuantizedLinear(nn.Module):
    """A linear layer that rounds its weight and its input, both rotated first if `rotate`. It shares the layer's parameters."""

    def __init__(self, layer: nn.Linear, rotate: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("rotation", hadamard(layer.in_features) if rotate else None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.rotation is not None:
            x, weight = x @ self.rotation, weight @ self.rotation
        return linear(rounded(x), rounded(weight), self.bias)


def quantize_linears(model: nn.Module, rotate: bool = False) -> nn.Module:
    """Replace every linear layer of a model, in place; gives the model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, QuantizedLinear(child, rotate))
    return model


def quantized_copy(model: nn.Module, rotate: bool = False) -> nn.Module:
    """What post-training quantization makes of a model; the model stays as it is."""
    return quantize_linears(copy.deepcopy(model), rotate)


@dataclass(frozen=True, slots=True)
class Measured:
    """A module of a network: its kind, outliers of its input, and the error of its output in the quantized network.

    `gains` are G1 and G2 of a linear layer's weight (`qcompile.analysis.gain_parts`).
    """

    name: str
    kind: str
    mmr: float
    kurtosis: float
    parts: ErrorParts
    gains: tuple[float, float] | None


@torch.no_grad()
def measure(
    model: nn.Module, quantized: nn.Module, tokens: Tensor, wanted: Callable[[nn.Module], bool]
) -> list[Measured]:
    """Measure the modules of one input that are `wanted`, and the whole network, on one batch.

    Args:
        model: the exact network. quantized: the same with some modules replaced.
        tokens: [batch, length].
        wanted: chooses modules of `model`; those that replace them are found by name.
    """
    names = [name for name, module in model.named_modules() if name and wanted(module)]
    inputs, other_inputs = (_inputs(network, names, tokens) for network in (model, quantized))
    measured = []
    for name in names:
        exact, other = model.get_submodule(name), quantized.get_submodule(name)
        h, h_q = inputs[name], other_inputs[name]
        ratios = max_to_median(h)
        gains = None
        if isinstance(exact, nn.Linear) and not torch.equal(h, h_q):
            gains = gain_parts(exact.weight, rounded(exact.weight) - exact.weight, h, h_q)
        parts = error_parts(exact, other, h, h_q)
        mmr = ratios[ratios.isfinite()].mean().item()
        measured.append(Measured(name, type(exact).__name__, mmr, kurtosis(h), parts, gains))
    return measured


def _inputs(network: nn.Module, names: list[str], tokens: Tensor) -> dict[str, Tensor]:
    """What each of these modules is called with."""
    found: dict[str, Tensor] = {}

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: found.update({name: given[0]})

    hooks = [network.get_submodule(name).register_forward_pre_hook(hook_of(name)) for name in names]
    try:
        network(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def output_error(model: nn.Module, quantized: nn.Module, tokens: Tensor) -> float:
    """R of the network's output: ||logits_q - logits||^2 / ||logits||^2."""
    exact, found = (network(tokens).double() for network in (model, quantized))
    return ((found - exact).square().sum() / exact.square().sum()).item()
