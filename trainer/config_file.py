"""A run's settings as TOML: the preset, and what differs from it. --print-config writes it, --config FILE reads it."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.arguments import CommandLine, parse
from trainer.config import OF_ONE_START, TrainConfig
from trainer.presets import PRESETS
from weightserver.common.atomic_files import to_path
from weightserver.common.logs import print_error
from weightserver.common.object_store import shown
from weightserver.common.spelling import did_you_mean

_NAMES = [name for name in TrainConfig().settings() if name not in OF_ONE_START]


def to_toml(config: TrainConfig, preset: str) -> str:
    """The text of the file: None, which TOML lacks, is "None", as on the command line."""
    default = PRESETS[preset][1].settings()
    lines, table = [f"preset = {_toml(preset)}"], ""
    different = [
        (name, value) for name, value in config.settings().items() if name in _NAMES and value != default[name]
    ]
    for name, value in sorted(different, key=lambda one: one[0].rpartition(".")[0]):
        above, _, last = name.rpartition(".")
        if above != table:
            lines += ["", f"[{above}]"]
            table = above
        lines.append(f"{last} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    text = shown(value) if isinstance(value, Path) else str(value)
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # a string of JSON is one of TOML


def parse_with_file(arguments: Sequence[str]) -> CommandLine:
    """Parses a command line, whose options override the settings of its --config FILE if it has one.

    Exits with status 2 for a file that cannot be read, for names that are no settings, and for values that are none of
    theirs.
    """
    parser = argparse.ArgumentParser(prog="pic train", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=to_path)
    options, left = parser.parse_known_args(arguments)
    if (path := options.config) is None:
        return parse(left)
    try:
        preset, settings = _read(path)
        file = parse([preset, *settings])
        given = left[0] if left and not left[0].startswith("-") else None
        if given not in (None, preset):
            raise ValueError(f"its preset is {preset}: omit {given}, or give another file")
    except SystemExit:  # of the parser, which said what it refuses
        print_error(f"trainer: --config {path}: the reason is above")
        raise
    except (ValueError, OSError) as error:
        print_error(f"trainer: --config {path}: {getattr(error, 'strerror', None) or error}")
        sys.exit(2)
    of_line = parse([preset, *left[given is not None :]]).given
    of_file = {name: value for name, value in file.given.items() if name != "steps" or "epochs" not in of_line}
    return CommandLine(preset, of_file | of_line)


def _read(path: Path) -> tuple[str, list[str]]:
    """The preset, and the settings as options of the command line. Raises ValueError and OSError."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    preset = content.pop("preset", None)
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}: give one of {', '.join(PRESETS)}")
    return preset, [option for name, value in _named(content) for option in _options(name, value)]


def _named(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = above + key.replace("-", "_")
        if isinstance(value, dict) and any(known.startswith(f"{name}.") for known in _NAMES):
            yield from _named(value, f"{name}.")
        elif isinstance(value, dict):
            keys = ", ".join(value) or "settings"
            raise ValueError(f"[{name}] is no table of settings: write {keys} above all tables, named as the options")
        elif name in _NAMES:
            yield name, value
        else:
            hint = did_you_mean(name, _NAMES, "see the settings of --help")
            raise ValueError(f"{name} is no setting of a run: {hint}")


def _options(name: str, value: Any) -> list[str]:
    above, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{above}{dot}{'' if value else 'no-'}{last}"]
    if isinstance(value, list):
        if strange := next((item for item in value if str(item).startswith("--")), None):
            raise ValueError(f"{name} has {strange!r}, which would be an option of its own: remove it")
        return [f"--{above}{dot}{last}", *map(str, value)]
    return [f"--{above}{dot}{last}={value}"]
