"""Accelerate: the plain loop, prepared, with gradient accumulation.

pip install accelerate && python examples/trainers/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn

import qcompile


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 64)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.tanh(x.flip(1))), batch_size=32)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    qcompile.compile_step(optimizer, recipe="8bit", strict=True)  # before `prepare`, which wraps the optimizer
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for _ in range(10):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    report = qcompile.explain(optimizer.optimizer)
    print(str(report).splitlines()[-1])
    print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
    assert losses[-1] < 0.5 * losses[0]
    assert report.state_bytes < 0.3 * report.dense_state_bytes


if __name__ == "__main__":
    main()
