"""What a terminal of 80 columns shows during a run, and at Ctrl-C."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from rich.console import Console

from tests.helpers.terminal import COLUMNS, Terminal
from trainer import display
from trainer.display import Counting, counting

ROOT = Path(__file__).parents[2]
SMALL = (
    "synthetic --num-images 3000 --encoder.name none --batch-size 16 --num-negatives 64 --window-size 96 "
    "--window-stride 24 --dim 8 --log-every 50 --no-evaluate --checkpoint-every 0"
)


def drawn(shown: Counting) -> list[str]:
    console = Console(file=io.StringIO(), width=COLUMNS, force_terminal=False)
    for line in shown.lines():
        console.print(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_the_log_has_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_LOG_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    with display.shown(), counting("epoch 4 of 5", 100, done=80), display.stage("kNN evaluation"):
        while not caplog.records:
            pass
    fields = vars(caplog.records[0])
    assert (fields["what"], fields["done"], fields["total"]) == ("epoch 4 of 5", 80, 100)
    assert fields["doing"].startswith("kNN evaluation, 0:00:0")


def interrupted_at(shown: str, terminal: Terminal) -> int:
    """The exit status of a command after Ctrl-C, pressed once it has shown that."""
    pressed = list[bool]()

    def on_screen(text: str) -> None:
        if not pressed and re.search(shown, text):
            pressed.append(True)
            terminal.interrupt()

    status = terminal.run(on_screen)
    assert pressed
    return status


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Terminal, Path, int]:
    """A run in a terminal that Ctrl-C stops once it has shown a loss."""
    output = tmp_path_factory.mktemp("terminal") / "run"
    command = [sys.executable, "-m", "trainer", *SMALL.split(), "--steps", "1000000", "--output", str(output)]
    terminal = Terminal([*command, "--num-shards", "5"])  # whose start takes several redraws
    return terminal, output, interrupted_at(r"loss \d\.\d\d \(chance 4\.16\)", terminal)


@pytest.mark.guard
def test_a_run_is_never_silent(interrupted: tuple[Terminal, Path, int]) -> None:
    terminal, _, _ = interrupted
    for stage in ("loading libraries", "building the encoder and opening the rows", "starting the weight servers"):
        assert stage in terminal.seen, stage
    assert re.search(
        r"epoch [\d.]+ of 5333 ━+ 0%, [\d,]+ of 1,000,000, (\d+ days?, )?\d+:\d\d:\d\d left", terminal.seen
    )
    assert re.search(r"loss \d\.\d\d \(chance 4\.16\), [\d,]+ images/s, wait \d+% data", terminal.seen)
    assert "━" in terminal.seen


@pytest.mark.guard
def test_ctrl_c_says_at_once_that_the_run_stops(interrupted: tuple[Terminal, Path, int]) -> None:
    terminal, output, status = interrupted
    assert status == 130
    assert "stopping after this step" in terminal.seen
    assert re.search(r"trainer: interrupted after \d+ steps: --resume continues from there", terminal.left)
    assert "Traceback" not in terminal.seen
    assert "━" not in terminal.left, "the bar is gone"
    assert (output / "checkpoints").is_dir()


@pytest.mark.guard
@pytest.mark.parametrize(
    "command",
    [
        ["trainer", "fashion-mnist"],
        ["trainer.data", "verify", "packed"],
        ["trainer.evaluate", "knn", "--pixels"],
        ["weightserver", "health", "127.0.0.1:1"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_can_be_interrupted_while_it_loads_libraries(command: list[str], tmp_path: Path) -> None:
    slow, is_server = tmp_path / "slow", command[0] == "weightserver"
    slow.mkdir()  # some load them so fast that they end before the key is pressed
    (slow / f"{'grpc' if is_server else 'torch'}.py").write_text("print('imported')\nimport time\ntime.sleep(60)\n")
    terminal = Terminal([sys.executable, "-m", *command], cwd=tmp_path, environment={"PYTHONPATH": str(slow)})
    assert interrupted_at("imported" if is_server else "loading libraries", terminal) == 130
    assert "interrupted" in terminal.left
    assert "loading libraries" not in terminal.left
    assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_ctrl_c_of_a_command_that_names_its_stage(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    Image.new("L", (8_000, 8_000)).save(tmp_path / "pictures/0.png")
    for number in range(1, 100):
        (tmp_path / f"pictures/{number}.png").hardlink_to(tmp_path / "pictures/0.png")
    command = [sys.executable, "-m", "trainer.data", "inspect", "pictures"]
    terminal = Terminal(command, cwd=tmp_path)
    assert interrupted_at("looking into the images, ", terminal) == 130
    assert terminal.left.strip() == "pic inspect: interrupted: repeat the command to continue"


def test_what_is_counted_shows_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    counted = Counting("held-out images", 12_000)
    assert "seconds_left" not in counted.fields()
    clock.now += 90
    counted.advance(3_000, loss=torch.tensor(1.25))
    line, numbers = drawn(counted)
    assert len(line.rstrip()) <= COLUMNS
    assert re.fullmatch(r"held-out images ━.* 25%, 3,000 of 12,000, 0:04:30 left *", line)
    assert numbers == "loss 1.25"
    assert counted.fields() == {
        "what": "held-out images",
        "done": 3_000,
        "total": 12_000,
        "numbers": "loss 1.25",
        "seconds_left": 270,
    }
    resumed = Counting("epoch 4 of 5", 100, done=80)
    assert "80%, 80 of 100" in drawn(resumed)[0]
    clock.now += 2
    resumed.advance()
    assert resumed.fields()["seconds_left"] == 38, "by the parts that were done here"
    clock.now += 60  # what came before the first part
    resumed = Counting("epoch 4 of 5", 100, done=80)
    for done in (81, 82):
        resumed.update(done, 100)
        clock.now += 1
    assert resumed.fields()["seconds_left"] == 36
    with display.shown(), counting("outer", 2), counting("inner", 3):
        pass
    assert not Counting("packing").lines(), "nothing is known yet"
