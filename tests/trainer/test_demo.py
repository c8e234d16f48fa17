"""The demo: its settings, the run without correction beside it, and what Ctrl-C leaves of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.companion import Companion
from trainer.coverage import coverage_warnings
from trainer.demo import main
from trainer.demonstration import Options, demo_config, train_and_compare
from trainer.model import EncoderConfig
from trainer.run.checkpoint_file import saved_steps
from trainer.run.resume import check_same_run, run_settings
from trainer.stopping import Interrupted
from weightserver.common.atomic_files import atomic_write

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 240


def test_rows_come_back_at_least_three_times(tmp_path: Path) -> None:
    config = demo_config(Options(tmp_path))
    num_images = config.data.num_images or 60_000
    visits = config.optimization.num_steps(num_images) * config.optimization.batch_size
    assert visits * config.sampling.window_stride / config.sampling.window_size >= 3 * num_images
    assert config.rows.num_negatives <= num_images / 30
    assert config.servers.num_shards == 2
    assert coverage_warnings(config, num_images) == []


def test_the_run_without_correction_differs_in_nothing_else(tmp_path: Path) -> None:
    options = Options(tmp_path, epochs=0.5, seed=3)
    without = demo_config(replace(options, correction="none"))
    assert without.rows.correction == "none"
    assert without.with_settings(correction="exact") == demo_config(options)


def begin(options: Options, **changes: Any) -> None:
    """Writes the settings of a demo, or of another run."""
    config = demo_config(options).with_settings(**changes)
    atomic_write(options.output / "config.json", lambda path: path.write_text(config.to_json()))


def test_a_resumed_demo_has_the_settings_of_its_run(tmp_path: Path) -> None:
    begin(Options(tmp_path, epochs=0.5, seed=3))
    resumed = demo_config(Options(tmp_path, resume=True))
    assert (resumed.run.resume, resumed.optimization.epochs, resumed.sampling.seed, resumed.sampling.order_seed) == (
        True,
        0.5,
        3,
        3,
    )
    check_same_run(resumed)
    longer = demo_config(Options(tmp_path, resume=True, epochs=0.75))
    assert longer.optimization.epochs == 0.75
    check_same_run(longer)


@pytest.mark.parametrize(
    ("begun", "given", "message"),
    [
        ({"weight_decay": 1e-4}, {}, "whose weight_decay is 0.0001, not 0.003"),
        ({"encoder": EncoderConfig()}, {}, r"whose encoder.blocks is \[1, 1, 1\], not \[1, 1\]"),
        ({}, {"seed": 5}, "whose order_seed is 3, not 5"),
        ({}, {"epochs": 0.25}, "whose epochs is 0.5, not 0.25"),
        ({}, {"correction": "none"}, "whose correction is exact, not none"),
        ({"correction": "none"}, {}, "whose correction is none, not exact"),
    ],
)
def test_a_demo_resumes_no_other_run(
    begun: dict[str, Any], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Both runs of a demo have its settings, so that the comparison is of the correction alone."""
    begin(Options(tmp_path, epochs=0.5, seed=3), **begun)
    with pytest.raises(ValueError, match=message):
        check_same_run(demo_config(Options(tmp_path, resume=True, **given)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "demo: {output} holds no demo to resume: start one without --resume"),
        (["--epochs", "nan"], "demo: --epochs must be positive and finite, got nan"),
        (["--epochs=-1"], "demo: --epochs must be positive and finite, got -1.0"),
        (["--epochs", "inf"], "demo: --epochs must be positive and finite, got inf"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--output", str(output)])
    assert ended.value.code == 1
    assert capsys.readouterr().err == message.format(output=output) + "\n"
    assert not output.exists()


@pytest.mark.slow  # a minute or two of evaluations
@pytest.mark.timeout(900)
def test_a_run_without_correction_alone_has_a_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.demo", "--correction", "none", "--epochs", "0.1"]
    ended = subprocess.run([*command, "--output", str(tmp_path / "demo")], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "trained encoder" in ended.stdout
    assert "raw pixels" in ended.stdout
    assert "without correction" not in ended.stdout


PROGRAMS = {
    "stops": "import signal, sys, time\n"
    "def stop(number, _):\n    print('stopped', flush=True)\n    time.sleep(0.2)\n    sys.exit(3)\n"
    "signal.signal(signal.SIGTERM, stop)\nsignal.signal(signal.SIGINT, stop)\nprint('ready', flush=True)\n"
    "time.sleep(60)",
    "fails": "print('one line')\nraise SystemExit('the reason')",
    "is silent": "raise SystemExit(7)",
    "works": "import os\nassert os.environ['THREADS'] == '1'",
    "follows": "import time\nfrom trainer.companion import stop_with_parent\nstop_with_parent()\n"
    "print('ready', flush=True)\ntime.sleep(60)",
    "follows and ends": "from trainer.companion import stop_with_parent\nstop_with_parent()",
}


@pytest.fixture
def companions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Companion]:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    for number, text in enumerate(PROGRAMS.values()):
        (tmp_path / f"program_{number}.py").write_text(text)
    return {
        name: Companion([f"program_{number}"], tmp_path / "log", {"THREADS": "1"})
        for number, name in enumerate(PROGRAMS)
    }


def wait_for(log: Path, text: str) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < end, log.read_text() if log.exists() else "no log"
        time.sleep(0.05)


def test_a_companion_is_stopped_once(companions: dict[str, Companion], tmp_path: Path) -> None:
    with companions["stops"] as companion:
        companion.start()
        companion.start()
        wait_for(tmp_path / "log", "ready\n")
    assert (tmp_path / "log").read_text() == "ready\nstopped\n"


@pytest.mark.parametrize(
    ("name", "failure"), [("fails", "the reason"), ("is silent", "it ended with status 7"), ("works", "")]
)
def test_a_companion_says_why_it_failed(name: str, failure: str, companions: dict[str, Companion]) -> None:
    with companions[name] as companion:
        companion.start()
        assert companion.failure() == failure


def test_a_companion_ends_with_the_process_that_started_it(companions: dict[str, Companion], tmp_path: Path) -> None:
    with companions["follows"] as companion:
        companion.start()
        wait_for(tmp_path / "log", "ready\n")
        process = companion._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()  # as the system does when this process dies
        assert process.wait(TIMEOUT_SECONDS) == -signal.SIGTERM
        process.stdin = None


def test_a_companion_that_follows_can_end_before(companions: dict[str, Companion]) -> None:
    with companions["follows and ends"] as companion:
        companion.start()
        assert companion.failure() == ""


@pytest.mark.slow  # most of a minute
@pytest.mark.timeout(600)
def test_ctrl_c_leaves_both_runs_to_resume(tmp_path: Path) -> None:
    """Killed and resumed twice: by SIGINT, and by SIGTERM, each of which only the demo's own process gets."""
    output = tmp_path / "demo"
    command = [sys.executable, "-m", "trainer.demo", "--output", str(output)]
    steps: list[int] = []
    stops: tuple[tuple[signal.Signals, list[str]], ...] = ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"]))
    for number, resume in stops:
        with (tmp_path / "err").open("wb") as err:
            demo = subprocess.Popen(
                [*command, *resume], cwd=ROOT, stderr=err, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        wait_until_both_train(output, after=max([0, *steps]))
        demo.send_signal(number)
        assert demo.wait(TIMEOUT_SECONDS) == 128 + number
        printed = (tmp_path / "err").read_text()
        assert "demo: interrupted after" in printed
        assert "Traceback" not in printed
        steps += [saved_steps(run / "checkpoints")[-1] for run in (output, output / "without-correction")]
        log = (output / "without-correction.log").read_text()
        assert log.count("demo: interrupted after") == len(steps) // 2
    assert steps[2] > steps[0] > 0
    assert steps[3] > steps[1] > 0
    settings = [run_settings(run) for run in (output, output / "without-correction")]
    assert [run.rows.correction for run in settings] == ["exact", "none"]


def wait_until_both_train(output: Path, *, after: int) -> None:
    """Waits for a record of a step from `after` on in both runs."""
    end = time.monotonic() + TIMEOUT_SECONDS
    files = [output / "metrics.jsonl", output / "without-correction/metrics.jsonl"]
    while any(not path.exists() or _last_step(path) < after for path in files):
        assert time.monotonic() < end
        time.sleep(0.2)


def _last_step(path: Path) -> int:
    lines = path.read_text().splitlines()
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else -1


@pytest.mark.guard
def test_an_interrupted_demo_stops_the_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    leave = Companion.__exit__

    def note(self: Companion, *error: object) -> None:
        leave(self, *error)  # type: ignore[arg-type]
        stopped.append(self._process is not None and self._process.poll() is not None)

    monkeypatch.setattr(Companion, "__exit__", note)
    monkeypatch.setattr("trainer.loop._observe", _raise_interrupted)
    with pytest.raises(Interrupted):
        train_and_compare(Options(tmp_path / "demo", epochs=0.1))
    assert stopped == [True]


def _raise_interrupted(*_: object, **__: object) -> None:
    raise Interrupted(signal.SIGTERM, "stopped")
