"""Hooks of the documentation site, which mkdocs.yml names."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces each link to a file outside docs/, which the site does not have, by the path of that file."""
    return re.sub(r"\[[^\]]*\]\(\.\./([^)\s]+)\)", r"`\1`", markdown)
