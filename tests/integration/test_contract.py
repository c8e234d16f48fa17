"""The wire contract without WeightClient: a shard refuses requests that the client would never send."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from tests.helpers.raw_calls import raw_channel, stub
from tests.integration.tables import begin, everything
from weightserver import FencedError, LocalCluster, TableSpec, WeightClient
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import MAX_ROWS, MAX_WRITE_ROWS, spec_to_proto

SPEC = TableSpec(num_rows=40, dim=2, rows_per_block=5)  # shard 0 has rows 0..4, 10..14, 20..24, 30..34
HORIZON = 6


def ids(*rows: int) -> pb.Rows:
    return pb.Rows(ids=struct.pack(f"<{len(rows)}q", *rows))


def ids_of(number: int) -> pb.Rows:
    """Rows 0 … number-1."""
    return pb.Rows(ranges=steps(0, number))


def values(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def rates(*numbers: float) -> pb.Rates:
    """All learning rates, as a client names them that knows nothing of the shard."""
    return pb.Rates(learning_rates=values(*numbers))


def steps(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


RATES = rates(*[0.5] * HORIZON)


class Shard:
    """Calls shard 0 through a stub, with a session."""

    def __init__(self, stub: Any, epoch: int) -> None:
        self.stub = stub
        self.epoch = epoch
        self.session_id: bytes = self.describe().session_id
        self.sequence = 0

    def describe(self) -> pb.DescribeResponse:
        return self.stub.Describe(pb.DescribeRequest(), timeout=60)

    def header(self, **changes: object) -> pb.WriteHeader:
        self.sequence += 1
        good = {
            "epoch": self.epoch,
            "session_id": self.session_id,
            "writer": b"c" * 16,
            "sequence": self.sequence,
            "step": 2,
        }
        return pb.WriteHeader(**(good | {"num_rows": 2, "rates": RATES} | changes))  # type: ignore[arg-type]

    def fetch(self, rows: pb.Rows, step: int = 3, rates: pb.Rates | None = None, **more: Any) -> list[pb.FetchResponse]:
        request = pb.FetchRequest(rows=rows, step=step, rates=rates or RATES, **more)
        return list(self.stub.Fetch(request, timeout=60))

    def push(self, *messages: pb.PushGradientsRequest) -> pb.WriteResponse:
        return self.stub.PushGradients(iter(messages), timeout=60)

    def push_rows(self, rows: pb.Rows, gradients: bytes = values(1, 1, 1, 1), **changes: object) -> pb.WriteResponse:
        return self.push(pb.PushGradientsRequest(header=self.header(**changes), rows=rows, gradients=gradients))

    def write(
        self,
        rows: pb.Rows,
        weight: bytes = values(1, 1, 1, 1),
        momentum: bytes = values(1, 1, 1, 1),
        last_step: bytes = steps(3, 3),
    ) -> pb.WriteResponse:
        message = pb.WriteStateRequest(
            header=self.header(), rows=rows, weight=weight, momentum_buffer=momentum, last_step=last_step
        )
        return self.stub.WriteState(iter([message]), timeout=60)

    def grow(self, num_rows: int, **more: int) -> pb.ExtendTableResponse:
        return self.stub.ExtendTable(pb.ExtendTableRequest(num_rows=num_rows, **more), timeout=60)

    def open(
        self, epoch: int, session_id: bytes = b"o" * 16, name: str = "thief", **more: Any
    ) -> pb.OpenSessionResponse:
        request = pb.OpenSessionRequest(name=name, epoch=epoch, session_id=session_id, **more)
        return self.stub.OpenSession(request, timeout=60)

    def checkpoint(self, step: int = 2, **more: Any) -> pb.WriteResponse:
        request = pb.CheckpointRequest(header=self.header(step=step), name="c", **more)
        return self.stub.Checkpoint(request, timeout=60)

    def create(self, spec: pb.TableSpec, **more: Any) -> pb.CreateTableResponse:
        return self.stub.CreateTable(pb.CreateTableRequest(spec=spec, **more), timeout=60)


NAN, INF = float("nan"), float("inf")
THIRD = 2**64 // 30 * 10  # three such steps lead round int64 and back; ± THIRD live on shard 0
OK = ids(0, 1)
MARK = "0123456789abcdef:1"
INVALID, RANGE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE
ABORTED, EXISTS = grpc.StatusCode.ABORTED, grpc.StatusCode.ALREADY_EXISTS


def spec(**changes: object) -> pb.TableSpec:
    """That of the table, with other fields."""
    message = spec_to_proto(SPEC)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def settled(shard: Shard) -> pb.WriteResponse:
    header = shard.header(writer=b"l" * 16, sequence=2)
    shard.stub.SettleWrite(pb.SettleWriteRequest(header=header), timeout=60)
    return shard.push_rows(OK, writer=b"l" * 16, sequence=2)


REFUSED: dict[str, tuple[Callable[[Shard], object], grpc.StatusCode, str]] = {
    "fetch: a row of the other shard": (lambda s: s.fetch(ids(0, 5)), INVALID, "row 5 does not live on shard 0 of 2"),
    "fetch: a row beyond the table": (lambda s: s.fetch(ids(0, 40)), INVALID, r"rows must lie in 0\.\.39, got 0\.\.40"),
    "fetch: a negative row": (lambda s: s.fetch(ids(-1, 0)), INVALID, r"rows must lie in 0\.\.39, got -1"),
    "fetch: rows in another order": (lambda s: s.fetch(ids(1, 0)), INVALID, "must increase strictly"),
    "fetch: a row twice": (lambda s: s.fetch(ids(1, 1)), INVALID, "must increase strictly"),
    "fetch: rows whose differences wrap": (lambda s: s.fetch(ids(0, THIRD, -THIRD, 1)), INVALID, "increase strictly"),
    "fetch: too many rows": (
        lambda s: s.fetch(ids_of(MAX_ROWS + 1)),
        INVALID,
        "may name at most 524288 rows: split it",
    ),
    "fetch: a negative step": (lambda s: s.fetch(OK, -1), RANGE, "step must not be negative, got -1"),
    "fetch: a step beyond the schedule": (lambda s: s.fetch(OK, 7), RANGE, "needs the learning rates of 7 steps"),
    "fetch: a row's past": (lambda s: s.fetch(OK, 1), RANGE, "row 0 has seen 2 updates"),
    "push: no message": (lambda s: s.push(), INVALID, "the first message of a write has no header"),
    "push: no header": (
        lambda s: s.push(pb.PushGradientsRequest(rows=OK, gradients=values(1, 1, 1, 1))),
        INVALID,
        "the first message of a write has no header",
    ),
    "push: a writer of 15 bytes": (lambda s: s.push_rows(OK, writer=b"c" * 15), INVALID, "writer must be 16 bytes"),
    "push: no sequence number": (lambda s: s.push_rows(OK, sequence=0), INVALID, "sequence must be positive"),
    "push: a settled sequence number": (settled, ABORTED, "of this writer is settled, and can have no effect any more"),
    "push: no session": (lambda s: s.push_rows(OK, epoch=0), ABORTED, "session 0 was superseded"),
    "push: a session to come": (lambda s: s.push_rows(OK, epoch=s.epoch + 1), ABORTED, "is not known, the newest is"),
    "push: another's session": (lambda s: s.push_rows(OK, session_id=b"x" * 16), ABORTED, r"is another one, epoch \d+"),
    "push: a session without its id": (lambda s: s.push_rows(OK, session_id=b""), ABORTED, "is another one"),
    "push: fewer rows than announced": (lambda s: s.push_rows(OK, num_rows=3), INVALID, "announced 3 rows and"),
    "push: more rows than announced": (lambda s: s.push_rows(ids_of(9)), INVALID, "announced 2 rows and contained 9"),
    "push: too many rows": (
        lambda s: s.push_rows(OK, num_rows=MAX_WRITE_ROWS + 1),
        INVALID,
        "16777217 rows in one write, at most 16777216 are accepted: split it",
    ),
    "push: a row of the other shard": (lambda s: s.push_rows(ids(4, 5)), INVALID, "row 5 does not live on shard 0"),
    "push: rows that go back in the second message": (
        lambda s: s.push(
            pb.PushGradientsRequest(header=s.header(), rows=ids(3), gradients=values(1, 1)),
            pb.PushGradientsRequest(rows=ids(2), gradients=values(1, 1)),
        ),
        INVALID,
        "must increase strictly",
    ),
    "push: a gradient too few": (
        lambda s: s.push_rows(OK, values(1, 1, 1)),
        INVALID,
        "gradients of 2 rows has 12 bytes, they need 16",
    ),
    "push: half a number": (lambda s: s.push_rows(OK, bytes(15)), INVALID, "gradients of 2 rows has 15 bytes"),
    "push: NaN": (lambda s: s.push_rows(OK, values(1, 1, 1, NAN)), INVALID, "gradients holds NaN or infinite values"),
    "push: a negative step": (lambda s: s.push_rows(OK, step=-1), RANGE, r"step must not be negative, got -1"),
    "push: the step at the horizon": (lambda s: s.push_rows(OK, step=HORIZON), RANGE, "learning rates of 7 steps"),
    "write: NaN in a weight": (lambda s: s.write(OK, values(1, NAN, 1, 1)), INVALID, "weight holds NaN or infinite"),
    "write: NaN in a momentum": (lambda s: s.write(OK, momentum=values(1, NAN, 1, 1)), INVALID, "buffer holds NaN or"),
    "write: a last_step too few": (
        lambda s: s.write(OK, last_step=steps(3)),
        INVALID,
        "last_step of 2 rows has 8 bytes, they need 16",
    ),
    "write: a negative last_step": (lambda s: s.write(OK, last_step=steps(3, -1)), RANGE, "must not be negative"),
    "write: a last_step to come": (lambda s: s.write(OK, last_step=steps(3, 7)), RANGE, "learning rates of 7 steps"),
    "write: an older state, second of two": (
        lambda s: s.write(ids(1, 3), last_step=steps(3, 0)),
        RANGE,
        "row 3 has seen 2 updates, the state to write only 0",
    ),
    "write: a row twice": (lambda s: s.write(ids(3, 3)), INVALID, "must increase strictly"),
    "rates: a negative start": (lambda s: s.fetch(OK, rates=pb.Rates(start=-1)), INVALID, "start must not be negative"),
    "rates: NaN": (lambda s: s.fetch(OK, rates=rates(NAN)), INVALID, "learning_rates holds NaN or infinite"),
    "rates: a negative one": (lambda s: s.push_rows(OK, rates=rates(-0.1)), INVALID, "finite and not negative"),
    "rates: half of one": (
        lambda s: s.push_rows(OK, rates=pb.Rates(learning_rates=bytes(3))),
        INVALID,
        "learning_rates has 3 bytes",
    ),
    "rates: too many": (
        lambda s: s.fetch(OK, rates=pb.Rates(start=2**25 + 1)),
        RANGE,
        "a schedule has at most 33554432 steps, not 33554433: give fewer",
    ),
    "fetch: other learning rates": (
        lambda s: s.fetch(OK, rates=rates(0.5, 0.4, 0.5)),
        EXISTS,
        r"the learning rate of step 1 is 0\.5 and was used, not 0\.4: only steps from 2 on may have others",
    ),
    "push: other learning rates": (
        lambda s: s.push_rows(OK, rates=pb.Rates(start=2, digest=7, learning_rates=values(0.5))),
        EXISTS,
        r"were updated by other learning rates before step 2 than the request has: call describe\(\)",
    ),
    "push: learning rates that the shard lacks": (
        lambda s: s.push_rows(OK, rates=pb.Rates(start=3, digest=7)),
        RANGE,
        "the shard does not have the learning rates that the request names by their digest, it has 2",
    ),
    "drop: a table of a newer session": (
        lambda s: s.stub.DropTable(pb.DropTableRequest(epoch=s.epoch - 1), timeout=60),
        ABORTED,
        r"is now that of epoch \d+ \(run 'owner'\), no longer of epoch \d+: nothing was dropped",
    ),
    "session: no epoch": (lambda s: s.open(0), INVALID, "epoch must be positive"),
    "session: a name too long": (lambda s: s.open(s.epoch + 1, name="n" * 257), INVALID, "more than 256 characters"),
    "session: a short id": (lambda s: s.open(s.epoch + 1, b"o"), INVALID, "session_id must be 16 bytes"),
    "session: the current epoch": (lambda s: s.open(s.epoch), ABORTED, "is not newer than epoch"),
    "session: joining the next epoch": (lambda s: s.open(s.epoch + 1, join=True), ABORTED, "is not known"),
    "session: joining that of another id": (
        lambda s: s.open(s.epoch, b"x" * 16, join=True),
        ABORTED,
        "of this shard is another one",
    ),
    "session: marks of too few shards": (lambda s: s.open(s.epoch + 1, peers=[MARK]), INVALID, "1 marks for 2 shards"),
    "session: an invalid mark": (
        lambda s: s.open(s.epoch + 1, peers=[MARK, f"{MARK}x"]),
        INVALID,
        "'0123456789abcdef:1x' is not a mark of a shard: give incarnation:commit, as the shard answers it",
    ),
    "checkpoint: marks of too many shards": (lambda s: s.checkpoint(peers=[MARK] * 3), INVALID, "3 marks for 2 shards"),
    "checkpoint: a step to come": (lambda s: s.checkpoint(HORIZON + 1), RANGE, "needs the learning rates of 7 steps"),
    "rollback: no timeline": (
        lambda s: s.stub.Rollback(pb.CheckpointRequest(header=s.header(), name="kept"), timeout=60),
        INVALID,
        "timeline must be 16 bytes",
    ),
    "table: no spec": (lambda s: s.create(pb.TableSpec()), INVALID, r"num_rows must lie in 1\.\."),
    "table: another one": (
        lambda s: s.create(spec(num_rows=41)),
        EXISTS,
        "table exists, num_rows 40 there and 41 here",
    ),
    "table: the same spec of another identity": (
        lambda s: s.create(spec(), identity=b"x" * 16),
        EXISTS,
        "shard 0 holds another table of the same spec, of epoch ",
    ),
    "table: a short identity": (lambda s: s.create(spec(), identity=b"x"), INVALID, "identity must be 16 bytes"),
    "table: a dtype of the future": (lambda s: s.create(spec(dtype=2)), INVALID, "dtype 2 of the table is unknown"),
    "table: one learning rate, and no correction": (
        lambda s: s.create(spec(single_rate=True, correction=False)),
        INVALID,
        "single_rate is a kind of correction: set correction too",
    ),
    "table: fewer rows": (lambda s: s.grow(39), INVALID, "the table has 40 rows, and can only become larger, not 39"),
    "table: too many rows": (lambda s: s.grow(2**62), INVALID, r"num_rows must lie in 1\.\."),
    "table: more rows for a fenced session": (lambda s: s.grow(41, epoch=s.epoch - 1), ABORTED, "was superseded"),
    "table: more rows for a session to come": (lambda s: s.grow(41, epoch=s.epoch + 1), ABORTED, "is not known"),
    "table: more rows of another one": (lambda s: s.grow(41, table=1), EXISTS, "the table was replaced"),
}


@contextmanager
def begun(client: WeightClient, cluster: LocalCluster) -> Iterator[Shard]:
    """A table on which rows 0..4 of shard 0 have seen 2 updates."""
    epoch = begin(client, SPEC, np.full(HORIZON, 0.5), session="owner")
    client.push_gradients(np.arange(5), np.ones((5, 2), np.float32), step=1)
    with raw_channel(cluster.addresses[0]) as channel:
        yield Shard(stub(channel), epoch)


@pytest.fixture
def shard(client: WeightClient, cluster: LocalCluster) -> Iterator[Shard]:
    with begun(client, cluster) as shard:
        yield shard


@pytest.fixture(scope="module")
def standing() -> Iterator[tuple[WeightClient, Shard]]:
    """A table for all that is refused."""
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client, begun(client, cluster) as shard:
        yield client, shard


@pytest.mark.parametrize(("call", "status", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_the_shard(
    standing: tuple[WeightClient, Shard], call: Callable[[Shard], object], status: grpc.StatusCode, message: str
) -> None:
    client, shard = standing
    before, used = everything(client), shard.sequence
    with pytest.raises(grpc.RpcError, match=message) as raised:
        call(shard)
    assert raised.value.code() is status
    assert "\n" not in raised.value.details()
    assert everything(client) == before
    # Neither did a refused write use up its sequence number, or the writer's right to continue.
    if shard.sequence > used:
        assert not shard.push_rows(ids(20, 21), sequence=shard.sequence, step=1).duplicate


def test_a_write_that_is_right_in_every_way(shard: Shard, client: WeightClient) -> None:
    """The valid write that the refused ones are derived from, in two messages; a repetition changes nothing."""
    header = shard.header(num_rows=3)
    messages = [
        pb.PushGradientsRequest(header=header, rows=ids(10, 12), gradients=values(1, 2, 3, 4)),
        pb.PushGradientsRequest(rows=pb.Rows(ranges=steps(20, 1)), gradients=values(5, 6)),
    ]
    before = client.fetch([10, 12, 20], step=2)
    assert not shard.push(*messages).duplicate
    after = client.fetch([10, 12, 20], step=3)
    moved = before - after
    np.testing.assert_allclose(moved, 0.5 * np.array([[1, 2], [3, 4], [5, 6]]), atol=1e-4)
    assert shard.push(*messages).duplicate
    assert np.array_equal(client.fetch([10, 12, 20], step=3), after)
    (answer,) = shard.fetch(ids(10, 12), state=True)
    assert np.frombuffer(answer.weight, "<f4").tolist() == after[:2].ravel().tolist()
    assert np.frombuffer(answer.last_step, "<i8").tolist() == [3, 3]


def test_a_write_cut_off_leaves_nothing(shard: Shard, client: WeightClient) -> None:
    """The writer dies after the first of two messages."""
    before = everything(client)
    stop, made = [], threading.Event()

    def messages() -> Iterator[pb.PushGradientsRequest]:
        yield pb.PushGradientsRequest(header=shard.header(num_rows=2), rows=ids(0), gradients=values(1, 1))
        made.wait(60)
        stop.append(call.cancel())
        yield pb.PushGradientsRequest(rows=ids(1), gradients=values(1, 1))

    with raw_channel(client.describe().shards[0].address) as channel:
        call = stub(channel).PushGradients.future(messages(), timeout=60)
        made.set()
        with pytest.raises(grpc.FutureCancelledError):
            call.result(60)
    assert stop == [True]
    assert everything(client) == before
    assert not shard.push_rows(OK, sequence=shard.sequence).duplicate


@pytest.mark.parametrize("name", ["a" * 256, "two\nlines", "\U0001d6c8" * 256])
def test_no_run_name_garbles_an_error(client: WeightClient, cluster: LocalCluster, name: str) -> None:
    """A fenced writer learns at once which run fenced it: the text must fit into gRPC's headers."""
    begin(client, SPEC, np.full(HORIZON, 0.5), session="old")
    with WeightClient(cluster.addresses, timeout_seconds=5, retry_seconds=2) as newer:
        newer.open_session(name)
        with pytest.raises(ValueError, match="name has 257 characters: give one of at most 256"):
            newer.open_session("a" * 257)
    with pytest.raises(FencedError, match="superseded") as raised:
        client.push_gradients([0], np.ones((1, 2), np.float32), step=0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("beyond", [2**20 + 1, 2**63, 2**64 - 1])
def test_no_session_uses_up_the_epochs(shard: Shard, beyond: int) -> None:
    """After such an epoch no newer session could be opened, and the table could not be dropped."""
    newest = shard.describe().epoch
    with pytest.raises(grpc.RpcError, match="is far beyond epoch") as raised:
        shard.open(min(newest + beyond, 2**64 - 1))
    assert raised.value.code() is INVALID
    assert shard.describe().epoch == newest
