"""A classifier of identities with several images each, tested on identities that it never saw.

    python examples/identities.py [OUTPUT] [EPOCHS]      pip install '.[examples]'

An identity is a place in one of two photographs, an image of it that place with another shift, light and noise: put a
data set of faces or products here, which yields (identity, image). The head starts a weight server on this machine, or
uses others: servers="ws0:50051,ws1:50051". Run it again with more epochs: it continues from OUTPUT/state.pt.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from weightserver.torch import ClassifierHead


class Places(Dataset[tuple[int, Tensor]]):
    """Images of places with their identities; the same image for the same index, unless `varied`."""

    photographs = torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2) / 255  # (2, 3, 427, 640)

    def __init__(self, identities: range, images_each: int, *, varied: bool = False) -> None:
        self.identities = torch.arange(identities.start, identities.stop).repeat_interleave(images_each)
        self.varied = varied

    def __len__(self) -> int:
        return len(self.identities)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        random = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if self.varied else index)
        identity, shift = int(self.identities[index]), torch.randint(0, 9, (2,), generator=random).tolist()
        top, left = identity // 2 % 13 * 30 + shift[0], identity // 26 * 30 + shift[1]
        image = self.photographs[identity % 2, :, top : top + 32, left : left + 32]
        light, contrast = torch.rand(2, generator=random).tolist()
        image = (0.6 + 0.8 * contrast) * (image - 0.5) + 0.3 * (light - 0.5)
        return identity, image + 0.05 * torch.randn(image.shape, generator=random)


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


@torch.no_grad()
def embedded(encoder: nn.Module, images: Places) -> Tensor:
    return torch.cat([encoder(batch) for _, batch in DataLoader(images, batch_size=256)])


def retrieval(embeddings: Tensor, identities: Tensor) -> float:
    """Share of images whose nearest other image shows the same identity."""
    cosines = F.normalize(embeddings) @ F.normalize(embeddings).T
    return (identities[cosines.fill_diagonal_(-1).argmax(dim=1)] == identities).float().mean().item()


def main(output: Path, epochs: int) -> None:
    torch.manual_seed(0)
    train, validation, held_out = Places(range(400), 8, varied=True), Places(range(400), 1), Places(range(400, 500), 4)
    encoder = nn.Sequential(block(3, 32), block(32, 64), block(64, 128), nn.Flatten(), nn.Linear(2048, 64))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    settings = {"num_negatives": 256, "margin": "arcface", "margin_size": 0.2, "temperature": 1 / 16}
    with ClassifierHead(400, 64, directory=output / "rows", **settings) as head:
        model, state = nn.ModuleDict({"encoder": encoder, "head": head}), output / "state.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        loader = DataLoader(train, batch_sampler=head.sampler(batch_size=64, classes=train.identities))
        while head.num_steps < epochs * (len(train) // 64):
            model.train()
            for identities, images in head.announced(loader):
                loss = head(encoder(images), identities)
                loss.backward()
                optimizer.step()
                head.step(learning_rate=0.1)
                optimizer.zero_grad()
            model.eval()
            known = head.evaluate(embedded(encoder, validation), validation.identities).top1
            unseen = retrieval(embedded(encoder, held_out), held_out.identities)
            print(f"step {head.num_steps}: loss {loss.item():.3f}, known {known:.0%}, unseen {unseen:.0%}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/identities"])[0]), int((sys.argv[2:] or [10])[0]))
