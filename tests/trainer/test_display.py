"""What a terminal of 80 columns shows during a run, and at Ctrl-C."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.helpers.image_tree import plain_tree
from tests.helpers.terminal import COLUMNS, Terminal
from trainer import display
from trainer.counting import Counting, counting
from trainer.display import Progress
from trainer.run.progress import TrainingProgress

ROOT = Path(__file__).parents[2]
SMALL = [
    "synthetic",
    "--num-images",
    "3000",
    "--encoder.name",
    "none",
    "--batch-size",
    "16",
    "--num-negatives",
    "64",
    "--window-size",
    "96",
]
SMALL += ["--window-stride", "24", "--dim", "8", "--log-every", "50", "--no-evaluate", "--checkpoint-every", "0"]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(clock: Clock, *, start: int = 0, num_steps: int = 100, num_images: int = 320) -> TrainingProgress:
    return TrainingProgress(
        start_step=start,
        num_steps=num_steps,
        batch_size=16,
        num_images=num_images,
        chance=6.931,
        stage=lambda: "rows",
        clock=clock,
    )


def drawn(shown: Progress) -> list[str]:
    console = Console(file=io.StringIO(), width=COLUMNS, force_terminal=False)
    for line in shown.lines():
        console.print(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def record(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 6.5, "seconds": 1.0, "data_seconds": 0.031, "row_wait_seconds": 0.0} | more


def test_the_lines_say_what_a_person_asks_and_fit() -> None:
    clock = Clock()
    shown = progress(clock, num_steps=500_400, num_images=1_281_167)
    for step in range(123_457):
        clock.now += 0.5
        shown.advance(step + 1, (step + 1) / 2)
    shown.update(record(123_456, knn_top1=67.8))
    first, second = drawn(shown)
    assert len(first) <= COLUMNS
    assert "25% step 123,457 of 500,400, epoch 1.542 of 6.249, 2 days, 4:21:12 left" in first
    assert second == "loss 6.50 (chance 6.93), 32 images/s, kNN 67.8 %, wait 3% data 0% rows"


def test_an_evaluation_is_no_part_of_the_speed_but_of_the_time_left() -> None:
    """Ten steps of one second, then a kNN of ten: there will be nine more of each."""
    clock = Clock()
    shown = progress(clock)
    for step in range(10):
        clock.now += 1
        shown.advance(step + 1, step + 1.0)
    assert shown.seconds_left == pytest.approx(90)
    clock.now += 10 + 1
    shown.advance(11, 11.0)
    assert shown.steps_per_second == pytest.approx(1)
    assert shown.seconds_left == pytest.approx(89 + 89 * 10 / 11)
    assert "16 images/s" in drawn(shown)[1]


def test_a_resumed_run_is_shown_where_it_is() -> None:
    clock = Clock()
    shown = progress(clock, start=80)
    assert "80% step 80 of 100, epoch 4 of 5" in drawn(shown)[0]
    assert "- images/s" in drawn(shown)[1]
    clock.now += 2
    shown.advance(81, 2.0)
    assert shown.seconds_left == pytest.approx(38)


def test_a_slow_step_says_what_it_waits_for() -> None:
    clock = Clock()
    shown = progress(clock, start=4)
    assert shown.activity() == ""
    clock.now += 75
    assert shown.activity() == "step 5: waiting for rows, 0:01:15"


def test_without_a_terminal_the_log_has_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_LOG_SECONDS", 0.01)
    clock = Clock()
    shown = progress(clock, start=80)
    caplog.set_level(logging.INFO)
    with display.shown(), display.following(shown), display.stage("kNN evaluation"):
        while not caplog.records:
            pass
    fields = vars(caplog.records[0])
    assert (fields["step"], fields["num_steps"], fields["epoch"]) == (80, 100, 4)
    assert fields["doing"].startswith("kNN evaluation, 0:00:0")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Terminal, Path, int]:
    """A run in a terminal that Ctrl-C stops once it has shown a loss."""
    output = tmp_path_factory.mktemp("terminal") / "run"
    command = [sys.executable, "-m", "trainer", *SMALL, "--steps", "1000000", "--output", str(output)]
    terminal = Terminal([*command, "--num-shards", "5"])  # whose start takes several redraws
    pressed: list[bool] = []

    def on_screen(text: str) -> None:
        if not pressed and re.search(r"loss \d\.\d\d \(chance 4\.16\)", text):
            pressed.append(True)
            terminal.interrupt()

    return terminal, output, terminal.run(on_screen)


@pytest.mark.guard
def test_a_run_is_never_silent(interrupted: tuple[Terminal, Path, int]) -> None:
    terminal, _, _ = interrupted
    for stage in ("loading libraries", "building the encoder and opening the rows", "starting the weight servers"):
        assert stage in terminal.seen, stage
    assert re.search(
        r"0% step [\d,]+ of 1,000,000, epoch [\d.]+ of 5333, (\d+ days?, )?\d+:\d\d:\d\d left", terminal.seen
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
    pressed = list[bool]()

    def on_screen(text: str) -> None:
        if not pressed and ("imported" if is_server else "loading libraries") in text:
            pressed.append(True)
            terminal.interrupt()

    assert terminal.run(on_screen) == 130
    assert pressed
    assert "interrupted" in terminal.left
    assert "loading libraries" not in terminal.left
    assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_ctrl_c_of_a_command_that_names_its_stage(tmp_path: Path) -> None:
    plain_tree(tmp_path / "pictures", 8)
    command = [sys.executable, "-m", "trainer.data", "preview", "pictures", "--views", "2000", "--images", "8"]
    terminal, pressed = Terminal(command, cwd=tmp_path), list[bool]()

    def on_screen(text: str) -> None:
        if not pressed and "drawing views, " in text:
            pressed.append(True)
            terminal.interrupt()

    assert terminal.run(on_screen) == 130
    assert terminal.left.strip() == "trainer.data: interrupted: repeat the command to continue"
    assert not (tmp_path / "preview.png").exists()


def test_what_is_counted_shows_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    counted = Counting("held-out images", 12_000)
    assert "seconds_left" not in counted.fields()
    clock.now += 90
    counted.advance(3_000, loss=torch.tensor(1.25))
    (line,) = drawn(counted)
    assert len(line.rstrip()) <= COLUMNS
    assert re.fullmatch(r"held-out images ━.* 25%, 3,000 of 12,000, 0:04:30 left, loss 1.25 *", line)
    assert counted.fields() == {
        "what": "held-out images",
        "done": 3_000,
        "total": 12_000,
        "numbers": "loss 1.25",
        "seconds_left": 270,
    }
    with display.shown(), counting("outer", 2), counting("inner", 3):
        pass
    assert not Counting("packing").lines(), "nothing is known yet"
