"""Runs every query of the rules on a real Prometheus that scrapes real shards and a real trainer.

Those of the panels run in test_panels.py.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.prometheus.local import LocalPrometheus, running_trainer
from tests.deploy.test_rules import ALERTS, RULES
from tests.helpers.small_run import NUM_IMAGES, ONLY_ROWS, small_run
from tests.helpers.watching import metric, wait_until
from trainer.loop import train
from weightserver import LocalCluster, WeightClient


def with_bool(expression: str) -> str:
    """Makes comparisons return 0 or 1 instead of filtering, so that everything they compare has a result."""
    return re.sub(r" (>|<|==) ", r" \1 bool ", expression)


def sides(expression: str) -> list[str]:
    """The sides of an expression's `or`, unless it is inside of parentheses."""
    parts = expression.split(" or ")
    return parts if all(part.count("(") == part.count(")") for part in parts) else [expression]


QUERIES = {
    # what an alert compares must be there, whether it fires or not, on either side of an `or`
    f"{rule.get('alert', rule.get('record'))} {number}.{part}": with_bool(side)
    for group in RULES["groups"]
    for number, rule in enumerate(group["rules"])
    for part, side in enumerate(sides(rule["expr"]))
    if rule.get("alert") != "CertificateExpires"  # these shards have none
}
OPTIONS = (
    "synthetic --num-images 3000 --steps 1000000 --batch-size 16 --num-negatives 64 --window-size 96 --window-stride "
    "24 --dim 16 --rows-per-block 5 --log-every 5 --checkpoint-every 50 --encoder.name none --no-evaluate"
)
DEADLINE_SECONDS = 240  # ClockBehind looks back two minutes
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="there is no prometheus: Debian's package of that name has it"
)


@dataclass
class Watched:
    prometheus: LocalPrometheus

    def series(self, expression: str) -> int:
        """The number of series of the expression that have a value."""
        return sum(not math.isnan(value) for _, value in self.prometheus.query(expression))

    def empty(self, queries: dict[str, str]) -> list[str]:
        """Names of the queries that never have a result."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        left = list(queries)
        while left and time.monotonic() < deadline:
            left = [name for name in left if not self.series(queries[name])]
            time.sleep(0.3)
        return left


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two shards and a trainer that runs until the tests end, scraped twice a second."""
    output = tmp_path_factory.mktemp("runs") / "watched"
    with LocalCluster(2) as cluster:
        options = [*OPTIONS.split(), "--servers", ",".join(cluster.addresses), "--output", str(output)]
        with (
            running_trainer(options) as (trainer, _),
            LocalPrometheus(
                {"default": {"weightserver": cluster.metrics_addresses, "trainer": [trainer]}}
            ) as prometheus,
        ):
            yield Watched(prometheus)


@needs_prometheus
@pytest.mark.slow
def test_no_rule_is_empty_and_a_healthy_run_raises_no_alert(watched: Watched) -> None:
    assert watched.empty(QUERIES) == []

    def states() -> dict[str, str]:
        rules = [rule for group in watched.prometheus.api("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}
        return {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}

    # seconds say nothing about the next four hours: DiskFilling may wait for half an hour of them
    expected = dict.fromkeys(ALERTS, "inactive") | {"Watchdog": "firing"}
    wait_until(lambda: states() | {"DiskFilling": "inactive"} == expected)
    assert [name for name, state in states().items() if state == "firing"] == ["Watchdog"]


@pytest.mark.guard
def test_a_run_that_has_ended_has_no_step_left(cluster: LocalCluster, client: WeightClient, tmp_path: Path) -> None:
    """The alert TrainerGone relies on it."""
    config = small_run(tmp_path / "run", servers=",".join(cluster.addresses), encoder=ONLY_ROWS)
    train(config)
    clocks = [metric(address, "weightserver_clock_steps") for address in cluster.metrics_addresses]
    assert max(clocks) == config.optimization.num_steps(NUM_IMAGES) > 0
