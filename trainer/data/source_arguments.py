"""Options of commands that read images: `SourceOptions`, one argument for each field."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trainer.data.config import SourceOptions
from trainer.settings import flag, set_help_texts


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an argument for each field; without it, `source_options` takes that of another source."""
    set_help_texts(SourceOptions)
    types: dict[str, Any] = get_type_hints(SourceOptions)
    group = parser.add_argument_group("how to read the images")
    for one in fields(SourceOptions):
        named = get_origin(types[one.name]) is Literal
        choices = get_args(types[one.name]) if named else None
        metavar = None if named else "NAME"
        group.add_argument(flag(one.name), choices=choices, metavar=metavar, help=one.metadata.get("help"))


def source_options(arguments: argparse.Namespace, others: SourceOptions | None = None) -> SourceOptions:
    """The options that are given, and `others`, or the defaults, for the rest."""
    given = {one.name: value for one in fields(SourceOptions) if (value := getattr(arguments, one.name)) is not None}
    return replace(others or SourceOptions(), **given)
