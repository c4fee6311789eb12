"""Hugging Face Trainer: a small GPT-2 from scratch, its AdamW with 8-bit state.

pip install transformers accelerate && python examples/trainers/with_transformers.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import qcompile


class Sequences(torch.utils.data.Dataset):
    """Counting upwards from a random number: 32 tokens out of 256."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + 37 * index) % 256
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=128, n_layer=2, n_head=4))
    optimizer = qcompile.compile_step(torch.optim.AdamW(model.parameters(), lr=2e-3), recipe="8bit", strict=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=16, num_train_epochs=2, logging_steps=16, save_strategy="no",
            report_to=[], use_cpu=not torch.cuda.is_available(), lr_scheduler_type="cosine",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Sequences(), optimizers=(optimizer, None))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = qcompile.explain(optimizer)
    print(str(report).splitlines()[-1])
    print(f"loss {losses[0]:.2f}, then {losses[-1]:.2f}")
    assert losses[-1] < losses[0]
    assert report.state_bytes < 0.3 * report.dense_state_bytes


if __name__ == "__main__":
    main()
