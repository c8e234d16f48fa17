"""The linear protocol: frozen features, resumption, ranks, and a good encoder told from a bad one.

As a script (under torchrun) this file is one rank, which prints its result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.data.pixels import MINUS_ONE_TO_ONE
from trainer.distributed import process_group
from trainer.evaluate.linear import LinearConfig, LinearResult, linear_probe

NUM_CLASSES = 4
CONFIG = LinearConfig(epochs=3, batch_size=32, learning_rates=(1.0,))


def striped(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of noise with a bright horizontal band, whose height is the class."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 4 * label : 4 * label + 4] += 150
    return images, labels


def made() -> Dataset:
    (train, train_labels), (test, test_labels) = striped(320, 1), striped(61, 2)
    return Dataset(train_images=train, train_labels=train_labels, test_images=test, test_labels=test_labels)


@pytest.fixture
def dataset() -> Dataset:
    return made()


class Rows(nn.Module):
    """Sees the brightness of each row, by way of a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.norm(images.mean(dim=(1, 3)))
        return features


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(16))

    def forward(self, images: Tensor) -> Tensor:
        return self.value.expand(len(images), 16)


def probe(encoder: nn.Module, dataset: Dataset, config: LinearConfig = CONFIG, **options: object) -> LinearResult:
    return linear_probe(encoder, dataset, MINUS_ONE_TO_ONE, config, **options)  # type: ignore[arg-type]


def test_tells_a_good_encoder_from_a_bad_one(dataset: Dataset) -> None:
    encoder = Rows()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    good = probe(encoder, dataset, replace(CONFIG, epochs=10))
    assert good.top1 > 90
    assert good.top5 == 100, "there are four classes"
    assert probe(Constant(), dataset).top1 < 45
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_refuses_the_result_of_an_encoder_that_changed(dataset: Dataset) -> None:
    class Counting(Rows):
        def forward(self, images: Tensor) -> Tensor:
            assert self.norm.running_mean is not None
            self.norm.running_mean += 1e-3
            return super().forward(images)

    with pytest.raises(RuntimeError, match="running_mean of the frozen encoder has changed"):
        probe(Counting(), dataset)


def test_held_out_images_choose_among_learning_rates(dataset: Dataset) -> None:
    single = probe(Rows(), dataset)
    assert single.held_out_top1 is None
    chosen = probe(Rows(), dataset, replace(CONFIG, learning_rates=(1e-6, 1.0), epochs=8))
    assert chosen.learning_rate == 1.0
    assert chosen.held_out_top1 is not None
    other = probe(
        Rows(), replace(dataset, test_labels=dataset.test_labels * 0), replace(CONFIG, learning_rates=(1e-6, 1.0))
    )
    assert other.learning_rate == 1.0, "no test label chooses"


def test_continues_after_the_last_whole_epoch_to_the_same_result(dataset: Dataset, tmp_path: Path) -> None:
    whole = probe(Rows(), dataset)
    seen = list[int]()

    def stop(step: int, num_steps: int, loss: float) -> None:
        seen.append(step)
        if len(seen) == 15:
            raise OSError("out of power")

    state = tmp_path / "linear.safetensors"
    with pytest.raises(OSError, match="out of power"):
        probe(Rows(), dataset, state_file=state, report=stop)
    assert probe(Rows(), dataset, state_file=state, report=stop) == whole
    assert seen == [*range(1, 16), *range(11, 31)], "ten steps an epoch"
    again = probe(Rows(), dataset, replace(CONFIG, seed=1), state_file=state)
    assert again == probe(Rows(), dataset, replace(CONFIG, seed=1)), "heads of other settings are not continued"


def test_rejects_what_makes_no_batch(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=r"320 images make no batch of 400: give a smaller --batch-size"):
        probe(Rows(), dataset, replace(CONFIG, batch_size=400))
    for rates in ((), (0.0,), (float("nan"),), (1.0, -1.0)):
        with pytest.raises(ValueError, match=r"learning_rates are .* positive and finite"):
            LinearConfig(learning_rates=rates)
    with pytest.raises(ValueError, match="have no labels"):
        probe(Rows(), replace(dataset, train_labels=torch.empty(0, dtype=torch.int64)))


@pytest.mark.guard
def test_three_ranks_have_the_result_of_one(dataset: Dataset) -> None:
    """Neither 32 images a batch nor 61 test images divide by three: each is counted once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, "-m", "tests.trainer.evaluate.test_linear"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found == [asdict(probe(Rows(), dataset))] * 3


if __name__ == "__main__":
    with process_group(torch.device("cpu")) as ranks:
        print(json.dumps(asdict(probe(Rows(), made(), ranks=ranks))), flush=True)
