"""The histograms of a shard, compared with those of the Prometheus client, and under many threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from weightserver.server.histogram import GapHistogram, Histogram

BUCKETS = (0.0001, 0.25, 1, 16_384, 4_194_304)
VALUES = [0, 0.0001, 0.00010001, 0.25, 0.3, 1, 2, 16_384, 20_000.5, 4_194_304, 4_194_305]


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Makes threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_histogram_matches_the_prometheus_client() -> None:
    """The output is equal except for creation times; also if the series are requested by name."""
    pages = []
    for kind in (Histogram, prometheus_client.Histogram):
        registry = CollectorRegistry()
        plain: Any = kind("plain_seconds", "Without labels.", buckets=BUCKETS, registry=registry)
        labelled = kind("calls_seconds", "By labels.", ["method", "status"], buckets=BUCKETS, registry=registry)
        if kind is Histogram:
            plain = plain.labels()
        labelled.labels("Fetch", "CANCELLED")
        for number, value in enumerate(VALUES):
            plain.observe(value)
            labelled.labels(f'Push "{number % 3}"', "OK").observe(value)
        for shown in (registry, registry.restricted_registry(["calls_seconds_sum"])):
            lines = generate_latest(shown).decode().splitlines()
            pages.append([line.rpartition(" ")[0] if "_created" in line and line[0] != "#" else line for line in lines])
    assert pages[:2] == pages[2:]
    assert len(pages[0]) > len(pages[1]) > 0


@pytest.mark.usefixtures("hasty_threads")
def test_no_observation_of_many_threads_is_lost() -> None:
    num_threads, num_turns = 8, 400
    registry = CollectorRegistry()
    histogram = Histogram("calls_seconds", "By labels.", ["call"], buckets=BUCKETS, registry=registry)
    gaps = GapHistogram()
    registry.register(gaps)
    turn = threading.Barrier(num_threads)

    def observe() -> None:
        for number in range(num_turns):
            if number % 20 == 0:
                turn.wait(60)  # all of them make the next series
            histogram.labels(str(number // 20)).observe(1)
            gaps.observe(np.full(500, number))

    threads = [threading.Thread(target=observe) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        generate_latest(registry)  # counts what waits
    for number in range(num_turns // 20):
        assert registry.get_sample_value("calls_seconds_count", {"call": str(number)}) == 20 * num_threads
    name = "weightserver_correction_gap_steps"
    assert registry.get_sample_value(f"{name}_count") == 500 * num_threads * num_turns
    assert registry.get_sample_value(f"{name}_sum") == 500 * num_threads * num_turns * (num_turns - 1) / 2
