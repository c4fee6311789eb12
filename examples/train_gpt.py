"""Train a byte-level GPT on the source of Python's standard library, dense and with quantized optimizer state.

    python examples/train_gpt.py
    python examples/train_gpt.py --layers 8 --width 256 --steps 1000 --plot loss.png

Both runs start from the same weights and see the same batches. The table compares validation loss, bytes of optimizer
state per parameter, time per step and time to compile.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from tqdm import tqdm

import qcompile
from qcompile.nn import StableEmbedding

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder over bytes, [batch, length] int64 in, [batch, length, 256] logits out.

    `tied` shares the weight of the head with the token embedding; `stable` makes that a `StableEmbedding`.
    """

    def __init__(self, layers: int, width: int, context: int, tied: bool = False, stable: bool = False) -> None:
        super().__init__()
        self.token = (StableEmbedding if stable else nn.Embedding)(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 32)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and not isinstance(module, StableEmbedding):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library() -> tuple[Tensor, Tensor]:
    """Train and validation bytes; every tenth file, in order of name, is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.relative_to(root).parts)
    )
    train, validation = bytearray(), bytearray()
    for i, path in enumerate(files):
        (validation if i % 10 == 0 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def batch_of(data: Tensor, generator: torch.Generator, batch: int, context: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - context - 1, (batch,), generator=generator)
    rows = torch.stack([data[s : s + context + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Result:
    recipe: str
    losses: list[float]
    validation: float
    bytes_per_parameter: float
    step_ms: float
    compile_seconds: float
    report: qcompile.Report


# How to make each optimizer from parameters and a learning rate, and its default learning rate.
OPTIMIZERS = {
    "adamw": (lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95), weight_decay=0.1), 1e-3),
    "adam": (lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(0.9, 0.95)), 2e-3),
    "sgd": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 0.3),
    "rmsprop": (lambda p, lr: torch.optim.RMSprop(p, lr=lr), 3e-4),
    "nadam": (lambda p, lr: torch.optim.NAdam(p, lr=lr, betas=(0.9, 0.95)), 2e-3),
    "adagrad": (lambda p, lr: torch.optim.Adagrad(p, lr=lr), 1e-2),
}


def train(recipe: str, args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> Result:
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.context)
    make, default_lr = OPTIMIZERS[args.optimizer]
    optimizer = make(model.parameters(), args.lr or default_lr)
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warmup, max(0.02, (args.steps - t) / (args.steps - warmup)))
    )

    # Clipping keeps all gradients alive, so one graph would save no memory here: see compare_memory.py.
    @qcompile.train_step(recipe=recipe, one_graph=False)
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    generator = torch.Generator().manual_seed(args.seed)
    losses, seconds = [], []
    with tqdm(range(args.steps), desc=f"{recipe:>6}", unit="step") as progress:
        for _ in progress:
            batch = batch_of(data[0], generator, args.batch, args.context)
            start = time.perf_counter()
            losses.append(train_step(*batch).item())
            seconds.append(time.perf_counter() - start)
            schedule.step()
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    typical = sorted(seconds)[len(seconds) // 2]
    report = train_step.explain()
    parameters = sum(p.numel() for p in model.parameters())
    return Result(
        recipe=recipe,
        losses=losses,
        validation=validate(model, args, data[1]),
        bytes_per_parameter=report.state_bytes / parameters,
        step_ms=1e3 * typical,
        compile_seconds=sum(s - typical for s in seconds[:5] if s > 2 * typical),
        report=report,
    )


@torch.no_grad()
def validate(model: GPT, args: argparse.Namespace, data: Tensor) -> float:
    generator = torch.Generator().manual_seed(1)
    batches = [batch_of(data, generator, args.batch, args.context) for _ in range(args.validation_batches)]
    return sum(loss_of(model, x, y).item() for x, y in batches) / len(batches)


def draw(results: list[Result], path: str) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for result in results:
        smooth = torch.tensor(result.losses).unfold(0, 10, 1).mean(1) if len(result.losses) > 10 else result.losses
        axes.plot(smooth, label=f"{result.recipe} (validation {result.validation:.4f})")
    axes.set(xlabel="step", ylabel="training loss, nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--validation-batches", type=int, default=40)
    parser.add_argument("--recipe", default="8bit", choices=[r for r in qcompile.RECIPES if r != "dense"])
    parser.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS))
    parser.add_argument("--lr", type=float, help="peak learning rate; each optimizer has a default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw the two loss curves")
    parser.add_argument("--explain", action="store_true", help="print what the compiler did with each state buffer")
    args = parser.parse_args()
    data = standard_library()
    results = [train(recipe, args, data) for recipe in ("dense", args.recipe)]
    if args.explain:
        print(results[1].report)
    print(f"{args.optimizer}, {args.layers} layers of width {args.width}, {args.steps} steps, seed {args.seed}")
    print(
        f"{'state':8}{'validation loss':>17}{'state B/param':>15}{'ms/step':>9}{'compile s':>11}{'graphs':>8}{'kernels':>9}"
    )
    for r in results:
        row = f"{r.validation:17.4f}{r.bytes_per_parameter:15.3f}{r.step_ms:9.1f}{r.compile_seconds:11.1f}"
        print(f"{r.recipe:8}{row}{r.report.graphs:8}{len(r.report.kernels):9}")
    quantized = [s for s in results[1].report.states if s.reason is None]
    if quantized:
        share = sum(s.stored_bytes for s in quantized) / sum(s.dense_bytes for s in quantized)
        print(f"quantized state: {len(quantized)} buffers at {share:.4f} of their dense bytes")
    gap = results[1].validation / results[0].validation - 1
    print(f"validation loss of {args.recipe} against dense: {100 * gap:+.2f} %")
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
