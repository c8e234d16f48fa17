"""The head in a HuggingFace Trainer: the trainer's own checkpoints (safetensors) restore its rows.

python examples/transformers_head.py [OUTPUT] [EPOCHS]      pip install '.[examples]'
"""

import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer.torchvision_schemas import declare_missing_schemas
from weightserver.torch import ClassifierHead

declare_missing_schemas()  # transformers imports torchvision, whose wheel may be for another build of torch

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

IMAGES = torch.from_numpy(load_digits().images).float() / 16  # (1797, 8, 8)


class InstanceClassifier(nn.Module):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.head = ClassifierHead(len(IMAGES), 64, num_negatives=512, directory=directory)

    def forward(self, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.encoder(images + 0.1 * torch.randn_like(images)), ids)}


class InstanceTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        images = [{"ids": index, "images": image} for index, image in enumerate(IMAGES)]
        loader = DataLoader(images, batch_sampler=self.model.head.sampler(batch_size=128))
        return self.model.head.announced(loader, ids_of=lambda batch: batch["ids"])


class HeadStep(TrainerCallback):
    def on_optimizer_step(self, *_: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **__: Any) -> None:
        model.head.step(learning_rate=optimizer.param_groups[0]["lr"])


def main(output: Path, epochs: int) -> None:
    arguments = TrainingArguments(
        str(output), num_train_epochs=epochs, learning_rate=0.1, optim="sgd", optim_args="momentum=0.9",
        lr_scheduler_type="constant", save_strategy="epoch", logging_strategy="epoch", report_to="none",
        use_cpu=True, ignore_data_skip=True,  # the head's sampler continues by itself
    )  # fmt: skip
    model = InstanceClassifier(output / "rows")
    trainer = InstanceTrainer(model, arguments, callbacks=[HeadStep()])
    last = get_last_checkpoint(str(output)) if output.exists() else None
    result = trainer.train(resume_from_checkpoint=last)
    print(f"step {model.head.num_steps}: loss {result.training_loss:.3f}")
    model.head.close()


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/transformers"])[0]), int((sys.argv[2:] or [20])[0]))
