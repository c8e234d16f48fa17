"""The package requires lower bounds: installing it replaces no library that is new enough."""

from __future__ import annotations

import re

from tests.test_installation import CONSTRAINTS, PROJECT, ROOT, names

TOOLS = ("dev", "docs")
"""Extras that are for work on the project itself."""


def required(*, tools: bool = False) -> list[str]:
    """All requirements of the package, on request with those of its development."""
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    groups = [requirements for name, requirements in extras.items() if tools or name not in TOOLS]
    return [*PROJECT["project"]["dependencies"], *(one for group in groups for one in group)]


def explained() -> set[str]:
    """The requirements in pyproject.toml whose line has a comment."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    return {found[1] for line in lines if (found := re.match(r'\s*"([^"]+)",\s*#', line))}


def test_requirements_are_lower_bounds() -> None:
    pinned = [one for one in required(tools=True) if not re.fullmatch(r"[\w.-]+(\[\w+\])?>=(\d+!)?[\d.]+", one)]
    assert set(pinned) <= explained(), "a cap says which version is known to break"
    assert not [one for one in required(tools=True) if "==" in one]


def test_a_bound_that_excludes_all_but_the_pinned_version_says_why() -> None:
    exact = dict(line.lower().replace("_", "-").split("==") for line in CONSTRAINTS if "==" in line)
    bounds = [(one, *one.lower().replace("_", "-").split(">=")) for one in required()]
    assert {one for one, name, least in bounds if f"{exact[name]}.".startswith(f"{least}.")} <= explained()


def test_exact_versions_of_all_are_in_the_constraints() -> None:
    assert names(required(tools=True)) <= names(CONSTRAINTS)
    exact = [line for line in CONSTRAINTS if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[^=]+", line) for line in exact)
