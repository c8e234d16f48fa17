"""The trainer's metrics, scraped from the served page."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.small_run import NUM_IMAGES, small_run
from tests.helpers.watching import metric
from trainer.run.prometheus import TrainerMetrics
from trainer.run.recorder import Recorder
from weightserver.torch import Ranks, RowCounters

RECORD = {"step": 9, "loss": 4.5, "learning_rate": 0.03, "active_rows": 64}
MONITORS = {
    "instance_top1": 12.5,
    "rankme": 60.0,
    "feature_std": 0.08,
    "mean_cosine": 0.1,
    "gradient_norm": 0.4,
    "row_norm": 0.3,
}
SIZES: dict[str, Any] = {"window_size": 96, "batch_size": 16, "num_steps": 40, "device": torch.device("cpu")}
Read = Callable[[str], float]


@pytest.fixture
def metrics() -> TrainerMetrics:
    return TrainerMetrics(run="run-a", rank=3, **SIZES)


@pytest.fixture
def read(metrics: TrainerMetrics) -> Iterator[Read]:
    """The value on the page of a metric without pic_trainer_."""
    address, close = metrics.serve(0)
    yield lambda name: metric(address, f"pic_trainer_{name}")
    close()


def test_records_of_the_training_loop(metrics: TrainerMetrics, read: Read) -> None:
    for _ in range(10):
        metrics.step_finished()
    metrics.observe(RECORD)
    expected = {
        'run_info{rank="3",run="run-a"}': 1,
        "window_size_rows": 96,
        "run_steps": 40,
        "batch_size": 16,
        "steps_total": 10,
        "images_total": 160,
        "loss": 4.5,
        "learning_rate": 0.03,
        "active_rows": 64,
        "row_wait_seconds_total": 0,
    }
    assert {name: read(name) for name in expected} == expected
    assert read("gpu_memory_bytes") >= 0
    assert all(math.isnan(read(name)) for name in MONITORS), "unknown is not 0"
    counters, began = RowCounters(wait_seconds=0.5), read("last_checkpoint_timestamp_seconds")
    metrics.follow(counters)
    metrics.observe(RECORD | MONITORS | {"step": 14, "loss": 4.0, "knn_top1": 71.0})
    assert read("row_wait_seconds_total") == 0.5
    counters.wait_seconds = 0.75
    metrics.checkpoint_saved()
    expected = {"loss": 4.0, "row_wait_seconds_total": 0.75} | MONITORS
    assert {name: read(name) for name in expected} == expected
    assert read("last_checkpoint_timestamp_seconds") > began
    metrics.observe(RECORD)
    assert all(math.isnan(read(name)) for name in MONITORS), "overflowed: no older value stays"


def test_each_rank_tells_the_active_rows_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Prometheus scrapes some of the ranks, chance is the logarithm of all rows too."""
    monkeypatch.setattr(Ranks, "sum_over_ranks", lambda _, values: [2 * value for value in values])
    monkeypatch.setattr(Ranks, "max_over_ranks", lambda _, values: values)
    with ExitStack() as stack:
        recorder = Recorder(small_run(tmp_path, metrics_port=0), NUM_IMAGES, Ranks(rank=1, world_size=2), stack)
        recorder.follow(RowCounters(), 0)
        record = recorder.measure(4, loss=3.0, learning_rate=0.1, active_rows=32, monitored={})
        (address,) = re.findall(r"http://(\S+)/metrics", capsys.readouterr().out)
        assert metric(address, "pic_trainer_active_rows") == record["active_rows"] == 64


def test_a_step_that_does_not_end_shows(metrics: TrainerMetrics, read: Read) -> None:
    """Waits and stages grow while they last."""
    counters, names = RowCounters(), ("row_wait_seconds_total", 'stage_seconds_total{stage="rows"}')
    metrics.follow(counters)
    metrics.clock.start("rows")
    with counters.waiting():
        time.sleep(0.1)
        first = [read(name) for name in names]
        time.sleep(0.1)
        second = [read(name) for name in names]
    for early, late in zip(first, second, strict=True):
        assert early >= 0.1
        assert late >= early + 0.1
    after = read("row_wait_seconds_total")
    assert after == pytest.approx(counters.wait_seconds)
    assert after >= second[0]


def test_it_serves_on_loopback_until_closed(metrics: TrainerMetrics) -> None:
    address, close = metrics.serve(0)
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    remedy = "give another --metrics-port, or another --metrics-host$"
    taken = rf"^cannot serve metrics on port {port} of 127.0.0.1 .Address already in use.: {remedy}"
    with pytest.raises(OSError, match=taken):
        TrainerMetrics(run="run-b", rank=0, **SIZES).serve(int(port))
    with pytest.raises(OSError, match=rf"^cannot serve metrics on port 0 of \w+\.invalid .[\w ]*[nN]ame .*: {remedy}"):
        TrainerMetrics(run="run-b", rank=0, **SIZES).serve(0, "nowhere.invalid")
    close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    _, close = metrics.serve(int(port))  # the port is free again
    close()
