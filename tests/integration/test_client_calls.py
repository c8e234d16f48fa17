"""What a client's metrics and log say while a shard does not answer, is restarted, or is slow."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY

from tests.helpers.watching import frozen, metric, wait_until
from weightserver import LocalCluster, ShardUnavailableError, TableSpec, WeightClient
from weightserver.client import calls
from weightserver.client.fetched_rows import FetchedRows, Output
from weightserver.client.threads import Caller
from weightserver.common.logs import REQUEST_ID
from weightserver.common.version import __version__
from weightserver.core.precision import precision_of
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import VERSION_KEY, rows_to_proto

SPEC = TableSpec(num_rows=4000, dim=16, rows_per_block=10)
ROWS = np.arange(400)


def value(name: str, **labels: str) -> float:
    """A metric of this process's clients; 0 if it does not exist yet."""
    return REGISTRY.get_sample_value(f"weightserver_client_{name}", labels) or 0.0


def fill(client: WeightClient) -> None:
    client.create_table(SPEC)
    client.extend_schedule(0, np.full(100, 0.1, np.float32))
    client.open_session("run")
    client.push_gradients(ROWS, np.ones((len(ROWS), SPEC.dim), np.float32), step=0)


@contextmanager
def in_thread(call: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """The values of each line that a watch has logged; reminders come each second."""
    monkeypatch.setattr(calls, "_REMINDER_SECONDS", 1.0)

    def said() -> list[dict[str, Any]]:
        own = [record for record in caplog.records if record.name == calls.__name__]
        return [
            {"text": record.getMessage(), "at": record.created} | (record.args if isinstance(record.args, dict) else {})
            for record in own
        ]

    return said


def test_series_of_failures_begin_at_zero_under_the_numbers_of_shards(cluster: LocalCluster) -> None:
    """Otherwise Prometheus' increase() is 0 at the first failure."""
    program = """
import sys, prometheus_client
from weightserver import WeightClient
with WeightClient(sys.argv[1:]) as client:
    client.drop_table()
print(prometheus_client.generate_latest().decode())
"""
    command = [sys.executable, "-c", program, *cluster.addresses]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r'weightserver_client_\w+{.*shard="([^"]*)"', shown)) == {"unknown", "0", "1"}
    for shard, status in itertools.product("01", ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")):
        of_call = f'method="DropTable",outcome="failed",shard="{shard}",status="{status}"'
        assert f"weightserver_client_errors_total{{{of_call}}} 0.0" in shown
    for shard, other in itertools.product(
        "01", ("another table", "no table", "another token", "another version", "another program")
    ):
        answered = f'answered="{other}",expected="{shard}/2",shard="{shard}"'
        assert f"weightserver_client_wrong_answers_total{{{answered}}} 0.0" in shown


@pytest.mark.parametrize("first", [0, 1])
def test_each_of_several_slow_shards_is_told_its_own_time(first: int, tmp_path: Path) -> None:
    """Of one fetch of a few rows: `first` answers before the other, and both are called from the beginning."""

    def of(name: str, shard: int) -> float:
        return value(name, shard=str(shard), method="Fetch")

    def spent(shard: int) -> float:
        return value("call_seconds_sum", shard=str(shard), method="Fetch", size_class="2048", outcome="ok")

    second = 1 - first
    with LocalCluster(2, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        fill(client)
        client.fetch(ROWS, step=1)
        before = [spent(shard) for shard in (0, 1)]
        with ExitStack() as until_second_continues:
            until_second_continues.enter_context(frozen(cluster, second))
            with frozen(cluster, first):
                began = time.monotonic()
                fetch = threading.Thread(target=lambda: client.fetch(ROWS, step=1))
                fetch.start()
                wait_until(lambda: min(of("oldest_call_seconds", shard) for shard in (0, 1)) > 0.3)
                ages = [of("oldest_call_seconds", shard) for shard in (0, 1)]
                assert max(ages) <= time.monotonic() - began
            wait_until(lambda: of("waiting_calls", first) == 0)
            at_most = time.monotonic() - began
            assert of("waiting_calls", second) == 1
            age = of("oldest_call_seconds", second)
            wait_until(lambda: of("oldest_call_seconds", second) > age + 0.5)
            at_least = of("oldest_call_seconds", second)
        fetch.join(60)
        after = [spent(shard) for shard in (0, 1)]
    assert ages[first] <= after[first] - before[first] <= at_most
    assert after[second] - before[second] >= at_least


@pytest.mark.guard
def test_all_frozen_shards_are_tried_at_once_and_named(
    tmp_path: Path, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """Neither does a small fetch wait for one after another."""
    with (
        LocalCluster(3, tmp_path) as cluster,
        WeightClient(cluster.addresses, timeout_seconds=1, retry_seconds=4) as client,
        ExitStack() as stack,
    ):
        fill(client)
        for shard in range(3):
            stack.enter_context(frozen(cluster, shard))
        for method, call in (("Fetch", lambda: client.fetch(ROWS, step=1)), ("Describe", client.describe)):
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(call)
                waits = [partial(value, "waiting_calls", shard=str(shard), method=method) for shard in range(3)]
                wait_until(lambda waits=waits: all(each() for each in waits))
                with pytest.raises(ShardUnavailableError, match=r"^shard 0 at .* for \d+\.") as raised:
                    waiting.result(60)
            others = ", ".join(f"shard {shard} at {cluster.addresses[shard]}" for shard in (1, 2))
            assert str(raised.value).endswith(f"; nor did {others} answer")
        assert {line["shard"] for line in lines()} == {"0", "1", "2"}
        assert all("tried for 4 s" in line["text"] for line in lines() if "budget" in line)


@pytest.mark.guard
def test_a_frozen_shard_shows_while_it_is_frozen(tmp_path: Path, lines: Callable[[], list[dict[str, Any]]]) -> None:
    of_shard = {"shard": "1", "method": "Fetch"}
    with LocalCluster(2, tmp_path) as cluster, WeightClient(cluster.addresses, timeout_seconds=1.5) as client:
        fill(client)
        before = [value(f"{name}_sum", size_class="2048") for name in ("fetch_seconds", "slowest_shard_seconds")]
        client.fetch(ROWS, step=1)
        after = [value(f"{name}_sum", size_class="2048") for name in ("fetch_seconds", "slowest_shard_seconds")]
        assert 0 < after[1] - before[1] <= after[0] - before[0], "a fetch counts once, with the slowest of its shards"
        ended = value("call_seconds_count", size_class="2048", outcome="ok", **of_shard)
        assert value("waiting_calls", **of_shard) == value("oldest_call_seconds", **of_shard) == 0
        with in_thread(lambda: client.fetch(ROWS, step=1)) as fetch:
            pass
        attempts, retries = value("attempts_total", **of_shard), value("retries_total", **of_shard)
        late = value("late_calls_total", **of_shard)
        deadline = {"method": "Fetch", "status": "DEADLINE_EXCEEDED", "outcome": "failed"}
        of_other = value("errors_total", shard="0", **deadline)
        with frozen(cluster, 1):
            fetch = threading.Thread(target=lambda: client.fetch(ROWS, step=1))
            fetch.start()
            wait_until(lambda: value("oldest_call_seconds", **of_shard) > 0.3)
            assert value("waiting_calls", **of_shard) == 1
            wait_until(lambda: value("late_calls_total", **of_shard) == late + 1)  # before it ends
            made = value("attempts_total", **of_shard) - attempts
            assert 1 <= made <= 1 + value("oldest_call_seconds", **of_shard) / 1.5, "one until its deadline"
            wait_until(lambda: value("waiting_calls", shard="0", method="Fetch") == 0)  # not the other shard's fault
            wait_until(lambda: value("retries_total", **of_shard) >= retries + 2)
            assert value("errors_total", shard="1", **deadline) >= 2
            assert value("oldest_call_seconds", **of_shard) > 3, "of the call, not of its attempt"
            wait_until(lambda: len(lines()) >= 3)
            assert value("call_seconds_count", size_class="2048", outcome="ok", **of_shard) == ended + 1
        fetch.join(60)
        wait_until(lambda: "answers again" in lines()[-1]["text"])
        assert value("waiting_calls", **of_shard) == 0
        assert value("errors_total", shard="0", **deadline) == of_other, "the other one failed at no attempt"
        assert value("late_calls_total", **of_shard) == late + 1, "counted once"
        assert value("call_seconds_count", size_class="2048", outcome="ok", **of_shard) == ended + 2
        first, second, third, *_ = said = lines()
    assert {line["shard"] for line in said} == {"1"}
    assert first["method"] == "Fetch"
    assert cluster.addresses[1] in first["text"]
    assert second["status"] == "DEADLINE_EXCEEDED"
    assert third["seconds"] > second["seconds"] > first["seconds"] >= 2.5
    assert sum("answers again" in line["text"] for line in said) == 1


def test_a_call_that_its_caller_has_left_is_no_answer(lines: Callable[[], list[dict[str, Any]]]) -> None:
    """As after Ctrl-C, while the thread that makes the call still waits for a frozen shard."""
    out: Output = [np.empty((len(ROWS), SPEC.dim), np.float32), None, None]
    rows = FetchedRows(ROWS, ROWS, out, precision_of(SPEC), Caller())
    call = calls.Call("1", "shard 1 at a:1", "1/2", "Fetch", rows=rows)
    calls.WATCH.began(call)
    call.heard -= 60
    calls.WATCH.look()
    calls.WATCH.leave([rows])
    calls.WATCH.look()
    assert lines()[-1]["text"].endswith("calls were given up")


def test_metrics_keep_no_fetched_rows(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not those of a shard's first fetch, with which its series begin."""
    monkeypatch.setattr(calls.WATCH, "_known", {("another", "call")})
    with WeightClient(cluster.addresses) as client:
        fill(client)
        fetched = client.fetch(ROWS, step=1)
        kept = weakref.ref(fetched)
        del fetched
        wait_until(lambda: kept() is None, seconds=20)


@pytest.mark.guard
def test_a_shard_that_is_gone_is_reported_until_its_caller_gives_up(
    tmp_path: Path, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses, retry_seconds=5) as client:
        fill(client)
        cluster.processes[0].kill()
        errors = value("errors_total", shard="0", method="PushGradients", status="UNAVAILABLE", outcome="failed")
        failed = value("failed_calls_total", shard="0", method="PushGradients")
        with pytest.raises(ShardUnavailableError):
            client.push_gradients(ROWS, np.ones((len(ROWS), SPEC.dim), np.float32), step=1)
        wait_until(lambda: bool(lines()) and "given up" in lines()[-1]["text"])
    first, *_ = lines()
    assert "given up" not in first["text"], "it was told before"
    assert (first["status"], first["method"]) == ("UNAVAILABLE", "PushGradients")
    assert value("errors_total", shard="0", method="PushGradients", status="UNAVAILABLE", outcome="failed") > errors + 2
    assert value("failed_calls_total", shard="0", method="PushGradients") == failed + 1, "the call, not its attempts"


def test_a_write_that_waits_counts_as_failed_before_it_ends(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, although it succeeds in the end. Its caller may give up only after minutes, and end."""
    monkeypatch.setattr(calls, "FAILED_SECONDS", 1.0)
    of_write = {"shard": "0", "method": "PushGradients"}
    with WeightClient(cluster.addresses) as client:
        fill(client)
        before = value("failed_calls_total", **of_write)
        with (
            in_thread(lambda: client.push_gradients(ROWS, np.ones((len(ROWS), SPEC.dim), np.float32), step=1)),
            frozen(cluster, 0),
        ):
            wait_until(lambda: value("failed_calls_total", **of_write) == before + 1)
        assert value("failed_calls_total", **of_write) == before + 1


@pytest.mark.guard
def test_a_short_restart_is_counted_and_not_logged(
    tmp_path: Path, lines: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SILENT_SECONDS", 50.0)
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        fill(client)
        retries, failed = (value(name, shard="0", method="Fetch") for name in ("retries_total", "failed_calls_total"))
        cluster.processes[0].kill()
        with in_thread(lambda: client.fetch(ROWS, step=1)):
            wait_until(lambda: value("retries_total", shard="0", method="Fetch") > retries)
            cluster.restart(0)
        assert value("failed_calls_total", shard="0", method="Fetch") == failed, "it was late, but not in vain"
    assert lines() == []


@pytest.mark.guard
def test_a_program_without_any_set_up_reports_on_stderr_and_serves_the_metrics(tmp_path: Path) -> None:
    program = """
import sys, threading, numpy as np, prometheus_client
from weightserver import WeightClient
with WeightClient(sys.argv[1:]) as client:
    client.fetch(np.arange(400), step=1)
    server, _ = prometheus_client.start_http_server(0, "127.0.0.1")
    print(server.server_port, flush=True)
    sys.stdin.readline()
    client.fetch(np.arange(400), step=1)
"""
    with LocalCluster(2, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        fill(client)
        command = [sys.executable, "-c", program, *cluster.addresses]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes, text=True) as running:
            assert running.stdin
            assert running.stdout
            assert running.stderr
            address = f"127.0.0.1:{running.stdout.readline().strip()}"
            with frozen(cluster, 1):
                running.stdin.write("\n")
                running.stdin.flush()
                assert "shard 1 at" in running.stderr.readline()
                name = 'weightserver_client_oldest_call_seconds{method="Fetch",shard="1"}'
                assert metric(address, name) > 2
            assert "answers again" in running.communicate(timeout=60)[1]


# ---- the shard's side


@pytest.mark.guard
def test_a_slow_fetch_has_one_id_in_the_lines_of_both_sides(
    tmp_path: Path, lines: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SLOW_SECONDS", 0.0)
    options = ["--log-format", "json", "--slow-request-seconds", "0.000001"]
    with LocalCluster(1, tmp_path, serve_options=options) as cluster, WeightClient(cluster.addresses) as client:
        fill(client)
        client.fetch(ROWS, step=1)
        client.fetch(ROWS, step=1)  # a line a second, for each method
    log = [json.loads(line) for line in (tmp_path / "shard-0.log").read_text().splitlines()]
    (shards,) = (line for line in log if line["event"] == "slow request" and line["method"] == "Fetch")
    (clients,) = (line for line in lines() if line["text"].startswith("slow call") and line["method"] == "Fetch")
    assert clients["request"] == shards["request"]
    assert (clients["shard"], clients["rows"], clients["outcome"]) == ("0", len(ROWS), "ok")
    assert clients["seconds"] > 0


@pytest.mark.guard
def test_a_slow_uploader_is_seen_as_receive_and_logged_as_a_slow_request(tmp_path: Path) -> None:
    options = ["--log-format", "json", "--slow-request-seconds", "0.5"]
    with LocalCluster(1, tmp_path, serve_options=options) as cluster, WeightClient(cluster.addresses) as client:
        fill(client)
        address = cluster.metrics_addresses[0]

        names = {"write": ("queue", "receive", "work", "commit"), "fetch": ("queue", "receive", "read", "send")}

        def stages(kind: str) -> dict[str, float]:
            series = f"weightserver_{kind}_stage_seconds_sum"
            return {stage: metric(address, f'{series}{{stage="{stage}"}}') for stage in names[kind]}

        before = stages("write"), stages("fetch")
        rates = pb.Rates(learning_rates=np.full(2, 0.1, np.float32).tobytes())

        def slowly(message: Any) -> Iterator[Any]:
            time.sleep(1)
            yield message

        def push() -> Iterator[pb.PushGradientsRequest]:
            header = client._writer.header(1000, step=1, rates=rates, num_rows=10)
            ones = np.ones((10, SPEC.dim), np.float32).tobytes()
            message = pb.PushGradientsRequest(header=header, rows=rows_to_proto(np.arange(10)), gradients=ones)
            return slowly(message)

        service = "/pic.weightserver.v1.WeightServer"
        metadata = [(VERSION_KEY, __version__), (REQUEST_ID, "slow-push")]
        with grpc.insecure_channel(cluster.addresses[0]) as channel:
            times = [time.monotonic()]
            channel.stream_unary(
                f"{service}/PushGradients", pb.PushGradientsRequest.SerializeToString, pb.WriteResponse.FromString
            )(push(), metadata=metadata)
            times.append(time.monotonic())
            request = pb.FetchRequest(rows=rows_to_proto(np.arange(10)), step=2, rates=rates)
            metadata[1] = (REQUEST_ID, "slow-fetch")
            fetch = channel.stream_stream(f"{service}/Fetch", pb.FetchRequest.SerializeToString)
            assert list(fetch(slowly(request), metadata=metadata))
            times.append(time.monotonic())
        after = stages("write"), stages("fetch")
        moved = [{key: later[key] - was[key] for key in was} for was, later in zip(before, after, strict=True)]
    for stage, (began, ended) in zip(moved, itertools.pairwise(times), strict=True):
        assert stage["receive"] > 0.9
        assert sum(stage.values()) < ended - began + 0.5, "no other stage counts the silent second as well"
    log = [json.loads(line) for line in (tmp_path / "shard-0.log").read_text().splitlines()]
    slow = {line["request"]: line for line in log if line["event"] == "slow request"}
    assert set(slow) == {"slow-push", "slow-fetch"}
    assert (slow["slow-push"]["method"], slow["slow-fetch"]["status"]) == ("PushGradients", "OK")
    for line in slow.values():
        assert line["seconds"] >= line["receive_seconds"] > 0.9
        assert line["level"] == "warning"
