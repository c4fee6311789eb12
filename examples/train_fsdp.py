"""Train the byte-level GPT of `train_gpt.py` under FSDP2, every rank with quantized state of its part; die, and resume.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    torchrun --nproc-per-node 2 examples/train_fsdp.py --checkpoints run --die-at 60
    torchrun --nproc-per-node 4 examples/train_fsdp.py --checkpoints run

The second kills a rank in its 60th step; the third goes on from the last checkpoint, on another number of ranks. Batches
depend on the step alone, and every rank takes an equal share, so all three see the same data. gloo on CPUs, NCCL on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from train_gpt import GPT, batch_of, loss_of, standard_library

import qcompile


def last_checkpoint(folder: Path) -> Path | None:
    """The newest one that is whole: it gets its name when everything is written."""
    whole = [path for path in folder.glob("step-*") if path.suffix != ".part"]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


class Training:
    """The model, its optimizer and the next step."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device, self.next_step = args, device, 0
        self.model = GPT(args.layers, args.width, args.context).to(device)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.update = torch.compile(self.optimizer.step, backend="qstate", options={"recipe": args.recipe})
        self.data = standard_library()[0]

    def step(self) -> float:
        """One step; the loss over the whole batch."""
        args, rank, ranks = self.args, dist.get_rank(), dist.get_world_size()
        warmup = max(1, args.steps // 20)
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * min(
                (self.next_step + 1) / warmup, max(0.02, 1 - self.next_step / max(1, args.steps - warmup))
            )
        generator = torch.Generator().manual_seed(args.seed + self.next_step)
        x, y = (t.chunk(ranks)[rank].to(self.device) for t in batch_of(self.data, generator, args.batch, args.context))
        loss = loss_of(self.model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.update()
        self.optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        self.next_step += 1
        return loss.item() / ranks

    def save(self, folder: Path) -> None:
        """Write a checkpoint next to its final name, so that a rank that dies in between leaves none that looks whole."""
        path = folder / f"step-{self.next_step}"
        part = path.with_name(f"{path.name}.part")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = {"model": model, "optimizer": optimizer, "next_step": self.next_step}
        checkpoint.save(found, checkpoint_id=part)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            part.rename(path)
        dist.barrier()

    def load(self, path: Path) -> None:
        qcompile.init_state(self.optimizer, recipe=self.args.recipe)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = {"model": model, "optimizer": optimizer, "next_step": 0}
        checkpoint.load(found, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        self.next_step = found["next_step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--recipe", default="8bit", choices=list(qcompile.RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save here, and go on from the last one")
    parser.add_argument("--every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="kill the last rank in this step")
    parser.add_argument(
        "--losses", type=Path, metavar="FILE", help="append each step and its loss, a line of JSON each"
    )
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for name, value in {"MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)  # started without torchrun: alone
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % ranks:
        parser.error(f"--batch {args.batch} cannot be shared by {ranks} ranks: take a multiple of {ranks}")
    training = Training(args, torch.device("cuda" if on_gpu else "cpu"))
    if args.checkpoints is not None and (path := last_checkpoint(args.checkpoints)) is not None:
        training.load(path)
        if rank == 0:
            print(f"going on from {path} on {ranks} rank(s)")
    loss = float("nan")
    with tqdm(total=args.steps, initial=training.next_step, unit="step", disable=rank != 0) as progress:
        while training.next_step < args.steps:
            if args.die_at == training.next_step + 1 and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = training.step()
            if args.checkpoints is not None and training.next_step % args.every == 0:
                training.save(args.checkpoints)
            if args.losses is not None and rank == 0:
                with args.losses.open("a") as log:
                    log.write(json.dumps({"step": training.next_step, "loss": loss}) + "\n")
            progress.update()
            progress.set_postfix(loss=f"{loss:.4f}")
    report = qcompile.explain(training.optimizer)
    held = torch.tensor([report.state_bytes, report.dense_state_bytes], device=training.device)
    dist.all_reduce(held)
    if rank == 0:
        stored, dense = held.tolist()
        print(
            f"{args.recipe}, {ranks} rank(s), {args.steps} steps: loss {loss:.4f}, state {stored:,} bytes on all ranks, dense {dense:,}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
