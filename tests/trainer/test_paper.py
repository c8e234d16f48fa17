"""Numbers and pseudo-code of the paper (Cao et al., 2020); docs/paper-to-code.md says where each is implemented."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trainer
from tests.helpers.recent import recent_rows
from tests.helpers.sizes import resident_rows
from trainer.arguments import parse_config
from trainer.config import TrainConfig
from trainer.distributed import averaged_over_ranks
from trainer.model import EncoderConfig, build_model
from weightserver.core.arrays import Int64Array
from weightserver.torch import Ranks, VisitSchedule
from weightserver.torch.windows import RowOrder

NUM_IMAGES = 1_281_167
"""N of ImageNet-1K."""
NUM_IMAGES_11K = 7_470_000
TRAINER = Path(trainer.__file__).parent


@cache
def imagenet(*options: str) -> TrainConfig:
    config = parse_config(["imagenet-1k", *options])
    config.check()
    return config


def schedule_of(config: TrainConfig, num_images: int = NUM_IMAGES) -> VisitSchedule:
    return VisitSchedule(
        num_rows=num_images,
        window_size=config.sampling.window_size,
        window_stride=config.sampling.window_stride,
        seed=config.sampling.seed,
    )


def distances(schedule: VisitSchedule, first: int) -> Int64Array:
    """Number of visits between two visits to the same row, for rows that are in the next window too."""
    size = schedule.window_size
    now, then = schedule.visits(first, first + size), schedule.visits(first + size, first + 2 * size)
    rows, here, there = np.intersect1d(now, then, assume_unique=True, return_indices=True)
    assert len(rows) == len(here)
    return there + size - here


# ---- Section 2.2, and Table 3


def test_in_epoch_order_an_image_comes_again_after_n_visits_on_average() -> None:
    """Proposition 1."""
    found = distances(VisitSchedule(num_rows=20_000, window_size=20_000, window_stride=20_000, seed=3), 0)
    assert len(found) == 20_000
    assert found.mean() == 20_000


def test_seven_eighths_of_a_window_come_again_after_w_visits_on_average() -> None:
    """γ = 87.5 % and D = W = 131,072 with S = 16,384 = (1 − γ)·W, at any N."""
    for num_images in (NUM_IMAGES, NUM_IMAGES_11K, 10**9):
        schedule = schedule_of(imagenet(), num_images)
        assert (schedule.window_size, schedule.window_stride) == (2**17, 2**14)
        found = distances(schedule, 5 * 2**17)
        assert len(found) / 2**17 == 0.875
        # Both shuffles are uniform: the distance has the mean W and the deviation W/√6.
        assert abs(found.mean() - 2**17) < 5 * 2**17 / np.sqrt(6 * len(found))


@pytest.mark.parametrize(
    ("window_size", "stride", "majority"),
    [
        (262_144, 16_384, 93.75),
        (131_072, 16_384, 87.5),
        (65_536, 16_384, 75),
        (32_768, 16_384, 50),
        (131_072, 32_768, 75),
        (131_072, 8_192, 93.75),
        (131_072, 4_096, 96.875),
    ],
)
def test_windows_of_table_3(window_size: int, stride: int, majority: float) -> None:
    schedule = schedule_of(imagenet("--window-size", str(window_size), "--window-stride", str(stride)))
    assert 100 * len(distances(schedule, 0)) / window_size == majority


class SlidingWindowSampler:
    """The appendix's implementation of the scheduler, without PyTorch's base class and with a given generator."""

    def __init__(self, indices: Int64Array, window_stride: int, window_size: int, random: np.random.Generator) -> None:
        self.indices = indices
        self.window_stride = window_stride
        self.window_size = window_size
        self.start_index = 0
        self.dataset_size = len(self.indices)
        self.random = random
        random.shuffle(self.indices)

    def window(self) -> list[int]:
        indices = np.mod(np.arange(self.window_size) + self.start_index, self.dataset_size)
        window_indices = self.indices[indices]
        self.random.shuffle(window_indices)
        self.start_index = (self.start_index + self.window_stride) % self.dataset_size
        return list(window_indices.tolist())


@pytest.mark.parametrize(("num_images", "window_size", "stride"), [(1_000, 128, 16), (997, 300, 37), (60, 60, 60)])
def test_windows_are_those_of_the_papers_sampler(num_images: int, window_size: int, stride: int) -> None:
    """The same images in the same fixed order, over several passes; only the shuffles within windows differ."""
    schedule = VisitSchedule(num_rows=num_images, window_size=window_size, window_stride=stride, seed=1)
    order = RowOrder(num_images, 7).images(np.arange(num_images))
    sampler = SlidingWindowSampler(np.arange(num_images), stride, window_size, np.random.default_rng(0))
    sampler.indices = order.copy()
    positions = set()
    for window in range(3 * num_images // stride):
        visited = order[schedule.visits(window * window_size, (window + 1) * window_size)]
        theirs = sampler.window()
        assert sorted(visited.tolist()) == sorted(theirs)
        positions.add(int(np.flatnonzero(visited == theirs[0])[0]))
    assert len(positions) > 1, "shuffled"


# ---- Section 2.3, and Table 2


@pytest.mark.parametrize("exponent", [9, 10, 12, 14, 16, 18])
def test_numbers_of_negatives_of_table_2(exponent: int) -> None:
    """ "The most recent K instances in recent iterations", including the step's own."""
    config = imagenet("--num-negatives", str(2**exponent))
    sizes = {"num_active": config.rows.num_negatives, "batch_size": config.optimization.batch_size}
    active = recent_rows(schedule_of(config), 20_000, **sizes)
    assert len(active.rows) == 2**exponent
    assert np.array_equal(np.unique(active.rows), active.rows)
    batch = schedule_of(config).visits(20_000 * 512, 20_001 * 512)
    assert np.array_equal(active.rows[active.labels], batch)
    seen = schedule_of(config).visits(20_001 * 512 - 2**exponent, 20_001 * 512)
    assert np.isin(seen, active.rows).all(), "no other row is more recent"


def test_resident_rows_depend_on_k_and_the_window_not_on_n() -> None:
    """ "The GPU memory consumption is thus determined by the number of sampled negatives K"."""
    config = imagenet()
    needed = {resident_rows(config, num_images) for num_images in (NUM_IMAGES, NUM_IMAGES_11K, 10**9)}
    assert len(needed) == 1
    assert needed.pop() < 2 * config.sampling.window_size


# ---- Section 4, Tables 1, 4 and 5


@pytest.mark.parametrize("epochs", [50, 100, 200, 400, 1600])
def test_an_epoch_is_as_many_iterations_as_in_epoch_order(epochs: int) -> None:
    """Table 4, and the footnote of Section 4.1."""
    sliding = imagenet("--epochs", str(epochs))
    in_epochs = imagenet("--epochs", str(epochs), "--window-size", str(NUM_IMAGES), "--window-stride", str(NUM_IMAGES))
    assert (
        sliding.optimization.num_steps(NUM_IMAGES)
        == in_epochs.optimization.num_steps(NUM_IMAGES)
        == round(epochs * NUM_IMAGES / 512)
    )


@pytest.mark.parametrize("epochs", [25, 50, 100])
def test_lengths_of_imagenet_11k(epochs: int) -> None:
    """Appendix, Experimental Results on ImageNet-11K: "the same pre-training setting", 25 to 100 epochs."""
    small, large = parse_config(["imagenet-1k"]), parse_config(["imagenet-11k", "--epochs", str(epochs)])
    large.check()
    assert large.optimization.num_steps(NUM_IMAGES_11K) == round(epochs * NUM_IMAGES_11K / 512)
    differing = {name for name, value in large.settings().items() if value != small.settings()[name]}
    assert differing == {"epochs", "output"}


def test_views_of_table_5() -> None:
    """One or two of an image, each also smaller than it."""

    def sizes(*options: str) -> list[int]:
        return [view.image_size for view in imagenet(*options).augmentations()]

    assert sizes() == [224]
    assert sizes("--views", "2", "--view-size", "160") == [160, 160]


# ---- Appendix, Experimental Settings


def test_views_are_augmented_as_by_simclr_with_mocos_crop() -> None:
    (view,) = imagenet().augmentations()
    settings = {
        "strong": True,
        "min_scale": 0.2,
        "max_scale": 1.0,
        "flip_probability": 0.5,
        "jitter_probability": 0.8,
        "brightness": 0.8,
        "contrast": 0.8,
        "saturation": 0.8,
        "hue": 0.2,
        "grey_probability": 0.2,
        "blur_probability": 0.5,
        "blur_sigma": (0.1, 2.0),
    }
    assert {name: getattr(view.config, name) for name in settings} == settings
    assert view.image_size == 224


def test_eight_gpus_have_64_images_each() -> None:
    shares = [Ranks(rank=rank, world_size=8).share(imagenet().optimization.batch_size) for rank in range(8)]
    assert [share.stop - share.start for share in shares] == [64] * 8


def test_the_encoder_is_resnet_50_with_a_head_of_two_layers_and_plain_batch_norm() -> None:
    """Its rows have D = 128; blocks start as their shortcuts (He et al., 2019, which Section 4.1 cites)."""
    config = imagenet()
    model = build_model(EncoderConfig(name="resnet50", in_channels=3, image_size=32), config.model.dim)
    layers = [(layer.in_features, layer.out_features) for layer in model.head if isinstance(layer, torch.nn.Linear)]
    assert layers == [(2048, 2048), (2048, 128)]
    assert [type(layer) for layer in model.head] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    kinds = {type(module) for module in model.modules() if "Norm" in type(module).__name__}
    assert kinds == {torch.nn.BatchNorm2d}
    last = [parameter for name, parameter in model.encoder.named_parameters() if name.endswith("bn3.weight")]
    assert len(last) == 16
    assert not torch.cat([*last]).any()


def test_batch_norm_is_left_to_each_gpu() -> None:
    """Nothing in training synchronises it, and no rank's statistics are broadcast: checked for every parallel model.

    Evaluations that train a network synchronise it, so that their results do not depend on the number of ranks.
    """
    found = 0
    for path in set(TRAINER.rglob("*.py")) - set((TRAINER / "evaluate").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
        assert not names & {"SyncBatchNorm", "convert_sync_batchnorm"}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DistributedDataParallel":
                assert path.name == "distributed.py", path
                found += 1
    assert found == 1


def test_no_ranks_buffers_are_broadcast_by_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option has another name since torch 2.13, which warns of the earlier one."""
    given: list[bool] = []

    def earlier(_: nn.Module, *, broadcast_buffers: bool = True, gradient_as_bucket_view: bool = False) -> None:
        given.append(broadcast_buffers)

    def later(_: nn.Module, *, forward_sync_buffers: bool = True, gradient_as_bucket_view: bool = False) -> None:
        given.append(forward_sync_buffers)

    for parallel in (earlier, later):
        monkeypatch.setattr("trainer.distributed.DistributedDataParallel", parallel)
        averaged_over_ranks(nn.Linear(1, 1), Ranks(world_size=2))
    assert given == [False, False]
