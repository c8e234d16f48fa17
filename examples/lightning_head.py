"""The head in a LightningModule: lightning's own checkpoints restore its rows.

python examples/lightning_head.py [OUTPUT] [EPOCHS]      pip install '.[examples]'
"""

import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainer.torchvision_schemas import declare_missing_schemas
from weightserver.torch import ClassifierHead

declare_missing_schemas()  # lightning imports torchvision, whose wheel may be for another build of torch

from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

IMAGES = torch.from_numpy(load_digits().images).float() / 16  # (1797, 8, 8)


class InstanceClassifier(LightningModule):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.head = ClassifierHead(len(IMAGES), 64, num_negatives=512, directory=directory)

    def train_dataloader(self) -> Any:
        sampler = self.head.sampler(window_size=1024, window_stride=256, batch_size=128)
        return self.head.announced(DataLoader(TensorDataset(torch.arange(len(IMAGES)), IMAGES), batch_sampler=sampler))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        ids, images = batch
        optimizer = self.optimizers()
        loss = self.head(self.encoder(images + 0.1 * torch.randn_like(images)), ids)
        self.manual_backward(loss)
        optimizer.step()
        self.head.step(learning_rate=optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9)


def main(output: Path, epochs: int) -> None:
    seed_everything(0)
    model = InstanceClassifier(output / "rows")
    checkpoints = ModelCheckpoint(output, save_last=True)
    trainer = Trainer(max_epochs=epochs, callbacks=[checkpoints], logger=False, accelerator="cpu")
    saved = output / "last.ckpt"
    trainer.fit(model, ckpt_path=saved if saved.exists() else None, weights_only=True)
    print(f"step {model.head.num_steps}: loss {trainer.callback_metrics['loss'].item():.3f}")
    model.head.close()


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/lightning"])[0]), int((sys.argv[2:] or [20])[0]))
