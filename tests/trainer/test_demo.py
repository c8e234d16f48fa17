"""The demo: its settings, the run without correction after it, and what Ctrl-C leaves of both."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.config import TrainConfig
from trainer.coverage import coverage_warnings
from trainer.demo import _parser, demo_config, main, without_correction
from trainer.run.checkpoint_file import saved_steps
from trainer.run.resume import check_same_run, run_settings

ROOT = Path(__file__).parents[2]


def demo(output: Path, *options: str) -> TrainConfig:
    """The settings of a demo of the command line."""
    return demo_config(_parser().parse_args(["--output", str(output), *options]))


def test_rows_come_back_at_least_three_times(tmp_path: Path) -> None:
    config = demo(tmp_path)
    num_images = config.data.num_images or 60_000
    visits = config.optimization.num_steps(num_images) * config.optimization.batch_size
    assert visits * config.sampling.window_stride / config.sampling.window_size >= 3 * num_images
    assert config.rows.num_negatives <= num_images / 30
    assert config.servers.num_shards == 2
    assert coverage_warnings(config, num_images) == []


def test_the_run_without_correction_differs_in_nothing_else(tmp_path: Path) -> None:
    config = demo(tmp_path, "--epochs", "0.5", "--seed", "3")
    without = without_correction(config)
    assert without.rows.correction == "none"
    assert without.with_settings(correction="exact", output=tmp_path) == config


def test_a_resumed_demo_has_the_settings_of_its_run(tmp_path: Path) -> None:
    begun = demo(tmp_path, "--epochs", "0.5", "--seed", "3")
    (tmp_path / "config.json").write_text(begun.to_json())
    resumed = demo(tmp_path, "--resume")
    assert (resumed.run.resume, resumed.optimization.epochs) == (True, 0.5)
    assert (resumed.sampling.seed, resumed.sampling.order_seed) == (3, 3)
    check_same_run(resumed, 10_000)
    longer = demo(tmp_path, "--resume", "--epochs", "0.75")
    assert longer.optimization.epochs == 0.75
    check_same_run(longer, 10_000)


def test_a_wrong_command_line_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--epochs=-1", "--output", str(tmp_path / "demo")])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "demo: --epochs must be positive and finite, got -1.0\n"
    assert not (tmp_path / "demo").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_takes_names_with_blanks() -> None:
    command = ["make", "-n", "-C", str(ROOT), "demo", "DATA_DIR=my images", "OUTPUT=my run"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    (run,) = (line for line in lines if "trainer.demo" in line)
    assert shlex.split(run)[-4:] == ["--data-dir", "my images", "--output", "my run"]


@pytest.mark.slow  # minutes
@pytest.mark.timeout(1800)
def test_ctrl_c_in_either_run_leaves_both_to_resume(tmp_path: Path) -> None:
    """By SIGINT in the first run, by SIGTERM in the second one; then both end, with a table."""
    output, environment = tmp_path / "demo", os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer.demo", "--epochs", "0.2", "--output", str(output)]
    runs = (output, output / "without-correction")
    for run, number in zip(runs, (signal.SIGINT, signal.SIGTERM), strict=True):
        resume = ["--resume"] if run != output else []
        with subprocess.Popen(
            [*command, *resume], cwd=ROOT, stderr=subprocess.PIPE, env=environment, text=True
        ) as program:
            while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
                assert program.poll() is None
                time.sleep(0.1)
            program.send_signal(number)
            printed = program.communicate()[1]
        assert program.returncode == 128 + number
        assert "demo: interrupted after" in printed
        assert "Traceback" not in printed
        assert saved_steps(run / "checkpoints")[-1] > 0
    ended = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    for row in ("trained encoder", "without correction", "untrained encoder", "raw pixels"):
        assert row in ended.stdout
    assert [run_settings(run).rows.correction for run in runs] == ["exact", "none"]
