"""A shard's health follows its database, and asking for it costs next to nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tests.helpers.commands import weightserver
from tests.helpers.failing_disk import FailingDisk
from tests.helpers.watching import metric, wait_until
from tests.integration.tables import begin
from tests.integration.test_damage import flip
from weightserver import LocalCluster, StorageError, TableSpec, WeightClient, WeightServerError
from weightserver.common.metrics_http import serve_metrics
from weightserver.server.health import ShardHealth

PROBE = Path(__file__).parent.parent.parent / "deploy/health.sh"
ROWS, ONES = np.arange(2000), np.ones((2000, 32), np.float32)


def asked(cluster: LocalCluster, path: str = "/healthz") -> tuple[int, str]:
    """Exit status and output of the probe."""
    host, _, port = cluster.metrics_addresses[0].rpartition(":")
    done = subprocess.run([PROBE, host, port, path], capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stdout.strip()


def fill(client: WeightClient, *, rows_per_block: int = 63) -> None:
    begin(client, TableSpec(num_rows=100_000, dim=32, rows_per_block=rows_per_block))
    client.push_gradients(ROWS, ONES, step=0)


@pytest.mark.guard
def test_a_shard_that_meets_a_damaged_page_of_lmdb_is_not_serving(tmp_path: Path) -> None:
    """Until the shard ends, it answers fetches that do not need the page."""
    with (
        LocalCluster(1, tmp_path, serve_options=["--log-format", "json"]) as cluster,
        WeightClient(cluster.addresses, retry_seconds=2) as client,
    ):
        fill(client, rows_per_block=5)
        assert asked(cluster) == (0, "SERVING")
        assert metric(cluster.metrics_addresses[0], "weightserver_serving") == 1
        directory, last = tmp_path / "shard-0", client.fetch_state(ROWS[-5:]).weight.tobytes()
        page = (directory / "data.mdb").read_bytes().find(last) // 4096
        flip(directory, 4096 * page + 10, 2)  # the leaf that holds the last rows is none any more
        with pytest.raises(StorageError, match="MDB_CORRUPTED"):
            client.fetch(ROWS[-1:], step=1)
        for path in ("/healthz", "/readyz"):
            status, said = asked(cluster, path)
            assert (status, said.partition(":")[0]) == (1, "NOT_SERVING")
        assert weightserver("health", cluster.addresses[0])[:2] == (1, f"{said}\n")
        assert metric(cluster.metrics_addresses[0], "weightserver_serving") == 0
        assert client.fetch(ROWS[:5], step=1).shape == (5, 32)
        with pytest.raises(StorageError, match="restart the shard, which checks its data"):
            client.push_gradients(ROWS[:5], ONES[:5], step=1)
    assert '"event": "not serving' in (tmp_path / "shard-0.log").read_text()


def test_a_shard_whose_volume_is_nearly_full_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardHealth(lambda: "", tmp_path)
    shard.serve()
    assert shard.ready() == (HTTPStatus.OK, "SERVING")
    monkeypatch.setattr("weightserver.server.health._MIN_FREE_MIB", 1 << 40)
    status, said = shard.ready()
    assert status is HTTPStatus.SERVICE_UNAVAILABLE
    assert f"NOT_READY: the volume of {tmp_path} is nearly full" in said
    assert shard.live() == (HTTPStatus.OK, "SERVING")


def test_a_shard_is_ready_while_it_serves_only(tmp_path: Path) -> None:
    """One that starts or drains lives: a restart would only make it take longer."""
    problem = [""]
    shard = ShardHealth(lambda: problem[0], tmp_path)
    assert shard.ready() == (HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY: the shard is starting")
    shard.serve()
    assert shard.ready() == (HTTPStatus.OK, "SERVING")
    shard.drain()
    problem[0] = "the directory is closed"
    assert shard.ready() == (HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY: the shard is draining")
    assert shard.live() == (HTTPStatus.OK, "SERVING")


def test_a_shard_whose_disk_refuses_writes_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a write succeeds. It lives and serves fetches: a restart would change nothing."""
    disk = FailingDisk(tmp_path)
    disk.install(monkeypatch)
    with LocalCluster(1, tmp_path / "servers") as cluster, WeightClient(cluster.addresses, retry_seconds=2) as client:
        fill(client)
        disk.fail(1, 1, errno.ENOSPC)
        with pytest.raises(StorageError, match="No space left on device"):
            client.push_gradients(ROWS, ONES, step=1)
        status, said = asked(cluster, "/readyz")
        assert status == 1
        assert said.startswith("NOT_READY: the last write was refused: ")
        assert "No space left on device" in said
        assert weightserver("health", cluster.addresses[0])[:2] == (1, f"{said}\n")
        assert asked(cluster) == (0, "SERVING")
        assert metric(cluster.metrics_addresses[0], "weightserver_serving") == 1
        assert (client.fetch_state(ROWS).last_step == 1).all()
        client.push_gradients(ROWS, ONES, step=1)
        assert (client.fetch_state(ROWS).last_step == 2).all()
        assert asked(cluster, "/readyz") == (0, "SERVING")


def test_a_shard_whose_database_stays_unusable_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its supervisor starts it again: Docker restarts no container that is only unhealthy."""
    code = "import weightserver.server.health as h; h._LASTING_SECONDS = 0.5; from weightserver.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--init", "--data-dir", str(tmp_path / "data"), "--announce"]
    command += ["--listen", "127.0.0.1:0", "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["metrics_address"]
        assert answered(address, "/healthz") == (200, b"SERVING\n")
        (tmp_path / "data/data.mdb").rename(tmp_path / "aside")
        assert answered(address, "/healthz")[0] == 503
        with contextlib.suppress(ConnectionError):
            wait_until(lambda: answered(address, "/healthz")[0] != 503)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 1
    assert re.search(r"^weightserver serve: .*data\.mdb cannot be read .*$", log, re.MULTILINE)


def test_two_short_problems_are_not_one_that_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that succeeds in between shows it, though no probe asked meanwhile."""
    problem, ended, now = [""], list[str](), [1000.0]
    monkeypatch.setattr("weightserver.server.health.time.monotonic", lambda: now[0])
    shard = ShardHealth(lambda: problem[0], tmp_path, on_lasting=ended.append)
    for refused in ("no reader is free", "", "no reader is free"):
        problem[0] = refused
        shard.wrote(refused)
        now[0] += 300
    assert ended == []
    shard.wrote("no reader is free")
    assert ended == ["no reader is free"]


@pytest.mark.guard
def test_a_damaged_block_costs_its_rows_and_a_counter_says_so(tmp_path: Path) -> None:
    """The other rows are served, so the shard's health stays SERVING."""
    options = ["--log-format", "json", "--slow-request-seconds", "60"]
    with (
        LocalCluster(1, tmp_path, serve_options=options) as cluster,
        WeightClient(cluster.addresses, retry_seconds=2) as client,
    ):
        counter = cluster.metrics_addresses[0], "weightserver_damaged_reads_total"
        begin(client, TableSpec(num_rows=100, dim=32, rows_per_block=50))
        client.push_gradients(ROWS[:100], ONES[:100], step=0)
        stored = client.fetch_state(ROWS[:50]).weight.tobytes()
        assert metric(*counter) == 0, "there before the first"
        data = tmp_path / "shard-0" / "data.mdb"
        with data.open("r+b") as file:
            file.seek(data.read_bytes().find(stored))
            file.write(bytes(8))
        attempts: list[Callable[..., object]] = [client.fetch, partial(client.push_gradients, gradients=ONES[:1])]
        for calls, call in enumerate(attempts, 1):
            with pytest.raises(StorageError, match=r"block 0 \(rows 0\.\.49\) is damaged") as caught:
                call(ROWS[:1], step=1)
            assert "\n" not in str(caught.value)
            assert metric(*counter) == calls
            lines = map(json.loads, (tmp_path / "shard-0.log").read_text().splitlines())
            *_, told = (line for line in lines if line["level"] == "warning")
            assert "damaged" in told["event"]
            assert f"its log tells more of request {told['request']}" in str(caught.value)
        assert client.fetch(ROWS[50:100], step=1).shape == (50, 32)
        client.push_gradients(ROWS[50:100], ONES[50:100], step=1)
        assert asked(cluster) == asked(cluster, "/readyz") == (0, "SERVING")
        assert metric(cluster.metrics_addresses[0], "weightserver_serving") == 1
        assert metric(*counter) == 2


@pytest.mark.guard
def test_a_shard_whose_data_file_is_replaced_is_not_serving_until_it_is_back(tmp_path: Path) -> None:
    """Nothing is written meanwhile: the probe itself looks. Clients are served."""
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(TableSpec(num_rows=100, dim=4))
        data, aside = tmp_path / "shard-0" / "data.mdb", tmp_path / "aside"
        data.rename(aside)
        assert asked(cluster)[0] == 1
        assert client.describe().clock == 0
        shutil.copy(aside, data)
        assert "was replaced" in asked(cluster)[1]
        aside.rename(data)
        assert asked(cluster) == (0, "SERVING")


@pytest.mark.guard
def test_a_shard_whose_data_file_is_cut_short_says_what_ends_it(tmp_path: Path) -> None:
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses, retry_seconds=1) as client:
        fill(client)
        os.truncate(tmp_path / "shard-0/data.mdb", 8192)
        with pytest.raises(WeightServerError):
            client.fetch(ROWS, step=1)
        assert cluster.processes[0].wait(20) == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in (tmp_path / "shard-0.log").read_text()


def answered(address: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = HTTPConnection(address, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_port_answers_its_own_paths_only(tmp_path: Path) -> None:
    """A mistyped probe fails; a shard that is gone is unhealthy."""
    with LocalCluster(1, tmp_path) as cluster:
        address = cluster.metrics_addresses[0]
        for path in ("/healthz", "/readyz", "/readyz?verbose", "/readyz/", "/readyz/?verbose=1"):
            assert answered(address, path) == (200, b"SERVING\n")
        for path in ("/", "/health", "/ready", "/readyz/more", "/metrics2", "//", "/%6Detrics"):
            assert answered(address, path) == (404, b"there is no such page: ask for /metrics, /healthz, /readyz\n")
        assert b'weightserver_serving{shard="0"} 1.0' in answered(address, "/metrics?name[]=all")[1]
        for path in ("/metrics", "/healthz", "/nothing"):
            assert answered(address, path, "HEAD") == (404 if path == "/nothing" else 200, b"")
        cluster.processes[0].kill()
        wait_until(lambda: cluster.processes[0].poll() is not None)
        assert asked(cluster)[0] == 1
        with pytest.raises(ConnectionRefusedError):
            answered(address, "/healthz")


def test_a_page_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """An answer that stays away would look like a shard that is gone, and nothing would tell why."""

    def fails() -> tuple[HTTPStatus, str]:
        raise OSError(errno.EIO, "Input/output error")

    port, close = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, {"/readyz": fails})
    assert answered(f"127.0.0.1:{port}", "/readyz") == (500, b"the page failed: see the log\n")
    assert answered(f"127.0.0.1:{port}", "/metrics")[0] == 200
    close()
    assert "/readyz failed" in caplog.text
    assert "Input/output error" in caplog.text


@pytest.mark.guard
def test_a_shard_that_hangs_is_killed_if_the_probe_may(tmp_path: Path) -> None:
    """Docker restarts no container for being unhealthy. One that has not answered yet is starting: it is left alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "weightserver", "serve", "--data-dir", str(tmp_path / "shard"), "--init"]
    command += ["--shard=0", "--num-shards=1", "--listen=127.0.0.1:0", f"--metrics-port={port}"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    def ask(*times: str) -> int:
        asked = [str(PROBE), "127.0.0.1", port, "/readyz", *times]
        return subprocess.run(asked, env=environment, capture_output=True, timeout=20, check=False).returncode

    for _ in range(3):
        assert ask("2") == 1
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: ask("2") == 0, seconds=60)
            process.send_signal(signal.SIGSTOP)
            assert [ask("2"), ask("2")] == [1, 1]
            assert process.poll() is None
            assert ask("2") == 1
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()


def test_metrics_are_served_without_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer would be waited for, before a shard begins to serve."""
    asked = list[str]()
    monkeypatch.setattr("socket.getfqdn", lambda name="": asked.append(name) or name)
    port, close = serve_metrics(CollectorRegistry(), "0.0.0.0", 0)
    close()
    assert port > 0
    assert asked == []
