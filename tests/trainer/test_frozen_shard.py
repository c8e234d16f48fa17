"""What a trainer's metrics and its log say while one of its shards is frozen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.watching import metric, wait_until
from weightserver import LocalCluster

OPTIONS = (
    "synthetic --num-images 3000 --steps 1000000 --batch-size 16 --num-negatives 64 --window-size 96 --window-stride "
    "24 --dim 16 --rows-per-block 5 --log-every 5 --checkpoint-every 100000 --encoder.name none --no-evaluate "
    "--rows remote --log-format json --metrics-port 0"
)


@pytest.mark.slow
def test_waits_and_speed_move_while_a_shard_is_frozen(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def events() -> list[dict[str, object]]:
        return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    with LocalCluster(2, tmp_path / "servers") as cluster:
        options = [*OPTIONS.split(), "--servers", ",".join(cluster.addresses), "--output", str(tmp_path / "run")]
        with (
            log.open("w") as told,
            subprocess.Popen([sys.executable, "-m", "trainer", *options], stderr=told, stdout=told) as trainer,
        ):
            try:
                wait_until(lambda: any(line["event"] == "metrics served" for line in events()), seconds=120)
                address = next(str(line["address"]) for line in events() if line["event"] == "metrics served")
                wait_until(lambda: metric(address, "pic_trainer_steps_total") > 10, seconds=120)
                cluster.processes[1].send_signal(signal.SIGSTOP)
                steps = metric(address, "pic_trainer_steps_total")
                wait_until(lambda: metric(address, "weightserver_client_oldest_call_seconds") > 1)
                times = [time.monotonic()]
                waited = [metric(address, "pic_trainer_row_wait_seconds_total")]
                times.append(time.monotonic())
                wait_until(lambda: any("has not answered" in str(line["event"]) for line in events()))
                time.sleep(1)
                times.append(time.monotonic())
                waited.append(metric(address, "pic_trainer_row_wait_seconds_total"))
                times.append(time.monotonic())
                shortest, longest = times[2] - times[1], times[3] - times[0]  # between the two answers
                assert 0.7 * shortest < waited[1] - waited[0] < 1.3 * longest, "all of the time, and never more than it"
                assert metric(address, "pic_trainer_steps_total") <= steps + 2
                cluster.processes[1].send_signal(signal.SIGCONT)
                wait_until(lambda: any("answers again" in str(line["event"]) for line in events()))
                wait_until(lambda: metric(address, "pic_trainer_steps_total") > steps + 10)
                told_of = next(line for line in events() if "has not answered" in str(line["event"]))
                assert (told_of["shard"], told_of["run"]) == ("1", "run")
                assert "(no answer yet): 1 waiting, 1 attempts" in str(told_of["event"]), "before the first deadline"
            finally:
                cluster.processes[1].send_signal(signal.SIGCONT)
                trainer.terminate()
                trainer.wait(60)
