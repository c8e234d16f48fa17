"""The trainer's metrics, scraped from the served page."""

from __future__ import annotations

import math
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from trainer.run.prometheus import TrainerMetrics
from weightserver.torch import RowCounters

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
Scrape = Callable[[], dict[str, float]]


@pytest.fixture
def metrics() -> TrainerMetrics:
    return TrainerMetrics(run="run-a", rank=3, **SIZES)


@pytest.fixture
def scrape(metrics: TrainerMetrics) -> Iterator[Scrape]:
    """All samples without labels other than a bucket's end or a stage: name without pic_trainer_ to value."""
    address, close = metrics.serve(0)

    def samples() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            page = answer.read().decode()
        values = {}
        for family in text_string_to_metric_families(page):
            if family.name.startswith(("process_", "weightserver_client_")):
                continue
            assert family.documentation.endswith("."), family.name
            for sample in family.samples:
                assert sample.name.startswith("pic_trainer_"), sample.name
                if sample.name.endswith("_created"):
                    continue
                end = "".join(f" {value}" for label, value in sample.labels.items() if label in ("le", "stage"))
                values[sample.name.removeprefix("pic_trainer_") + end] = sample.value
        return values

    yield samples
    close()


def test_records_of_the_training_loop(metrics: TrainerMetrics, scrape: Scrape) -> None:
    for _ in range(10):
        metrics.step_finished()
    metrics.observe(RECORD)
    values = scrape()
    assert metrics.registry.get_sample_value("pic_trainer_run_info", {"run": "run-a", "rank": "3"}) == 1
    expected = {
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
    assert {name: values[name] for name in expected} == expected
    assert values["gpu_memory_bytes"] >= 0
    for name in MONITORS:
        assert math.isnan(values[name]), "unknown is not 0"
    counters = RowCounters(wait_seconds=0.5)
    metrics.follow(counters)
    metrics.observe(RECORD | MONITORS | {"step": 14, "loss": 4.0, "knn_top1": 71.0})
    scrape()
    counters.wait_seconds = 0.75
    metrics.checkpoint_saved()
    began, values = values["last_checkpoint_timestamp_seconds"], scrape()
    expected = {"loss": 4.0, "row_wait_seconds_total": 0.75} | MONITORS
    assert {name: values[name] for name in expected} == expected
    assert values["last_checkpoint_timestamp_seconds"] > began


def test_a_step_that_does_not_end_shows(metrics: TrainerMetrics, scrape: Scrape) -> None:
    """Waits and stages grow while they last."""
    counters = RowCounters()
    metrics.follow(counters)
    metrics.clock.start("rows")
    with counters.waiting():
        time.sleep(0.1)
        first = scrape()
        time.sleep(0.1)
        second = scrape()
    for name in ("row_wait_seconds_total", "stage_seconds_total rows"):
        assert first[name] >= 0.1
        assert second[name] >= first[name] + 0.1
    after = scrape()
    assert after["row_wait_seconds_total"] == pytest.approx(counters.wait_seconds)
    assert after["row_wait_seconds_total"] >= second["row_wait_seconds_total"]


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
