"""The presets are recipes of the paper, and every one is a run that can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import PRESETS, parse_config


@pytest.mark.parametrize("preset", ["imagenet-1k", "imagenet-11k"])
def test_imagenet_is_trained_as_in_the_paper(preset: str) -> None:
    config = parse_config([preset, "--data-dir", "packed"])
    recipe = {
        "batch_size": 512,
        "learning_rate": 0.06,
        "weight_decay": 1e-4,
        "momentum": 0.9,
        "temperature": 0.2,
        "num_negatives": 65_536,
        "window_size": 131_072,
        "window_stride": 16_384,
        "epochs": 200,
        "views": 1,
    }
    assert {name: getattr(config, name) for name in recipe} == recipe
    assert config.warmup_fraction * config.epochs == pytest.approx(5)
    assert (config.encoder.name, config.encoder.image_size, config.data_dir) == ("resnet50", 224, Path("packed"))
    assert config.augmentation.min_scale == 0.2
    assert config.base_learning_rate == config.learning_rate
    half = parse_config([preset, "--batch-size", "256", "--learning-rate-batch", "512"])
    assert half.base_learning_rate == 0.03


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_settings_that_fit_together(preset: str) -> None:
    config = parse_config([preset])
    config.check()
    assert config.resident_rows(1_281_167) >= config.num_negatives


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["imagenet-1k", "--window-sise", "3"], "--window-size"),
        (["imagenet-1k", "--encoder.nam", "vit"], "--encoder.name"),
        (["imagenet-1k", "--rows", "residnt"], "'resident'"),
        (["imagenet1k"], "there is no preset 'imagenet1k': did you mean imagenet-1k?"),
        (["imagnet-1k", "--seed", "1"], "there is no preset 'imagnet-1k': did you mean imagenet-1k?"),
        (["reprot", "runs/a"], "did you mean report?"),
        (["mnist-of-letters"], "choose one of fashion-mnist, imagenet-1k, imagenet-11k, synthetic"),
        (["synthetic", "--encoder.blocks", "0"], "Error parsing encoder: blocks is (0,)"),
        (["synthetic", "--augmentation.min-scale", "2"], "Error parsing augmentation: min_scale and max_scale are"),
        (["imagenet-1k", "--batch-size", "many"], "--batch-size"),
    ],
)
def test_the_nearest_right_option_is_told(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(arguments)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err
