"""Base of the parts of a run's settings, `trainer.config.TrainConfig`. Each part lives with the code that uses it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from weightserver.core.errors import ArgumentError
from weightserver.core.spec import TableSpec

Value = TypeVar("Value")


def resumable(default: Value) -> Value:
    """Defines a setting that may change when a run is resumed; all others must stay the same."""
    value: Any = field(default=default, metadata={"resumable": True})
    return value  # type: ignore[no-any-return]  # a dataclass field, whose declared type is that of its default


def of_one_start(default: Value) -> Value:
    """Defines a setting of one start of a run, which only the command line gives and no file keeps."""
    value: Any = field(default=default, metadata={"resumable": True, "of_one_start": True})
    return value  # type: ignore[no-any-return]


class SettingError(ValueError):
    """Settings out of range, or that contradict each other.

    Attributes:
        settings: names of those that would be right with their defaults.
    """

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


@dataclass(frozen=True)
class Settings:
    """One part of a run's settings: a frozen dataclass whose field names are flags and whose docstrings are help texts.

    Every part checks its own values. Checks name the flag, so that a message says what to change on the command line.
    """

    def check(self) -> None:
        """Raises SettingError for a value out of range, or for settings of this part that contradict each other."""

    def unused_settings(self) -> dict[str, str]:
        """Settings of this part that have no effect with its other values, each with the option that it needs."""
        return {}


def problems_of(part: Settings) -> list[SettingError]:
    """All that is wrong with a part: settings that are none of their choices, which from Python no parser checks, and
    what its check refuses. That ends with the first problem, so it is repeated with the defaults of those."""
    problems = list[SettingError]()
    for name, kind in get_type_hints(type(part)).items():
        if get_origin(kind) is Literal and getattr(part, name) not in (choices := get_args(kind)):
            *most, last = map(str, choices)
            message = f"{flag(name)} must be {', '.join(most)} or {last}, got {getattr(part, name)}"
            problems.append(SettingError(message, name))
            part = replace(part, **{name: _default(part, name)})
    while True:
        try:
            part.check()
        except SettingError as problem:
            named = {name for known in problems for name in known.settings}
            if named.isdisjoint(problem.settings):
                problems.append(problem)  # else it comes from the default that replaced a wrong value
            before, part = part, changed(part, {name: _default(part, name) for name in problem.settings})
            if part != before:
                continue
        return problems


def unused_in(part: Settings) -> Iterator[SettingError]:
    """A problem for each setting of a part that is given but has no effect with its other values."""
    for name, needed in part.unused_settings().items():
        value = getattr(part, name)
        if value != _default(part, name):
            yield SettingError(f"{flag(name)} {value} is for {needed}: omit it, or give {needed} too", name)


def _default(part: Settings, name: str) -> Any:
    return attrgetter(name)(type(part)())


def settings_of(kind: type[Value], stored: Mapping[str, Any]) -> Value:
    """The settings that a config.json holds: an instance of the dataclass `kind`, with defaults for missing ones."""
    types = get_type_hints(kind)
    return kind(**{name: _restored(types[name], value) for name, value in stored.items() if name in types})


def _restored(kind: Any, value: Any) -> Any:
    """A value as it was before it was written as JSON, which knows neither tuples nor paths nor dataclasses."""
    if isinstance(value, dict) and is_dataclass(kind):
        return settings_of(kind, value)  # type: ignore[arg-type]  # a class, not an instance
    if isinstance(value, list):
        return tuple(_restored(None, item) for item in value)
    return Path(value) if isinstance(value, str) and Path in (kind, *get_args(kind)) else value


def changed(settings: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values, by name; those of nested ones have dotted names.

    Raises:
        TypeError: there is no such name.
    """
    own = {name: value for name, value in values.items() if "." not in name}
    for outer in {name.partition(".")[0] for name in values.keys() - own.keys()}:
        inner = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{outer}.")}
        own[outer] = changed(own.get(outer, getattr(settings, outer)), inner)
    return replace(settings, **own)


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by name, nested ones under dotted names."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, value


def flag(name: str) -> str:
    """The command line's flag of a setting: batch_size is --batch-size."""
    return f"--{name.replace('_', '-')}"


@contextmanager
def named_by_flags(above: str = "") -> Iterator[None]:
    """Turns an error about an argument into one about the setting of that name, for a nested one below `above`."""
    try:
        yield
    except ArgumentError as error:
        name = f"{above}.{error.argument}" if above else error.argument
        raise SettingError(f"{flag(name)} {error.problem}", name) from None


def check_at_least(settings: Settings, least: int, *names: str) -> None:
    """Raises SettingError for a setting below `least`. None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            required = "must not be negative" if least == 0 else f"must be at least {least}"
            raise SettingError(f"{flag(name)} {required}, got {value}", name)


def check_positive(settings: Settings, *names: str) -> None:
    """Raises SettingError for a setting that is not positive and finite."""
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:
            raise SettingError(f"{flag(name)} must be positive and finite, got {getattr(settings, name)}", name)


def check_not_negative(settings: Settings, *names: str) -> None:
    """Raises SettingError for a setting that is negative or not finite. None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise SettingError(f"{flag(name)} must be finite and not negative, got {value}", name)


def check_of_table(settings: Settings, *names: str) -> None:
    """Raises SettingError for a setting that no table of rows can have. None passes."""
    for name in names:
        if (value := getattr(settings, name)) is not None:
            with named_by_flags():
                TableSpec(**{"num_rows": 1, "dim": 1, name: value})


@functools.cache
def set_help_texts(settings: type) -> None:
    """Makes each field's docstring its help text, as one line: tyro would keep the line breaks of the source."""
    import docstring_parser  # here, so that a command without the trainer's libraries says what it needs

    for base in settings.__bases__:
        if is_dataclass(base):
            set_help_texts(base)
    try:
        described = docstring_parser.parse_from_object(settings).params
    except OSError:  # installed without sources
        return
    texts = {field.arg_name: " ".join((field.description or "").split()) for field in described}
    for setting in fields(settings):
        if setting.name in texts:
            setting.metadata = MappingProxyType(dict(setting.metadata) | {"help": texts[setting.name]})
