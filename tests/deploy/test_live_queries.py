"""Runs every query of the dashboards and rules on a real Prometheus that scrapes real shards and a real trainer."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from deploy.grafana.dashboards import CHOICES
from deploy.prometheus import screenshot
from deploy.prometheus.local import LocalPrometheus, running_trainer
from tests.deploy.test_dashboards import DASHBOARDS, queries
from tests.deploy.test_rules import ALERTS, RULES, with_bool
from tests.helpers.small_run import NUM_IMAGES, ONLY_ROWS, small_run
from tests.helpers.watching import metric, wait_until
from trainer.loop import train
from weightserver import LocalCluster, StepError, TableSpec, WeightClient


def sides(expression: str) -> list[str]:
    """The sides of an expression's `or`, unless it is inside of parentheses."""
    parts = expression.split(" or ")
    return parts if all(part.count("(") == part.count(")") for part in parts) else [expression]


def chosen(expression: str, **choices: str) -> str:
    """The expression as Grafana asks it, with everything chosen but these."""
    values = dict.fromkeys(CHOICES, ".*") | choices | {"__rate_interval": "1m"}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


QUERIES = {
    f"{name}: {panel['title']} {target['refId']}": chosen(target["expr"])
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel["targets"]
} | {
    # what an alert compares must be there, whether it fires or not, on either side of an `or`
    f"rule {rule.get('alert', rule.get('record'))} {number}.{part}": with_bool(side)
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
needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="there is no chromium: Debian's package of that name has it"
)


@dataclass
class Watched:
    prometheus: LocalPrometheus
    fail: Callable[[], None]
    """Makes a fetch fail on every shard."""

    def series(self, expression: str) -> int:
        """The number of series of the expression that have a value."""
        return sum(not math.isnan(value) for _, value in self.prometheus.query(expression))

    def empty(self, queries: dict[str, str]) -> list[str]:
        """Names of the queries that never have a result."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        left = list(queries)
        while left and time.monotonic() < deadline:
            self.fail()
            left = [name for name in left if not self.series(queries[name])]
            time.sleep(0.3)
        return left


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two shards and a trainer that runs until the tests end, scraped twice a second."""
    output = tmp_path_factory.mktemp("runs") / "watched"
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        options = [*OPTIONS.split(), "--servers", ",".join(cluster.addresses), "--output", str(output)]
        with (
            running_trainer(options) as (trainer, _),
            LocalPrometheus(
                {"default": {"weightserver": cluster.metrics_addresses, "trainer": [trainer]}}
            ) as prometheus,
        ):

            def fail() -> None:
                with contextlib.suppress(StepError):  # the shards refuse it once the rows have been written
                    client.fetch(np.arange(100), step=0)

            yield Watched(prometheus, fail)


def broken(expression: str) -> Iterator[str]:
    """Yields the expression with each of its metrics and label values replaced by one that does not exist."""
    names = r"\b(?:(?:weightserver_|pic_trainer_|process_|pic:)\w|up\{)"
    for found in re.finditer(names + r'|(?<=\w=")|(?<==~")[^"]*', expression):
        is_pattern = expression[: found.start()].endswith('~"')
        wrong = "nothing" if is_pattern else f"no_{found.group()}"
        yield expression[: found.start()] + wrong + expression[found.end() :]


@needs_prometheus
@pytest.mark.slow
def test_no_panel_and_no_rule_is_empty(watched: Watched) -> None:
    assert watched.empty(QUERIES) == []
    failures = next(name for name in QUERIES if "Which requests fail" in name)
    failing = {
        labels["shard"]: value
        for labels, value in watched.prometheus.query(QUERIES[failures])
        if labels.get("status") == "OUT_OF_RANGE"
    }
    assert set(failing) == {"0", "1"}
    assert min(failing.values()) > 0, "an error is seen"


@needs_prometheus
@pytest.mark.slow
def test_each_panel_tells_two_clusters_apart(tmp_path: Path) -> None:
    """Two clusters of other shards and rows: what a panel shows of all is what it shows of each, and true."""
    with (
        LocalCluster(2, tmp_path / "a") as a,
        LocalCluster(1, tmp_path / "b") as b,
        WeightClient(a.addresses) as ours,
        WeightClient(b.addresses) as theirs,
    ):
        for client, num_rows in ((ours, 400), (theirs, 90)):
            client.create_table(TableSpec(num_rows=num_rows, dim=8, rows_per_block=10))
            client.extend_schedule(0, np.full(4, 0.1, np.float32))
            client.open_session("run")
            client.push_gradients(np.arange(num_rows), np.ones((num_rows, 8), np.float32), step=0)
            client.checkpoint("kept", step=1)
        watched = {name: {"weightserver": cluster.metrics_addresses} for name, cluster in (("a", a), ("b", b))}
        with LocalPrometheus(watched) as prometheus:
            wait_until(lambda: len(prometheus.query("weightserver_stored_rows")) == 3)
            for _ in range(20):
                ours.fetch(np.arange(400), step=1)
                theirs.fetch(np.arange(90), step=1)
            scrapes = prometheus.query("max(count_over_time(up[1m]))")[0][1]
            wait_until(lambda: prometheus.query("min(count_over_time(up[1m]))")[0][1] >= scrapes + 6)
            ((_, clock),) = prometheus.query("time()")
            now = str(clock - 1)

            def lines(expression: str, cluster: str) -> dict[tuple[tuple[str, str], ...], str]:
                found = prometheus.api("query", query=chosen(expression, cluster=cluster), time=now)["result"]
                return {tuple(sorted(line["metric"].items())): line["value"][1] for line in found}

            told = 0
            for panel in (panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"]):
                for target in panel["targets"]:
                    each = [lines(target["expr"], name) for name in ("a", "b")]
                    assert lines(target["expr"], "a|b") == each[0] | each[1], panel["title"]
                    assert all(dict(labels)["cluster"] == "ab"[which] for which in (0, 1) for labels in each[which])
                    told += all(each)
            assert told > 25, "panels that show something of both"

            def shown(question: str, number: int = 0) -> dict[tuple[str, str], float]:
                found = lines(queries(question)[number], ".*").items()
                values = [(dict(labels), float(value)) for labels, value in found]
                return {(labels["cluster"], labels.get("shard", labels.get("instance", ""))): v for labels, v in values}

            places = {("a", "0"): (a, 0), ("a", "1"): (a, 1), ("b", "0"): (b, 0)}

            def truth(name: str) -> dict[tuple[str, str], float]:
                return {
                    key: metric(cluster.metrics_addresses[shard], f"weightserver_{name}")
                    for key, (cluster, shard) in places.items()
                }

            stored = shown("How much of the table was ever written")
            assert stored == truth("stored_rows") == {("a", "0"): 200, ("a", "1"): 200, ("b", "0"): 90}
            assert shown("How much of the table", 2) == dict.fromkeys(places, 1), "checkpoints"
            assert set(shown("Is every shard up").values()) == {1}
            assert shown("How much space is left") == pytest.approx(truth("volume_free_bytes"), rel=0.05)
            assert shown("How large are the files") == truth("disk_bytes")
            assert set(shown("Does any shard fail calls").values()) == {0}
            assert set(shown("Does any shard fall behind").values()) <= {0}
            sizes = shown("How large are the messages")
            assert sizes == pytest.approx({("a", "0"): 200 * 32, ("a", "1"): 200 * 32, ("b", "0"): 90 * 32}, rel=0.01)

            ours.push_gradients(np.arange(400), np.ones((400, 8), np.float32), step=1)
            wait_until(lambda: {value for _, value in prometheus.query('weightserver_clock_steps{cluster="a"}')} == {2})
            ours.rollback("kept")
            (event,) = (e for e in DASHBOARDS["service"]["annotations"]["list"] if e["name"] == "rollback")
            wait_until(lambda: [labels["cluster"] for labels, _ in prometheus.query(chosen(event["expr"]))] == ["a"])


@needs_prometheus
@pytest.mark.slow
def test_a_query_for_something_that_does_not_exist_is_noticed(watched: Watched) -> None:
    assert watched.empty(QUERIES) == []
    num_broken = 0
    for name, expression in QUERIES.items():
        assert watched.empty({name: expression}) == []
        for side in sides(expression):
            num_series = watched.series(side)
            if " or " in side or not num_series:
                continue  # added parts have cases in rules_test.yml; without errors, the line is at 0
            for mutant in broken(side):
                assert watched.series(mutant) < num_series, f"{name}: {mutant}"
                num_broken += 1
    assert num_broken > 2 * len(QUERIES)


@needs_prometheus
@pytest.mark.slow
def test_a_healthy_run_raises_no_alert(watched: Watched) -> None:
    assert watched.empty(QUERIES) == []

    def states() -> dict[str, str]:
        rules = [rule for group in watched.prometheus.api("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}
        return {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}

    # seconds say nothing about the next four hours: DiskFilling may wait for half an hour of them
    expected = dict.fromkeys(ALERTS, "inactive") | {"Watchdog": "firing"}
    wait_until(lambda: states() | {"DiskFilling": "inactive"} == expected)
    assert [name for name, state in states().items() if state == "firing"] == ["Watchdog"]


@needs_prometheus
@needs_chromium
@pytest.mark.slow
def test_the_screenshot_shows_a_curve_for_each_shard(watched: Watched, tmp_path: Path) -> None:
    assert watched.empty({graph: graph for graph in screenshot.GRAPHS}) == []
    time.sleep(10)  # a curve, not a point
    screenshot.photograph(screenshot.graph_url(watched.prometheus.url, 10), tmp_path / "graph.png")
    image = imread(tmp_path / "graph.png")
    assert image.shape[:2] == (1640, 1500)
    red, green, blue = (image[..., colour] for colour in range(3))
    for line in ((green > red + 0.2) & (green > blue + 0.2), (red > green + 0.3) & (red > blue + 0.3)):
        assert line.any(axis=0).sum() > 500, "columns of the picture in which the line is"


@pytest.mark.guard
def test_a_run_that_has_ended_has_no_step_left(cluster: LocalCluster, client: WeightClient, tmp_path: Path) -> None:
    """The alert TrainerGone relies on it."""
    config = small_run(tmp_path / "run", servers=",".join(cluster.addresses), encoder=ONLY_ROWS)
    train(config)
    clocks = [metric(address, "weightserver_clock_steps") for address in cluster.metrics_addresses]
    assert max(clocks) == config.optimization.num_steps(NUM_IMAGES) > 0
