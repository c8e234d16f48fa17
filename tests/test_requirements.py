"""The package requires lower bounds: installing it replaces no library that is new enough."""

from __future__ import annotations

import re

from tests.test_installation import CONSTRAINTS, PROJECT, ROOT, names

TOOLS = ("dev", "docs")
"""Extras that are for work on the project itself."""


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    return {name: requirements for name, requirements in found.items() if name not in TOOLS}


def required() -> list[str]:
    """All requirements of the package, without those of its development."""
    return [*PROJECT["project"]["dependencies"], *(one for group in extras().values() for one in group)]


def explained() -> set[str]:
    """The requirements in pyproject.toml whose line has a comment."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    return {found[1] for line in lines if (found := re.match(r'\s*"([^"]+)",\s*#', line))}


def test_requirements_are_lower_bounds() -> None:
    pinned = [one for one in required() if not re.fullmatch(r"[\w.-]+(\[\w+\])?>=[\d.]+", one)]
    assert set(pinned) <= explained(), "a cap says which version is known to break"
    assert not [one for one in required() if "==" in one]


def test_exact_versions_of_all_are_in_the_constraints() -> None:
    assert names(required()) <= names(CONSTRAINTS)
    exact = [line for line in CONSTRAINTS if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[^=]+", line) for line in exact)
