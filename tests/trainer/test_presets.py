"""The presets are recipes of the paper, and each of them passes the checks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.sizes import resident_rows
from trainer.arguments import parse_config
from trainer.presets import PRESETS
from trainer.run.run_images import RunImages
from weightserver.common.logs import LogFormat, log_events

NUM_IMAGES = 1_281_167
"""N of ImageNet-1K."""


@pytest.mark.parametrize(("preset", "epochs"), [("imagenet-1k", 200), ("imagenet-11k", 100)])
def test_imagenet_is_trained_as_in_the_paper(preset: str, epochs: int) -> None:
    config = parse_config([preset, "--data-dir", "packed"])
    recipe = {
        "batch_size": 512,
        "learning_rate": 0.06,
        "warmup_epochs": 5,
        "weight_decay": 1e-4,
        "momentum": 0.9,
        "temperature": 0.2,
        "num_negatives": 65_536,
        "window_size": 131_072,
        "window_stride": 16_384,
        "epochs": epochs,
        "views": 1,
        "correction": "exact",
        "softmax": "cosine",
        "head_layers": 2,
    }
    assert {name: config.settings()[name] for name in recipe} == recipe
    assert (config.model.encoder.name, config.model.encoder.image_size, config.data.data_dir) == (
        "resnet50",
        224,
        Path("packed"),
    )
    assert config.views.augmentation.min_scale == 0.2


@pytest.mark.guard
@pytest.mark.parametrize("length", [[], ["--epochs", "50"], ["--epochs", "1600"], ["--steps", "100000"]])
def test_the_warm_up_is_five_epochs_at_any_length(length: list[str]) -> None:
    """Experimental Settings: "For different training epochs, we all adopt a 5-epoch linear warm-up period"."""
    rates = rates_of(["imagenet-1k", *length])
    assert int(rates.argmax()) == round(5 * NUM_IMAGES / 512) == 12_511
    assert rates.max() == np.float32(0.06)
    assert np.allclose(rates[:12_512], np.linspace(0.0006, 0.06, 12_512), rtol=2**-23, atol=0), "linear"


@pytest.mark.parametrize(
    ("arguments", "peak"),
    [
        (["imagenet-1k", "--steps", "100000", "--warmup-fraction", "0.25"], 25_000),
        (["imagenet-1k", "--steps", "100000", "--warmup-epochs", "2.5"], 6_256),
        (["imagenet-1k", "--steps", "100000", "--warmup-epochs", "None"], 10_000),
        (["imagenet-1k", "--steps", "100000", "--warmup-epochs=0"], 0),
        (["synthetic", "--steps", "100000"], 10_000),
        (["synthetic", "--steps", "100000", "--warmup_epochs", "1"], 2_502),
        (["synthetic", "--steps", "100000", "--warmup-fraction=0.5"], 50_000),
        (["synthetic", "--steps", "100000", "--warmup-epochs=1", "--warmup-fraction=0.5"], 50_000),
    ],
)
def test_the_warm_up_that_is_given_takes_the_place_of_the_presets(arguments: list[str], peak: int) -> None:
    assert int(rates_of(arguments).argmax()) == peak


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synthetic", "--warmup-epochs", "-1"], r"--warmup-epochs must be finite and not negative, got -1"),
        (["synthetic", "--warmup-epochs", "inf"], r"--warmup-epochs must be finite and not negative, got inf"),
        (["synthetic", "--warmup-epochs", "1e9"], r"--warmup-epochs 1e\+09 would take 2\.5e\+12 steps, at most"),
    ],
)
def test_check_rejects_impossible_warm_ups(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rates_of(arguments)


def rates_of(arguments: list[str]) -> np.ndarray:
    config = parse_config(arguments)
    config.check()
    return RunImages(NUM_IMAGES, NUM_IMAGES).learning_rates(config.optimization)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_settings_that_fit_together(preset: str) -> None:
    config = parse_config([preset])
    config.check()
    assert resident_rows(config, 1_281_167) >= config.rows.num_negatives


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["imagenet1k"], "unknown preset 'imagenet1k': did you mean imagenet-1k?"),
        (["imagnet-1k", "--seed", "1"], "unknown preset 'imagnet-1k': did you mean imagenet-1k?"),
        (["reprot", "runs/a"], "did you mean report?"),
        (["mnist-of-letters"], "give a folder that exists, or one of fashion-mnist, demo, cifar-10, imagenet-1k"),
        (["imagenet-1k", "--output", "", "--resume"], "trainer: --output: the path is empty: is a variable not set?"),
        (["synthetic", "--data_dir="], "trainer: --data-dir: the path is empty"),
    ],
)
def test_a_wrong_preset_or_path_is_refused_in_one_line(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["imagenet-1k", "--window-sise", "3"], "--window-size"),
        (["imagenet-1k", "--encoder.nam", "vit"], "--encoder.name"),
        (["imagenet-1k", "--rows", "residnt"], "'resident'"),
        (["imagenet-1k", "--batch-size", "many"], "--batch-size"),
        (["synthetic", "--window-size", "│For full helptext│ x"], "'│For full helptext│ x'"),
    ],
)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_wrong_option_suggests_the_nearest_one(
    arguments: list[str],
    hint: str,
    log_format: LogFormat,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the parser's own words, which are one event of a JSON log."""
    monkeypatch.setenv("COLUMNS", "200")  # no line is wrapped
    log_events(log_format)
    with pytest.raises(SystemExit) as ended:
        parse_config(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert hint in (json.loads(said)["event"] if log_format == "json" else said)
