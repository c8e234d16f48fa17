"""All that docs/paper-to-code.md names exists: files, functions, fields, options and tests; citations fit the paper."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from trainer.arguments import parse_config
from trainer.presets import PRESETS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "paper-to-code.md").read_text()
NAMED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
PLACES = [name for name in NAMED if re.match(r"[\w/]+\.py\b", name)]
OPTIONS = [name for name in NAMED if name.startswith("--")]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The definitions of a module or class, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
    return found


def exists(place: str) -> bool:
    """Whether the place exists: a `file.py`, `file.py:name`, `file.py:Class.name` or `tests/file.py::test`."""
    file, _, name = place.replace("::", ":").partition(":")
    if not (ROOT / file).exists():
        return False
    body = parsed(ROOT / file).body
    for part in name.split(".") if name else []:
        node = defined(body).get(part)
        if node is None:
            return False
        body = getattr(node, "body", [])
    return True


@pytest.mark.parametrize("place", PLACES)
def test_every_named_place_exists(place: str) -> None:
    assert exists(place)
    assert ("::" in place) == place.startswith("tests/")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_named_option_can_be_given(option: str) -> None:
    words = option.split()
    needs_value = not (words[-1].isalnum() or "no-" in words[-1])
    parse_config(["imagenet-1k", *words, *(["7"] if needs_value else [])])


def test_every_row_of_settings_names_code_and_a_test() -> None:
    settings = TEXT.partition("## Different on purpose")[0]
    rows = [line.split("|")[1:-1] for line in settings.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip() != "the paper"]
    assert len(rows) > 35
    for stated, here, held in rows:
        assert re.search(r"`(--|\w+/\S+\.py)|preset `", here), stated
        assert re.search(r"`tests/\S+\.py::test_\w+`", held), stated


def test_every_preset_of_the_paper_is_named() -> None:
    assert {name for name in PRESETS if f"`{name}`" in TEXT} == {"imagenet-1k", "imagenet-11k"}


CITED = re.compile(r"(Equation|Section|Table|Figure|Algorithm)s? \(?(\d+(?:\.\d+)?)")
SUBJECT = re.compile(
    r"(?P<of_1>softmax|cos\b|cosine|loss)|(?P<of_2>SGD|update|u ←|momentum)"
    r"|(?P<of_3>coefficients|correct|closed form|gap)"
)
"""What the paper's equations are about."""
OF_OTHERS = re.compile(r"et al\.|CVPR")
"""Marks a citation of another paper."""


def test_every_citation_of_the_paper_is_one_that_the_map_has() -> None:
    """And an equation is cited for what it says: the nearest words that are about an equation are about that one."""
    mapped = {match.groups() for match in CITED.finditer(TEXT)} | {("Section", "4"), ("Section", "4.3")}
    mapped |= {("Table", number) for number in ("6", "7")}  # results alone: experiments/tables repeats them
    num_cited = 0
    for folder in ("weightserver", "trainer", "experiments", "benchmarks", "examples", "docs", "tests"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix not in (".py", ".md", ".c", ".h") or path.name.startswith("results"):
                continue
            text = path.read_text()
            for match in CITED.finditer(text):
                start, end = match.span()
                if OF_OTHERS.search(text[max(0, start - 60) : start]):
                    continue
                num_cited += 1
                assert match.groups() in mapped, f"{path.relative_to(ROOT)} cites {match[0]}"
                if match[1] == "Equation":
                    near = SUBJECT.finditer(text, max(0, start - 100), end + 100)
                    subject = min(near, key=lambda words: max(start - words.end(), words.start() - end), default=None)
                    assert subject, f"{path.relative_to(ROOT)} does not say what {match[0]} is about"
                    assert subject.lastgroup == f"of_{match[2]}", f"{path.relative_to(ROOT)}: not {match[0]}"
    assert num_cited > 80
