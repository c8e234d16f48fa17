"""Logs of shards and trainers: one line per event, joined by request ids, without secrets."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.small_run import EVERY, ONLY_ROWS, small_run
from trainer.loop import train
from weightserver import FencedError, LocalCluster, StorageError, TableSpec, WeightClient
from weightserver.common.logs import LOG_FORMATS, LogFormat, log_events


def lines(cluster: LocalCluster, shard: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cluster.directory / f"shard-{shard}.log").read_text().splitlines()]


@pytest.mark.guard
def test_a_shard_logs_each_event_once_and_no_rows(tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path, serve_options=["--log-format", "json"]) as cluster:
        with WeightClient(cluster.addresses) as client, WeightClient(cluster.addresses) as late:
            client.create_table(TableSpec(num_rows=1000, dim=4, rows_per_block=10))
            client.create_table(TableSpec(num_rows=1000, dim=4, rows_per_block=10))  # changes nothing
            client.extend_schedule(0, np.full(300, 0.1, np.float32))
            epoch = client.open_session("first")
            late.open_session("first", join=epoch)
            for step in range(100):
                client.push_gradients(np.arange(20), np.ones((20, 4), np.float32), step=step)
                client.fetch(np.arange(100), step=step + 1)
            client.checkpoint("kept", step=100)
            client.open_session("second")
            with pytest.raises(FencedError):
                late.push_gradients(np.arange(20), np.ones((20, 4), np.float32), step=100)
            client.rollback("kept")
            client.release("kept")
            client.drop_table()
        cluster.restart(0)
        told = lines(cluster)
    events = Counter(line["event"] for line in told if line["level"] == "info")
    assert events == {
        "serving": 2,
        "table created": 1,
        "schedule change committed": 1,
        "session opened": 2,
        "checkpoint taken": 1,
        "rolled back": 1,
        "checkpoint released": 1,
        "table dropped": 1,
        "draining": 1,
        "closed": 1,
    }
    (refused,) = (line for line in told if line["level"] == "warning")
    assert "superseded" in refused["event"]
    assert re.fullmatch("[0-9a-f]{16}", refused["request"])
    assert all({"timestamp", "shard", "epoch", "step"} <= line.keys() for line in told)
    taken = next(line for line in told if line["event"] == "checkpoint taken")
    assert (taken["shard"], taken["epoch"], taken["step"], taken["checkpoint"]) == (0, epoch, 100, "kept")


@pytest.mark.guard
def test_a_failure_is_found_by_its_request(tmp_path: Path) -> None:
    with LocalCluster(1, tmp_path, serve_options=["--log-format", "json"]) as cluster:
        with WeightClient(cluster.addresses) as client:
            client.create_table(TableSpec(num_rows=100, dim=64, rows_per_block=50))
            client.extend_schedule(0, np.full(10, 0.1, np.float32))
            client.open_session("run")
            client.push_gradients(np.arange(100), np.ones((100, 64), np.float32), step=0)
            data = tmp_path / "shard-0" / "data.mdb"
            stored = client.fetch_state(np.arange(50)).weight.tobytes()
            position = data.read_bytes().find(stored)
            with data.open("r+b") as file:
                file.seek(position)
                file.write(bytes(8))
            with pytest.raises(StorageError, match="its log tells more of request") as caught:
                client.fetch(np.arange(50), step=1)
        (told,) = (line for line in lines(cluster) if line["level"] == "warning")
    assert told["request"] in str(caught.value)
    assert "damaged" in told["event"]


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_a_traceback_shows_no_values(log_format: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is a local variable of some function."""
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    log_events(log_format, lambda: {"shard": 3})
    token = "".join(["to", "ken", "-of-the-shard"])
    try:
        raise RuntimeError("as planned", len(token))
    except RuntimeError:
        logging.getLogger("weightserver.server.service").exception("failed")
    text = told.getvalue()
    assert "as planned" in text
    assert "token-of-the-shard" not in text
    if log_format == "json":
        assert json.loads(text)["shard"] == 3
    else:
        assert "[error] failed shard=3" in text


@pytest.mark.guard
def test_a_trainer_logs_events_and_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    log_events("json", lambda: {"run": "a", "rank": 0})
    train(small_run(tmp_path / "run", steps=2 * EVERY + 1, encoder=ONLY_ROWS))
    records = [json.loads(line) for line in told.getvalue().splitlines() if line.startswith("{")]
    begins, saved = records[1], [records[0], *records[2:]]
    assert (begins["event"], begins["step"], begins["rank"]) == ("training begins", 0, 0)
    assert begins["epoch"] == 1
    assert [(line["event"], line["step"]) for line in saved] == [
        ("checkpoint saved", step) for step in (0, EVERY, 2 * EVERY)
    ]


@pytest.mark.guard
def test_a_shard_whose_log_is_closed_continues(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightserver", "serve", "--init", "--data-dir", str(tmp_path / "data")]
    shard = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--announce"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert shard.stdout is not None
    assert shard.stderr is not None
    try:
        address = json.loads(shard.stdout.readline())["address"]
        shard.stderr.close()
        with WeightClient([address], retry_seconds=3) as client:
            client.create_table(TableSpec(num_rows=100, dim=4))
            client.extend_schedule(0, np.full(10, 0.1, np.float32))
            client.open_session("run")
            client.push_gradients([1], np.ones((1, 4), np.float32), step=0)
            client.checkpoint("kept", step=1)
        shard.terminate()
        assert shard.wait(20) == 0
    finally:
        shard.kill()
        shard.wait()
        shard.stdout.close()


@pytest.mark.slow
def test_every_line_is_json_where_that_is_asked_for(cluster: LocalCluster, tmp_path: Path) -> None:
    """Names of a shard that cannot start, and of a run that trains and then cannot continue."""
    secret = tmp_path / "token"
    secret.write_text("x" * 20)
    secret.chmod(0o644)
    serve = ["weightserver", "serve", "--init", "--data-dir", str(tmp_path / "data"), "--token-file", str(secret)]
    serve += ["--listen", cluster.addresses[0]]
    run = ["trainer", "synthetic", "--num-images", "2000", "--steps", "3", "--rows", "dense", "--output"]
    run += [str(tmp_path / "run"), "--encoder.name", "none", "--num-negatives", "64", "--window-size", "96"]
    run += ["--window-stride", "24", "--batch-size", "16", "--log-every", "1"]
    for arguments, status in ((serve, 1), (run, 0), (run, 1)):
        command = [sys.executable, "-m", *arguments, "--log-format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done.stderr
        events = [json.loads(line) for line in done.stderr.splitlines()]
        assert events
        if status:
            assert events[-1]["level"] == "error"
    assert "holds another run" in events[-1]["event"]


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_names_in_logs_do_not_control_the_terminal(log_format: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    log_events(log_format)
    logging.getLogger("weightserver.server.service").info(
        "session opened", extra={"run": "\x1b[31mred\x9b\u202e\nline"}
    )
    assert told.getvalue().count("\n") == 1
    assert not set(told.getvalue()) & set("\x1b\x9b\u202e")


@pytest.mark.guard
def test_a_flood_of_refusals_is_a_line_a_second(tmp_path: Path) -> None:
    with LocalCluster(1, tmp_path, serve_options=["--log-format", "json"]) as cluster:
        with WeightClient(cluster.addresses) as client, WeightClient(cluster.addresses) as late:
            client.create_table(TableSpec(num_rows=100, dim=4))
            client.extend_schedule(0, np.full(10, 0.1, np.float32))
            late.open_session("first")
            client.open_session("second")
            started = time.monotonic()
            for _ in range(100):
                with pytest.raises(FencedError):
                    late.push_gradients([1], np.ones((1, 4), np.float32), step=0)
            seconds = time.monotonic() - started
        assert 1 <= sum(line["level"] == "warning" for line in lines(cluster)) <= seconds + 1
