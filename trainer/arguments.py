"""Parses the command line of a run: a preset, or a run to resume, and the settings that it gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

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


@dataclass(frozen=True)
class CommandLine:
    """What a command line says: a preset, "" for a run to resume, and settings."""

    preset: str
    given: dict[str, Any]
    """The settings that are given, by name, nested ones under dotted names."""

    @property
    def alone(self) -> TrainConfig:
        """The given settings, and the preset's."""
        return self.over(PRESETS[self.preset][1] if self.preset else TrainConfig())

    def over(self, default: TrainConfig) -> TrainConfig:
        """The given settings, and others of `default`, whose steps do not override epochs that are given."""
        epochs_alone = "epochs" in self.given and "steps" not in self.given
        return default.with_settings(**({"steps": None} if epochs_alone else {}) | self.given)

    def config(self) -> TrainConfig:
        """The settings of the run. With --resume, all that are not given are those of the run in --output. A preset's
        window and classes of a step fit into its number of images. Exits with status 2 if there is no run to resume."""
        config = self.alone
        if _is_there(config):
            return self.over(_of_run(config))
        if self.preset and config.data.num_images:
            return self.over(_for_fewer_images(PRESETS[self.preset][1], config.data.num_images))
        if not self.preset and int(os.environ.get("RANK", "0")) == 0:  # other ranks take their settings from it
            _exit(f"{config.run.output} holds no run to resume: give its --output, or a preset to start one")
        return config


def parse_config(arguments: Sequence[str] | None = None) -> TrainConfig:
    """The settings of a command line, by default the process's; exits as `parse` and `CommandLine.config`."""
    return parse(sys.argv[1:] if arguments is None else arguments).config()


def parse(arguments: Sequence[str]) -> CommandLine:
    """Parses a command line, PRESET --OPTIONS, where the preset may be omitted with --resume; exits with status 2 if it
    is invalid."""
    for settings in (*(type(part) for _, part in TrainConfig().parts()), EncoderConfig, AugmentationConfig):
        set_help_texts(settings)
    arguments = ["--correction=none" if one == "--no-correction" else one for one in arguments]
    preset = arguments[0] if arguments and arguments[0] in PRESETS else ""
    given = _given(arguments)
    if not preset and (not arguments[:1] or not arguments[0].startswith("-") or "resume" not in given):
        _refuse_preset(arguments)
    parsed = _parsed(preset, arguments[bool(preset) :]).settings()
    return CommandLine(preset, {name: parsed[name] for name in given})


def _given(arguments: Sequence[str]) -> list[str]:
    """Names of the settings that a command line gives; --no-evaluate gives evaluate."""
    found = set[str]()
    for argument in arguments:
        if argument.startswith("--"):
            *above, last = argument[2:].partition("=")[0].replace("-", "_").split(".")
            found |= {".".join([*above, name]) for name in (last, last.removeprefix("no_"))}
    return [name for name in TrainConfig().settings() if name in found]


def _parsed(preset: str, options: Sequence[str]) -> TrainConfig:
    what = f"Train on {PRESETS[preset][0].partition(':')[0]}." if preset else "Resume a run."  # is not wrapped
    if preset == "images":
        what += "\n\nWhat is not given is chosen from images and machine, not by these defaults."

    def parse(options: list[str]) -> TrainConfig:
        return tyro.cli(
            TrainConfig,
            prog=f"pic train {preset}".rstrip(),
            description=f"{what}\n{_OF_FILES}",
            args=options,
            default=PRESETS[preset][1] if preset else TrainConfig(),
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


def _of_run(config: TrainConfig) -> TrainConfig:
    """The settings of the run in the --output of `config`, as defaults for the command line that resumes it."""
    return TrainConfig.of_run(read_settings(config.run.output)).with_settings(output=config.run.output)


def _refuse_preset(arguments: Sequence[str]) -> NoReturn:
    """Exits: the command line begins with no preset, or asks for help."""
    if not {"-h", "--help"}.isdisjoint(arguments[:1]):
        print(PAGES["train"])
        sys.exit(0)
    if not arguments or arguments[0].startswith("-"):
        _exit(f"begin with a folder of images, or one of {', '.join(PRESETS)}")
    hint = f"give a folder that exists, or one of {', '.join(PRESETS)}"
    hint = did_you_mean(arguments[0], [*PRESETS, "report"], hint)
    _exit(f"unknown preset {arguments[0]!r}: {hint}")


def _exit(message: str) -> NoReturn:
    print_error(f"trainer: {message}")
    sys.exit(2)
