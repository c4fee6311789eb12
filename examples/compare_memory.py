"""Where the memory of a training step goes: dense or quantized state, several graphs or one.

    python examples/compare_memory.py
    python examples/compare_memory.py --layers 24 --width 2048 --plot memory.png

Peak bytes while a step runs, of 12 equal layers by default. Parameters and state are what lives between steps. The rest is
what the step allocates, from torch's own record of every allocation: a buffer as large as a weight is a gradient (or a
temporary of its update), anything else an activation. On a GPU the total is `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import qcompile

MIB = 2**20
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step."""

    way: str
    parameters: int
    state: int
    gradients: int
    activations: int
    graphs: str

    @property
    def total(self) -> int:
        return self.parameters + self.state + self.gradients + self.activations


def network(layers: int, width: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(*blocks).to(device)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


WAYS: dict[str, Callable[[Step], Step]] = {
    "dense, eager": lambda step: step,
    "dense, Inductor": lambda step: torch.compile(step, backend="inductor"),
    "8bit, several graphs": lambda step: torch.compile(step, backend="qstate"),
    "8bit, one graph": lambda step: qcompile.train_step(fullgraph=True)(step),
}


def peak(step: Step, x: Tensor, weight_bytes: int) -> tuple[int, int]:
    """Bytes of weight-sized and of other buffers that one step holds at the moment it holds most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(x)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    weights = others = 0
    most = (0, 0)
    for event in changes:
        size = event["args"]["Bytes"]
        if abs(size) == weight_bytes:
            weights += size
        else:
            others += size
        if weights + others > sum(most):
            most = (weights, others)
    return most


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    buffers = [b for values in optimizer.state.values() for b in values.values() if isinstance(b, Tensor)]
    return sum(b.stored_bytes if isinstance(b, qcompile.QuantizedState) else b.nbytes for b in buffers)


def measure(way: str, args: argparse.Namespace) -> Memory:
    torch.compiler.reset()
    model = network(args.layers, args.width, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = WAYS[way](plain_step(model, optimizer))
    x = torch.randn(args.batch, args.width, device=args.device)
    for _ in range(3):  # compile, make state, settle
        step(x)
    parameters = sum(p.nbytes for p in model.parameters())
    state = state_bytes(optimizer)
    weight = args.width * args.width * 4
    if args.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(x)
        transient = torch.cuda.max_memory_allocated() - parameters - state - x.nbytes
        activations = min(transient, args.layers * 2 * x.nbytes)
        gradients, others = transient - activations, activations
    else:
        gradients, others = peak(step, x, weight)
    explain = getattr(step, "explain", None)
    graphs = str(explain().graphs) if explain is not None else "-"
    return Memory(way, parameters, state, gradients, others, graphs)


def draw(rows: list[Memory], path: str) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    left = [0.0] * len(rows)
    for part in ("parameters", "state", "gradients", "activations"):
        widths = [getattr(row, part) / MIB for row in rows]
        axes.barh([row.way for row in rows], widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="MiB at the peak of a step")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--plot", metavar="FILE", help="draw the table")
    args = parser.parse_args()
    if args.batch == args.width:
        parser.error("batch and width must differ: buffers are told apart by their size")
    rows = [measure(way, args) for way in tqdm(WAYS, desc="measuring")]
    print(f"{args.layers} layers of {args.width}x{args.width}, batch {args.batch}, AdamW; MiB at the peak of a step")
    print(
        f"{'':22}{'parameters':>11}{'state':>9}{'gradients':>11}{'activations':>13}{'total':>9}{'layers of gradients':>21}"
    )
    weight = args.width * args.width * 4
    for row in rows:
        parts = f"{row.parameters / MIB:11.1f}{row.state / MIB:9.1f}{row.gradients / MIB:11.1f}{row.activations / MIB:13.1f}"
        print(f"{row.way:22}{parts}{row.total / MIB:9.1f}{row.gradients / weight:21.2f}")
    one = rows[-1]
    bound = one.parameters + one.state + one.activations + 2 * weight
    print(
        f"one graph: {one.total / MIB:.1f} MiB; parameters + state + activations + 2 layers' gradients: {bound / MIB:.1f} MiB"
    )
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
