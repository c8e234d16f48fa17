"""The commands that the documents show are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import trainer.data.__main__
import trainer.export.__main__
import trainer.report
import weightserver.cli

ROOT = Path(__file__).parent.parent
PARSERS = {
    "weightserver ": weightserver.cli._parser,
    "python -m trainer.export ": trainer.export.__main__._parser,
    "python -m trainer.data ": trainer.data.__main__._parser,
    "python -m trainer report ": trainer.report._parser,
}
COMMANDS = [
    (document, line.strip())
    for document in ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
    for line in (ROOT / document).read_text().replace("\\\n", " ").splitlines()
    if line.startswith(tuple(f"    {prefix}" for prefix in PARSERS))
]


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_commands_in_documents_can_be_parsed(document: str, command: str) -> None:
    (prefix,) = (prefix for prefix in PARSERS if command.startswith(prefix))
    PARSERS[prefix]().parse_args(shlex.split(command.removeprefix(prefix), comments=True))


def test_every_command_is_documented() -> None:
    shown = {command.split()[1] for _, command in COMMANDS if command.startswith("weightserver ")}
    known = re.search(r"\{(.*?)\}", weightserver.cli._parser().format_usage())
    assert known is not None
    assert shown == set(known.group(1).replace("\n", "").replace(" ", "").split(","))


def anchors(document: Path) -> set[str]:
    """What links to a document's headings name."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^)\s:]*)\)", document.read_text()):
            path = (document.parent / target) if target else document
            assert path.exists(), f"{document.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{document.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_reference_has_every_public_name() -> None:
    told = re.findall(r"^::: weightserver\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(weightserver.__all__)
