"""The documentation as a site: it has a home page, and no link of it leads nowhere."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest
import yaml

from docs.hooks import content_of, linked_files, linked_to_pages, page_of, pictures_of
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


@pytest.mark.parametrize("document", [*(f"docs/{path.name}" for path in PAGES), *linked_files()])
def test_links_lead_to_pages(document: str) -> None:
    """Those of the pages of docs/, and of the repository's files that become pages."""
    if document.startswith("docs/"):
        changed = linked_to_pages((ROOT / document).read_text(), "docs")
    else:
        changed = content_of(document)
    if not document.endswith(".md"):
        assert not (ROOT / document).is_file() or (ROOT / document).read_text() in changed
        return
    places = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*")}
    for target in linked_files():
        places |= {page_of(target), *(f"source/{picture}" for picture in pictures_of(target))}
    here = posixpath.dirname(page_of(document))
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)\s]*)?\)", changed)
    assert {posixpath.normpath(posixpath.join(here, link)) for link in links} <= places
    assert re.sub(r"\]\([^)]*\)", "", changed).endswith(re.sub(r"\]\([^)]*\)", "", (ROOT / document).read_text()))


def test_links_of_a_file_lead_to_pages_from_its_own_page() -> None:
    text = "See [the\nrules](../deploy/slo.yml), [alerts](runbook.md#alerts), [a](https://b/c.md) and [here](#here)."
    assert linked_to_pages(text, "docs") == text.replace("../deploy/slo.yml", "source/deploy/slo.yml.md")
    text = "[1](docs/design.md#a) [2](SECURITY.md#b) [3](deploy/) [4](a.png) [5](not/there) [6](docs/hooks.py)"
    assert linked_to_pages(text, "") == (
        "[1](../design.md#a) [2](SECURITY.md#b) [3](deploy.md) [4](a.png) [5](not/there) [6](docs/hooks.py.md)"
    )
    text = "[1](../../docs/design.md) [2](../../UPGRADING.md) [3](partial_fc.md#c) [4](../bench.py)"
    expected = "[1](../../../design.md) [2](../../UPGRADING.md) [3](partial_fc.md#c) [4](../bench.py.md)"
    (name,) = [path.name for path in sorted((ROOT / "benchmarks").glob("*.py"))][:1]
    text, expected = (one.replace("bench.py", name) for one in (text, expected))
    assert linked_to_pages(text, "benchmarks/results") == expected


def test_a_release_builds_the_site_with_its_addresses() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _Settings)  # noqa: S506 (a SafeLoader)
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    (build,) = [step for step in jobs["site"]["steps"] if step.get("run") == "make docs"]
    named = {settings[name][0] for name in ("site_url", "repo_url")}
    assert build["env"].keys() == named
    assert all("github.repository" in build["env"][name] or "event.repository" in build["env"][name] for name in named)
