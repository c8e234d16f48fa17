"""A classifier with one class for each image, in a loop of one's own.

    python examples/own_loop.py [OUTPUT] [EPOCHS]      pip install '.[examples]'

The head starts a weight server on this machine, which keeps the rows in OUTPUT/rows. Run it again with more epochs: it
continues from OUTPUT/state.pt.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from weightserver.torch import ClassifierHead


class Digits(Dataset[tuple[int, Tensor]]):
    """1,797 images of handwritten digits, each shifted at random, with their numbers."""

    images = torch.from_numpy(load_digits().images).float()[:, None] / 16  # (N, 1, 8, 8)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        shift = torch.randint(-1, 2, (2,)).tolist()
        return index, self.images[index].roll(shift, (1, 2)) + 0.1 * torch.randn(1, 8, 8)


def main(output: Path, epochs: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    num_images, state = len(Digits.images), output / "state.pt"
    with ClassifierHead(num_images, 64, num_negatives=512, directory=output / "rows") as head:
        model = nn.ModuleDict({"encoder": encoder, "head": head})
        if state.exists():
            saved = torch.load(state, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        print(f"begins at step {head.num_steps}")
        sampler = head.sampler(window_size=1024, window_stride=256, batch_size=128)
        loader = DataLoader(Digits(), batch_sampler=sampler)
        while head.num_steps < epochs * (num_images // 128):
            for ids, images in head.announced(loader):
                loss = head(encoder(images), ids)
                loss.backward()
                optimizer.step()
                head.step(learning_rate=optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
            print(f"step {head.num_steps}: loss {loss.item():.3f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/own-loop"])[0]), int((sys.argv[2:] or [20])[0]))
