"""Waiting for what another process does, and what a shard says of itself."""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightserver import LocalCluster


def wait_until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    deadline, pause = time.monotonic() + seconds, 0.001
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened for {seconds} s"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)


def once_within(seconds: float, attempt: Callable[[int], float]) -> None:
    """Asserts that one of three attempts takes less than `seconds`: the machine may pause in others.

    Args:
        attempt: called with 0, 1, 2; returns what it took.
    """
    taken: list[float] = []
    while len(taken) < 3 and (not taken or taken[-1] >= seconds):
        taken.append(attempt(len(taken)))
    assert taken[-1] < seconds, f"{taken} s"


def page(metrics_address: str) -> str:
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def metric(metrics_address: str, name: str) -> float:
    """The sum of the metrics of this name that have the labels in its braces, if any, from /metrics."""
    return metric_on(page(metrics_address), name)


def metric_on(text: str, name: str) -> float:
    """The same of a page that was read."""
    wanted, _, braces = name.partition("{")
    labels = set(braces.rstrip("}").split(",")) - {""}
    samples = re.findall(r"^(\w+)(?:{(.*)})? (\S+)$", text, re.MULTILINE)
    values = [float(value) for found, has, value in samples if found == wanted and labels <= set(has.split(","))]
    assert values, f"no metric {name}"
    return sum(values)


@contextmanager
def frozen(cluster: LocalCluster, shard: int) -> Iterator[None]:
    """Pauses a shard, which then does not answer but stays alive."""
    process = cluster.processes[shard]
    process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    wait_until(lambda: all(" T " in (thread / "stat").read_text() for thread in threads.iterdir()))
    try:
        yield
    finally:
        cluster.processes[shard].send_signal(signal.SIGCONT)
