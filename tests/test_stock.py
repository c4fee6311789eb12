"""What is not ours in a graph: as Inductor compiles it, but for what that computes wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import qcompile

A, B, X = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((24, 8), (8, 40), (24, 40)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a, b: torch.add(x, a @ b, alpha=-0.01),
        lambda x, a, b: torch.add(a @ b, x, alpha=3),
        lambda x, a, b: torch.add(x, a @ b),
        lambda x, a, b: torch.sub(x, a @ b, alpha=0.5),
        lambda x, a, b: torch.add(a @ b, 2.0, alpha=0.5),
    ],
    ids=["scaled product", "scaled other", "no alpha", "sub", "number"],
)
def test_a_product_keeps_its_alpha(function: Callable[..., Tensor]) -> None:
    torch.testing.assert_close(torch.compile(function, backend="qstate")(X, A, B), function(X, A, B))


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.9}], ids=str)
def test_sgd_in_one_graph_is_as_in_eager(settings: dict[str, Any]) -> None:
    """Its update reads a product of matrices, the gradient, in the same graph."""
    ends = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, **settings)

        def step(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = qcompile.train_step(step, recipe="dense", fullgraph=True) if compiled else step
        for i in range(3):
            run(torch.randn(8, 64, generator=torch.Generator().manual_seed(i)))
        ends.append(model.weight.detach())
    torch.testing.assert_close(ends[0], ends[1])


def test_passes_of_the_user_still_run() -> None:
    seen: list[int] = []

    class Count(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(len(graph.nodes))

        def uuid(self) -> str:
            return f"count {id(seen)}"

    options = {"inductor": {"post_grad_custom_pre_pass": Count()}}
    found = torch.compile(lambda x, a, b: torch.add(x, a @ b, alpha=2), backend="qstate", options=options)(X, A, B)
    assert len(seen) == 1
    torch.testing.assert_close(found, X + 2 * (A @ B))
