"""Options of commands that read images: `SourceOptions`, one argument for each field."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trainer.data.config import SourceOptions
from trainer.settings import flag, set_help_texts
from weightserver.common.atomic_files import to_path


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an argument for each field; without it, `source_options` takes that of another source."""
    set_help_texts(SourceOptions)
    types: dict[str, Any] = get_type_hints(SourceOptions)
    group = parser.add_argument_group("how to read the images")
    for one in fields(SourceOptions):
        kind, _ = get_args(types[one.name])  # the other one is None
        text = one.metadata.get("help")
        if get_origin(kind) is Literal:
            group.add_argument(flag(one.name), choices=get_args(kind), help=text)
        elif get_origin(kind) is tuple:
            group.add_argument(flag(one.name), nargs=2, type=float, metavar=("LOW", "HIGH"), help=text)
        else:
            convert = to_path if kind is Path else kind
            group.add_argument(flag(one.name), type=convert, metavar=one.name.split("_")[-1].upper(), help=text)


def source_options(arguments: argparse.Namespace, others: SourceOptions | None = None) -> SourceOptions:
    """The options that are given, and `others`, or the defaults, for the rest."""
    given = {one.name: value for one in fields(SourceOptions) if (value := getattr(arguments, one.name)) is not None}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    options = replace(others or SourceOptions(), **given)
    options.check()
    return options
