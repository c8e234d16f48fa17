"""Logs of shards and trainers: one line per event, joined by request ids, without secrets."""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer.__main__
import trainer.data.__main__
import trainer.demo
import trainer.embed
import trainer.evaluate.__main__
import trainer.export.__main__
import weightserver.cli
from tests.helpers.small_run import EVERY, ONLY_ROWS, small_run
from tests.integration.tables import SLOW, begin
from trainer.loop import train
from weightserver import FencedError, LocalCluster, TableSpec, WeightClient
from weightserver.common.logs import LOG_FORMATS, LogFormat, Remark, log_events, print_error, say

LOGGING = ["--log-format", "json", "--slow-request-seconds", "60"]
"""Options of shards whose disk may pause."""


def lines(cluster: LocalCluster) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cluster.directory / "shard-0.log").read_text().splitlines()]


@pytest.mark.guard
def test_a_shard_logs_each_event_once_and_no_rows(tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path, serve_options=LOGGING) as cluster:
        with WeightClient(cluster.addresses) as client, WeightClient(cluster.addresses) as late:
            client.create_table(TableSpec(num_rows=1000, dim=4, rows_per_block=10))
            epoch = begin(client, TableSpec(num_rows=1000, dim=4, rows_per_block=10), session="first")  # the same table
            late.extend_schedule(0, SLOW)
            late.open_session("first", join=epoch, hold=False)  # no refused renewal
            for step in range(10):
                client.push_gradients(np.arange(20), np.ones((20, 4), np.float32), step=step)
                client.fetch(np.arange(100), step=step + 1)
            client.checkpoint("kept", step=10)
            client.open_session("second")
            with pytest.raises(FencedError):
                late.push_gradients(np.arange(20), np.ones((20, 4), np.float32), step=10)
            client.rollback("kept")
            client.release("kept")
            client.drop_table()
        cluster.restart(0)
        told = lines(cluster)
    events = Counter(line["event"] for line in told if line["level"] == "info")
    assert events == {
        "serving": 2,
        "table created": 1,
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
    assert (taken["shard"], taken["epoch"], taken["step"], taken["checkpoint"]) == (0, epoch, 10, "kept")


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_a_traceback_shows_no_values(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    """The token is a local variable of some function."""
    log_events(log_format, lambda: {"shard": 3})
    token = "".join(["to", "ken", "-of-the-shard"])
    try:
        raise RuntimeError("as planned", len(token))
    except RuntimeError:
        logging.getLogger("weightserver.server.service").exception("failed", extra={"_of_another_library": 1})
    text = capsys.readouterr().err
    assert "of_another_library" not in text
    assert "as planned" in text
    assert "token-of-the-shard" not in text
    if log_format == "json":
        assert json.loads(text)["shard"] == 3
    else:
        assert "[error] failed shard=3" in text


@pytest.mark.guard
def test_a_trainer_logs_events_and_no_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_events("json", lambda: {"run": "a", "rank": 0})
    train(small_run(tmp_path / "run", steps=2 * EVERY + 1, encoder=ONLY_ROWS))
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    (begins,) = (line for line in records if line["event"] == "training begins")
    assert (begins["step"], begins["rank"], begins["session"]) == (0, 0, 1)
    saved = [line["step"] for line in records if line["event"] == "checkpoint saved"]
    assert saved == [0, EVERY, 2 * EVERY, 2 * EVERY + 1]
    others = {line["event"] for line in records} - {"training begins", "checkpoint saved"}
    assert all("no row returns" in event for event in others), others  # a warning about so short a run


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
            begin(client, TableSpec(num_rows=100, dim=4))
            client.push_gradients([1], np.ones((1, 4), np.float32), step=0)
            client.checkpoint("kept", step=1)
        shard.terminate()
        assert shard.wait(20) == 0
    finally:
        shard.kill()
        shard.wait()
        shard.stdout.close()


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_names_in_logs_do_not_control_the_terminal(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    log_events(log_format)
    logging.getLogger("weightserver.server.service").info(
        "session opened", extra={"run": "\x1b[31mred\x9b\u202e\nline"}
    )
    print_error("weightserver health: another program answered \x1b[31mred\x9b\u202e")
    told = capsys.readouterr().err
    assert told.count("\n") == 2
    assert not set(told) & set("\x1b\x9b\u202e")


@pytest.mark.guard
def test_a_flood_of_refusals_is_a_line_a_second(tmp_path: Path) -> None:
    with LocalCluster(1, tmp_path, serve_options=["--log-format", "json"]) as cluster:
        with WeightClient(cluster.addresses) as client, WeightClient(cluster.addresses) as late:
            client.create_table(TableSpec(num_rows=100, dim=4))
            late.extend_schedule(0, SLOW)
            late.open_session("first", hold=False)  # no refused renewal
            client.open_session("second")
            started = time.monotonic()
            for _ in range(100):
                with pytest.raises(FencedError):
                    late.push_gradients([1], np.ones((1, 4), np.float32), step=0)
            seconds = time.monotonic() - started
        assert 1 <= sum(line["level"] == "warning" for line in lines(cluster)) <= seconds + 1


def test_json_has_the_values_of_a_sentence_and_whatever_else_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings of libraries, and errors that nobody catches, in threads too."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        log_events("json")
        logging.getLogger("any").warning("%(path)s has %(free)d bytes left", {"path": "/data", "free": 3})
        warnings.warn("deprecated", stacklevel=1)
        logging.captureWarnings(False)
    thread = threading.Thread(target=lambda: [][0])
    thread.start()
    thread.join()
    sentence, warning, failure = map(json.loads, capsys.readouterr().err.splitlines())
    assert (sentence["event"], sentence["path"], sentence["free"]) == ("/data has 3 bytes left", "/data", 3)
    assert "deprecated" in warning["event"]
    assert "IndexError" in failure["exception"]


@pytest.mark.parametrize(
    "command",
    [
        (trainer.__main__.main, "report", "RUN"),
        (trainer.data.__main__.main, "pack", "RUN", "RUN-packed"),
        (trainer.data.__main__.main, "verify", "RUN"),
        (trainer.demo.main, "--data-dir", "RUN", "--output", "RUN"),
        (trainer.embed.main, "RUN", "RUN", "--output", "RUN.npz"),
        (trainer.evaluate.__main__.main, "knn", "--run", "RUN"),
        (trainer.export.__main__.main, "rows", "RUN", "--output", "RUN-rows"),
        (trainer.export.__main__.main, "encoder", "RUN", "--format", "timm", "--output", "RUN-encoder"),
        (trainer.export.__main__.main, "import", "RUN", "--model", "resnet18", "--output", "RUN.safetensors"),
        (weightserver.cli.main, "verify", "RUN"),
        (weightserver.cli.main, "health", "127.0.0.1:1"),
    ],
    ids=lambda command: f"{command[0].__module__} {command[1]}",
)
def test_every_command_says_in_json_why_it_fails(
    command: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An input that is missing, and an option that is unknown."""
    main, *arguments = command
    arguments = [argument.replace("RUN", str(tmp_path / "missing")) for argument in arguments]
    for more in ([], ["--no-such"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--log-format", "json", *more])
        assert ended.value.code in ((2,) if more else (1, 2))
        printed = capsys.readouterr()
        (event,) = map(json.loads, printed.err.splitlines())
        assert event["level"] == "error"
        assert ("no-such" in event["event"]) == bool(more)
        assert printed.out == ""


def test_values_of_remarks_are_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log_events("text")
    say(Remark("3 images are new", images=3))
    log_events("json")
    say(Remark("3 images are new", images=3))
    text, line = capsys.readouterr().err.splitlines()
    assert text == "3 images are new"
    assert json.loads(line)["images"] == 3


def test_every_value_in_a_sentence_of_the_log_has_a_name() -> None:
    """Otherwise it would be no field of a JSON line."""
    folders = [Path(weightserver.__file__).parent, Path(trainer.__file__).parent]
    calls = [
        (f"{path.name}:{node.lineno}", node)
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and node.args
    ]
    logged = [(place, call.args) for place, call in calls if ast.unparse(call.func).startswith("_log.")]
    assert len(logged) > 35
    for place, (sentence, *values) in logged:
        assert isinstance(sentence, ast.Constant | ast.Subscript), f"{place} formats its sentence"
        assert len(values) < 2, f"{place} has values without names"
        for value in values:
            named = isinstance(value, ast.Dict | ast.BinOp | ast.Name) or ast.unparse(value).endswith(".fields()")
            assert named, place
    remarks = [(place, call) for place, call in calls if ast.unparse(call.func) == "Remark"]
    assert len(remarks) > 8
    for place, call in remarks:
        assert call.keywords or not isinstance(call.args[0], ast.JoinedStr), f"{place} has values without names"
