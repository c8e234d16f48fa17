"""Lost replies, shards killed under load, and a full disk: acknowledged writes stay, and nothing is applied twice."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.watching import metric, wait_until
from weightserver import LocalCluster, RowState, StorageError, TableSpec, WeightClient

SPEC = TableSpec(num_rows=120, dim=6, rows_per_block=4)
ROWS = np.arange(SPEC.num_rows)
Rows = npt.NDArray[np.int64]
Gradients = npt.NDArray[np.float32]


class Proxy:
    """Passes bytes between a client and one shard; while `mute` is set, the shard's answers are lost."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.mute = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # the shard is away
                near.close()
                continue
            self._pairs.append((near, far))
            threading.Thread(target=self._pass, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, self.mute), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, mute: threading.Event | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if mute is None or not mute.is_set():
                    sink.sendall(data)
        self._shut(source, sink)

    def _shut(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Ends all connections, as a network that recovers does."""
        for near, far in self._pairs:
            self._shut(near, far)

    def close(self) -> None:
        self._shut(self._listener)
        self._listener.close()
        self.cut()
        for near, far in self._pairs:
            near.close()
            far.close()


@contextlib.contextmanager
def proxy_before(target: str) -> Iterator[Proxy]:
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


def open_table(client: WeightClient, num_steps: int = 60) -> int:
    client.create_table(SPEC)
    client.extend_schedule(0, np.linspace(0.3, 0.01, num_steps))
    return client.open_session("test")


def assert_same(one: RowState, other: RowState) -> None:
    for name in ("weight", "momentum_buffer", "last_step"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("killed", [False, True], ids=["reply lost", "reply lost, then killed"])
@pytest.mark.guard  # seconds
def test_a_write_whose_reply_is_lost_is_applied_once(killed: bool) -> None:
    """Shard 0 makes the push durable, but its answer never arrives; the client's next attempt must be recognised,
    by a shard that has forgotten everything that was only in its memory too."""
    gradients = np.random.default_rng(0).standard_normal((len(ROWS), SPEC.dim)).astype(np.float32)
    with (
        LocalCluster(2) as cluster,
        proxy_before(cluster.addresses[0]) as proxy,
        WeightClient(cluster.addresses) as direct,
        WeightClient([proxy.address, cluster.addresses[1]], timeout_seconds=2, retry_seconds=30) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        open_table(client)
        client.push_gradients(ROWS, gradients, step=0)
        proxy.mute.set()
        push = pool.submit(client.push_gradients, ROWS, 2 * gradients, step=1)
        wait_until(lambda: [shard.clock for shard in direct.describe().shards] == [2, 2])
        applied = direct.fetch_state(ROWS)
        if killed:
            cluster.processes[0].kill()
            cluster.restart(0)
        assert not push.done(), "the client cannot know yet"
        proxy.mute.clear()
        proxy.cut()
        push.result(40)
        assert metric(cluster.metrics_addresses[0], "weightserver_duplicate_writes_total") >= 1
        assert_same(direct.fetch_state(ROWS), applied)
        client.push_gradients(ROWS, gradients, step=2)  # and the writer continues
        assert direct.describe().clock == 3


def run_under_kills(pushes: list[tuple[Rows, Gradients]], num_kills: int) -> tuple[RowState, int, int]:
    """The rows after one push per step, while shards are killed in turn and restarted."""
    sent = threading.Semaphore(0)
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses, timeout_seconds=5, retry_seconds=60) as client:

        def kill() -> None:
            for number in range(num_kills):
                for _ in range(8):
                    assert sent.acquire(timeout=30)
                time.sleep(0.003 * number)  # somewhere in a push
                cluster.processes[number % 2].kill()
                cluster.restart(number % 2)

        open_table(client)
        with ThreadPoolExecutor(1) as pool:
            killer = pool.submit(kill)
            for step, (rows, gradients) in enumerate(pushes):
                sent.release()
                client.push_gradients(rows, gradients, step=step)
            killer.result(60)
        info = client.describe()
        return client.fetch_state(ROWS), info.clock, info.rows_stored


@pytest.mark.guard
def test_kills_at_any_time_change_no_bit() -> None:
    """Compares 40 pushes while shards are killed with the same pushes undisturbed."""
    generator = np.random.default_rng(1)
    pushes = [
        (generator.integers(0, SPEC.num_rows, 80), generator.standard_normal((80, SPEC.dim)).astype(np.float32))
        for _ in range(40)
    ]
    undisturbed, disturbed = run_under_kills(pushes, 0), run_under_kills(pushes, 4)
    assert disturbed[1:] == undisturbed[1:]
    assert_same(disturbed[0], undisturbed[0])


def test_a_full_disk_refuses_a_write_and_recovers(tmp_path: Path) -> None:
    """If the data file cannot grow, the whole push fails and rows stay readable; with free space it succeeds."""
    spec = TableSpec(num_rows=20_000, dim=32)
    rows = np.arange(spec.num_rows)
    gradients = np.ones((len(rows), spec.dim), np.float32)
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses, retry_seconds=2) as client:
        client.create_table(spec)
        client.extend_schedule(0, np.full(10, 0.5))
        client.open_session("test")
        client.push_gradients(rows[:100], gradients[:100], step=0)
        before, info = client.fetch_state(rows[:200]), client.describe()
        process = cluster.processes[0].pid
        unlimited = resource.prlimit(process, resource.RLIMIT_FSIZE)
        size = (tmp_path / "shard-0" / "data.mdb").stat().st_size
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size + 8192, unlimited[1]))
        with pytest.raises(StorageError, match="shard 0 at") as raised:
            client.push_gradients(rows, gradients, step=1)
        assert "\n" not in str(raised.value)
        assert_same(client.fetch_state(rows[:200]), before)
        now = client.describe()
        assert (now.clock, now.rows_stored) == (info.clock, info.rows_stored)
        resource.prlimit(process, resource.RLIMIT_FSIZE, unlimited)
        client.push_gradients(rows, gradients, step=1)
        assert client.describe().rows_stored == len(rows)
        once = client.fetch_state(rows)
        client.push_gradients(rows[:1], gradients[:1], step=2)
        cluster.restart(0)
        assert_same(
            RowState(once.weight[1:], once.momentum_buffer[1:], once.last_step[1:]), client.fetch_state(rows[1:])
        )
