"""A plain loop, as torchtune's recipes have it: accumulation, clipping, a schedule, a checkpoint in the middle.

python examples/trainers/plain_loop.py
"""

import io

import torch
from torch import nn

import qcompile


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 5))
    step = torch.compile(optimizer.step, backend="qstate", options={"recipe": "8bit", "strict": True})
    losses: list[float] = []
    for i in range(30):
        for _ in range(2):  # micro-batches
            inputs = torch.randn(32, 64)
            loss = (model(inputs) - torch.tanh(inputs.flip(1))).square().mean() / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(2 * loss.item())
        if i == 14:  # what a run that is resumed does
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            found = torch.load(file, weights_only=True)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
    report = qcompile.explain(optimizer)
    print(str(report).splitlines()[-1])
    print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
    assert losses[-1] < 0.5 * losses[0]
    assert report.state_bytes < 0.3 * report.dense_state_bytes


if __name__ == "__main__":
    main()
