"""A shard's caller that repeats its writes, writes for another session, says nothing or gives no token; and that can
keep the shard from writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import lmdb
import numpy as np

from tests.helpers.raw_calls import raw_channel, stub
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import ACKNOWLEDGED_KEY, rows_to_proto
from weightserver.server.service import NAME

_SECONDS = 60


class RawWriter(AbstractContextManager["RawWriter"]):
    """Calls one shard, whose data are in `directory`, about these rows of it."""

    def __init__(self, address: str, token: str, directory: Path, rows: list[int]) -> None:
        self._stack = ExitStack()
        self._channel, self._rows = self._stack.enter_context(raw_channel(address)), np.array(rows)
        self._stub, self._token = stub(self._channel), (("authorization", f"Bearer {token}"),)
        self.know()
        self._data = self._stack.enter_context(lmdb.open(str(directory), map_size=1 << 30, lib_version=0))
        self._number = 0

    def know(self) -> None:
        """Learns the session, the last update, and the learning rates."""
        self._known = self._stub.Describe(pb.DescribeRequest(), metadata=self._token, timeout=_SECONDS)
        schedule = self._stub.ReadSchedule(pb.ReadScheduleRequest(), metadata=self._token, timeout=_SECONDS)
        self._rates = schedule.learning_rates

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def push(self, *, repeated: bool = False, session_id: bytes = b"", ahead: int = 0) -> Any:
        """Begins a push for the last finished update, or one `ahead` of it whose learning rate is 0.01, by a writer of
        its own unless it repeats the last one."""
        self._number += not repeated
        header = pb.WriteHeader(
            epoch=self._known.epoch,
            session_id=session_id or self._known.session_id,
            writer=self._number.to_bytes(16, "big"),
            sequence=1,
            step=self._known.clock - 1 + ahead,
            num_rows=len(self._rows),
            rates=pb.Rates(learning_rates=self._rates + ahead * np.float32(0.01).tobytes()),
        )
        gradients = bytes(self._known.spec.dim * 4 * len(self._rows))
        message = pb.PushGradientsRequest(header=header, rows=rows_to_proto(self._rows), gradients=gradients)
        return self._stub.PushGradients.future(iter([message]), metadata=self._token, timeout=_SECONDS)

    def describe(self, *metadata: tuple[str, str]) -> grpc.StatusCode:
        """The status of a call with this metadata instead of the token."""
        call = self._stub.Describe.future(pb.DescribeRequest(), metadata=metadata, timeout=_SECONDS)
        call.exception()
        return call.code()

    def describe_of_another(self) -> grpc.StatusCode:
        """The status of a call that knows of an acknowledged write that the shard has never had."""
        return self.describe(*self._token, (ACKNOWLEDGED_KEY, f"{0:016}:1"))

    def fetch(self) -> grpc.StatusCode:
        """The status of a fetch of the rows as they are stored."""
        call = self._begin_fetch()
        with suppress(grpc.RpcError):
            list(call)
        return call.code()

    def _begin_fetch(self) -> Any:
        rows = pb.FetchRequest(rows=rows_to_proto(self._rows), raw=True)
        return self._stub.Fetch(rows, metadata=self._token, timeout=_SECONDS)

    def say_nothing(self, count: int) -> None:
        """Makes calls that never send their message, until the shard cuts them off."""

        def nothing(end: Event) -> Iterator[bytes]:
            end.wait(_SECONDS)
            yield b""

        end = Event()
        begin = self._channel.stream_unary(f"/{NAME}/Describe").future
        calls = [begin(nothing(end), metadata=self._token, timeout=_SECONDS) for _ in range(count)]
        assert {call.exception().code() for call in calls} == {grpc.StatusCode.CANCELLED}
        end.set()

    def damage(self, file: Path) -> None:
        """Changes the first stored row, of 64 bytes, in the shard's file, while nobody writes."""
        (answer,) = self._begin_fetch()
        with file.open("r+b") as data:
            changed = data.read().replace(answer.weight[:64], bytes(64))  # also where pages were before
            data.seek(0)
            data.write(changed)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps a snapshot of the data file, as a notebook may."""
        with self._data.begin():
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets no transaction of the shard begin."""
        with self._data.begin(write=True):
            yield
