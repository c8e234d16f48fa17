"""Overload: callers that are silent, cancelled or far too many. The shard stays small and continues to serve."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from tests.helpers.fake_context import FakeContext
from tests.helpers.raw_calls import raw_channel, versioned
from tests.helpers.schedules import extend_schedule
from tests.helpers.slow_fetches import SlowFetches
from tests.helpers.watching import metric, once_within, wait_until
from weightserver import (
    InvalidRequestError,
    LocalCluster,
    OverloadedError,
    ShardUnavailableError,
    TableSpec,
    WeightClient,
    WeightServerError,
)
from weightserver.client import connection, retries
from weightserver.client.calls import CallWatch
from weightserver.client.connection import ShardConnection
from weightserver.client.workers import Workers
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol._generated.weight_server_pb2_grpc import WeightServerStub
from weightserver.protocol.codec import (
    CHUNK_BYTES,
    MARK_KEY,
    MAX_REQUEST_BYTES,
    MAX_ROWS,
    ONE_MESSAGE_KEY,
    RETRY_HINT,
    WAITED_KEY,
    rows_to_proto,
)
from weightserver.server.admission import BASE_BYTES
from weightserver.server.lanes import LANES, MAX_CALLS, MAX_WAITING
from weightserver.server.metrics import ShardMetrics
from weightserver.server.request_memory import RequestMemory
from weightserver.server.service import NAME, WeightServerService
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=1_000_000, dim=64, momentum=0, weight_decay=0, init_std=0)
MEMORY_MIB = 128
CEILING = BASE_BYTES + (MEMORY_MIB << 20) + MAX_CALLS * CHUNK_BYTES
"""Upper bound for callers whose messages have 1 MiB, as here."""
OPTIONS = ["--request-memory-mib", str(MEMORY_MIB), "--stall-seconds", "1"]
SOAK_MINUTES = float(os.environ.get("SOAK_MINUTES", "60"))


class Crowd:
    """One shard with little memory, a good client, and misbehaving callers."""

    def __init__(self, cluster: LocalCluster, client: WeightClient) -> None:
        self.cluster, self.client = cluster, client
        self.process = psutil.Process(cluster.processes[0].pid)
        client.create_table(SPEC)
        client.extend_schedule(0, np.ones(10, np.float32))
        self.epoch = client.open_session("crowd")
        self.opener: bytes = client.call_shard(0, "Describe", pb.DescribeRequest()).opener
        self._channels = [versioned(grpc.insecure_channel(cluster.addresses[0], [("crowd", n)])) for n in range(4)]
        self._stubs = [WeightServerStub(channel) for channel in self._channels]
        self._calls: list[Any] = []
        self.end = threading.Event()
        self._left = threading.Event()
        self.peak = 0
        self.longest_silence = 0.0
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()

    def _sample(self) -> None:
        while not self.end.wait(0.01):
            try:
                self.peak = max(self.peak, self.memory())
            except psutil.NoSuchProcess:
                return

    def memory(self) -> int:
        """Bytes of memory of the shard's process, without the map of its data file."""
        found = self.process.memory_info()
        return int(found.rss - found.shared)

    def metric(self, name: str) -> float:
        return metric(self.cluster.metrics_addresses[0], name)

    def stub(self, number: int = 0) -> WeightServerStub:
        return self._stubs[number % len(self._stubs)]

    def channel(self, number: int = 0) -> grpc.Channel:
        return self._channels[number % len(self._channels)]

    def header(self, number: int, num_rows: int) -> pb.WriteHeader:
        writer = number.to_bytes(16, "big")
        return pb.WriteHeader(epoch=self.epoch, opener=self.opener, writer=writer, sequence=1, num_rows=num_rows)

    def read_nothing(self, count: int) -> None:
        """Starts fetches of a million rows whose answers are not read."""
        request = pb.FetchRequest(rows=rows_to_proto(np.arange(SPEC.num_rows)), step=0, state=True)
        self._calls += [self.stub(number).Fetch(request) for number in range(count)]

    def send_halves(self, count: int, num_rows: int = 8192) -> None:
        """Starts writes that stop after the first of two messages."""
        half = rows_to_proto(np.arange(num_rows // 2))

        def messages(number: int, left: threading.Event) -> Iterator[pb.PushGradientsRequest]:
            gradients = bytes(2 * num_rows * SPEC.dim)
            yield pb.PushGradientsRequest(header=self.header(number, num_rows), rows=half, gradients=gradients)
            left.wait()

        self._calls += [self.stub(number).PushGradients.future(messages(number, self._left)) for number in range(count)]

    def trickle(self, count: int, end: threading.Event) -> None:
        """Starts writes that send a row now and then and never finish; cancels them when `end` is set.

        `longest_silence` is how long one of them did not send because this process had no time.
        """
        value = bytes(4 * SPEC.dim)

        def messages(number: int) -> Iterator[pb.PushGradientsRequest]:
            header: pb.WriteHeader | None = self.header(number, 10_000)
            sent = time.monotonic()
            for row in range(10_000):
                self.longest_silence = max(self.longest_silence, time.monotonic() - sent)
                sent = time.monotonic()
                yield pb.PushGradientsRequest(
                    header=header, rows=rows_to_proto(np.arange(row, row + 1)), gradients=value
                )
                header = None
                if end.wait(0.2):
                    return

        self._calls += [self.stub(number).PushGradients.future(messages(number)) for number in range(count)]

    def push(self, number: int, *, waited_ms: int = 0, timeout: float = 60) -> Any:
        """Pushes 1 to one row as a new writer; returns a future."""
        message = pb.PushGradientsRequest(
            header=self.header(1000 + number, 1),
            rows=rows_to_proto(np.array([number])),
            gradients=np.ones(SPEC.dim, np.float32).tobytes(),
        )
        metadata = [(WAITED_KEY, str(waited_ms))] if waited_ms else []
        return self.stub(number).PushGradients.future(iter([message]), metadata=metadata, timeout=timeout)

    def send_no_message(self, count: int) -> None:
        """Starts unary calls that never send their message."""

        def nothing(left: threading.Event) -> Iterator[bytes]:
            left.wait()
            yield b""

        for number in range(count):
            channel = self.channel(number)
            method = ("pic.weightserver.v1.WeightServer/Describe", "grpc.health.v1.Health/Check")[number % 2]
            self._calls.append(channel.stream_unary(f"/{method}").future(nothing(self._left)))

    def work(self, rounds: int) -> float:
        """Seconds that the good client needs for fetches and pushes."""
        rows = np.arange(1000)
        started = time.monotonic()
        for _ in range(rounds):
            self.client.fetch(rows, step=1)
            self.client.push_gradients(rows, np.ones((1000, SPEC.dim), np.float32), step=0)
        return time.monotonic() - started

    def add(self, calls: list[Any]) -> None:
        self._calls += calls

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
        self.end.set()
        self._sampler.join()
        for channel in self._channels:
            channel.close()


@contextmanager
def crowd_at(directory: Path, *options: str, kind: type[LocalCluster] = LocalCluster) -> Iterator[Crowd]:
    with ExitStack() as stack:
        cluster = stack.enter_context(kind(1, directory, serve_options=[*OPTIONS, *options]))
        client = stack.enter_context(WeightClient(cluster.addresses, timeout_seconds=10, retry_seconds=60))
        crowd = Crowd(cluster, client)
        stack.callback(crowd.close)
        yield crowd
    assert "Traceback" not in (directory / "shard-0.log").read_text()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    with crowd_at(tmp_path_factory.mktemp("crowd")) as crowd:
        yield crowd


@pytest.mark.guard
def test_silent_callers_do_not_block_others(crowd: Crowd) -> None:
    """Ten times as many callers as places read nothing, send half a write, or send no message at all."""
    crowd.work(3)
    crowd.read_nothing(10 * LANES["Fetch"])
    crowd.send_halves(10 * LANES["write"])
    crowd.send_no_message(10 * LANES["control"])
    assert crowd.work(5) < 40
    assert crowd.client.describe().spec == SPEC
    assert crowd.peak < CEILING
    assert crowd.metric("weightserver_refused_calls_total") > 0
    assert crowd.metric("weightserver_cut_off_calls_total") > 0
    wait_until(lambda: crowd.metric("weightserver_request_memory_bytes ") == 0)  # no caller is waited for without end
    crowd.leave()


_BLOCKS = pb.ReadBlocksRequest(checkpoint="unread")
_MEBIBYTE = pb.FetchRequest(rows=rows_to_proto(np.arange(CHUNK_BYTES // (4 * SPEC.dim))), raw=True, state=True)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("method", "message", "metadata"), [("ReadBlocks", _BLOCKS, []), ("Fetch", _MEBIBYTE, [(ONE_MESSAGE_KEY, "1")])]
)
def test_unread_replies_are_bounded(crowd: Crowd, method: str, message: Any, metadata: list[tuple[str, str]]) -> None:
    """Replies of one message too occupy their lane and memory until they are read or their call is cancelled."""
    crowd.work(3)
    if method == "ReadBlocks":
        crowd.client.checkpoint("unread", step=1)
    request = message.SerializeToString()
    ended = -crowd.metric("weightserver_cut_off_calls_total")
    window = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    with ExitStack() as stack:
        for number in range(10):
            channel = stack.enter_context(raw_channel(crowd.cluster.addresses[0], [*window, ("unread", number)]))
            stream = channel.unary_stream(f"/{NAME}/{method}")
            calls = [stream(request, metadata=metadata) for _ in range(8)]
            crowd.add(calls)
        wait_until(lambda: crowd.metric("weightserver_request_memory_bytes ") > 0)
        wait_until(lambda: crowd.metric("weightserver_request_memory_bytes ") == 0)
        for call in crowd.leave():
            ended += call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    ended += crowd.metric("weightserver_cut_off_calls_total")
    assert ended >= 30
    assert crowd.peak < CEILING
    assert crowd.work(3) < 60


def test_a_large_announcement_reserves_little_memory(tmp_path: Path) -> None:
    """Writes that send only a header take no memory from others, however large they announce to be."""

    def header(crowd: Crowd, number: int) -> Iterator[pb.PushGradientsRequest]:
        yield pb.PushGradientsRequest(header=crowd.header(number, 80_000))
        crowd.end.wait(100)

    with crowd_at(tmp_path, "--stall-seconds", "100") as crowd:
        calls = [crowd.stub(n).PushGradients.future(header(crowd, n), timeout=100) for n in range(LANES["write"] - 1)]
        time.sleep(0.2)
        assert crowd.metric("weightserver_request_memory_bytes ") < 1 << 20
        assert crowd.work(3) < 50, "it waited for the others"
        for call in calls:
            call.cancel()


def test_no_lane_takes_all_memory() -> None:
    """The rest is for calls of other lanes; refused callers cause silent holders to be cancelled."""
    memory, full = RequestMemory(64 << 20), list[str | None]()
    memory.on_full = full.append
    with memory.reservation("write") as write, memory.reservation("Fetch") as fetch:
        with pytest.raises(InvalidRequestError, match="needs 57 MiB of memory, the shard has 56 MiB for all requests"):
            write.take(57 << 20)
        write.take(56 << 20)
        with memory.reservation("write") as other, pytest.raises(OverloadedError):
            other.take(1)
        fetch.take(8 << 20)
        with pytest.raises(OverloadedError):
            fetch.take(1)
        assert full == ["write", None]
        assert memory.used_bytes == 64 << 20
    assert memory.used_bytes == 0


def test_a_write_without_free_memory_is_refused(tmp_path: Path) -> None:
    """The refusal says when to retry; a write that could never fit is refused at its start."""
    with crowd_at(tmp_path, "--stall-seconds", "30") as crowd:
        num_rows, value = 80_000, bytes(4 * SPEC.dim)  # 74 MB of 117 that writes may take
        answered = threading.Event()

        def begin(number: int, num_rows: int, messages: int) -> Any:
            def halves() -> Iterator[pb.PushGradientsRequest]:
                header: pb.WriteHeader | None = crowd.header(number, num_rows)
                for first in range(0, 4000 * messages, 4000):
                    rows = rows_to_proto(np.arange(first, first + 4000))
                    yield pb.PushGradientsRequest(header=header, rows=rows, gradients=4000 * value)
                    header = None
                answered.wait(20)

            return crowd.stub(number).PushGradients.future(halves(), timeout=30)

        first = begin(1, num_rows, 10)
        wait_until(lambda: crowd.metric("weightserver_request_memory_bytes ") > 70_000_000)
        second = begin(2, num_rows, 10)
        assert second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no memory for another request now" in second.details()
        assert 0 < int(dict(second.trailing_metadata())[RETRY_HINT]) < 10_000
        far_too_large = begin(3, 400_000, 1)
        assert far_too_large.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "split it, or give the shard more --request-memory-mib" in far_too_large.details()
        answered.set()
        if first.code() is not grpc.StatusCode.CANCELLED:  # it was silent for a second while the others had no memory
            assert first.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"announced {num_rows} rows and contained 40000" in first.details()
        scattered = pb.Rows(ids=np.arange(0, SPEC.num_rows, 200).tobytes())
        message = pb.PushGradientsRequest(header=crowd.header(4, 5000), rows=scattered, gradients=5000 * value)
        with pytest.raises(
            grpc.RpcError, match=r"the request needs \d+ MiB of memory"
        ) as raised:  # of blocks that it changes
            crowd.stub().PushGradients(iter([message]), timeout=10)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert crowd.metric("weightserver_request_memory_bytes ") == 0


@pytest.mark.guard
def test_large_messages_stay_below_the_ceiling(crowd: Crowd) -> None:
    """Many of the largest requests at a time: each has arrived completely before memory can be reserved for it."""
    request = pb.FetchRequest(rows=pb.Rows(ids=np.arange(MAX_ROWS).tobytes()), raw=True)
    calls = [crowd.stub(number).Fetch(request, timeout=20) for number in range(8)]
    statuses = {call.code().name for call in calls}
    assert statuses <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "CANCELLED"}  # the last sent nothing whole in time
    assert crowd.peak < BASE_BYTES + (MEMORY_MIB << 20) + 8 * MAX_REQUEST_BYTES


@pytest.mark.guard
@pytest.mark.parametrize("method", ["Watch", "Check"])
def test_silent_callers_without_a_token_do_not_block_others(crowd: Crowd, method: str) -> None:
    """Health checks need no token. They occupy only their own lane, and a refusal says when to retry."""

    def nothing() -> Iterator[bytes]:
        crowd.end.wait(100)
        yield b""

    channel = crowd.channel()
    calls = [channel.stream_stream(f"/grpc.health.v1.Health/{method}")(nothing()) for _ in range(100)]
    wait_until(lambda: sum(call.done() for call in calls) >= 100 - LANES["health"])
    request = pb.FetchRequest(rows=rows_to_proto(np.arange(10_000)), step=1)
    with ThreadPoolExecutor(8) as pool:
        fetches = [
            pool.submit(lambda number: len(list(crowd.stub(number).Fetch(request, timeout=60))), number)
            for number in range(8)
        ]
        assert {fetch.result(60) > 0 for fetch in fetches} == {True}
    refused = [call for call in calls if call.done() and call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert len(refused) >= 100 - 2 * LANES["health"]
    for call in refused:
        assert f"busy with {LANES['health']} health calls" in call.details()
        assert int(dict(call.trailing_metadata())[RETRY_HINT]) > 0
    for call in calls:
        call.cancel()


@contextmanager
def connected(
    describe: Callable[[bytes, grpc.ServicerContext], bytes], retry_seconds: float
) -> Iterator[ShardConnection]:
    """A client's connection to a server with this method alone."""
    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {"Describe": grpc.unary_unary_rpc_method_handler(describe)}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("pic.weightserver.v1.WeightServer", handlers)]
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    workers = Workers()
    watch = CallWatch(5)
    connection = ShardConnection(
        address,
        credentials=None,
        token=None,
        timeout_seconds=5,
        retry_seconds=retry_seconds,
        workers=workers,
        watch=watch,
    )
    try:
        yield connection
    finally:
        connection.close()
        workers.end()
        watch.end()
        server.stop(None)


def test_a_client_gives_up_when_answers_stay_in_doubt() -> None:
    """The mark of each answer is of another process of the shard, which the client, too, has just seen."""
    num_calls = 0

    def describe(_: bytes, context: grpc.ServicerContext) -> bytes:
        nonlocal num_calls
        num_calls += 1
        connected_shard.acknowledged = f"{num_calls:016x}:1"  # as from another thread's answer
        context.set_trailing_metadata(((MARK_KEY, f"{2**63 + num_calls:016x}:1"),))
        return b""

    with (
        connected(describe, retry_seconds=2) as connected_shard,
        pytest.raises(ShardUnavailableError, match=r"did not answer for .* s \(ABORTED: .* not be ordered\): check"),
    ):
        connected_shard.call("Describe", pb.DescribeRequest())
    assert 2 < num_calls < 50, "not one after another without a pause"


@pytest.mark.guard
def test_a_client_waits_for_the_hinted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says for how long it has tried. Its clock advances by its own pauses only, as its shortest pause is a part of
    that time."""
    times, told, pauses, others = list[float](), list[str](), list[float](), set(threading.enumerate())
    began = time.monotonic()

    def sleep(seconds: float) -> None:
        if threading.current_thread() not in others:  # which earlier tests left
            pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: began + sum(pauses), sleep=sleep))

    def describe(_: bytes, context: grpc.ServicerContext) -> bytes:
        times.append(time.monotonic())
        told.append(dict(context.invocation_metadata()).get(WAITED_KEY, ""))
        if len(times) < 3:
            context.set_trailing_metadata(((RETRY_HINT, "400"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return b""

    with connected(describe, retry_seconds=5) as connected_shard:
        connected_shard.call("Describe", pb.DescribeRequest())
    assert [later - earlier > 0.39 for earlier, later in itertools.pairwise(times)] == [True, True]
    assert [0.4 <= seconds <= 0.6 for seconds in pauses] == [True, True], "half as long again at most"
    first, *later = told
    assert not first
    assert [float(ms) for ms in later] == pytest.approx([1000 * sum(pauses[:1]), 1000 * sum(pauses)], rel=0.1)


def test_a_fetch_ends_with_its_caller(crowd: Crowd) -> None:
    fetched = 'weightserver_rows_total{operation="fetch"}'
    before = crowd.metric(fetched)
    answer = crowd.stub().Fetch(
        pb.FetchRequest(rows=rows_to_proto(np.arange(SPEC.num_rows)), step=1, state=True), timeout=10
    )
    next(answer)
    answer.cancel()
    wait_until(lambda: crowd.metric("weightserver_request_memory_bytes ") == 0)
    read = crowd.metric(fetched) - before
    assert 0 < read < SPEC.num_rows / 4
    time.sleep(0.2)
    assert crowd.metric(fetched) - before == read


def while_callers_send(directory: Path, scenario: Callable[[Crowd], None]) -> None:
    """Runs a scenario whose trickling callers keep sending; again, if this process had no time to send."""
    for attempt in range(3):
        try:
            with crowd_at(directory / str(attempt), "--stall-seconds", "30") as crowd:
                scenario(crowd)
        except AssertionError:
            if crowd.longest_silence < 0.8:
                raise
        else:
            return
    pytest.fail("this process paused in each of three attempts")


@pytest.mark.guard
def test_a_paused_shard_does_not_cut_off_its_callers(tmp_path: Path) -> None:
    """It has received nothing for longer than a caller may be silent while others wait, but they did send."""

    def scenario(crowd: Crowd) -> None:
        end = threading.Event()
        crowd.trickle(LANES["write"] + 1, end)
        wait_until(lambda: crowd.metric('weightserver_waiting_calls{lane="write"}') == 1)
        for _ in range(2):
            crowd.process.suspend()
            time.sleep(1.5)
            crowd.process.resume()
            time.sleep(0.5)
        assert crowd.metric("weightserver_cut_off_calls_total") == 0
        assert crowd.metric('weightserver_waiting_calls{lane="write"}') == 1
        end.set()

    while_callers_send(tmp_path, scenario)


@pytest.mark.guard
def test_calls_that_wait_are_bounded_and_leave_with_their_callers(tmp_path: Path) -> None:
    """The write lane is full of callers that keep sending. Calls waiting there block no other lane."""
    while_callers_send(tmp_path, wait_behind_callers_that_send)


def wait_behind_callers_that_send(crowd: Crowd) -> None:
    num_pushed = 12
    crowd.work(1)

    def num_waiting() -> float:
        return crowd.metric('weightserver_waiting_calls{lane="write"}')

    end = threading.Event()
    crowd.trickle(LANES["write"] + 1, end)
    wait_until(lambda: num_waiting() == 1)
    stay = [crowd.push(number) for number in range(num_pushed - 1)]
    leave = [crowd.push(number) for number in range(100, 110)]
    wait_until(lambda: num_waiting() == num_pushed + 10)
    for call in leave:
        call.cancel()
    wait_until(lambda: num_waiting() == num_pushed)
    late = [crowd.push(number, timeout=1) for number in range(200, 210)]
    assert {call.code() for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    wait_until(lambda: num_waiting() == num_pushed)
    assert crowd.metric("weightserver_refused_calls_total") == 0

    crowd.client.fetch(np.arange(1000), step=1)
    assert crowd.client.describe().spec == SPEC

    more = [crowd.push(number) for number in range(300, 300 + MAX_WAITING["write"])]
    wait_until(lambda: sum(call.done() for call in more) == num_pushed)
    for call in more:
        if call.done():
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"busy with 16 write calls, and {MAX_WAITING['write']} wait" in call.details()
            assert int(dict(call.trailing_metadata())[RETRY_HINT]) == 500
    old = crowd.push(num_pushed - 1, waited_ms=600_000)
    wait_until(lambda: sum(call.done() for call in more) == num_pushed + 1)  # one of these in its place
    assert num_waiting() == MAX_WAITING["write"]

    end.set()
    for call in [*stay, old]:
        call.result(20)
    wait_until(lambda: num_waiting() == 0)
    fetched = crowd.client.fetch(np.r_[:num_pushed, 100:110, 200:210], step=1)[:, 0]
    crowd.leave()
    assert fetched.tolist() == [-2.0] * num_pushed + [-1.0] * 20  # of which -1 is what work() pushed


def assert_about_equal(served: list[int]) -> None:
    """Clients wait for a processor too: a tenth at either end may differ. With the lane's order reversed a quarter is
    served once, others 70 times. `tests/weightserver/test_lanes.py` is strict, at simulated times."""
    tenth = len(served) // 10
    kept = sorted(served)[tenth:-tenth]
    assert kept[-1] <= 3 * kept[0], sorted(served)
    assert min(served) > 1, sorted(served)


@pytest.mark.guard
@pytest.mark.parametrize("num_clients", [80, pytest.param(160, marks=pytest.mark.slow)])
def test_equal_clients_are_served_equally(tmp_path: Path, num_clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More clients than may wait fetch as fast as they can: two at a time, for 10 ms each, so that they wait for the
    lane and not for this process. Each is served once per round."""
    own_connection = ("grpc.use_local_subchannel_pool", 1)  # as clients in their own processes have
    monkeypatch.setattr(connection, "_OPTIONS", [*connection._OPTIONS, own_connection])
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

    with crowd_at(tmp_path, kind=SlowFetches) as crowd, ThreadPoolExecutor(num_clients) as pool:
        ready = threading.Barrier(num_clients)
        for one in [pool.submit(run, number, crowd.cluster.addresses[0], ready) for number in range(num_clients)]:
            one.result(120)
    assert_about_equal(served)


def test_a_waiting_write_ends_with_its_caller(tmp_path: Path) -> None:
    """It waits in the queue after another one. It is never applied, and its memory is released at once."""
    storage = LmdbStorage(tmp_path)
    shard = Shard(storage, shard=0, num_shards=1)
    committer, memory = Committer(shard.batch), RequestMemory(64 << 20)
    service = WeightServerService(shard, committer, ShardMetrics(shard=0, num_shards=1, version="0"), memory)
    committer.submit(lambda batch: shard.create_table(batch, SPEC)).result(10)
    committer.submit(lambda batch: extend_schedule(shard, batch, 0, np.ones(5, np.float32))).result(10)
    committer.submit(lambda batch: shard.open_session(batch, "test", 1, b"o" * 16)).result(10)
    began, go, context = threading.Event(), threading.Event(), FakeContext()
    busy = committer.submit(lambda batch: (began.set(), go.wait(20)))
    assert began.wait(10)
    header = pb.WriteHeader(epoch=1, opener=b"o" * 16, writer=b"w" * 16, sequence=1, num_rows=2)
    message = pb.PushGradientsRequest(header=header, rows=rows_to_proto(np.arange(2)), gradients=bytes(8 * SPEC.dim))
    with ThreadPoolExecutor(1) as pool:
        push = pool.submit(service.PushGradients, iter([message]), context)
        wait_until(lambda: bool(context.gone))
        assert memory.used_bytes > 0
        context.gone[0]()
        with pytest.raises(CancelledError):
            push.result(10)
        assert memory.used_bytes == 0
        go.set()
        busy.result(10)
    committer.close()
    assert shard.state.clock == 0
    storage.close()


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
            row = np.array([1000 * number])
            while True:
                try:
                    client.push_gradients(row, np.ones((1, SPEC.dim), np.float32), step=0)
                except OverloadedError:
                    continue
                except WeightServerError:
                    return
                acknowledged[number] += 1

    with crowd_at(directory, "--grace-seconds", str(grace_seconds), "--stall-seconds", "100") as crowd:
        with ThreadPoolExecutor(num_writers) as pool:
            counting = [pool.submit(count, n, crowd.cluster.addresses[0], crowd.epoch) for n in range(num_writers)]
            wait_until(lambda: min(acknowledged) > 3)
            crowd.read_nothing(6)
            crowd.send_halves(2 * LANES["write"])  # so that some wait for their turn
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


def push_much(crowd: Crowd, end: float, counts: list[int]) -> None:
    """Pushes 8 MiB at a time: ten pushes would exceed the memory."""
    rows, gradients = np.arange(32_768), np.ones((32_768, SPEC.dim), np.float32)
    with WeightClient(crowd.cluster.addresses, timeout_seconds=10, retry_seconds=80) as client:
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
    assert crowd.metric("weightserver_request_memory_bytes ") == 0
    assert min(crowd.work(10) for _ in range(3)) < 2 * quiet + 0.5


@pytest.mark.soak
@pytest.mark.timeout(60 * SOAK_MINUTES + 300)
def test_soak(tmp_path: Path) -> None:
    """Mixed load for SOAK_MINUTES (60): after the first quarter neither memory nor file descriptors grow."""
    seen: list[tuple[int, int]] = []
    with crowd_at(tmp_path) as crowd:
        end, pushed = time.monotonic() + 60 * SOAK_MINUTES, list[int]()
        number = 0
        while time.monotonic() < end:
            number += 1
            crowd.read_nothing(30)
            crowd.send_halves(30)
            crowd.send_no_message(30)
            with ThreadPoolExecutor(8) as pool:
                for one in [pool.submit(push_much, crowd, time.monotonic() + 3, pushed) for _ in range(8)]:
                    one.result(120)
            crowd.work(10)
            crowd.client.checkpoint(f"c{number}", step=1)
            if number > 1:
                crowd.client.release(f"c{number - 1}")
            crowd.leave()
            wait_until(lambda: crowd.metric("weightserver_request_memory_bytes ") == 0)
            time.sleep(1)  # until what malloc kept is given back
            seen.append((crowd.memory(), crowd.process.num_fds()))
        quarter = max(1, len(seen) // 4)
        memory, descriptors = np.array(seen[quarter:]).T
        half = max(1, len(memory) // 2)
        print(
            f"{len(pushed)} pushes, {number} rounds, peak {crowd.peak >> 20} MiB, MiB and descriptors after each:",
            *((one >> 20, other) for one, other in seen),
        )
        assert crowd.peak < CEILING
        assert memory[half:].max() < memory[:half].max() + (64 << 20)
        assert descriptors[half:].max() <= descriptors[:half].max() + 4
