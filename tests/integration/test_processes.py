"""Shards as processes: health, metrics, drain, and the death of their parent."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from tests.helpers.commands import weightserver
from tests.helpers.failpoints import DyingCluster
from tests.helpers.raw_calls import raw_channel, stub
from tests.helpers.watching import metric, once_within, wait_until
from tests.integration.tables import begin
from weightserver import LocalCluster, ShardUnavailableError, TableSpec, WeightClient, WeightServerError
from weightserver.client.channels import _OPTIONS as CHANNEL_OPTIONS
from weightserver.common.metrics_http import MAX_CONNECTIONS
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import rows_to_proto

SPEC = TableSpec(num_rows=200_000, dim=32)


QUICKLY = """
from weightserver.protocol import codec
codec.KEEPALIVE_SECONDS, codec.KEEPALIVE_TIMEOUT_SECONDS = 1, 1
from weightserver.cli import main
main()
"""
"""A shard whose clock of pings is ten times as fast."""


@pytest.mark.guard
def test_a_shard_takes_the_pings_of_its_clients_and_not_ten_times_as_many(tmp_path: Path) -> None:
    """A call that is silent would end by the server's GOAWAY: by default after the third ping."""

    class QuickCluster(LocalCluster):
        _program = [sys.executable, "-c", QUICKLY]  # noqa: RUF012 - read only

    keepalive, released = "grpc.keepalive_time_ms", threading.Event()
    options = dict(CHANNEL_OPTIONS)
    options[keepalive] //= 10

    def silent() -> Iterator[pb.PushGradientsRequest]:
        released.wait()
        yield from ()

    with (
        QuickCluster(1, tmp_path / "quick") as quick,
        LocalCluster(1, tmp_path / "own") as own,
        raw_channel(quick.addresses[0], [*options.items()]) as to_quick,
        raw_channel(own.addresses[0], [*options.items()]) as to_own,
    ):
        try:
            taken, refused = (stub(to).PushGradients.future(silent(), timeout=100) for to in (to_quick, to_own))
            began = time.monotonic()
            assert "Too many pings" in str(refused.exception())
            time.sleep(time.monotonic() - began)  # as many pings again
            assert not taken.done(), taken.exception()
        finally:
            released.set()
        assert taken.code() is grpc.StatusCode.INVALID_ARGUMENT, "it has no message"


@pytest.mark.guard
def test_sigterm_lets_a_running_fetch_end(tmp_path: Path) -> None:
    """A fetch of 25 messages of which one was read completes; new calls are refused; then the shard ends."""
    grace = ["--grace-seconds", "100"]
    with (
        LocalCluster(1, tmp_path, serve_options=grace) as cluster,
        WeightClient(cluster.addresses, retry_seconds=0) as client,
    ):
        client.create_table(SPEC)
        rows = np.arange(SPEC.num_rows)
        expected = client.fetch_state(rows).weight
        with raw_channel(cluster.addresses[0], [("grpc.max_receive_message_length", -1)]) as channel:
            answer = stub(channel).Fetch(pb.FetchRequest(rows=rows_to_proto(rows), raw=True), timeout=100)
            messages = [next(answer).weight]
            cluster.processes[0].send_signal(signal.SIGTERM)
            wait_until(lambda: "draining" in (tmp_path / "shard-0.log").read_text())
            assert weightserver("health", cluster.addresses[0], "--timeout-seconds", 0.5)[0] == 1
            with pytest.raises(ShardUnavailableError):
                client.fetch([1], step=0)
            assert cluster.processes[0].poll() is None, "the running fetch was cut off"
            messages += [message.weight for message in answer]
        assert b"".join(messages) == expected.tobytes()
        assert len(messages) > 20
        assert cluster.processes[0].wait(20) == 0
        log = (tmp_path / "shard-0.log").read_text()
        assert "closed" in log
        assert "Traceback" not in log


@pytest.mark.guard
def test_a_shard_that_may_not_drain_still_ends_well(tmp_path: Path) -> None:
    """Without grace, calls are cancelled while they read; closing waits for the reads, whose memory it unmaps."""
    rows = np.arange(SPEC.num_rows)

    def fetch_until_it_ends(client: WeightClient) -> type[Exception]:
        while True:
            try:
                client.fetch(rows, step=1)
            except WeightServerError as error:
                return type(error)

    for attempt in range(4):  # without the wait about one in four dies of a segmentation fault
        with (
            LocalCluster(1, tmp_path, serve_options=["--grace-seconds", "0"]) as cluster,
            WeightClient(cluster.addresses, retry_seconds=0) as client,
            ThreadPoolExecutor(3) as pool,
        ):
            if attempt == 0:
                begin(client, SPEC)
                client.push_gradients(rows, np.ones((SPEC.num_rows, 32), np.float32), step=0)
            ends = [pool.submit(fetch_until_it_ends, client) for _ in range(3)]
            time.sleep(0.15 + 0.01 * attempt)
            cluster.processes[0].send_signal(signal.SIGTERM)
            assert {end.result(20) for end in ends} == {ShardUnavailableError}
            assert cluster.processes[0].wait(20) == 0


@pytest.mark.guard
def test_shards_stop_when_their_parent_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; from weightserver import LocalCluster\n"
        "cluster = LocalCluster(2, sys.argv[1]); print(*[p.pid for p in cluster.processes], flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    shards = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(shards) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(shards, timeout=15)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_nobody_takes_the_ports_of_a_dead_shard() -> None:
    with LocalCluster(1) as cluster:
        cluster.processes[0].kill()
        cluster.processes[0].wait()
        for address in (cluster.addresses[0], cluster.metrics_addresses[0]):
            host, _, port = address.rpartition(":")
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((host, int(port)))
        cluster.restart(0)
        assert weightserver("health", cluster.addresses[0]) == (0, "SERVING\n", "")


def test_health_tells_of_each_shard_also_if_others_do_not_answer() -> None:
    with LocalCluster(1) as cluster:
        status, said, error = weightserver("health", "127.0.0.1:9", cluster.addresses[0], "127.0.0.1:1")
    assert (status, said) == (1, f"{cluster.addresses[0]} SERVING\n")
    assert re.match(r"weightserver health: 127.0.0.1:9 does not answer .*; nor did 127.0.0.1:1 answer\n$", error)


@pytest.mark.guard
def test_sigterm_ends_a_large_write_within_the_grace_period(tmp_path: Path) -> None:
    """A write of many blocks that takes several seconds is undone, and its repetition is applied."""
    once_within(0.5 + 2, lambda number: seconds_to_end_a_large_write(tmp_path / str(number), grace_seconds=0.5))


def seconds_to_end_a_large_write(directory: Path, *, grace_seconds: float) -> float:
    """From SIGTERM to the end of the process."""
    rows = 63 * np.arange(30_000)
    with (
        LocalCluster(1, directory, serve_options=["--grace-seconds", str(grace_seconds)]) as cluster,
        WeightClient(cluster.addresses, timeout_seconds=30, retry_seconds=0) as client,
    ):
        begin(client, TableSpec(num_rows=10_000_000, dim=128))
        with ThreadPoolExecutor(1) as pool:
            push = pool.submit(client.push_gradients, rows, np.ones((len(rows), 128), np.float32), step=0)
            wait_until(lambda: metric(cluster.metrics_addresses[0], "weightserver_request_memory_bytes") > 1 << 30)
            time.sleep(1.0)  # for the rows to arrive
            began = time.monotonic()
            cluster.processes[0].terminate()
            assert cluster.processes[0].wait(60) == 0
            seconds = time.monotonic() - began
            with pytest.raises(WeightServerError):
                push.result(10)
        cluster.restart(0)
        assert client.describe().rows_stored == 0
        client.push_gradients(rows[:10], np.ones((10, 128), np.float32), step=0)
        assert client.describe().rows_stored == 10
    return seconds


@pytest.mark.guard
def test_sigterm_does_not_wait_for_the_disk_beyond_the_grace_period(tmp_path: Path) -> None:
    """A commit that the disk does not complete in time is cut short as by a kill: it is not acknowledged."""
    once_within(0.3 + 1 + 2, lambda number: seconds_to_end_on_a_slow_disk(tmp_path / str(number), grace_seconds=0.3))


def seconds_to_end_on_a_slow_disk(directory: Path, *, grace_seconds: float) -> float:
    """From SIGTERM to the end of the process."""
    row, gradient = np.array([5]), np.ones((1, 32), np.float32)
    with (
        DyingCluster(1, directory, serve_options=["--grace-seconds", str(grace_seconds)]) as cluster,
        WeightClient(cluster.addresses, timeout_seconds=20, retry_seconds=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        begin(client, SPEC)
        cluster.arm(0, "slow", 2)  # the first is that of the start
        cluster.restart(0)
        client.describe()
        push = pool.submit(client.push_gradients, row, gradient, step=0)
        wait_until((directory / "shard-0.slow").exists)
        began = time.monotonic()
        cluster.processes[0].terminate()
        assert cluster.processes[0].wait(45) == 0, "it waited for the disk, which takes 60 s"
        seconds = time.monotonic() - began
        with pytest.raises(WeightServerError):
            push.result(10)
        assert "closed before the last commit reached the disk" in (directory / "shard-0.log").read_text()
        cluster.restart(0)
        assert client.describe().rows_stored == 0
        client.push_gradients(row, gradient, step=0)
        assert client.describe().rows_stored == 1
    return seconds


@pytest.mark.guard
def test_slow_callers_of_the_metrics_take_nothing_from_the_shard(tmp_path: Path) -> None:
    """Hundreds of connections with half a request take a few threads, and proper requests are answered."""
    with (
        LocalCluster(1, tmp_path) as cluster,
        WeightClient(cluster.addresses, retry_seconds=0) as client,
        ExitStack() as stack,
    ):
        process = psutil.Process(cluster.processes[0].pid)
        client.create_table(SPEC)
        threads, descriptors = process.num_threads(), process.num_fds()
        host, _, port = cluster.metrics_addresses[0].rpartition(":")
        for _ in range(300):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        wait_until(lambda: process.num_fds() <= descriptors + MAX_CONNECTIONS + 2)
        assert process.num_threads() <= threads + MAX_CONNECTIONS + 8, "those of gRPC may begin meanwhile"
        assert metric(cluster.metrics_addresses[0], "weightserver_table_rows") == SPEC.num_rows
        assert client.describe().spec == SPEC


@pytest.mark.guard
def test_a_shard_takes_all_descriptors_that_it_may_have(tmp_path: Path) -> None:
    """More idle connections than the soft limit, often 1,024, shut out no other client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        cluster = LocalCluster(1, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with cluster:
        assert psutil.Process(cluster.processes[0].pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
