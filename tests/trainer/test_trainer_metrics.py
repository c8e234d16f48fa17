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
from weightserver.common.stages import StageClock
from weightserver.torch import RowCounters

RECORD = {
    "step": 9,
    "num_steps": 10,
    "loss": 4.5,
    "learning_rate": 0.03,
    "images_per_second": 640.0,
    "seconds": 0.2,
    "active_rows": 64,
}
COUNTS: dict[str, Any] = {
    "wait_seconds": 0.01,
    "fetched_bytes": 1000,
    "pushed_bytes": 2000,
    "fetched_rows": 30,
    "pushed_rows": 40,
    "resident_rows": 500,
    "prefetch_pending_rows": 7,
    "write_back_pending_rows": 8,
}
MONITORS = {
    "instance_top1": 12.5,
    "rankme": 60.0,
    "feature_std": 0.08,
    "mean_cosine": 0.1,
    "gradient_norm": 0.4,
    "row_norm": 0.3,
    "online_top1": 50.0,
}
SIZES: dict[str, Any] = {
    "window_size": 96,
    "batch_size": 16,
    "num_steps": 40,
    "device": torch.device("cpu"),
    "retry_seconds": 500.0,
}
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


def test_a_record_of_the_training_loop(metrics: TrainerMetrics, scrape: Scrape) -> None:
    for _ in range(10):
        metrics.step_finished()
    metrics.observe(RECORD)
    values = scrape()
    expected = {
        "run_info": 1,
        "window_size_rows": 96,
        "run_steps": 40,
        "batch_size": 16,
        "steps_total": 10,
        "images_total": 160,
        "loss": 4.5,
        "learning_rate": 0.03,
        "active_rows": 64,
        "step_seconds_count": 10,
        "step_seconds_sum": pytest.approx(0.2),
        "step_seconds_bucket 0.01": 0,
        "step_seconds_bucket 0.025": 10,
        "row_wait_seconds_total": 0,
        "row_fetched_rows_total": 0,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["gpu_memory_bytes"] >= 0
    for name in ("resident_rows", "prefetch_pending_rows", "write_back_pending_rows", *MONITORS):
        assert math.isnan(values[name]), "unknown is not 0"


def test_counters_add_up_and_gauges_follow(metrics: TrainerMetrics, scrape: Scrape) -> None:
    """In two intervals, and from one row store to the next."""
    counters, clock = RowCounters(**COUNTS), StageClock("other")
    metrics.follow(counters, clock)
    metrics.observe(RECORD)
    metrics.observe(RECORD | MONITORS | {"step": 14, "num_steps": 5, "loss": 4.0, "knn_top1": 71.0})
    scrape()
    counters.fetched_bytes += 500
    metrics.follow(counters, StageClock("other"))
    scrape()
    metrics.follow(RowCounters(fetched_bytes=300, resident_rows=60), StageClock("other"))
    values = scrape()
    expected = {
        "loss": 4.0,
        "step_seconds_count": 15,
        "step_seconds_bucket 0.025": 10,
        "step_seconds_bucket 0.05": 15,
        "row_wait_seconds_total": 0.01,
        "row_fetched_bytes_total": 1000 + 500 + 300,
        "row_pushed_bytes_total": 2000,
        "row_fetched_rows_total": 30,
        "row_pushed_rows_total": 40,
        "resident_rows": 60,
        "prefetch_pending_rows": 0,
    } | MONITORS
    assert {name: values[name] for name in expected} == expected


def test_a_step_that_does_not_end_shows(metrics: TrainerMetrics, scrape: Scrape) -> None:
    """Waits and stages grow while they last, and the speed falls; a pause for an evaluation leaves the speed alone."""
    counters, clock = RowCounters(), StageClock("other")
    metrics.follow(counters, clock)
    metrics.observe(RECORD | {"seconds": 0.05})
    metrics.follow(counters, clock)
    clock.start("pause")
    time.sleep(0.15)
    assert scrape()["images_per_second"] == 640
    clock.start("rows")
    with counters.waiting():
        time.sleep(0.1)
        first = scrape()
        time.sleep(0.1)
        second = scrape()
    for name in ("row_wait_seconds_total", "stage_seconds_total rows"):
        assert first[name] >= 0.1
        assert second[name] >= first[name] + 0.1
    assert second["images_per_second"] == 0
    metrics.step_finished()
    after = scrape()
    assert 0 < after["images_per_second"] <= 16 / 0.2
    assert after["row_wait_seconds_total"] == pytest.approx(counters.wait_seconds)
    assert after["row_wait_seconds_total"] >= second["row_wait_seconds_total"]


def test_fetches_and_checkpoints_are_counted(metrics: TrainerMetrics, scrape: Scrape) -> None:
    began = scrape()["last_checkpoint_timestamp_seconds"]
    counters = RowCounters()
    metrics.follow(counters, StageClock("other"))
    counters.fetch_seconds.extend([0.004, 0.02, 0.02, 400])
    metrics.checkpoint_saved()
    values = scrape()
    assert values["fetch_seconds_count"] == 4
    assert values["fetch_seconds_bucket 0.005"] == 1
    assert values["fetch_seconds_bucket 300.0"] == 3
    assert values["fetch_seconds_bucket 500.0"] == 4, "as long as fetches are retried"
    assert values["fetch_seconds_sum"] == pytest.approx(400.044)
    assert values["last_checkpoint_timestamp_seconds"] > began


def test_run_and_rank_are_reported(metrics: TrainerMetrics) -> None:
    assert metrics.registry.get_sample_value("pic_trainer_run_info", {"run": "run-a", "rank": "3"}) == 1


def test_two_trainers_in_one_process_share_nothing(metrics: TrainerMetrics) -> None:
    other: Any = TrainerMetrics(run="run-b", rank=0, **SIZES)
    metrics.step_finished()
    assert other.registry.get_sample_value("pic_trainer_steps_total") == 0


def test_it_serves_on_loopback_until_closed(metrics: TrainerMetrics) -> None:
    address, close = metrics.serve(0)
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match=rf"cannot serve metrics on port {port} \(Address already in use\)") as caught:
        TrainerMetrics(run="run-b", rank=0, **SIZES).serve(int(port))
    assert "\n" not in str(caught.value)
    close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    _, close = metrics.serve(int(port))  # the port is free again
    close()
