"""The transcript of a first hour: its commands run, in short form, and the page shows them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from experiments.first_hour import PAGE, STEPS, Shown, Step, normalised, page, run_steps
from tests.helpers.image_tree import plain_tree

ROOT = Path(__file__).parents[2]


@pytest.mark.guard  # nine programs that import torch: a minute
@pytest.mark.timeout(600)
def test_the_commands_run_and_leave_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_tree(tmp_path / "pictures/train", 48)
    plain_tree(tmp_path / "pictures/test", 12, first=48)
    broken = sorted((tmp_path / "pictures/train").rglob("*/*"))[0]
    broken.write_bytes(broken.read_bytes()[:100])
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shown = run_steps(STEPS, tmp_path, is_short=True)
    text = page(shown, tmp_path)
    assert "Traceback" not in text
    assert str(tmp_path) not in text
    for said in ("--resume continues from there", "kNN of the trained encoder", "Next:"):
        assert said in text, text
    assert len(re.findall(r"epoch [\d.]+ of [\d.]+ [━╸╺]", text)) == 2, "the progress of both parts of the run"
    for left in ("features.npz", "rows/images.csv", "runs/pictures/report.html"):
        assert (tmp_path / left).exists(), left


def test_the_page_shows_the_commands_and_sentences_of_today() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^    \$ (.+)$", text, re.MULTILINE) == [step.command for step in STEPS]
    assert re.findall(r"^\w.*:$", text, re.MULTILINE) == [step.text for step in STEPS if step.text.endswith(":")]


def test_the_page_is_of_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "build-7")
    text = f"2026-11-23T00:48:42.591284Z {tmp_path}/runs/a of build-7 at 127.0.0.1:43211"
    assert normalised(text, tmp_path) == "2026-01-01T12:00:00Z runs/a of localhost at 127.0.0.1:50051"
    assert not re.search(r"/tmp/|/root|/home/", PAGE.read_text())


def test_a_command_that_fails_ends_the_transcript(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'exit 3' ended with status 3, not 0"):
        run_steps([Step(text="", command="exit 3")], tmp_path)


def test_a_section_shows_its_command_and_what_is_left(tmp_path: Path) -> None:
    shown = Shown(Step(title="Look", text="This lists:", command="ls", show="━"), ("━━ 3%",), ("a", "b"))
    assert page([shown], tmp_path).endswith("## Look\n\nThis lists:\n\n    $ ls\n\n    ━━ 3%\n\n    a\n    b\n")
