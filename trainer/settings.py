"""Base of a run's settings. Each part lives with the code that uses it; `trainer.config.TrainConfig` is their union."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

Value = TypeVar("Value")


def resumable(default: Value) -> Value:
    """Defines a setting that may change when a run is resumed; all others must stay the same."""
    value: Any = field(default=default, metadata={"resumable": True})
    return value  # type: ignore[no-any-return]  # a dataclass field, whose declared type is that of its default


@dataclass(frozen=True)
class Settings:
    """One part of a run's settings: a frozen dataclass whose field names are flags and whose docstrings are help texts.

    Every part checks its own values. Checks name the flag, so that a message says what to change on the command line.
    """

    def check(self) -> None:
        """Raises ValueError for a value out of range, or for settings of this part that contradict each other."""

    def unused_settings(self) -> dict[str, str]:
        """Settings of this part that have no effect with its other values, each with the option that it needs."""
        return {}


def problems_of(part: type[Settings], settings: Settings) -> tuple[list[str], set[str]]:
    """The messages of all checks of a part that `settings` do not pass, and the names of the settings at fault.

    A check ends with the first problem, so it is repeated with the defaults of those that are at fault.
    """
    problems, at_fault = list[str](), set[str]()
    while problem := _problem(part, settings):
        problems.append(problem)
        wrong = _causes(part, settings, problem)
        at_fault |= wrong.keys()
        if not wrong:
            break
        settings = replace(settings, **wrong)
    return problems, at_fault


def _problem(part: type[Settings], settings: Settings) -> str:
    """The first problem that a part's check finds; empty if there is none."""
    try:
        part.check(settings)
    except ValueError as error:
        return str(error)
    return ""


def _causes(part: type[Settings], settings: Settings, problem: str) -> dict[str, Any]:
    """The settings without which the problem would be another, by name, with their defaults."""
    causes = {
        one.name: one.default
        for one in fields(part)
        if one.default is not MISSING and getattr(settings, one.name) != one.default
    }
    before = None
    while before != causes:
        before = dict(causes)
        for name, default in before.items():
            without = replace(settings, **{name: default})
            if _problem(part, without) == problem:
                settings = without
                del causes[name]
    return causes


def settings_of(kind: type[Value], stored: dict[str, Any]) -> Value:
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


def check_at_least(settings: Settings, least: int, *names: str) -> None:
    """Raises ValueError for a setting below `least`. None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            required = "must not be negative" if least == 0 else f"must be at least {least}"
            raise ValueError(f"{flag(name)} {required}, got {value}")


def check_positive(settings: Settings, *names: str) -> None:
    """Raises ValueError for a setting that is not positive and finite."""
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:
            raise ValueError(f"{flag(name)} must be positive and finite, got {getattr(settings, name)}")


def check_not_negative(settings: Settings, *names: str) -> None:
    """Raises ValueError for a setting that is negative or not finite. None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag(name)} must be finite and not negative, got {value}")


def check_choice(settings: Settings, name: str, *choices: object) -> None:
    """Raises ValueError for a setting that is not one of `choices`; from Python, no parser checks it."""
    if getattr(settings, name) not in choices:
        *most, last = map(str, choices)
        raise ValueError(f"{flag(name)} must be {', '.join(most)} or {last}, got {getattr(settings, name)}")


def set_help_texts(settings: type) -> None:
    """Makes each field's docstring its help text, as one line: tyro would keep the line breaks of the source."""
    try:
        (definition,) = ast.parse(inspect.getsource(settings)).body
    except OSError:  # installed without sources
        return
    assert isinstance(definition, ast.ClassDef)
    texts = {
        node.target.id: " ".join(following.value.value.split())
        for node, following in itertools.pairwise(definition.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(following.value.value, str)
    }
    for setting in fields(settings):
        if setting.name in texts:
            setting.metadata = MappingProxyType(dict(setting.metadata) | {"help": texts[setting.name]})
