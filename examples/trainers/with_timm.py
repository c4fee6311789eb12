"""timm: a small vision transformer with an exponential moving average of its weights, and timm's own parameter groups.

pip install timm && python examples/trainers/with_timm.py
"""

import timm
import torch
from timm.optim import param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import nn

import qcompile


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), lr=1e-3)
    labels = torch.arange(64) % 10
    images = torch.randn(10, 3, 32, 32)[labels] + 0.3 * torch.randn(64, 3, 32, 32)

    @qcompile.train_step(recipe="8bit", strict=True, one_graph=False)
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for i in range(12):
        chosen = torch.arange(16) + 16 * (i % 4)
        losses.append(train_step(images[chosen], labels[chosen]).item())
        average.update(model)
    report = train_step.explain()
    print(str(report).splitlines()[-1 if report.not_one_graph is None else -2])
    with torch.no_grad():
        mean = nn.functional.cross_entropy(average.module.eval()(images), labels).item()
    print(f"loss {losses[0]:.2f}, then {losses[-1]:.2f}; of the averaged weights {mean:.2f}")
    assert mean < losses[0]
    assert report.state_bytes < 0.3 * report.dense_state_bytes


if __name__ == "__main__":
    main()
