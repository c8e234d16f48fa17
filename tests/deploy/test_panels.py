"""Compares what every panel shows of two live clusters, each with a run and its client, with what the test knows."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from deploy.grafana.dashboards import CHOICES
from deploy.prometheus.local import LocalPrometheus
from tests.deploy.test_dashboards import DASHBOARDS
from tests.deploy.test_live_queries import needs_prometheus
from tests.helpers.held_run import NUM_STEPS, rows_of
from tests.helpers.small_run import NUM_IMAGES
from tests.helpers.watching import frozen, metric, metric_on, page, wait_until
from trainer.run.prometheus import STAGES
from weightserver import LocalCluster, WeightClient
from weightserver.client.retries import ANSWERED
from weightserver.common.metrics import SECONDS
from weightserver.common.processes import usable_memory
from weightserver.common.security import TOKEN_VARIABLE
from weightserver.protocol.status import ERROR_OF_STATUS

DIM = 16
NUM_TRAINED, NUM_FETCHES, NUM_REFUSED = 40, 100, 10
"""Steps that runs make while they are watched, and calls of their clients then; shard 1 refuses one more."""
NUM_SLOW, SLOW_SECONDS = 3, 1.0
"""The last fetches, and for how long all shards stand still when they begin."""
TOKEN = "sixteen-letters-and-more"
UNKNOWN = "unknown"
"""What clients call a shard until it has said its number."""
OF_EARLIER_MINUTES = {"Does any shard fall behind?", "Are more fetches late than the objective allows?"}
"""Panels of what was minutes ago, whose lines are those of two alerts."""


@dataclass(frozen=True)
class Between:
    """Equals what lies between two numbers, these included."""

    least: float
    most: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and self.least <= other <= self.most


@dataclass
class Watched:
    """A cluster, its run, and what the run said."""

    name: str
    cluster: LocalCluster
    directory: Path
    batch_size: int
    run: subprocess.Popen[str]
    trainer: str = ""
    """Address of the run's metrics."""
    seconds: list[float] = field(default_factory=list)
    """Of each fetch since the moment began."""
    pages: dict[str, str] = field(default_factory=dict)
    """Address to what its metrics were when the moment began."""
    processor_seconds: list[float] = field(default_factory=list)
    """Of each shard when the moment began."""

    @property
    def shards(self) -> range:
        return range(len(self.cluster.addresses))

    def tell(self, command: str) -> None:
        assert self.run.stdin is not None
        self.run.stdin.write(f"{command}\n")
        self.run.stdin.flush()

    def wait(self) -> None:
        """Waits until the run stands still."""
        assert self.run.stdout is not None
        for line in self.run.stdout:
            if found := re.search(r"metrics on http://(\S+)/metrics", line):
                self.trainer = found[1]
            if line.startswith("{"):
                self.seconds += json.loads(line)["seconds"]
                return
        raise AssertionError("the run has ended")

    def begin(self) -> None:
        """A moment begins."""
        self.seconds = []
        self.pages = {address: page(address) for address in (self.trainer, *self.cluster.metrics_addresses)}
        self.processor_seconds = [self.spent(shard) for shard in self.shards]

    def more(self, address: str, name: str) -> float:
        """By how much a metric has grown since then."""
        return metric(address, name) - metric_on(self.pages[address], name)

    @property
    def clocks(self) -> list[float]:
        return [metric(address, "weightserver_clock_steps") for address in self.cluster.metrics_addresses]

    def of_shard(self, shard: int, name: str) -> float:
        return self.more(self.cluster.metrics_addresses[shard], f"weightserver_{name}")

    def of_client(self, name: str, shard: int) -> float:
        """The same of a shard's calls by the client."""
        return self.more(self.trainer, f'weightserver_client_{name}{{shard="{shard}"}}')

    def mapped(self, shard: int) -> float:
        """Bytes of a shard's file that its process has mapped."""
        maps = self.process(shard).memory_maps(grouped=False)
        ends = [one.addr.split("-") for one in maps if one.path == str(self.file(shard))]
        return float(sum(int(end, 16) - int(begin, 16) for begin, end in ends))

    def spent(self, shard: int) -> float:
        """Processor seconds of a shard."""
        times = self.process(shard).cpu_times()
        return float(times.user + times.system)

    def process(self, shard: int) -> psutil.Process:
        return psutil.Process(self.cluster.processes[shard].pid)

    def memory(self, shard: int, name: str) -> float:
        """Bytes of a line of /proc/PID/status."""
        status = Path(f"/proc/{self.process(shard).pid}/status").read_text()
        (kibibytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        return 1024 * float(kibibytes)

    def file(self, shard: int) -> Path:
        return self.directory / self.name / f"shard-{shard}/data.mdb"

    @property
    def records(self) -> list[dict[str, float]]:
        return [
            json.loads(line) for line in (self.directory / f"run-{self.name}/metrics.jsonl").read_text().splitlines()
        ]

    def last(self, key: str) -> float:
        return [record[key] for record in self.records if key in record][-1]

    def trained(self, key: str) -> float:
        """The sum of a record's field over the steps since the moment began."""
        return sum(record[key] for record in self.records[-NUM_TRAINED:])

    def each(self, lines: str, value: Any, *others: str) -> dict[str, Any]:
        """Lines of each shard, divided by ";", and of others, to a value, or what a function returns for its number."""
        return {
            f"shard {shard}{line}": value(shard) if callable(value) else value
            for line in lines.split(";")
            for shard in (*self.shards, *others)
        }


@contextmanager
def watched(name: str, num_shards: int, batch_size: int, directory: Path) -> Iterator[Watched]:
    options = ["--token-file", str(directory / "token"), "--request-memory-mib", "16", "--stall-seconds", "6"]
    with LocalCluster(num_shards, directory / name, serve_options=options) as cluster:
        command = [sys.executable, "-m", "tests.helpers.held_run", str(directory / f"run-{name}")]
        command += [",".join(cluster.addresses), str(batch_size)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            try:
                yield Watched(name, cluster, directory, batch_size, run)
            finally:
                run.kill()


@dataclass
class Moment:
    """When Prometheus is asked, and over which time rates are taken."""

    prometheus: LocalPrometheus
    begun: float
    at: float

    @property
    def window(self) -> int:
        """Seconds, among them those of a scrape before it began."""
        return math.ceil(self.at - self.begun) + 2

    def rate(self, number: float, slack: float = 0) -> Any:
        """The rate of so many in this time, and up to `slack` others that the test did not make. Prometheus guesses
        what came in its first and last second."""
        return pytest.approx(number / self.window, rel=0.15, abs=slack / self.window)

    def trend(self, one: Watched, shard: int, name: str, seconds: float) -> Any:
        """What a straight line through all values says of a later moment."""
        query = f'{{__name__="weightserver_{name}", cluster="{one.name}", shard="{shard}"}}[30m]'
        kinds = self.prometheus.api("query", query=query, time=str(self.at))["result"]
        (values,) = [kind["values"] for kind in kinds if kind["metric"].get("kind") in (None, "anonymous")]
        times, held = np.array(values, float).T
        slope, now = np.polyfit(times - self.at, held, 1)
        return pytest.approx(now + slope * seconds, rel=1e-3)

    def lines(self, panel: dict[str, Any], cluster: str = ".*") -> dict[str, float]:
        """What a panel shows, by the names of its lines."""
        shown: dict[str, float] = {}
        links = str(panel["fieldConfig"]["defaults"].get("links", ""))
        for target in panel["targets"]:
            query = chosen(target["expr"], cluster=cluster, __rate_interval=f"{self.window}s")
            for series in self.prometheus.api("query", query=query, time=str(self.at))["result"]:
                labels = series["metric"]
                assert labels.keys() >= set(re.findall(r"__field\.labels\.(\w+)", links)), "a link would choose nothing"
                named = target["legendFormat"] if "{{cluster}}" in target["legendFormat"] else "{{cluster}} {{le}}"
                line = named.replace("{{", "{").replace("}}", "}").format_map(defaultdict(str, labels)).rstrip()
                assert line not in shown, f"two lines {line}"
                if not math.isnan(value := float(series["value"][1])):
                    shown[line] = value
        return shown


def chosen(expression: str, **choices: str) -> str:
    """The expression as Grafana asks it, with everything chosen but these."""
    values = dict.fromkeys(CHOICES, ".*") | choices
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


def scraped(prometheus: LocalPrometheus, times: int = 6) -> float:
    """When everything has been scraped a few times more, by Prometheus' clock."""
    scrapes = "min(count_over_time(up[1h]))"
    before = prometheus.query(scrapes)[0][1]
    wait_until(lambda: prometheus.query(scrapes)[0][1] >= before + times)
    return prometheus.query("time()")[0][1]


def after_fetches(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """Titles of panels to their lines, and what these must show when a client has fetched and its run stood still."""
    each, rate, client = one.each, moment.rate, one.trainer
    slowest, median = Between(0, 1.25 * max(one.seconds)), statistics.median(one.seconds[-NUM_FETCHES:-NUM_SLOW])
    clients_slowest = Between(SLOW_SECONDS / 1.25, slowest.most)
    statuses = "".join(f"; {status.name}" for status in ERROR_OF_STATUS)
    late, retries = ([one.of_client(f"{name}_total", s) for s in one.shards] for name in ("late_calls", "retries"))
    waits = each("; calls; retries", 0, UNKNOWN) | each(";".join(f": {other} answers" for other in ANSWERED), 0)
    waits |= each(" retries", lambda s: rate(retries[s]))
    num_calls = [NUM_FETCHES + NUM_REFUSED + shard for shard in one.shards]
    others = [  # such as renewals of the run's lease
        one.of_shard(s, "requests_total") - one.of_shard(s, 'requests_total{method="Fetch"}') for s in one.shards
    ]
    num_rows = [len(rows_of(shard, len(one.shards))) for shard in one.shards]
    total = NUM_FETCHES * len(one.shards)
    anonymous = [one.memory(shard, "RssAnon") for shard in one.shards]
    in_an_hour = [moment.trend(one, shard, "memory_bytes", 3600) for shard in one.shards]
    spent = [one.spent(shard) - before for shard, before in enumerate(one.processor_seconds)]
    with WeightClient(one.cluster.addresses, token=TOKEN) as asks:
        num_checkpoints = len(asks.checkpoints())
    return {
        "Is every shard up?": dict.fromkeys(one.cluster.metrics_addresses, 1),
        "How many requests does each shard answer?": each("", lambda s: rate(num_calls[s] + others[s])),
        "Which requests fail or are refused?": each(f"; CANCELLED{statuses}", 0)
        | each(" cut off: silent caller; fenced; repeated", 0)
        | each(" OUT_OF_RANGE", lambda s: rate(NUM_REFUSED + s)),
        "How long do a shard's slowest requests take?": each(" Fetch", slowest),
        "Do calls wait for threads or memory?": each(" running; waiting for memory", 0),
        "How many rows do requests name, and how many move?": each(" push named; push moved", 0)
        | each(" write_state named; write_state moved", 0)
        | each(" fetch named", lambda s: rate(num_calls[s] * num_rows[s]))
        | each(" fetch moved", lambda s: rate(NUM_FETCHES * num_rows[s])),
        "How large are the messages?": each(" fetch", lambda s: pytest.approx(num_rows[s] * 4 * DIM, rel=0.1)),
        "How much of the memory that it may have does each shard take, now and in an hour?": each(
            "", lambda s: pytest.approx(anonymous[s] / usable_memory(), rel=0.1)
        )
        | each(" in an hour", lambda s: pytest.approx(in_an_hour[s].expected / usable_memory(), rel=1e-3)),
        "Which threads use the processor?": each(
            " in all", lambda s: pytest.approx(spent[s] / moment.window, rel=0.3, abs=0.02)
        )
        | each(
            " MainThread; Thread; committer; grpc; metrics; other; parent; stalls; sweeper",
            lambda s: Between(0, 1.3 * spent[s] / moment.window + 0.02),
        ),
        "How long do all fetches take?": {str(bound): Between(0, 1.15 * total) for bound in SECONDS}
        | {"+Inf": pytest.approx(total, rel=0.15)},
        "Which shard is slow for clients?": each(", 2048 rows", clients_slowest),
        "Do clients' writes fail?": {f"{client} {line}": 0 for line in each("", 0)},
        "How much longer do clients wait than their slowest shard works?": {
            "client 50%": Between(median / 2, 1.25 * median),
            "client 99%": clients_slowest,
            "its slowest shard 50%": Between(0, median),
            "its slowest shard 99%": Between(0, SLOW_SECONDS / 1.25),  # they began when they ran again
        },
        "What does a step spend its time on?": {},
        "What fills the data files?": each(
            " blocks", lambda s: Between(num_rows[s] * 8 * DIM, one.file(s).stat().st_size)
        )
        | each(" free; meta; schedule; versions; writers", lambda s: Between(0, one.file(s).stat().st_size)),
        "How much space is left, now and in four hours?": each(
            "", pytest.approx(shutil.disk_usage(one.directory).free, rel=0.05)
        )
        | each(" in 4 h", lambda s: moment.trend(one, s, "volume_free_bytes", 4 * 3600)),
        "How much of the table was ever written?": each(" stored", lambda s: num_rows[s])
        | each(" table", NUM_IMAGES)
        | each(" checkpoints", num_checkpoints),
        "Does anybody call without the token?": each(" missing; wrong", 0),
        "Does any shard fail calls for good?": each(" INTERNAL; DATA_LOSS; FAILED_PRECONDITION", 0),
        "Does any shard restart, or does not serve?": each(" restarts; does not serve; met damaged records", 0),
        "How much memory does each shard hold?": each(" requests", 0)
        | each(" anonymous", lambda s: pytest.approx(one.memory(s, "RssAnon"), rel=0.1))
        | each(" file", lambda s: pytest.approx(one.memory(s, "RssFile"), rel=0.1))
        | each(" swap", lambda s: pytest.approx(one.memory(s, "VmSwap"), abs=1e6))
        | each(" in all", lambda s: pytest.approx(one.process(s).memory_info().rss, rel=0.1)),
        "How large are the files, and who keeps them from shrinking?": each(" held by a reader", 0)
        | each(" file", lambda s: 512 * one.file(s).stat().st_blocks)
        | each(" map", one.mapped),
        "Which attempts of clients fail?": each("; failed; late", 0, UNKNOWN)
        | each(" UNAVAILABLE; DEADLINE_EXCEEDED; RESOURCE_EXHAUSTED; UNIMPLEMENTED", 0, UNKNOWN)
        | each(" late", lambda s: rate(late[s], slack=1))
        | each(" OUT_OF_RANGE", lambda s: rate(NUM_REFUSED + s)),
        "Which shard do clients wait for now?": {f"{client} {line}": value for line, value in waits.items()},
    }


def after_steps(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """The same when a run has made steps."""
    each, rate, run = one.each, moment.rate, f"run-{one.name}"
    window = Between(0, moment.window)
    saved = max(path.stat().st_mtime for path in (one.directory / run / "checkpoints").iterdir())
    stages = {stage: one.trained(f"{stage}_seconds") / NUM_TRAINED for stage in STAGES}

    def size(shard: int, operation: str, methods: str, num_bytes: int) -> Any:
        """Bytes of rows of an average message."""
        rows = one.of_shard(shard, f'rows_total{{operation="{operation}"}}')
        calls = one.of_shard(shard, f'requests_total{{method="{methods}",status="OK"}}')
        return pytest.approx(num_bytes * rows / calls, rel=0.1)

    def exact(line: str, key: str) -> dict[str, float]:
        return {f"{run}{line}": one.last(key)}

    return {
        "How long do a shard's slowest requests take?": each(" Fetch; WriteState", window),
        "How large are the messages?": each(" fetch", lambda s: size(s, "fetch", "Fetch", 8 * DIM + 8))  # whole states
        | each(" push|write_state", lambda s: size(s, "write_state", "WriteState", 8 * DIM)),
        "Which stage do the slowest fetches and writes wait for, and on which shard?": each(
            " fetch queue; fetch receive; fetch read; fetch correct; fetch send", window
        )
        | each(" write queue; write receive; write work; write commit", window),
        "How long until a write is on disk?": each(" wait; transaction", window),
        "Do writes queue, and share transactions?": each(" in a transaction", Between(1, 64)) | each(" waiting", 0),
        "Does it learn?": exact("", "loss") | {f"{run} chance": math.log(one.last("active_rows"))},
        "How far is the run?": {"updates": max(one.clocks), f"{run} steps": NUM_STEPS},
        "How many images does it train on per second?": {run: rate(NUM_TRAINED * one.batch_size)},
        "What does a step spend its time on?": {
            f"{run} {stage}": pytest.approx(seconds, rel=0.1, abs=1e-5) for stage, seconds in stages.items()
        }
        | {f"{run} other": Between(0, moment.window / NUM_TRAINED)},  # it stood still before and after
        "How much of the time does it wait for rows?": {f"{run} rank 0": rate(one.trained("row_wait_seconds"))},
        "How much training would a crash lose?": {run: pytest.approx(moment.at - saved, abs=2)},
        "Which learning rate does it have?": exact("", "learning_rate"),
        "Does it recognise its images?": exact("", "instance_top1"),
        "How many dimensions do its embeddings use?": exact("", "rankme"),
        "Do all images look the same to it?": exact(" mean cosine", "mean_cosine")
        | exact(" standard deviation", "feature_std"),
        "Do gradients or rows blow up?": exact(" gradient", "gradient_norm") | exact(" row", "row_norm"),
        "How much memory does training take?": {
            f"{run} rank 0 process": pytest.approx(psutil.Process(one.run.pid).memory_info().rss, rel=0.1),
            f"{run} rank 0 GPU": 0,
        },
    }


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_panel_shows_the_truth_of_two_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the chosen one alone; each line has a name of its own, and the labels by which its links choose."""
    panels = {panel["title"]: panel for board in DASHBOARDS.values() for panel in board["panels"]}
    wrong, compared = list[str](), set[str]()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with ExitStack() as stack:
        several = [
            stack.enter_context(watched(name, num_shards, batch_size, tmp_path))
            for name, num_shards, batch_size in (("a", 2, 16), ("b", 1, 12))
        ]
        for one in several:
            one.wait()
        jobs = {one.name: {"weightserver": one.cluster.metrics_addresses, "trainer": [one.trainer]} for one in several}
        prometheus = stack.enter_context(LocalPrometheus(jobs))
        wait_until(lambda: len(prometheus.query("up == 1")) == 5)

        def tell(*commands: str) -> None:
            for command in commands:
                for one in several:
                    one.tell(command)
                for one in several:
                    one.wait()

        def compare(truth: Callable[[Watched, Moment], dict[str, dict[str, Any]]], act: Callable[[], object]) -> None:
            begun = scraped(prometheus)
            for one in several:
                one.begin()
            act()
            moment = Moment(prometheus, begun, scraped(prometheus))
            for one in several:
                for title, lines in truth(one, moment).items():
                    compared.add(title)
                    expected = {f"{one.name} {line}": value for line, value in lines.items()}
                    everything = moment.lines(panels[title])
                    own = {line: value for line, value in everything.items() if line.startswith(one.name)}
                    for shown in (moment.lines(panels[title], one.name), own):
                        wrong.extend(
                            f"{truth.__name__}: {title} {line}: shows {shown.get(line)}, not {expected.get(line)}"
                            for line in shown | expected
                            if shown.get(line) != expected.get(line)
                        )

        compare(after_steps, partial(tell, f"train {NUM_TRAINED}"))
        tell("refused 1", "fetch 1", "write 1", "push 1")  # with which series of a status or a size begin

        def fetch() -> None:
            tell(f"refused {NUM_REFUSED}", f"fetch {NUM_FETCHES - NUM_SLOW}")
            for _ in range(NUM_SLOW):
                with ExitStack() as stopped:
                    for one in several:
                        for shard in one.shards:
                            stopped.enter_context(frozen(one.cluster, shard))
                        one.tell("fetch 1")
                    time.sleep(SLOW_SECONDS)
                for one in several:
                    one.wait()

        compare(after_fetches, fetch)
        assert not wrong, "\n".join(wrong)
        assert compared == set(panels) - OF_EARLIER_MINUTES

        first, _ = several
        first.run.kill()
        with WeightClient(first.cluster.addresses, token=TOKEN) as client:
            client.open_session("back", force=True, take_over=True)
            client.rollback(min(client.checkpoints(), key=lambda kept: kept.step).name)
        (event,) = (e for e in DASHBOARDS["service"]["annotations"]["list"] if e["name"] == "rollback")
        query = chosen(event["expr"], __rate_interval="1m")
        wait_until(lambda: [labels["cluster"] for labels, _ in prometheus.query(query)] == ["a"])
