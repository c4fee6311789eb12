"""Layers made for quantized optimizer state."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

_alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class StableEmbedding(nn.Embedding):
    """An embedding for training with quantized state: Xavier uniform weights, a layer norm behind it, and a weight whose
    state stays dense whatever the recipe. An override of the backend's options still wins.

    Source: arXiv 2110.02861, section 2.3. To be put in the place of the token embedding, before positions are added.

    Args:
        num_embeddings, embedding_dim, **options: of `torch.nn.Embedding`.

    Shape: [*] of integers in, [*, embedding_dim] of the weight's dtype out.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, **options: object) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)  # type: ignore[arg-type]
        place = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.norm = nn.LayerNorm(embedding_dim, **place)  # type: ignore[arg-type]
        _alive.add(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _alive.add(self)  # a copy, or one from a file, is not made by __init__

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()
        if "norm" in self._modules:
            self.norm.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        # the norm is computed in the norm's own dtype, which may be wider than the weight's
        return self.norm(super().forward(input).to(self.norm.weight.dtype)).to(self.weight.dtype)


def is_stable_embedding(param: Tensor | None) -> bool:
    """Whether a parameter is the weight of a `StableEmbedding`, if of other layers too."""
    return param is not None and any(layer._parameters.get("weight") is param for layer in _alive)
