"""The embedding whose state stays dense."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm

import qcompile
from qcompile.nn import StableEmbedding, is_stable_embedding

WORDS, WIDTH = 128, 64


class Model(nn.Module):
    """Embeddings and a head, which may share its weight with them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.token, self.head = StableEmbedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.token(tokens))


def reasons(model: nn.Module, **options: object) -> dict[str, str | None]:
    """Why state of each matrix is dense, after two steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(optimizer.step, backend="qstate", options={"strict": True, **options})
    for _ in range(2):
        model(torch.arange(WORDS)).logsumexp(1).sum().backward()
        step()
        optimizer.zero_grad()
    states = qcompile.explain(optimizer).states
    return {s.param: s.reason for s in states if s.key == "exp_avg" and len(s.shape) == 2}


def test_values_are_those_of_an_embedding_and_a_norm() -> None:
    torch.manual_seed(0)
    layer = StableEmbedding(WORDS, WIDTH, padding_idx=3)
    bound = (6 / (WORDS + WIDTH)) ** 0.5
    assert 0.9 * bound < float(layer.weight.abs().max()) <= bound
    assert not layer.weight[3].any()
    tokens = torch.randint(WORDS, (2, 5))
    expected = layer_norm(embedding(tokens, layer.weight), (WIDTH,), layer.norm.weight, layer.norm.bias)
    assert torch.equal(layer(tokens), expected)
    half = StableEmbedding(WORDS, WIDTH, dtype=torch.bfloat16)
    half.norm.float()
    assert half(tokens).dtype == torch.bfloat16
    with torch.no_grad():
        layer.norm.weight.fill_(2.0)
    layer.reset_parameters()
    assert torch.equal(layer.norm.weight, torch.ones(WIDTH))


def test_its_state_stays_dense() -> None:
    found = reasons(Model())
    assert found["token.weight"] == "its layer is a StableEmbedding"
    assert found["head.weight"] is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_one_too(copied) -> None:
    model = copied(Model())
    assert reasons(model)["token.weight"] == "its layer is a StableEmbedding"
    assert not is_stable_embedding(model.head.weight)


def test_a_shared_weight_stays_dense() -> None:
    (reason,) = reasons(Model(tied=True)).values()
    assert reason == "its layer is a StableEmbedding"


def test_an_override_wins() -> None:
    found = reasons(Model(), overrides={"token.weight": "8bit", "head.*": "dense"})
    assert found == {"token.weight": None, "head.weight": "an override keeps it dense"}
