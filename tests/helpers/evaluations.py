"""Small evaluations in tests: images of four classes, a good encoder and a useless one, and interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.helpers.small_run import PowerLoss
from tests.helpers.torchrun import torchrun
from trainer.data import Dataset
from trainer.evaluate.__main__ import main
from trainer.evaluate.encoders import LoadedEncoder
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.features import Advance
from trainer.model import EncoderConfig, TorchvisionEncoder
from trainer.torchvision_schemas import import_module
from weightserver.torch import Ranks

NUM_CLASSES = 4
SIDE = 16


def striped(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of noise with a bright horizontal band, whose height is the class."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (count, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 4 * label : 4 * label + 4] += 150
    return images, labels


def made_dataset(num_train: int = 320, num_test: int = 61) -> Dataset:
    (train, train_labels), (test, test_labels) = striped(num_train, 1), striped(num_test, 2)
    return Dataset(train_images=train, train_labels=train_labels, test_images=test, test_labels=test_labels)


class SeesRows(nn.Module):
    """Features are the brightnesses of the rows of pixels, by way of a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SIDE)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.norm(images.mean(dim=(1, 3)))
        return features


class Convolution(nn.Module):
    """A trainable encoder with a BatchNorm2d and a BatchNorm1d."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.convolution = nn.Conv2d(1, 8, (1, SIDE), bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.BatchNorm1d(8 * SIDE)
        with torch.no_grad():
            self.convolution.weight.copy_(torch.randn(8, 1, 1, SIDE, generator=generator) / SIDE)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm(self.convolution(images)).relu()
        features: Tensor = self.last(maps.flatten(1))
        return features


RESNET = EncoderConfig(
    name="torchvision:resnet10", in_channels=3, image_size=64, pixel_mean=(0.5, 0.4, 0.45), pixel_std=(0.25,) * 3
)


def small_resnet() -> nn.Module:
    """A torchvision ResNet of one block in each stage, for `RESNET`."""
    resnet = import_module("torchvision.models.resnet")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchvisionEncoder(resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])).eval()


class SeesNothing(nn.Module):
    """All images have the same features."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(SIDE))

    def forward(self, images: Tensor) -> Tensor:
        return self.value.expand(len(images), SIDE)


def made_evaluation(
    encoder: nn.Module,
    state: Path,
    dataset: Dataset | None = None,
    ranks: Ranks | None = None,
    *,
    config: EncoderConfig | None = None,
    data_dir: Path | None = None,
) -> Evaluation:
    dataset = dataset or made_dataset()
    state.mkdir(parents=True, exist_ok=True)
    return Evaluation(
        encoder=LoadedEncoder(name="made", module=encoder, config=config or EncoderConfig(image_size=SIDE)),
        dataset=dataset,
        data_dir=data_dir,
        state=state,
        ranks=ranks or Ranks(),
    )


def evaluate(arguments: list[str]) -> int:
    """Runs `python -m trainer.evaluate` in this process; returns its exit status."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


@dataclass(frozen=True, kw_only=True)
class Watched(Evaluation):
    """Lists the descriptions and counts that `advance` is told, and fails at the one numbered `fails_at`."""

    seen: list[tuple[str, int]]
    fails_at: int | None = None

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Advance]:
        def advance(count: int = 1, **shown: Tensor) -> None:
            self.seen.append((description, count))
            if len(self.seen) == self.fails_at:
                raise PowerLoss

        yield advance


def interrupted_evaluation(
    run: Callable[[Evaluation], Outcome], evaluation: Evaluation, *, fails_at: int
) -> tuple[Outcome, list[tuple[str, int]]]:
    """The outcome of an evaluation that failed once, and what was done after the failure."""
    fields = {
        name: getattr(evaluation, name) for name in ("encoder", "dataset", "state", "ranks", "data_dir", "bfloat16")
    }
    try:
        run(Watched(**fields, seen=[], fails_at=fails_at))
    except PowerLoss:
        seen = list[tuple[str, int]]()
        return run(Watched(**fields, seen=seen)), seen
    raise AssertionError(f"no {fails_at} parts were done")


def outcomes_of_ranks(module: str, num_ranks: int, directory: Path) -> list[Outcome]:
    """Runs a test module as a script under torchrun; returns what each rank gave to `write_outcome`."""
    directory.mkdir()
    torchrun(module, directory, num_ranks=num_ranks)
    return [Outcome(**json.loads((directory / f"{rank}.json").read_text())) for rank in range(num_ranks)]


def write_outcome(outcome: Outcome, directory: Path, rank: int) -> None:
    (directory / f"{rank}.json").write_text(json.dumps(asdict(outcome)))
