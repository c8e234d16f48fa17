"""Finds links, pictures and anchors of a built site that lead nowhere: python -m docs.site_links build/site."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class _Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name == "srcset" and value:
                self.links += [part.split()[0] for part in value.split(",")]
            elif value and (name == "id" or (tag, name) == ("a", "name")):
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """A line for each link to a file of the site or an anchor that does not exist; 404.html, served anywhere, apart."""
    site = site.resolve()
    pages = {path: _read(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            has_anchor = target not in pages or not parts.fragment or unquote(parts.fragment) in pages[target].anchors
            if not (target.is_file() and target.is_relative_to(site) and has_anchor):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


if __name__ == "__main__":
    if not (Path(sys.argv[1]) / "index.html").exists():
        sys.exit(f"{sys.argv[1]} has no home page")
    if dead := dead_links(Path(sys.argv[1])):
        sys.exit("\n".join(["links that lead nowhere:", *dead]))
