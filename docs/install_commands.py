"""Writes how to install the package into all pages and examples: python -m docs.install_commands."""

from __future__ import annotations

import re
from pathlib import Path

from weightserver.common.installing import install_command

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").iterdir())]


def updated(text: str) -> str:
    """The text with each command that installs an extra as `install_command` says."""
    return re.sub(
        r"pip install(\s)'(?:pic-weightserver|\.)\[(\w+)\]'",
        lambda found: install_command(found.group(2)).replace("install ", f"install{found.group(1)}"),
        text,
    )


if __name__ == "__main__":
    for file in FILES:
        if (text := file.read_text()) != updated(text):
            file.write_text(updated(text))
            print(f"wrote {file.relative_to(ROOT)}")
