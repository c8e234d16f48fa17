"""The head with lightly's transforms and modules: two views of each image, whose rows are the class.

python examples/lightly_head.py [OUTPUT] [EPOCHS]      pip install '.[examples]'
"""

import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer.torchvision_schemas import declare_missing_schemas
from weightserver.torch import ClassifierHead

declare_missing_schemas()  # lightly imports torchvision, whose wheel may be for another build of torch

from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform

IMAGES = (load_digits().images * 15.9).astype("uint8")  # (1797, 8, 8)


class TwoViews(Dataset[Any]):
    transform = SimCLRTransform(input_size=16, min_scale=0.4, cj_prob=0.5, gaussian_blur=0.0)

    def __getitem__(self, index: int) -> Any:
        image = Image.fromarray(IMAGES[index]).resize((16, 16)).convert("RGB")
        return self.transform(image), index  # two float tensors (3, 16, 16), and the class


def main(output: Path, epochs: int) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.Flatten(),
        SimCLRProjectionHead(1024, 256, 64),
    )
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    with ClassifierHead(len(IMAGES), 64, num_negatives=512, directory=output / "rows") as head:
        loader = DataLoader(TwoViews(), batch_sampler=head.sampler(batch_size=128))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        for _ in range(epochs):
            for views, ids in head.announced(loader, ids_of=lambda batch: batch[1]):
                loss = sum(head(encoder(view), ids) for view in views) / len(views)
                loss.backward()
                optimizer.step()
                head.step(learning_rate=optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
            plateau.step(loss.item())
            print(f"step {head.num_steps}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/lightly"])[0]), int((sys.argv[2:] or [20])[0]))
