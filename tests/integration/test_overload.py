"""Overload: callers that are silent, cancelled or far too many. The shard stays small and continues to serve."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from tests.helpers.fake_context import FakeContext
from tests.helpers.narrow_shard import NUM_THREADS, CrowdedShard, NarrowShard
from tests.helpers.raw_calls import raw_channel, stub, versioned
from tests.helpers.watching import metric, once_within, wait_until
from tests.integration.handlers import handlers
from tests.integration.tables import SLOW, begin
from weightserver import LocalCluster, OverloadedError, TableSpec, WeightClient, WeightServerError
from weightserver.client.security import ClientSecurity
from weightserver.core.errors import InvalidRequestError
from weightserver.operations.health import _serving_status
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, MAX_REQUEST_BYTES, MAX_ROWS, ONE_MESSAGE_KEY, rows_to_proto
from weightserver.server.admission import BASE_BYTES, MAX_THREADS
from weightserver.server.service import NAME
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=1_000_000, dim=64, momentum=0, weight_decay=0, init_std=0)
MEMORY_MIB = 128
CEILING = BASE_BYTES + (MEMORY_MIB << 20) + MAX_THREADS * 3 * CHUNK_BYTES
"""Upper bound for callers whose messages have 1 MiB, as here."""


class Crowd:
    """One shard with little memory, a good client, and misbehaving callers."""

    def __init__(self, cluster: LocalCluster, client: WeightClient) -> None:
        self.cluster, self.client = cluster, client
        self.process = psutil.Process(cluster.processes[0].pid)
        self.epoch = begin(client, SPEC, np.ones(10, np.float32), session="crowd")
        self.session_id: bytes = client.call_shard(0, "Describe", pb.DescribeRequest()).session_id
        self._channels = [versioned(grpc.insecure_channel(cluster.addresses[0], [("crowd", n)])) for n in range(8)]
        self._calls: list[Any] = []
        self._left, self._end = threading.Event(), threading.Event()
        self.peak = 0
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()

    def _sample(self) -> None:
        while not self._end.wait(0.01):
            try:
                self.peak = max(self.peak, self.memory())
            except psutil.NoSuchProcess:
                return

    def memory(self) -> int:
        """Bytes of memory of the shard's process, without the map of its data file."""
        found = self.process.memory_info()
        return int(found.rss - found.shared)

    def metric(self, name: str) -> float:
        return metric(self.cluster.metrics_addresses[0], f"weightserver_{name}")

    def channel(self, number: int = 0) -> grpc.Channel:
        return self._channels[number % len(self._channels)]

    def stub(self, number: int = 0) -> Any:
        return stub(self.channel(number))

    def header(self, number: int, num_rows: int, num_blocks: int | None = None) -> pb.WriteHeader:
        return pb.WriteHeader(
            epoch=self.epoch,
            session_id=self.session_id,
            writer=number.to_bytes(16, "big"),
            sequence=1,
            num_rows=num_rows,
            num_blocks=num_rows // SPEC.rows_per_block + 2 if num_blocks is None else num_blocks,
        )

    def add(self, calls: list[Any]) -> list[Any]:
        self._calls += calls
        return calls

    def read_nothing(self, count: int) -> list[Any]:
        """Starts fetches of many rows whose answers are not read."""
        request = pb.FetchRequest(rows=rows_to_proto(np.arange(200_000)), raw=True, state=True)
        return self.add([self.stub(number).Fetch(request) for number in range(count)])

    def announce(self, count: int, num_rows: int = 500) -> list[Any]:
        """Starts writes that send a few rows of those that they announce."""
        left, some = self._left, rows_to_proto(np.arange(100))

        def messages(number: int) -> Iterator[pb.PushGradientsRequest]:
            gradients = bytes(4 * 100 * SPEC.dim)
            yield pb.PushGradientsRequest(header=self.header(number, num_rows), rows=some, gradients=gradients)
            left.wait()

        return self.add([self.stub(number).PushGradients.future(messages(number)) for number in range(count)])

    def send_no_message(self, count: int, method: str = f"/{NAME}/Describe") -> list[Any]:
        """Starts unary calls that never send their message."""

        def nothing(left: threading.Event) -> Iterator[bytes]:
            left.wait()
            yield b""

        calls = [self.channel(n).stream_unary(method).future(nothing(self._left)) for n in range(count)]
        return self.add(calls)

    def work(self, rounds: int) -> float:
        """Seconds that the good client needs for fetches and pushes."""
        rows = np.arange(1000)
        started = time.monotonic()
        for _ in range(rounds):
            self.client.fetch(rows, step=1)
            self.client.push_gradients(rows, np.ones((1000, SPEC.dim), np.float32), step=0)
        return time.monotonic() - started

    def leave(self) -> list[Any]:
        """Cancels the calls that are still running, and ends the threads that fed them."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.cancel()
        self._left.set()
        self._left = threading.Event()
        return calls

    def close(self) -> None:
        self.leave()
        self._end.set()
        self._sampler.join()
        for channel in self._channels:
            channel.close()


@contextmanager
def crowd_at(
    directory: Path, *options: str, kind: type[LocalCluster] = LocalCluster, stall_seconds: float = 1
) -> Iterator[Crowd]:
    limits = ["--request-memory-mib", str(MEMORY_MIB), "--stall-seconds", str(stall_seconds)]
    with ExitStack() as stack:
        cluster = stack.enter_context(kind(1, directory, serve_options=[*limits, *options]))
        client = stack.enter_context(WeightClient(cluster.addresses, timeout_seconds=20, retry_seconds=60))
        crowd = Crowd(cluster, client)
        stack.callback(crowd.close)
        yield crowd
    assert "Traceback" not in (directory / "shard-0.log").read_text()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    with crowd_at(tmp_path_factory.mktemp("crowd")) as crowd:
        yield crowd


# ---- silent callers


@pytest.mark.guard
def test_silent_callers_block_neither_others_nor_health_checks(crowd: Crowd) -> None:
    """Several times as many as there are threads read nothing, announce a write, or send no message at all. All wait in
    one line with the good client, and each has its thread and memory for a second."""
    crowd.work(3)
    crowd.read_nothing(MAX_THREADS)
    crowd.announce(MAX_THREADS)
    crowd.send_no_message(MAX_THREADS)
    wait_until(lambda: crowd.metric("running_calls") >= MAX_THREADS)
    for _ in range(10):
        assert _serving_status(crowd.cluster.addresses[0], ClientSecurity(), 2) == "SERVING"
    assert crowd.work(5) < 40
    assert crowd.client.describe().spec == SPEC
    assert crowd.peak < CEILING
    assert crowd.metric("cut_off_calls_total") > 0
    wait_until(lambda: crowd.metric("request_memory_bytes") == 0)  # no caller is waited for without end
    crowd.leave()


@pytest.mark.guard
@pytest.mark.parametrize("method", [f"/{NAME}/Describe", "/grpc.health.v1.Health/Check"])
def test_a_call_without_a_message_does_not_wait_for_it(crowd: Crowd, method: str) -> None:
    """Health checks need no token, so none may hold anything: they are answered before their message arrives."""
    calls = crowd.send_no_message(10, method)
    wait_until(lambda: all(call.done() for call in calls))
    answered = method.endswith("Check")
    assert {call.code() for call in calls} == {grpc.StatusCode.OK if answered else grpc.StatusCode.CANCELLED}


_BLOCKS = pb.ReadBlocksRequest(checkpoint="unread")
_MEBIBYTE = pb.FetchRequest(rows=rows_to_proto(np.arange(CHUNK_BYTES // (4 * SPEC.dim))), raw=True, state=True)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("method", "message", "metadata"), [("ReadBlocks", _BLOCKS, []), ("Fetch", _MEBIBYTE, [(ONE_MESSAGE_KEY, "1")])]
)
def test_unread_replies_are_bounded(crowd: Crowd, method: str, message: Any, metadata: list[tuple[str, str]]) -> None:
    """Replies of one message occupy memory until they are read or their call is cancelled."""
    crowd.work(3)
    if method == "ReadBlocks":
        crowd.client.checkpoint("unread", step=1)
    request = message.SerializeToString()
    before = crowd.metric("cut_off_calls_total")
    window = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    with ExitStack() as stack:
        for number in range(10):
            channel = stack.enter_context(raw_channel(crowd.cluster.addresses[0], [*window, ("unread", number)]))
            stream = channel.unary_stream(f"/{NAME}/{method}")
            crowd.add([stream(request, metadata=metadata) for _ in range(8)])
        wait_until(lambda: crowd.metric("request_memory_bytes") > 0)
        wait_until(lambda: crowd.metric("request_memory_bytes") == 0)
        crowd.leave()
    assert crowd.metric("cut_off_calls_total") - before >= 30
    assert crowd.peak < CEILING
    assert crowd.work(3) < 60


@pytest.mark.guard
def test_a_paused_shard_does_not_cut_off_its_callers(tmp_path: Path) -> None:
    """Its own pause is not their silence, which has its whole time afterwards."""
    for attempt in range(3):
        with crowd_at(tmp_path / str(attempt), kind=NarrowShard) as crowd:
            began = time.monotonic()
            crowd.announce(NUM_THREADS)
            wait_until(lambda: crowd.metric("running_calls") == NUM_THREADS)
            crowd.process.suspend()
            awake = time.monotonic() - began
            time.sleep(3)
            began = time.monotonic()
            crowd.process.resume()
            cut_off = crowd.metric("cut_off_calls_total")
            awake += time.monotonic() - began
            if awake < 0.7:  # else this process paused, or the machine is slow
                assert cut_off == 0
                wait_until(lambda: crowd.metric("cut_off_calls_total") == NUM_THREADS)
                return
    pytest.fail("this process paused in each of three attempts")


# ---- many callers


@pytest.mark.guard
def test_a_flood_is_refused_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    """Calls beyond the shard's places are refused before anything is done, and patient clients repeat theirs. Those of
    one client would take turns."""
    one, num_clients = np.ones((1, SPEC.dim), np.float32), 40
    with (
        crowd_at(tmp_path, kind=CrowdedShard) as crowd,
        ExitStack() as stack,
        ThreadPoolExecutor(num_clients) as pool,
    ):
        clients = [
            stack.enter_context(WeightClient(crowd.cluster.addresses, retry_seconds=(60, 0)[number % 2]))
            for number in range(num_clients)
        ]
        for client in clients:
            client.extend_schedule(0, np.ones(10, np.float32))
            client.open_session("crowd", join=crowd.epoch)
        pushes = [pool.submit(clients[row % num_clients].push_gradients, [row], one, step=0) for row in range(400)]
        errors = [push.exception(120) for push in pushes]
        applied = -crowd.client.fetch(np.arange(400), step=1)[:, 0]
    assert not any(errors[::2])
    refused = [error for error in errors if error is not None]
    assert refused
    for error in refused:
        assert isinstance(error, OverloadedError)
        assert error.not_applied
    assert applied.tolist() == [float(error is None) for error in errors]


@pytest.mark.guard
@pytest.mark.parametrize("num_clients", [40, pytest.param(160, marks=pytest.mark.slow)])
def test_equal_clients_are_served_equally(tmp_path: Path, num_clients: int) -> None:
    """They fetch as fast as they can, two at a time for 10 ms each, so that they wait for the shard and not for this
    process: first come, first served."""
    rounds, rows = 12, np.arange(16)
    served, ended = [0] * num_clients, threading.Event()

    def run(number: int, address: str, ready: threading.Barrier) -> None:
        with WeightClient([address], timeout_seconds=30, retry_seconds=60) as client:
            client.describe()
            ready.wait(60)
            while not ended.is_set():
                client.fetch(rows, step=0)
                served[number] += 1
                if sum(served) >= rounds * num_clients:
                    ended.set()

    with crowd_at(tmp_path, kind=NarrowShard) as crowd, ThreadPoolExecutor(num_clients) as pool:
        ready = threading.Barrier(num_clients)
        for one in [pool.submit(run, number, crowd.cluster.addresses[0], ready) for number in range(num_clients)]:
            one.result(120)
    assert max(served) <= 2 * min(served), sorted(served)


# ---- memory


def test_writes_wait_for_memory_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    """A write reserves all that it announces at once. A silent one loses it to one that waits."""
    with crowd_at(tmp_path, stall_seconds=100) as crowd:
        (holder,) = crowd.announce(1, num_rows=110_000)
        wait_until(lambda: crowd.metric("request_memory_bytes") > 100 << 20)
        rows, ones = np.arange(40_000), np.ones((40_000, SPEC.dim), np.float32)
        crowd.client.push_gradients(rows, ones, step=0)
        assert holder.code() is grpc.StatusCode.CANCELLED

        def refusal(num_rows: int, num_blocks: int) -> str:
            """Of a write of rows in a block each."""
            message = pb.PushGradientsRequest(
                header=crowd.header(4, num_rows, num_blocks),
                rows=rows_to_proto(np.arange(0, 200 * num_rows, 200)),
                gradients=bytes(4 * num_rows * SPEC.dim),
            )
            call = crowd.stub().PushGradients.future(iter([message]), timeout=10)
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
            return str(call.details())

        assert "MiB of memory, the shard has 128 MiB for all requests: split it, or give" in refusal(5000, 5000)
        assert refusal(500, 499) == "the write announced 499 blocks and changes 500"
        wait_until(lambda: crowd.metric("request_memory_bytes") == 0)


def test_learning_rates_that_a_shard_does_not_hold_take_a_fetchs_memory(tmp_path: Path) -> None:
    """However far ahead of its steps they are; and only once, then the shard holds them."""
    with closing(LmdbStorage(tmp_path)) as storage, handlers(storage) as served:
        served.do(lambda batch: batch.create_table(SPEC))

        def taken(num_rates: int, learning_rate: float = 0.5) -> int:
            """Bytes of memory while a fetch by so many learning rates is answered."""
            context, rates = FakeContext(), np.full(num_rates, learning_rate, np.float32)
            request = pb.FetchRequest(rows=rows_to_proto(np.arange(2)), step=5)
            request.rates.learning_rates = rates.tobytes()
            with closing(served.service.Fetch(request, context)) as answers:
                next(answers)
                taken = served.memory.used_bytes
            context.leave()
            return taken

        few, many = taken(5), taken(300_000)
        assert many - few >= 80 * 299_000
        assert taken(300_000) < many // 10
        assert taken(300_000, learning_rate=0.25) == many
        with pytest.raises(InvalidRequestError, match="MiB of memory, the shard has 64 MiB for all requests"):
            taken(1_000_000)
        assert served.memory.used_bytes == 0


@pytest.mark.guard
def test_large_messages_stay_below_the_ceiling(crowd: Crowd) -> None:
    """Many of the largest requests at a time: each has arrived completely before memory can be reserved for it."""
    beyond = np.arange(SPEC.num_rows + 1 - MAX_ROWS, SPEC.num_rows + 1)
    request = pb.FetchRequest(rows=pb.Rows(ids=beyond.tobytes()), raw=True)
    calls = [crowd.stub(number).Fetch(request, timeout=20) for number in range(32)]
    statuses = {call.code().name for call in calls}
    assert statuses <= {"INVALID_ARGUMENT", "CANCELLED"}  # the latter sent nothing whole in time
    assert crowd.peak < BASE_BYTES + (MEMORY_MIB << 20) + 32 * 3 * MAX_REQUEST_BYTES


def push_much(crowd: Crowd, end: float, counts: list[int]) -> None:
    """Pushes 8 MiB at a time: ten pushes would exceed the memory."""
    rows, gradients = np.arange(32_768), np.ones((32_768, SPEC.dim), np.float32)
    with WeightClient(crowd.cluster.addresses, timeout_seconds=20, retry_seconds=80) as client:
        client.open_session("crowd", join=crowd.epoch)
        while True:
            client.push_gradients(rows, gradients, step=0)
            counts.append(1)
            if time.monotonic() > end:
                return


@pytest.mark.parametrize(("num_writers", "seconds"), [(16, 0.1), pytest.param(40, 30.0, marks=pytest.mark.slow)])
@pytest.mark.guard
def test_ten_times_the_load_keeps_the_ceiling(crowd: Crowd, num_writers: int, seconds: float) -> None:
    """Four writers fit at a time. Every write succeeds in the end; afterwards the shard is as fast as before."""
    quiet, pushed = min(crowd.work(10) for _ in range(2)), list[int]()
    with ThreadPoolExecutor(num_writers) as pool:
        end = time.monotonic() + seconds
        writers = [pool.submit(push_much, crowd, end, pushed) for _ in range(num_writers)]
        crowd.read_nothing(20)
        for writer in writers:
            writer.result(90)
    crowd.leave()
    assert len(pushed) >= num_writers
    assert crowd.peak < CEILING, f"{crowd.peak >> 20} MiB"
    wait_until(lambda: crowd.metric("request_memory_bytes") == 0)
    assert min(crowd.work(10) for _ in range(3)) < 2 * quiet + 0.5


# ---- ends


def test_a_fetch_ends_with_its_caller(crowd: Crowd) -> None:
    def fetched() -> float:
        return metric(crowd.cluster.metrics_addresses[0], 'weightserver_rows_total{operation="fetch"}')

    before = fetched()
    answer = crowd.read_nothing(1)[0]
    next(answer)
    answer.cancel()
    wait_until(lambda: crowd.metric("request_memory_bytes") == 0)
    read = fetched() - before
    assert 0 < read < 100_000
    time.sleep(0.2)
    assert fetched() - before == read


def test_a_waiting_write_ends_with_its_caller(tmp_path: Path) -> None:
    """It waits in the queue after another one. It is never applied, and its memory is released at once."""
    began, go, context = threading.Event(), threading.Event(), FakeContext()
    rates, own = pb.Rates(learning_rates=SLOW.tobytes()), {"session_id": b"o" * 16, "writer": b"w" * 16}
    header = pb.WriteHeader(epoch=1, sequence=1, num_rows=2, num_blocks=1, rates=rates, **own)  # type: ignore[arg-type]
    message = pb.PushGradientsRequest(header=header, rows=rows_to_proto(np.arange(2)), gradients=bytes(8 * SPEC.dim))
    with (
        closing(LmdbStorage(tmp_path)) as storage,
        handlers(storage) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        served.do(lambda batch: batch.create_table(SPEC))
        served.do(lambda batch: batch.open_session("test", 1, b"o" * 16))
        busy = served.committer.submit(lambda batch: (began.set(), go.wait(20)))
        assert began.wait(10)
        push = pool.submit(served.service.PushGradients, iter([message]), context)
        wait_until(lambda: context.num_callbacks == 2)
        assert served.memory.used_bytes > 0
        context.leave()
        with pytest.raises(CancelledError):
            push.result(10)
        assert served.memory.used_bytes == 0
        go.set()
        busy.result(10)
        assert served.shard.state.clock == 0


@pytest.mark.guard
def test_sigterm_under_load_ends_in_time_and_loses_nothing(tmp_path: Path) -> None:
    """Writers each increment their own row while others read nothing and send half writes."""
    once_within(0.5 + 2, lambda number: seconds_to_end_under_load(tmp_path / str(number), grace_seconds=0.5))


def seconds_to_end_under_load(directory: Path, *, grace_seconds: float) -> float:
    """From SIGTERM to the end of the process."""
    num_writers = 6
    acknowledged = [0] * num_writers

    def count(number: int, address: str, epoch: int) -> None:
        with WeightClient([address], timeout_seconds=60, retry_seconds=0) as client:
            client.open_session("crowd", join=epoch)
            client.extend_schedule(0, np.ones(10, np.float32))
            row = np.array([1000 * number])
            while True:
                try:
                    client.push_gradients(row, np.ones((1, SPEC.dim), np.float32), step=0)
                except OverloadedError:
                    continue
                except WeightServerError:
                    return
                acknowledged[number] += 1

    with crowd_at(directory, "--grace-seconds", str(grace_seconds), stall_seconds=100) as crowd:
        with ThreadPoolExecutor(num_writers) as pool:
            counting = [pool.submit(count, n, crowd.cluster.addresses[0], crowd.epoch) for n in range(num_writers)]
            wait_until(lambda: min(acknowledged) > 3)
            crowd.read_nothing(6)
            crowd.announce(2 * MAX_THREADS)  # so that some wait for their turn
            time.sleep(0.3)
            began = time.monotonic()
            crowd.cluster.processes[0].send_signal(signal.SIGTERM)
            assert crowd.cluster.processes[0].wait(50) == 0, "it waited for callers, who may stay silent for 100 s"
            seconds = time.monotonic() - began
            for one in counting:
                one.result(60)
        crowd.leave()
        crowd.cluster.restart(0)
        applied = -crowd.client.fetch(1000 * np.arange(num_writers), step=1)[:, 0]
        assert all(told <= done <= told + 1 for told, done in zip(acknowledged, applied, strict=True))
    return seconds
