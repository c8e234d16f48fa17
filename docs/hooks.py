"""Hooks of the documentation site, which mkdocs.yml names: files of the repository that pages link to become pages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_IN_SITE = re.compile(r"docs/(?!.*\.py$)")
"""Files that are pages or pictures of the site by themselves, as mkdocs.yml says."""
_HEAD = "---\nsearch: {exclude: true}\n---\n"
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each file outside docs/ that pages link to, and the pictures of those that are Markdown."""
    from mkdocs.structure.files import File  # here, so that tests need no mkdocs

    for target in linked_files():
        files.append(File.generated(config, page_of(target), content=content_of(target)))
        for picture in pictures_of(target):
            files.append(File.generated(config, f"source/{picture}", abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the links of a page of docs/; those of the repository's files have been by `content_of`."""
    return markdown if page.file.src_uri.startswith("source/") else linked_to_pages(markdown, "docs")


def linked_files() -> list[str]:
    """The files and folders outside docs/ that a page of docs/ links to, or one of these files that is Markdown."""
    found, unread = set[str](), [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    while unread:
        folder, text = posixpath.dirname(unread[-1]), (ROOT / unread.pop()).read_text()
        targets = {_target(link, folder) for link, _ in _LINK.findall(text)}
        new = {target for target in targets - found if target and not _IN_SITE.match(target)}
        found |= new
        unread += [target for target in new if target.endswith(".md")]
    return sorted(found)


def linked_to_pages(markdown: str, folder: str) -> str:
    """Replaces each link of a Markdown file in a folder of the repository by one to a page."""
    here = posixpath.dirname(page_of(f"{folder}/page.md"))

    def linked(found: re.Match[str]) -> str:
        target = _target(found[1], folder)
        return f"]({posixpath.relpath(page_of(target), here or '.')}{found[2] or ''})" if target else found[0]

    return _LINK.sub(linked, markdown)


def page_of(target: str) -> str:
    """The page of a file or folder of the repository, as docs/ names it."""
    if _IN_SITE.match(target):
        return target.removeprefix("docs/")
    return posixpath.normpath(f"source/{target}" if target.endswith(".md") else f"source/{target}.md")


def content_of(target: str) -> str:
    """The Markdown of the page of a file or folder: Markdown with its links to pages; other text as code; a folder's
    list."""
    path = ROOT / target
    if path.suffix == ".md":
        return _HEAD + linked_to_pages(path.read_text(), posixpath.dirname(target))
    if path.is_dir():
        return f"{_HEAD}# {target}\n\n" + "\n".join(f"- `{found.name}`" for found in sorted(path.iterdir()))
    return f"{_HEAD}# {target}\n\n````{_LANGUAGES.get(path.suffix, '')}\n{path.read_text()}````\n"


def pictures_of(target: str) -> Iterator[str]:
    """The pictures that a Markdown file shows."""
    if target.endswith(".md"):
        for name in re.findall(r"!\[[^\]]*\]\(([^):]+)\)", (ROOT / target).read_text()):
            yield str(Path(target).parent / name)


def _target(link: str, folder: str) -> str | None:
    """The file or folder of the repository that a link in a folder leads to; None for a picture, or nothing."""
    target = posixpath.normpath(posixpath.join(folder, link))
    is_page = not target.endswith((".png", ".svg", ".jpg")) and (ROOT / target).exists()
    return target if is_page else None
