"""Parses the command line of a run: a preset, or a run to resume, and the settings that it gives."""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Sequence
from typing import NoReturn

import tyro

from trainer.config import SETTINGS, TrainConfig
from trainer.data.augmentation_config import AugmentationConfig
from trainer.encoder_config import EncoderConfig
from trainer.presets import PRESETS
from trainer.run.directory import CONFIG_FILE, read_settings
from trainer.settings import flag, set_help_texts
from trainer.wrong_arguments import parsed_or_exit
from weightserver.common.atomic_files import EMPTY_PATH
from weightserver.common.logs import print_error

_DESCRIPTION = """Train an encoder by instance classification.

Instead of a preset:
  FOLDER                 train on a folder of your own images
  --resume --output RUN  resume a run with all of its settings
  --config FILE          read the settings that --print-config wrote"""
_OF_FILES = "--print-config writes the settings as TOML, and --config FILE reads them."


def parse_config(
    arguments: Sequence[str] | None = None,
    *,
    default: TrainConfig | None = None,
) -> TrainConfig:
    """Parses a command line, PRESET --OPTIONS; exits with status 2 if it is invalid.

    With --resume, all settings that are not given are those of the run in --output, and the preset may be omitted.
    `default` replaces the preset's settings.
    """
    for settings in (*(type(part) for _, part in TrainConfig().parts()), EncoderConfig, AugmentationConfig):
        set_help_texts(settings)
    arguments = _with_correction_named(sys.argv[1:] if arguments is None else arguments)
    _refuse_empty_paths(arguments)
    preset = arguments[0] if arguments else ""
    if preset in PRESETS:
        config = _parsed(preset, default or PRESETS[preset][1], arguments[1:])
        if config.data.num_images and default is None:
            config = _parsed(preset, _for_fewer_images(PRESETS[preset][1], config.data.num_images), arguments[1:])
        return _parsed(preset, _of_run(config, arguments), arguments[1:]) if _is_there(config) else config
    if any(argument.partition("=")[0] == "--resume" for argument in arguments) and preset.startswith("-"):
        config = _parsed("", TrainConfig(), arguments)
        if _is_there(config):
            return _parsed("", _of_run(config, arguments), arguments)
        print_error(f"trainer: {config.run.output} holds no run to resume: give its --output, or a preset to start one")
        sys.exit(2)
    if preset and not preset.startswith("-"):
        _refuse_preset(preset)

    def parse(options: list[str]) -> TrainConfig:
        return tyro.extras.overridable_config_cli(PRESETS, prog="pic train", description=_DESCRIPTION, args=options)

    return parsed_or_exit(parse, arguments, command="trainer")


def _parsed(preset: str, default: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    what = f"Train on {PRESETS[preset][0].partition(':')[0]}." if preset else "Resume a run."  # is not wrapped
    what += f"\n{_OF_FILES}"

    def parse(options: list[str]) -> TrainConfig:
        return tyro.cli(
            TrainConfig,
            prog=f"pic train {preset}".rstrip(),
            description=what,
            args=options,
            default=_without_other_warmup(default, options),
            config=(tyro.conf.AvoidSubcommands,),
        )

    return parsed_or_exit(parse, arguments, command="trainer")


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


def _of_run(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The settings of the run in the --output of `config`, as defaults for the command line that resumes it."""
    stored = TrainConfig.of_run(read_settings(config.run.output))
    given = {argument.partition("=")[0] for argument in arguments}
    if "--epochs" in given and "--steps" not in given:
        stored = stored.with_settings(steps=None)  # which would override them
    return stored.with_settings(output=config.run.output, resume=False, resume_step=None, extend=False)


def _refuse_preset(preset: str) -> NoReturn:
    near = difflib.get_close_matches(preset, [*PRESETS, "report"], n=1)
    hint = f"did you mean {near[0]}?" if near else f"give a folder that exists, or one of {', '.join(PRESETS)}"
    print_error(f"trainer: unknown preset {preset!r}: {hint}")
    sys.exit(2)


def _refuse_empty_paths(arguments: Sequence[str]) -> None:
    """Exits if a path is empty, for example because a variable is not set: it would mean the current folder."""
    paths = {flag(setting.name) for setting in SETTINGS if "Path" in str(setting.type)}
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_assigned, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in paths and (value if is_assigned else following) == "":
            print_error(f"trainer: {name}: {EMPTY_PATH}")
            sys.exit(2)


def _with_correction_named(arguments: Sequence[str]) -> list[str]:
    """Replaces --correction and --no-correction, flags of earlier versions, by --correction=exact and =none."""
    named = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        flag = argument.replace("_", "-")
        if flag == "--no-correction":
            argument = "--correction=none"
        elif flag == "--correction" and following.startswith("-"):
            argument = "--correction=exact"
        named.append(argument)
    return named


def _without_other_warmup(default: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """A preset without its own warm-up if the command line gives one in another unit."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--warmup-fraction" in given:
        default = default.with_settings(warmup_epochs=None)
    if "--warmup-epochs" in given:
        default = default.with_settings(warmup_fraction=None)
    return default
