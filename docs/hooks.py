"""Hooks of the documentation site, which mkdocs.yml names: files of the repository that pages link to become pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\(\.\./([^)\s]+)\)")
_HEAD = "---\nsearch: {exclude: true}\n---\n"
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each file outside docs/ that a page links to, and the pictures of those that are Markdown."""
    from mkdocs.structure.files import File  # here, so that tests need no mkdocs

    linked = {target for path in (ROOT / "docs").glob("*.md") for target in _LINK.findall(path.read_text())}
    for target in sorted(linked):
        files.append(File.generated(config, page_of(target), content=content_of(target)))
        for picture in _pictures(target):
            files.append(File.generated(config, f"source/{picture}", abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the links of a page of docs/; those of the repository's files have been by `content_of`."""
    return markdown if page.file.src_uri.startswith("source/") else linked_to_pages(markdown)


def linked_to_pages(markdown: str) -> str:
    """Replaces each link to a file outside docs/ by one to its page."""
    return _LINK.sub(lambda found: f"]({page_of(found.group(1))})", markdown)


def page_of(target: str) -> str:
    """The page of a file or folder of the repository, as docs/ names it."""
    return f"source/{target}" if target.endswith(".md") else f"source/{target}.md"


def content_of(target: str) -> str:
    """The Markdown of the page of a file or folder: Markdown, with its links into docs/; other text as code; a folder's
    list."""
    path = ROOT / target
    if path.suffix == ".md":
        return _HEAD + path.read_text().replace("](docs/", f"]({'../' * (target.count('/') + 1)}")
    if path.is_dir():
        return f"{_HEAD}# {target}\n\n" + "\n".join(f"- `{found.name}`" for found in sorted(path.iterdir()))
    return f"{_HEAD}# {target}\n\n````{_LANGUAGES.get(path.suffix, '')}\n{path.read_text()}````\n"


def _pictures(target: str) -> Iterator[str]:
    if target.endswith(".md"):
        for name in re.findall(r"!\[[^\]]*\]\(([^):]+)\)", (ROOT / target).read_text()):
            yield str(Path(target).parent / name)
