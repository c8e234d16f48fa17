"""Parses the command line of a run: a preset, or a run to resume, and the settings that it gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import tyro

from trainer.command_line import parsed_or_exit
from trainer.config import SETTINGS, TrainConfig
from trainer.data.augmentation_config import AugmentationConfig
from trainer.encoder_config import EncoderConfig
from trainer.presets import PRESETS
from trainer.run.directory import CONFIG_FILE, read_settings
from trainer.settings import set_help_texts
from trainer.short_help import PAGES
from weightserver.common.logs import print_error
from weightserver.common.spelling import did_you_mean

_OF_FILES = "--print-config writes the settings as TOML, and --config FILE reads them."


def parse_config(arguments: Sequence[str] | None = None, *, default: TrainConfig | None = None) -> TrainConfig:
    """Parses a command line, PRESET --OPTIONS; exits with status 2 if it is invalid.

    With --resume, all settings that are not given are those of the run in --output, and the preset may be omitted.
    `default` replaces the preset's settings.
    """
    for settings in (*(type(part) for _, part in TrainConfig().parts()), EncoderConfig, AugmentationConfig):
        set_help_texts(settings)
    arguments = [
        "--correction=none" if one == "--no-correction" else one
        for one in (sys.argv[1:] if arguments is None else arguments)
    ]
    preset = arguments[0] if arguments and arguments[0] in PRESETS else ""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if not preset and (not arguments[:1] or not arguments[0].startswith("-") or "--resume" not in given):
        _refuse_preset(arguments)
    parse = partial(_parsed, preset, arguments[bool(preset) :])
    config = parse(default or (PRESETS[preset][1] if preset else TrainConfig()))
    if preset and config.data.num_images and default is None:
        config = parse(_for_fewer_images(PRESETS[preset][1], config.data.num_images))
    if _is_there(config):
        return parse(_of_run(config, given))
    if not preset and int(os.environ.get("RANK", "0")) == 0:  # other ranks take their settings from it
        _exit(f"{config.run.output} holds no run to resume: give its --output, or a preset to start one")
    return config


def _parsed(preset: str, options: Sequence[str], default: TrainConfig) -> TrainConfig:
    what = f"Train on {PRESETS[preset][0].partition(':')[0]}." if preset else "Resume a run."  # is not wrapped

    def parse(options: list[str]) -> TrainConfig:
        return tyro.cli(
            TrainConfig,
            prog=f"pic train {preset}".rstrip(),
            description=f"{what}\n{_OF_FILES}",
            args=options,
            default=default,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff),  # which it would look for each time
        )

    return parsed_or_exit(parse, options, SETTINGS, command="trainer")


def _for_fewer_images(preset: TrainConfig, num_images: int) -> TrainConfig:
    """A preset whose window and classes of a step fit into a number of images."""
    sampling, rows = preset.sampling, preset.rows
    return preset.with_settings(
        window_size=min(sampling.window_size, num_images),
        window_stride=min(sampling.window_stride, num_images),
        num_negatives=min(rows.num_negatives, num_images),
    )


def _is_there(config: TrainConfig) -> bool:
    """Whether a run is to be resumed whose settings can be read; others are refused later."""
    if not config.run.resume or not (config.run.output / CONFIG_FILE).exists():
        return False
    try:
        return bool(read_settings(config.run.output))
    except ValueError:
        return False


def _of_run(config: TrainConfig, given: set[str]) -> TrainConfig:
    """The settings of the run in the --output of `config`, as defaults for the command line that resumes it."""
    stored = TrainConfig.of_run(read_settings(config.run.output))
    if "--epochs" in given and "--steps" not in given:
        stored = stored.with_settings(steps=None)  # which would override them
    return stored.with_settings(output=config.run.output)


def _refuse_preset(arguments: Sequence[str]) -> NoReturn:
    """Exits: the command line begins with no preset, or asks for help."""
    if not {"-h", "--help"}.isdisjoint(arguments[:1]):
        print(PAGES["train"])
        sys.exit(0)
    if not arguments or arguments[0].startswith("-"):
        _exit(f"give a folder of images, or one of {', '.join(PRESETS)}")
    hint = f"give a folder that exists, or one of {', '.join(PRESETS)}"
    hint = did_you_mean(arguments[0], [*PRESETS, "report"], hint)
    _exit(f"unknown preset {arguments[0]!r}: {hint}")


def _exit(message: str) -> NoReturn:
    print_error(f"trainer: {message}")
    sys.exit(2)
