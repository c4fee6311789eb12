"""Lightning: the optimizer that `configure_optimizers` returns.

pip install lightning && python examples/trainers/with_lightning.py
"""

import lightning
import torch
from torch import Tensor, nn

import qcompile


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, targets = batch
        loss = (self.net(inputs) - targets).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = qcompile.compile_step(torch.optim.AdamW(self.parameters(), lr=1e-2), recipe="8bit", strict=True)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(256, 64)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.tanh(x.flip(1))), batch_size=32)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=8, accelerator="auto", gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, data)
    report = qcompile.explain(trainer.optimizers[0])
    print(str(report).splitlines()[-1])
    print(f"loss {module.losses[0]:.3f}, then {module.losses[-1]:.3f}")
    assert module.losses[-1] < 0.5 * module.losses[0]
    assert report.state_bytes < 0.3 * report.dense_state_bytes


if __name__ == "__main__":
    main()
