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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from deploy.grafana.dashboards import CHOICES
from deploy.prometheus.local import LocalPrometheus
from tests.deploy.test_dashboards import DASHBOARDS
from tests.deploy.test_live_queries import needs_prometheus
from tests.helpers.held_run import NUM_STEPS, rows_of
from tests.helpers.raw_writes import RawWriter
from tests.helpers.small_run import NUM_IMAGES
from tests.helpers.watching import frozen, metric, metric_on, page, wait_until
from trainer.run.prometheus import STAGES
from weightserver import LocalCluster, WeightClient
from weightserver.client.retries import ANSWERED
from weightserver.common.metrics import SECONDS
from weightserver.common.processes import usable_memory
from weightserver.common.security import TOKEN_VARIABLE
from weightserver.protocol.status import ERROR_OF_STATUS

DIM, WINDOW = 16, 96
NUM_TRAINED, NUM_FETCHES, NUM_REFUSED = 40, 100, 10
"""Steps that runs make while they are watched, and calls of their clients then; shard 1 refuses one more."""
NUM_SLOW, SLOW_SECONDS = 3, 1.0
"""The last fetches, and for how long all shards stand still when they begin."""
NUM_PUSHES, NUM_WRITES, NUM_DESCRIBED = 40, 25, 150
"""Calls of all rows by clients."""
NUM_REPEATED, NUM_FENCED, NUM_CUT_OFF, NUM_MISSING, NUM_WRONG, NUM_LOST, NUM_DAMAGED = 16, 4, 8, 2, 30, 3, 2
"""Raw calls of each shard: writes that it has applied before, and that are fenced; calls of silent callers, without a
token, with a wrong one, and after a loss of data; and fetches in the second cluster that meet damage."""
NUM_RAW_ROWS, NUM_LOCKED, NUM_FITTING = 100, 23, 20
"""Rows of these writes; how many come while a shard's file is locked, and for how many there is memory."""
TOKEN = "sixteen-letters-and-more"
UNKNOWN = "unknown"
"""What clients call a shard until it has said its number."""


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
    first: dict[str, str] = field(default_factory=dict)
    """The same of the first moment."""
    processor_seconds: list[float] = field(default_factory=list)
    """Of each shard when the moment began."""
    locked_seconds: tuple[float, float] = 0, 0
    """For how long the first write had to wait for its transaction to begin, and the second one for the first."""

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
        self.first = self.first or self.pages
        self.processor_seconds = [self.spent(shard) for shard in self.shards]

    def more(self, address: str, name: str) -> float:
        """By how much a metric has grown since then."""
        return metric(address, name) - metric_on(self.pages[address], name)

    @property
    def clocks(self) -> list[float]:
        return [metric(address, "weightserver_clock_steps") for address in self.cluster.metrics_addresses]

    @property
    def num_waiting(self) -> set[float]:
        """Calls that wait for memory, of any shard."""
        return {metric(address, "weightserver_waiting_calls") for address in self.cluster.metrics_addresses}

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
    expected: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Titles of panels and clusters to the lines that they must show."""

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

    def misses(self, panel: dict[str, Any], query: str, wrong: str) -> bool:
        """Whether the panel would show what is expected with a wrong query instead of one of its own."""
        clusters = [name for title, name in self.expected if title == panel["title"]]
        (target,) = (target for target in panel["targets"] if target["expr"] == query)
        try:
            shown = self.lines(panel | {"targets": [target | {"expr": wrong}]}) if clusters else {}
        except (ValueError, AssertionError):  # Prometheus refuses it, or lines have the same name
            return False
        right = self.lines(panel | {"targets": [target]}) if clusters else {}
        return all(
            shown.get(line) == self.expected[panel["title"], name].get(line)
            for name in clusters
            for line in right | shown
            if line.startswith(f"{name} ")
        )


def chosen(expression: str, **choices: str) -> str:
    """The expression as Grafana asks it, with everything chosen but these."""
    values = dict.fromkeys(CHOICES, ".*") | choices
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


UNPROVEN = {
    "up",
    "process_start_time_seconds",
    "weightserver_serving",
    "weightserver_client_retries_total",
    "weightserver_client_failed_calls_total",
}
"""Families that stay at 0, or at what they begin with: no shard ends and no call fails for good."""
EQUAL = {
    "process_resident_memory_bytes": {"weightserver_memory_bytes"},
    "process_cpu_seconds_total": {"weightserver_thread_cpu_seconds_total"},
    "weightserver_commit_writes_count": {"weightserver_commit_seconds_count"},
} | {
    f"pic:late_fetches:ratio_rate{window}": {
        f"pic:late_fetches:ratio_rate{other}" for other in ("5m", "30m", "1h", "6h")
    }
    for window in ("5m", "1h")
}
"""Families that show the same: sums of parts, two counts of transactions, and windows that are longer than the test."""


def wrong_queries(prometheus: LocalPrometheus, query: str) -> Iterator[str]:
    """Yields the query with each family replaced by each other one of its kind and job, and with each value of a label
    that it names replaced by each other one that the label has."""
    ours = "(weightserver|pic_trainer|process)_.*|pic:.*|up"
    known = prometheus.api("query", query=f'group by (__name__, job) ({{__name__=~"{ours}"}})')["result"]
    jobs = {(series["metric"]["__name__"], series["metric"].get("job")) for series in known}

    def kind(name: str) -> str:
        return re.findall(r"_total|_bucket|_count|_sum|$", name)[0]

    for found in re.finditer(r"([\w:]+)\{([^}]*)\}", query):
        name, braces = found.groups()
        if name in UNPROVEN or query[: found.start()].endswith("0 * rate("):  # of which only the labels are shown
            continue
        same = {other for other, job in jobs if (name, job) in jobs and kind(other) == kind(name)}
        for other in sorted(same - {name} - EQUAL.get(name, set())):
            yield query[: found.start(1)] + other + query[found.end(1) :]
        for label, values in re.findall(r'(\w+)!?=~?"([\w|]+)"', braces):
            known_values = prometheus.api(f"label/{label}/values", **{"match[]": name})
            for value, other in product(values.split("|"), known_values):
                if other not in values.split("|"):
                    wrong = re.sub(rf'\b{value}\b(?=[\w|]*")', other, braces)
                    yield query[: found.start(2)] + wrong + query[found.end(2) :]


def scraped(prometheus: LocalPrometheus, times: int = 6) -> float:
    """When everything has been scraped a few times more, by Prometheus' clock."""
    scrapes = "min(count_over_time(up[1h]))"
    before = prometheus.query(scrapes)[0][1]
    wait_until(lambda: prometheus.query(scrapes)[0][1] >= before + times)
    return prometheus.query("time()")[0][1]


def memory(one: Watched, requests: Any) -> dict[str, dict[str, Any]]:
    """Titles of panels to their lines, and what these must show: that of a shard's memory."""
    return {
        "How much memory does each shard hold?": one.each(" requests", requests)
        | one.each(" anonymous", lambda s: pytest.approx(one.memory(s, "RssAnon"), rel=0.1))
        | one.each(" file", lambda s: pytest.approx(one.memory(s, "RssFile"), rel=0.1))
        | one.each(" swap", lambda s: pytest.approx(one.memory(s, "VmSwap"), abs=1e6))
        | one.each(" in all", lambda s: pytest.approx(one.process(s).memory_info().rss, rel=0.1))
    }


def files(one: Watched, held: Any) -> dict[str, dict[str, Any]]:
    """The same of a shard's file, of which a reader holds so many bytes."""
    return {
        "How large are the files, and who keeps them from shrinking?": one.each(" held by a reader", held)
        | one.each(" file", lambda s: 512 * one.file(s).stat().st_blocks)
        | one.each(" map", one.mapped)
    }


def training_memory(one: Watched) -> dict[str, dict[str, Any]]:
    process = psutil.Process(one.run.pid)
    return {
        "How much memory does training take?": {
            f"run-{one.name} rank 0 process": pytest.approx(process.memory_info().rss, rel=0.1),
            f"run-{one.name} rank 0 GPU": 0,
        }
    }


def waiting(one: Watched, moment: Moment, seconds: Any, calls: float) -> dict[str, dict[str, Any]]:
    """The same of how long, and in how many calls of each shard, the client waits."""
    answers = "".join(f";: {other} answers" for other in ANSWERED)[1:]
    retries = [one.of_client("retries_total", shard) for shard in one.shards]
    lines = (
        one.each("; calls; retries", 0, UNKNOWN)
        | one.each(answers, 0)
        | one.each("", seconds)
        | one.each(" calls", calls)
        | one.each(" retries", lambda s: moment.rate(retries[s]))
    )
    return {"Which shard do clients wait for now?": {f"{one.trainer} {line}": value for line, value in lines.items()}}


def attempts(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """The same of the client's attempts, some of which were refused."""
    late = [one.of_client("late_calls_total", s) for s in one.shards]
    return {
        "Which attempts of clients fail?": one.each("; failed; late", 0, UNKNOWN)
        | one.each(" UNAVAILABLE; DEADLINE_EXCEEDED; RESOURCE_EXHAUSTED; UNIMPLEMENTED", 0, UNKNOWN)
        | one.each(" late", lambda s: moment.rate(late[s], slack=1))
        | one.each(" OUT_OF_RANGE", lambda s: moment.rate(NUM_REFUSED + s))
    }


def shards(one: Watched, num_damaged: int) -> dict[str, dict[str, Any]]:
    """The same of what hinders the shards."""
    return {
        "Does any shard restart, or does not serve?": one.each(" restarts; does not serve", 0)
        | one.each(" met damaged records", num_damaged)
    }


def after_fetches(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """Titles of panels to their lines, and what these must show when a client has fetched and its run stood still."""
    each, rate, client = one.each, moment.rate, one.trainer
    slowest, median = Between(0, 1.25 * max(one.seconds)), statistics.median(one.seconds[-NUM_FETCHES:-NUM_SLOW])
    clients_slowest = Between(SLOW_SECONDS / 1.25, slowest.most)
    statuses = "".join(f"; {status.name}" for status in ERROR_OF_STATUS)
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
        **shards(one, 0),
        **memory(one, 0),
        **files(one, 0),
        **attempts(one, moment),
        **waiting(one, moment, 0, 0),
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
        **training_memory(one),
    }


def after_misuse(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """The same when clients have written, and others have called as they should not."""
    each, rate = one.each, moment.rate
    num_rows = [len(rows_of(shard, len(one.shards))) for shard in one.shards]
    num_raw = 3  # the first of the repeated ones, and those before a lock
    pushed = [NUM_PUSHES * num + num_raw * NUM_RAW_ROWS for num in num_rows]
    num_bytes = [4 * DIM * (pushed[shard] + 2 * NUM_WRITES * num) for shard, num in enumerate(num_rows)]
    num_writes = NUM_PUSHES + NUM_WRITES + num_raw + NUM_REPEATED
    first, second = one.locked_seconds
    statuses = "".join(f"; {status.name}" for status in ERROR_OF_STATUS)
    return {
        "Which requests fail or are refused?": each(f"{statuses}", 0)
        | each("; OUT_OF_RANGE", 0)
        | each(" cut off: silent caller", rate(NUM_CUT_OFF))
        | each(" CANCELLED; INVALID_ARGUMENT", Between(0, 1.15 * NUM_CUT_OFF / moment.window))  # one or the other
        | each(" fenced; ABORTED", rate(NUM_FENCED))
        | each(" repeated", rate(NUM_REPEATED))
        | each(" UNAUTHENTICATED", rate(NUM_MISSING + NUM_WRONG))
        | each(" DATA_LOSS", rate(NUM_LOST)),
        "Does anybody call without the token?": each(" missing", pytest.approx(NUM_MISSING, rel=0.15))
        | each(" wrong", pytest.approx(NUM_WRONG, rel=0.15)),
        "How long do a shard's slowest requests take?": each(" PushGradients; WriteState", Between(0, moment.window)),
        "How many rows do requests name, and how many move?": each(" fetch named; fetch moved", 0)
        | each(" push named", lambda s: rate(pushed[s] + NUM_REPEATED * NUM_RAW_ROWS))
        | each(" push moved", lambda s: rate(pushed[s]))
        | each(" write_state named; write_state moved", lambda s: rate(NUM_WRITES * num_rows[s])),
        "How large are the messages?": each(
            " push|write_state", lambda s: pytest.approx(num_bytes[s] / num_writes, rel=0.1)
        ),
        "How long until a write is on disk?": each(" wait", Between(second / 1.25, first / 1.25))
        | each(" transaction", Between(first / 1.25, 1.5 * first)),
        "Do writes queue, and share transactions?": each(" in a transaction", Between(1, 2)) | each(" waiting", 0),
        "How far is the run?": {"updates": max(one.clocks), f"run-{one.name} steps": NUM_STEPS},
    }


def while_locked(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """The same while no write can be committed, and a fetch and some of these have no memory."""
    return {
        "Do calls wait for threads or memory?": one.each(" running", Between(NUM_LOCKED + 1, NUM_LOCKED + 2))
        | one.each(" waiting for memory", NUM_LOCKED - NUM_FITTING + 1),
        "Do writes queue, and share transactions?": one.each(" waiting", Between(NUM_FITTING / 2, NUM_FITTING - 1)),
        **memory(one, Between(2**24 * (1 - 1 / NUM_FITTING), 2**24)),
        **files(
            one,
            lambda s: Between(NUM_PUSHES * len(rows_of(s, len(one.shards))) * 8 * DIM, one.file(s).stat().st_size),
        ),
        **waiting(one, moment, Between(2, 600), 1),
        **training_memory(one),
    }


def after_lock(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """The same when these have ended; the fetch took as long, and then came quick calls without rows."""
    seconds = Between(one.seconds[0] / 1.25, one.seconds[0] * 1.25)
    return {
        "How much longer do clients wait than their slowest shard works?": {
            f"{side} {quantile}": seconds for side in ("client", "its slowest shard") for quantile in ("50%", "99%")
        },
        "Do writes queue, and share transactions?": one.each(" in a transaction", Between(3, NUM_LOCKED))
        | one.each(" waiting", 0),
    }


def in_the_end(one: Watched, moment: Moment) -> dict[str, dict[str, Any]]:
    """The same two minutes later; and after a call that was late, since a shard did not answer it."""
    furthest, client, num_failed = max(one.clocks), one.trainer, NUM_DAMAGED * (one.name == "b")

    def since(address: str, name: str) -> float:
        return metric(address, f"weightserver_{name}") - metric_on(one.first[address], f"weightserver_{name}")

    def late(shard: int) -> dict[str, Any]:
        """As its client and the shard itself tell it, of all calls since the first moment."""
        labels, own = f'{{method="Fetch",shard="{shard}"}}', one.cluster.metrics_addresses[shard]
        calls = since(client, f"client_attempts_total{labels}") - since(client, f"client_retries_total{labels}")
        answered = 'request_seconds_bucket{{le="{}",method="Fetch",outcome="ok"}}'
        answers, in_time = (since(own, answered.format(bound)) for bound in ("+Inf", "0.1"))
        told = {
            f"client {client}": since(client, f"client_late_calls_total{labels}") / calls,
            f"shard {own}": (answers - in_time + num_failed) / (answers + num_failed),
        }
        return {
            f"{side} shard {shard}{window}": pytest.approx(share, rel=0.15, abs=0.002)
            for side, share in told.items()
            for window in ("", ", 1 h")
        }

    return {
        **shards(one, num_failed),
        "Does any shard fail calls for good?": one.each(" INTERNAL", 0)
        | one.each(" DATA_LOSS", pytest.approx(NUM_LOST, rel=0.15))
        | one.each(" FAILED_PRECONDITION", pytest.approx(num_failed, rel=0.15)),
        "Does any shard fall behind?": one.each("", lambda s: furthest - one.clocks[s])
        | {f"run-{one.name} 2·W/B": 2 * WINDOW / one.batch_size},
        "Are more fetches late than the objective allows?": {
            line: share for shard in one.shards for line, share in late(shard).items()
        },
    }


def misuse(several: list[Watched], writers: list[RawWriter], tell: Callable[..., None]) -> None:
    """Writes, and makes calls as none should be made."""
    tell(f"write {NUM_WRITES}", f"push {NUM_PUSHES}")
    for writer in writers:
        writer.know()
        repeated = [writer.push().result().duplicate]
        repeated += [writer.push(repeated=True).result().duplicate for _ in range(NUM_REPEATED)]
        assert repeated == [False] + [True] * NUM_REPEATED
        fenced = {writer.push(session_id=bytes(16)).exception().code() for _ in range(NUM_FENCED)}
        assert fenced == {grpc.StatusCode.ABORTED}
        refused = [writer.describe() for _ in range(NUM_MISSING)]
        refused += [writer.describe(("authorization", "Bearer another")) for _ in range(NUM_WRONG)]
        assert set(refused) == {grpc.StatusCode.UNAUTHENTICATED}
        lost = {writer.describe_of_another() for _ in range(NUM_LOST)}
        assert lost == {grpc.StatusCode.DATA_LOSS}
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda writer: writer.say_nothing(NUM_CUT_OFF), writers))
    with ExitStack() as locked:
        for writer in writers:
            locked.enter_context(writer.locked())
        started, pushes = time.perf_counter(), [writer.push() for writer in writers]
        time.sleep(1.5)
        then, more = time.perf_counter(), [writer.push() for writer in writers]
        time.sleep(1.5)
    ended = time.perf_counter()
    assert not any(push.result().duplicate for push in (*pushes, *more))
    for one in several:
        one.locked_seconds = ended - started, ended - then


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_panel_shows_the_truth_of_two_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And would notice each wrong family and each wrong value of a label in each query."""
    panels = {panel["title"]: panel for board in DASHBOARDS.values() for panel in board["panels"]}
    wrong, moments = list[str](), list[Moment]()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with ExitStack() as stack:
        several = [
            stack.enter_context(watched(name, num_shards, batch_size, tmp_path))
            for name, num_shards, batch_size in (("a", 2, 16), ("b", 1, 12))
        ]
        first, second = several
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

        def compare(
            truth: Callable[[Watched, Moment], dict[str, dict[str, Any]]], act: Callable[[], object] = lambda: None
        ) -> None:
            begun = scraped(prometheus)
            for one in several:
                one.begin()
            act()
            moment = Moment(prometheus, begun, scraped(prometheus))
            moments.append(moment)
            for one in several:
                for title, lines in truth(one, moment).items():
                    expected = {f"{one.name} {line}": value for line, value in lines.items()}
                    moment.expected[title, one.name] = expected
                    everything = moment.lines(panels[title])
                    own = {line: value for line, value in everything.items() if line.startswith(one.name)}
                    for shown in (moment.lines(panels[title], one.name), own):
                        wrong.extend(
                            f"{truth.__name__}: {title} {line}: shows {shown.get(line)}, not {expected.get(line)}"
                            for line in shown | expected
                            if shown.get(line) != expected.get(line)
                        )

        compare(after_steps, partial(tell, f"train {NUM_TRAINED}"))
        # with which series of a status or a size begin
        tell("refused 1", "fetch 1", "write 1", "push 1")
        writers = [
            stack.enter_context(
                RawWriter(address, TOKEN, one.file(shard).parent, rows_of(shard, len(one.shards))[:NUM_RAW_ROWS])
            )
            for one in several
            for shard, address in enumerate(one.cluster.addresses)
        ]
        with ExitStack() as held, ExitStack() as locked:
            for writer in writers:
                held.enter_context(writer.reading())
                writer.push().result()
            compare(after_misuse, partial(misuse, several, writers, tell))
            for writer in writers:
                locked.enter_context(writer.locked())
            pushes = [writer.push() for writer in writers for _ in range(NUM_LOCKED)]
            wait_until(lambda: all(one.num_waiting == {NUM_LOCKED - NUM_FITTING} for one in several))
            for one in several:
                one.tell("fetch 1")
            wait_until(lambda: all(one.num_waiting == {NUM_LOCKED - NUM_FITTING + 1} for one in several))
            compare(while_locked)

            def release() -> None:
                locked.close()
                assert not any(push.result().duplicate for push in pushes)
                for one in several:
                    one.wait()
                tell(f"describe {NUM_DESCRIBED}")

            compare(after_lock, release)
        assert not writers[0].push(ahead=1).result().duplicate  # the clock of the other shard falls behind

        def fetch() -> None:
            tell(f"describe {2 * NUM_DESCRIBED}", f"refused {NUM_REFUSED}", f"fetch {NUM_FETCHES - NUM_SLOW}")
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

        def waits_long(one: Watched) -> bool:
            return metric(one.trainer, "weightserver_client_oldest_call_seconds") > 1

        def is_alone(named: set[str]) -> bool:
            now = scraped(prometheus, 2)
            shown = Moment(prometheus, now - 5, now).lines(panels["Which shard do clients wait for now?"])
            return {line for line, value in shown.items() if value} == named

        for one in several:
            shard = one.shards[-1]
            with frozen(one.cluster, shard):
                one.tell("fetch 1")
                wait_until(partial(waits_long, one))
                named = f"{one.name} {one.trainer} shard {shard}"
                wait_until(partial(is_alone, {named, f"{named} calls"}))  # other shards' leases are renewed meanwhile
            one.wait()
        writers[-1].damage(second.file(0))
        assert {writers[-1].fetch() for _ in range(NUM_DAMAGED)} == {grpc.StatusCode.FAILED_PRECONDITION}
        unnoticed = [
            (panel, query, other)
            for panel in panels.values()
            for query in [target["expr"] for target in panel["targets"]]
            for other in wrong_queries(prometheus, query)
            if all(moment.misses(panel, query, other) for moment in moments)
        ]
        # all were scraped, and knew what they know now, for a while two minutes ago
        clocks = "min_over_time(sum(weightserver_clock_steps)[15s:500ms] offset 105s) == sum(weightserver_clock_steps)"
        wait_until(lambda: bool(prometheus.query(clocks)), seconds=240)
        compare(in_the_end)
        assert not wrong, "\n".join(wrong)
        assert {title for moment in moments for title, _ in moment.expected} == set(panels)
        left = [
            f"{panel['title']}: {other}, not {query}"
            for panel, query, other in unnoticed
            if moments[-1].misses(panel, query, other)
        ]
        assert not left, "\n".join(left)

        first.run.kill()
        with WeightClient(first.cluster.addresses, token=TOKEN) as client:
            client.open_session("back", force=True, take_over=True)
            client.rollback(min(client.checkpoints(), key=lambda kept: kept.step).name)
        (event,) = (e for e in DASHBOARDS["service"]["annotations"]["list"] if e["name"] == "rollback")
        query = chosen(event["expr"], __rate_interval="1m")
        wait_until(lambda: [labels["cluster"] for labels, _ in prometheus.query(query)] == ["a"])
