"""The documentation as a site: it has a home page, and no link of it leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs.hooks import content_of, linked_to_pages, page_of
from docs.site_links import dead_links

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


class _Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, whose !ENV takes a setting from the environment."""


_Settings.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))


def page(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><body>{content}</body></html>")


def test_links_of_a_site_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "logo.png").touch()
    page(
        tmp_path / "index.html",
        '<a href="a/#there">1</a> <a href="#here">2</a> <img src="logo.png"> <a href="https://elsewhere/">3</a>'
        '<a href="a/#missing">4</a> <a href="b/">5</a> <a href="#nowhere">6</a> <a name="here"></a>',
    )
    page(tmp_path / "a/index.html", '<h2 id="there"></h2> <a href="..#here">1</a> <a href="..#there">2</a>')
    page(tmp_path / "c/index.html", '<img srcset="../logo.png 1x, ../logo-2.png 2x"> <a href="../../out.html">1</a>')
    page(tmp_path / "404.html", '<a href="/served/from/the/root">1</a>')
    assert dead_links(tmp_path) == [
        "a/index.html: ..#there",
        "c/index.html: ../logo-2.png",
        "c/index.html: ../../out.html",
        "index.html: a/#missing",
        "index.html: b/",
        "index.html: #nowhere",
    ]


def test_make_docs_checks_the_built_site() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _Settings)  # noqa: S506 (a SafeLoader)
    assert settings["hooks"] == ["docs/hooks.py"]
    assert set(settings["validation"]["links"].values()) == {"warn"}
    (target,) = re.findall(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.search(r"mkdocs build --strict\n.*-m docs\.site_links build/site\n", target)


def test_every_page_is_in_the_navigation_and_the_first_is_the_home() -> None:
    named = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert named[0] == "index.md"
    assert set(named) == {path.name for path in PAGES}


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_links_to_become_pages(document: Path) -> None:
    """Their words stay in the sentence, and what a reader finds behind them is the file."""
    targets = re.findall(r"\]\(\.\./([^)\s]+)\)", document.read_text())
    changed = linked_to_pages(document.read_text())
    assert "](../" not in changed
    for target in targets:
        assert f"]({page_of(target)})" in changed
        if (ROOT / target).is_file():
            text = (ROOT / target).read_text()
            assert text.replace("](docs/", "](../") in content_of(target).replace("../../", "../")


def test_a_link_that_leaves_the_site_keeps_its_words() -> None:
    text = "See [the\nrules](../deploy/rules.yml) and [alerts](runbook.md#alerts)."
    assert linked_to_pages(text) == "See [the\nrules](source/deploy/rules.yml.md) and [alerts](runbook.md#alerts)."
