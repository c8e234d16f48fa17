"""Options of commands that are the fields of a dataclass: each is named, described and given its default once."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from weightserver.common.atomic_files import to_path

Settings = TypeVar("Settings")


def option(text: str, default: Any = MISSING) -> Any:
    """A field that is an option too; `text` is its help, to which the default is added."""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    if default is not MISSING and default is not None and not isinstance(default, bool):
        text += f" (default {shown})"
    return field(default=default, metadata={"help": text})


def add_options(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """Adds the options of a dataclass: required ones for fields without a default, --no-… too for booleans."""
    kinds = get_type_hints(settings)
    for one in fields(settings):
        if (text := one.metadata.get("help")) is None:
            continue
        kind = next((part for part in get_args(kinds[one.name]) if isinstance(part, type)), kinds[one.name])
        more: dict[str, Any] = {"type": to_path if kind is Path else kind}
        if kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is Literal:
            more = {"choices": get_args(kind)}
        required = one.default is MISSING
        more |= {"required": True} if required else {"default": one.default}
        parser.add_argument(f"--{one.name.replace('_', '-')}", help=text, **more)


def given_options(arguments: argparse.Namespace, settings: type[Settings]) -> Settings:
    """The dataclass of the options that were given."""
    return settings(**{one.name: getattr(arguments, one.name) for one in fields(settings)})  # type: ignore[arg-type]
