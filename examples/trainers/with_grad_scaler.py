"""torch.amp: fp16 autocast, GradScaler, and the update in the one function that is compiled around it.

python examples/trainers/with_grad_scaler.py
"""

import torch
from torch import nn

import qcompile


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    optimizer = qcompile.compile_step(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), strict=True)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16)
    losses: list[float] = []
    for i in range(40):
        inputs = torch.randn(32, 64, device=device)
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            outputs = model(inputs)
        loss = (outputs.float() - torch.tanh(inputs.flip(1))).square().mean()
        scaler.scale(loss).backward()
        if i == 10:  # a gradient that overflows: the step is skipped, and no code changes
            model[0].weight.grad[0, 0] = float("inf")
            before = optimizer.state[model[0].weight]["exp_avg"].codes.clone()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if i == 10:
            assert torch.equal(before, optimizer.state[model[0].weight]["exp_avg"].codes)
        optimizer.zero_grad()
        losses.append(loss.item())
    report = qcompile.explain(optimizer)
    print(str(report).splitlines()[-1])
    print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}; scale {scaler.get_scale():.0f}")
    assert losses[-1] < 0.7 * losses[0]
    assert report.state_bytes < 0.3 * report.dense_state_bytes


if __name__ == "__main__":
    main()
