"""How to install the package and its extras: the one place that a first release changes.

Every page and message says what `install_command` returns; `python -m docs.install_commands` writes it into the pages.
"""

from __future__ import annotations

IS_ON_AN_INDEX = False
"""Whether a package index has a release."""


def install_command(extra: str) -> str:
    """The command that installs the package with an extra, by a package index or in a clone of the repository."""
    return f"pip install 'pic-weightserver[{extra}]'" if IS_ON_AN_INDEX else f"pip install '.[{extra}]'"


def install_advice(extra: str) -> str:
    """The command, and where to run it."""
    return install_command(extra) + ("" if IS_ON_AN_INDEX else " in a clone of the repository")
