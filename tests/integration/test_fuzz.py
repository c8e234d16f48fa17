"""Requests of every method with nearly valid fields, with changed bytes, and random bytes, sent to the
handlers and to the bare port: each is refused or executed, and the shard continues undamaged."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.helpers.fake_context import FakeContext
from tests.helpers.memory_storage import MemoryStorage
from tests.helpers.raw_calls import raw_channel, stub
from tests.helpers.schedules import used_by
from tests.helpers.stored import decoded
from tests.integration.handlers import Handlers, handlers
from tests.integration.tables import everything
from weightserver import LocalCluster, TableSpec, WeightClient, __version__
from weightserver.core.errors import StepError
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import ACKNOWLEDGED_KEY, MARK_KEY, VERSION_KEY, spec_to_proto, table_number
from weightserver.server.admission import BASE_BYTES
from weightserver.server.service import NAME, add_to_server
from weightserver.shard.changes import ShardChange
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader

SPEC = TableSpec(num_rows=60, dim=2, rows_per_block=5)
SPECS = [SPEC, replace(SPEC, correction="paper"), replace(SPEC, dtype="bfloat16")]
"""One for each call that creates a table."""
METHODS = pb.DESCRIPTOR.services_by_name["WeightServer"].methods
METHODS_BY_NAME = pb.DESCRIPTOR.services_by_name["WeightServer"].methods_by_name
HORIZON = 6
MEMORY_MIB = 64
INTEGERS = [0, 1, 2, 3, 5, 6, 59, 60, 1 << 22, (1 << 22) + 1, 1 << 24, 2**31 - 1, 2**32, 2**62, 2**63 - 1, 2**64 - 1]
FORBIDDEN = {"UNKNOWN", "INTERNAL", "FAILED_PRECONDITION", "DATA_LOSS", "UNIMPLEMENTED"}
VERSIONS = ["", "0", "0.1", "0.1.9", "1", "-1.2", "x.y", "0.2rc1", ".", "0.", "9" * 5000 + ".0", "v" * 7000]
MARK = "0123456789abcdef:"
MARKS = ["", ":", "x", MARK, f"{MARK}-1", "123:4", f"{MARK}1e3", MARK + "9" * 5000]
Metadata = tuple[tuple[str, str], ...]


class Inputs:
    """Makes random requests from a seed; `epoch` is the session that they may name, 0 for none."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._random = random.Random(seed)
        self._epoch = epoch
        self.table = 0
        """The table that requests may name."""
        self.spec: TableSpec | None = None
        """The spec of the table."""
        self.session_id = b"o" * 16
        """The session id that requests may name."""
        self.mark = f"{MARK}12"
        """The mark that requests may name."""

    def metadata(self, mark: str) -> tuple[Metadata, set[str]]:
        """Returns a call's metadata, mostly valid for a shard with that mark, and the errors allowed if it is not
        valid."""
        r = self._random
        if r.random() < 0.02:
            versions = [] if r.random() < 0.2 else [(VERSION_KEY, r.choice(VERSIONS))]
            return (*versions, (ACKNOWLEDGED_KEY, mark)), {"INVALID_ARGUMENT"}
        version = (VERSION_KEY, r.choice([__version__, "0.3", "0.3.99"]))
        if r.random() < 0.02:
            incarnation, _, commit = mark.partition(":")
            lost = [f"{incarnation}:{int(commit) + 10**9}", "0" * 16 + ":0", f"{'f' * 16}:{2**63}"]
            return (version, (ACKNOWLEDGED_KEY, r.choice(lost))), {"DATA_LOSS"}
        if r.random() < 0.02:
            return (version, (ACKNOWLEDGED_KEY, r.choice(MARKS[1:]))), {"INVALID_ARGUMENT"}
        return (version, (ACKNOWLEDGED_KEY, mark)) if r.random() < 0.5 else (version,), set()

    def request(self) -> tuple[Any, list[bytes]]:
        """Returns a method of the contract and the messages of one call."""
        method = self._random.choice(METHODS)
        if method.name == "DropTable" and self._random.random() < 0.9:
            method = self._random.choice(METHODS[-6:])
        kind = GetMessageClass(method.input_type)
        count = self._random.choice([1, 1, 1, 2, 3, 0]) if method.client_streaming else 1
        return method, [self._bytes(kind, first=number == 0) for number in range(count)]

    def _bytes(self, kind: type[Message], *, first: bool) -> bytes:
        r = self._random
        if r.random() < 0.05:
            return r.randbytes(r.choice([0, 1, 7, 40, 3000]))
        message = kind()
        self._fill(message, first=first)
        data = bytearray(message.SerializeToString())
        if r.random() < 0.25:
            for _ in range(r.randint(1, 4)):
                at = r.randrange(len(data) + 1)
                if r.random() < 0.5 and at < len(data):
                    data[at] = r.randrange(256)
                elif r.random() < 0.5:
                    data[at:at] = r.randbytes(r.randint(1, 9))
                else:
                    del data[at : at + r.randint(1, 9)]
        return bytes(data)

    def _fill(self, message: Any, *, first: bool) -> None:
        """Fills each field with a mostly valid value, else with anything of its type."""
        r = self._random
        for field in message.DESCRIPTOR.fields:
            if r.random() < 0.04 or (field.name == "header" and not first and r.random() < 0.9):
                continue
            if field.is_repeated:
                for _ in range(r.choice([0, 0, 0, 1, 2, 2, 2, 2, 2])):
                    getattr(message, field.name).append(r.choice(MARKS) if r.random() < 0.03 else self.mark)
            elif field.message_type is not None:
                self._fill(getattr(message, field.name), first=first)
                if field.name == "spec" and r.random() < 0.7:
                    message.spec.CopyFrom(spec_to_proto(r.choice([*SPECS, *[self.spec or SPEC] * 6])))
            elif isinstance(message, pb.ExtendTableRequest) and field.name == "num_rows" and r.random() < 0.5:
                message.num_rows = SPEC.num_rows + r.choice([0, 1, 12])
            elif field.cpp_type == field.CPPTYPE_ENUM:
                setattr(message, field.name, r.choice([*field.enum_type.values_by_number, 7]))
            elif field.cpp_type == field.CPPTYPE_BOOL:
                setattr(message, field.name, r.random() < 0.5)
            elif field.cpp_type == field.CPPTYPE_DOUBLE:
                setattr(message, field.name, r.choice([0.0, 0.9, 1.0, -1.0, 1e300, float("inf"), float("nan")]))
            elif field.type == field.TYPE_BYTES:
                setattr(message, field.name, self._field_bytes(field.name))
            elif field.cpp_type == field.CPPTYPE_STRING:
                setattr(message, field.name, r.choice([*"aaaaaab", "", "n" * 257, "zwei\nZeilen", "\U0001d6c8" * 256]))
            else:
                signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
                bits = 32 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
                value = self._integer(field.name)
                setattr(
                    message,
                    field.name,
                    max(-(1 << bits - 1), min(value, (1 << bits - signed) - 1))
                    if signed
                    else min(abs(value), (1 << bits) - 1),
                )

    def _integer(self, name: str) -> int:
        r = self._random
        right = {"epoch": self._epoch, "table": self.table, "num_rows": 2, "num_blocks": 2, "start": 0, "digest": 0}
        if r.random() < 0.85 and name in right:
            return right[name]
        if r.random() < 0.7:
            return r.randint(1, 1100) if name == "sequence" else r.randint(0, HORIZON)
        return r.choice(INTEGERS) * r.choice([1, 1, 1, -1])

    def _field_bytes(self, name: str) -> bytes:
        r = self._random
        if r.random() < 0.08:
            return r.randbytes(r.choice([0, 1, 8, 15, 16, 100]))
        if name == "session_id" and r.random() < 0.85:
            return self.session_id
        if name in ("writer", "session_id", "identity"):
            return bytes([r.randrange(100 if name == "writer" else 3)]) * 16  # a writer's numbers only grow
        if name == "ranges":
            return b"" if r.random() < 0.8 else struct.pack("<2q", *(self._signed() for _ in range(2)))
        if name == "ids":
            first = r.choice([0, 1, 10, 23])
            ids = [first, first + 1] if r.random() < 0.8 else [self._signed() for _ in range(r.randint(0, 5))]
            return struct.pack(f"<{len(ids)}q", *ids)
        if name == "last_step":
            return struct.pack("<2q", *(r.randint(0, HORIZON) if r.random() < 0.9 else self._signed() for _ in "ab"))
        if name == "learning_rates" and r.random() < 0.97:
            return np.full(HORIZON, 0.5, "<f4").tobytes()
        values = [
            r.choice([0.0, 0.1, 1.0, 0.5]) if r.random() < 0.97 else r.choice([3e38, float("nan"), -1]) for _ in "abcd"
        ]
        stored = np.array(values, "<f4")
        if self.spec is not None and self.spec.dtype == "bfloat16" and r.random() < 0.95:
            return (stored.view("<u4") >> 16).astype("<u2").tobytes()
        return stored.tobytes()

    def _signed(self) -> int:
        return max(-(2**63), min(self._random.choice(INTEGERS) * self._random.choice([1, -1]), 2**63 - 1))


class Ended(Exception):
    """The call ended with a status."""


class Caller(FakeContext):
    """Keeps what its call ended with."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata
        self.status, self.details, self.mark = "OK", "", ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [*self._metadata]

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.mark = dict(metadata).get(MARK_KEY, "")

    def abort(self, status: grpc.StatusCode, details: str) -> NoReturn:
        self.status, self.details = status.name, details
        raise Ended

    def cancel(self) -> None: ...
    def time_remaining(self) -> None: ...

    def is_active(self) -> bool:
        return True


class InProcess:
    """A shard's handlers, without a channel or a disk."""

    def __init__(self, served: Handlers) -> None:
        self.shard, self.memory, self.do = served.shard, served.memory, served.do
        self._specs = itertools.cycle(SPECS)
        registered: list[Any] = []
        add_to_server(served.service, SimpleNamespace(add_generic_rpc_handlers=registered.extend))
        self._handlers = {}
        for method in METHODS:
            details = SimpleNamespace(method=f"/{NAME}/{method.name}", invocation_metadata=())
            self._handlers[method.name] = registered[0].service(details)
        self.prepare()

    def prepare(self) -> None:
        """Makes a table and a session, whose epoch is 1 at first."""
        if self.shard.spec is None:
            spec = next(self._specs)
            self.do(lambda batch: batch.create_table(spec, bytes([1]) * 16))  # one that requests may name
            self.do(lambda batch: batch.open_session("fuzz", self.shard.state.epoch + 1, b"o" * 16))
            header = WriteHeader(self.shard.state.epoch, b"o" * 16, b"p" * 16, 1, 0)
            self.do(lambda batch: batch.checkpoint(header, "a"))  # before there are rows: later ones are often refused

    def call(self, method: Any, messages: list[bytes], metadata: Metadata = ((VERSION_KEY, __version__),)) -> Caller:
        handler, context = self._handlers[method.name], Caller(metadata)
        with contextlib.suppress(Ended):
            if handler.response_streaming:
                for _ in handler.stream_stream(iter(messages), context):
                    pass
            else:
                handler.stream_unary(iter(messages), context)
        context.leave()
        return context


@pytest.fixture
def in_process() -> Iterator[InProcess]:
    with handlers(MemoryStorage(), num_shards=2) as served:
        yield InProcess(served)


@pytest.mark.parametrize("count", [5_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_handlers(count: int, in_process: InProcess) -> None:
    """The session's epoch may be guessed, so many requests succeed; rows stay finite and every reservation is ended."""
    answers: Counter[tuple[str, str]] = Counter()
    lost = 0
    inputs = Inputs(seed=0, epoch=0)
    for number in range(count):
        state = in_process.shard.state
        inputs._epoch, inputs.session_id, inputs.mark = state.epoch, bytes.fromhex(state.session_id), state.mark
        if number % 500 == 499 or (
            in_process.shard.spec not in SPECS and (in_process.shard.spec is None or number % 50 == 0)
        ):
            in_process.do(ShardChange.drop_table)
            in_process.prepare()
        inputs.spec = in_process.shard.spec
        inputs.table = (
            table_number(in_process.shard.spec, in_process.shard.table_identity) if in_process.shard.spec else 0
        )
        (method, messages), before = inputs.request(), in_process.shard.state
        metadata, refusals = inputs.metadata(before.mark)
        outcome = in_process.call(method, messages, metadata)
        told = (number, method.name, outcome.status, outcome.details, messages, metadata)
        assert outcome.status not in FORBIDDEN - refusals, told
        assert "\n" not in outcome.details, outcome.details
        assert len(outcome.details) < 2000, told
        if refusals:
            assert outcome.status in {*refusals, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, told
            assert in_process.shard.state == before, told
        if outcome.status == "OK":
            assert outcome.mark == in_process.shard.state.mark, told
        assert in_process.memory.used_bytes == 0
        answers[method.name, outcome.status] += 1
        lost += outcome.status == "DATA_LOSS"
    succeeded = {method for method, status in answers if status == "OK"}
    assert succeeded == {method.name for method in METHODS}
    assert lost > count // 200
    if in_process.shard.spec in SPECS:
        rows = np.flatnonzero((np.arange(SPEC.num_rows) // SPEC.rows_per_block) % 2 == 0)
        assert np.isfinite(
            decoded(in_process.shard.fetch(rows, step=None, state=True), in_process.shard.spec).weight
        ).all()
        rates = used_by(in_process.shard, np.full(HORIZON, 0.5)[len(in_process.shard.used_rates) :])
        for row in rows:  # corrected they are finite, or the fetch says which row and update
            try:
                chunks = in_process.shard.fetch(np.array([row]), step=HORIZON, state=True, rates=rates)
                part = decoded(chunks, in_process.shard.spec)
                assert np.isfinite([part.weight, part.momentum_buffer]).all()
            except StepError as error:
                assert f"row {row} would be infinite or NaN after update" in str(error)  # noqa: PT017
    in_process.prepare()
    opened = in_process.shard.state.epoch + 1
    for request in (
        pb.DescribeRequest(),
        pb.OpenSessionRequest(name="next", epoch=opened, session_id=b"n" * 16, take_over=True),
        pb.DropTableRequest(epoch=opened),
        pb.DescribeRequest(),
    ):
        method = METHODS_BY_NAME[type(request).__name__.removesuffix("Request")]
        outcome = in_process.call(method, [request.SerializeToString()])
        assert outcome.status == "OK", (method.name, outcome.details)


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_error_of_the_shards_own_is_not_told_as_the_callers(
    error: type[Exception], in_process: InProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a handler or of the committer's thread; the log has its traceback."""

    def fails(*arguments: object, **options: object) -> None:
        raise error("a slip")

    monkeypatch.setattr(Shard, "learning_rates", fails)
    monkeypatch.setattr(ShardChange, "drop_table", fails)
    for name, request in (("ReadSchedule", pb.ReadScheduleRequest()), ("DropTable", pb.DropTableRequest())):
        caplog.clear()
        outcome = in_process.call(METHODS_BY_NAME[name], [request.SerializeToString()])
        assert (outcome.status, outcome.details) == ("INTERNAL", f"shard 0 failed on {name}")
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [error]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, WeightClient]]:
    directory = tmp_path_factory.mktemp("fuzz")
    options = ["--request-memory-mib", str(MEMORY_MIB), "--stall-seconds", "2"]
    with LocalCluster(1, directory, serve_options=options) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(HORIZON, 0.5))
        client.open_session("owner", hold=False)
        client.push_gradients(np.arange(40), np.ones((40, 2), np.float32), step=1)
        client.checkpoint("kept", step=2)
        with raw_channel(cluster.addresses[0]) as channel:  # an epoch that no input guesses
            opening = pb.OpenSessionRequest(name="owner", epoch=1_000_003, session_id=b"o" * 16)
            stub(channel).OpenSession(opening, timeout=10)
        yield cluster, client
    assert "Traceback" not in (directory / "shard-0.log").read_text()


def own_memory(process: psutil.Process) -> int:
    """Bytes of memory without the map of the data file."""
    return int(process.memory_info().rss - process.memory_info().shared)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_at_the_bare_port(place: tuple[LocalCluster, WeightClient], count: int) -> None:
    """Bytes at random, parts of HTTP/2's greeting, frames of every kind after a whole one; some never hang up."""
    cluster, client = place
    before, r = everything(client), random.Random(3)
    process, (host, _, port) = psutil.Process(cluster.processes[0].pid), cluster.addresses[0].rpartition(":")
    descriptors = process.num_fds()
    held: list[socket.socket] = []

    def frame() -> bytes:
        payload = r.randbytes(r.choice([0, 4, 5, 8, 40, 3000]))
        size = len(payload) if r.random() < 0.8 else r.choice([0, 1, 2**24 - 1])
        return (
            struct.pack(">I", size)[1:]
            + bytes([r.randrange(12), r.randrange(256)])
            + struct.pack(">I", r.choice([0, 1, 3, 2**31 - 1]))
            + payload
        )

    for number in range(count):
        data = [
            r.randbytes(r.choice([1, 24, 500, 70_000])),
            PREFACE[: r.randrange(len(PREFACE))],
            PREFACE + b"".join(frame() for _ in range(r.randint(1, 20))),
            PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"".join(frame() for _ in range(r.randint(1, 20))),
        ][number % 4]
        one = socket.create_connection((host, int(port)), timeout=10)
        held.append(one)
        with contextlib.suppress(OSError):  # it may have hung up
            one.sendall(data)
        if len(held) > 100:
            held.pop(r.randrange(100)).close()
    assert everything(client) == before
    for one in held:
        one.close()
    deadline = time.monotonic() + 20
    while process.num_fds() > descriptors + 5:
        assert time.monotonic() < deadline, "connections whose peer is gone are kept"
        time.sleep(0.05)
    assert own_memory(process) < BASE_BYTES + (MEMORY_MIB << 20)
