"""Settings chosen for one's own images pass all checks, whatever the images and the machine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.sizes import resident_rows
from trainer.autoconfig import Machine, choose
from trainer.config import TrainConfig
from trainer.data.survey import ImagesSurvey
from trainer.presets import PRESETS
from weightserver.torch import ClassOrder

GIB = 1 << 30
TWO_CORES = Machine(cores=2, memory_bytes=24 * GIB)
GPU = Machine(cores=16, memory_bytes=128 * GIB, gpu_memory_bytes=78 * GIB)
MACHINES = [
    TWO_CORES,
    Machine(cores=1, memory_bytes=1 * GIB),
    Machine(cores=64, memory_bytes=256 * GIB),
    GPU,
    replace(GPU, gpu_memory_bytes=4 * GIB),
    replace(GPU, cores=128, ranks=8),
]
NUMBERS = [20, 21, 63, 64, 100, 999, 3_648, 16_384, 16_385, 60_000, 131_073, 10**6, 1_281_167, 14 * 10**6, 10**8, 10**9]
SIDES = [1, 16, 28, 32, 63, 64, 128, 375, 2_000]


def survey(number: int = 3_648, side: int = 375, **more: Any) -> ImagesSurvey:
    facts: dict[str, Any] = {"image_bytes": 100 + side * side // 8, "num_classes": min(11, number), "num_tests": 0}
    return ImagesSurvey(number=number, shorter_side=side, pixels=side * side * 4 // 3, **facts | more)


def chosen(images: ImagesSurvey, machine: Machine, **given: Any) -> TrainConfig:
    values = {name: choice.value for name, choice in choose(images, machine, given).items()}
    assert not values.keys() & given.keys()
    return PRESETS["images"][1].with_settings(**values | given)


def check(config: TrainConfig, images: ImagesSurvey) -> None:
    """The checks that a run makes at its start."""
    config.check()
    config.sampling.visit_schedule(images.number)
    config.negative_sampler(images.number).check(config.optimization.batch_size)
    num_steps = config.optimization.num_steps(images.number)
    assert config.optimization.warmup_steps(images.number, num_steps) <= num_steps
    assert resident_rows(config, images.number) >= config.rows.num_negatives
    assert len(config.augmentations()) == 1
    assert not config.report.evaluate or images.num_tests or images.can_hold_out
    assert not config.report.knn_every or images.num_classes


@pytest.mark.parametrize("machine", MACHINES)
def test_choices_pass_all_checks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(machine.ranks))
    every = zip(itertools.product(NUMBERS, SIDES), itertools.cycle((0, 11, 1000, 11)), strict=False)
    for (number, side), labels in every:
        images = survey(number, side, num_classes=min(labels, number), num_tests=labels and 100)
        config = chosen(images, machine)
        check(config, images)
        assert config.optimization.batch_size >= 2 * machine.ranks
        assert config.model.encoder.image_size <= max(32, side), "pixels are not made up"
        # rows come back: the window passes over all images at least twice, if it slides at all
        passes = config.optimization.epochs / (config.sampling.window_size / config.sampling.window_stride)
        assert passes >= (2 if config.optimization.epochs >= 4 else 1)


GIVEN: list[dict[str, Any]] = [
    {"batch_size": 512},
    {"num_negatives": 30},
    {"window_size": 100},
    {"window_size": 100, "num_negatives": 300},
    {"window_stride": 17},
    {"window_size": 200, "window_stride": 20},
    {"steps": 10},
    {"epochs": 1.0},
    {"accumulate": 3},
    {"encoder.name": "resnet50"},
    {"encoder.name": "timm:vit_tiny_patch16_224", "encoder.image_size": 224},
    {"encoder.image_size": 28},
    {"encoder.image_size": 512},
    {"labels": "classes"},
    {"negatives": "both"},
]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("number", [2_000, 3_648, 10**6])
def test_given_settings_win_and_the_others_fit_them(given: dict[str, Any], number: int) -> None:
    for machine in (TWO_CORES, GPU):
        images = survey(number, shared=ClassOrder(np.arange(number) % 11, 0) if "labels" in given else None)
        config = chosen(images, machine, **given)
        config.check()
        config.sampling.visit_schedule(number)
        config.negative_sampler(11 if "labels" in given else number).check(config.optimization.batch_size)
        found = config.settings()
        assert {name: found[name] for name in given} == given


@pytest.mark.parametrize(
    ("num_shared", "negatives", "window"), [(2, 2, 10**6), (1_000, 1_000, 10**6), (10**5, 32_768, 65_536)]
)
def test_shared_classes_are_all_in_a_step_unless_a_window_has_enough_of_them(
    num_shared: int, negatives: int, window: int
) -> None:
    shared = ClassOrder(np.arange(10**6) % num_shared, 0)
    config = chosen(survey(10**6, shared=shared), GPU, labels="labels.npy")
    assert (config.rows.num_negatives, config.sampling.window_size) == (negatives, window)
    assert config.servers.num_shards == 1, "a shard has rows of classes, not of images"
    config.negative_sampler(num_shared).check(config.optimization.batch_size)
    long_tail = ClassOrder(np.maximum(np.arange(10**6) - 300_000, 0) // 3, 0)  # one class fills windows
    assert chosen(survey(10**6, shared=long_tail), GPU, labels="labels.npy").sampling.window_size == 10**6


def test_more_images_and_better_machines_take_larger_encoders() -> None:
    assert chosen(survey(3_648), TWO_CORES).model.encoder.name == "small"
    assert chosen(survey(3_648), GPU).model.encoder.name == "resnet18"
    imagenet = chosen(survey(1_281_167, num_tests=50_000, num_classes=1000), GPU)
    assert (imagenet.model.encoder.name, imagenet.model.encoder.image_size) == ("resnet50", 224)
    papers: dict[str, Any] = {
        "batch_size": 512,
        "num_negatives": 65_536,
        "window_size": 131_072,
        "window_stride": 16_384,
    }
    papers |= {"learning_rate": 0.06, "precision": "bfloat16"}
    assert {name: imagenet.settings()[name] for name in papers} == papers
    few = chosen(survey(3_648), TWO_CORES)
    assert (few.rows.num_negatives, few.sampling.window_size, few.sampling.window_stride) == (512, 1_024, 128)
    fewest = chosen(survey(500), TWO_CORES)
    assert fewest.sampling.window_size == fewest.sampling.window_stride == 500, "epoch order"


def test_short_runs_have_a_stronger_weight_decay() -> None:
    """By their learning rates, also given ones; long runs have the paper's."""
    images = survey(2_000)
    cases: list[tuple[dict[str, Any], float]] = [
        ({"epochs": 100.0}, 1e-3),
        ({"epochs": 400.0}, 3.2e-4),  # 6,250 steps of 128 images, of 0.05 on average
        ({"epochs": 400.0, "learning_rate": 0.2}, 1.6e-4),
        ({"steps": 10**6}, 1e-4),
        ({"learning_rate": 0.0}, 1e-3),
        ({"steps": 10**6, "weight_decay": 0.5}, 0.5),
    ]
    for given, decay in cases:
        assert chosen(images, TWO_CORES, **given).optimization.weight_decay == decay, given
    assert chosen(survey(1_281_167), GPU).optimization.weight_decay == 1e-4


@pytest.mark.parametrize("number", [20, 500, 2_047, 2_048, 60_000, 130_000])
def test_short_runs_have_few_classes_in_a_step(number: int) -> None:
    """K far above B collapsed the encoder in runs of so few images (docs/results-fashion-mnist.md, Table 2)."""
    config = chosen(survey(number), TWO_CORES)
    assert config.optimization.batch_size <= config.rows.num_negatives <= 4 * config.optimization.batch_size


def test_a_folder_is_read_as_it_is_and_a_pack_as_a_pack() -> None:
    small, large = survey(1_000), survey(10**7)
    for images, words in ((small, "which stay in memory"), (large, "which do not stay in memory")):
        choice = choose(images, GPU, {})["dataset"]
        assert (choice.value, choice.reason.split(", ")[-1]) == ("folder", words)
    assert chosen(replace(small, packed=True), TWO_CORES).data.dataset == "packed"


def test_every_choice_has_a_reason_of_one_line() -> None:
    for images, machine in itertools.product((survey(20), survey(), survey(10**9)), MACHINES):
        for name, choice in choose(images, machine, {}).items():
            assert choice.reason, name
            assert "\n" not in choice.reason
            assert len(choice.reason) <= 40, choice.reason


def test_images_are_held_out_if_there_are_no_others_to_test_on() -> None:
    assert choose(survey(can_hold_out=True), MACHINES[0], {})["evaluate"].value
    assert not choose(survey(), MACHINES[0], {})["evaluate"].value
    assert not choose(survey(num_classes=0, can_hold_out=False), MACHINES[0], {})["evaluate"].value
