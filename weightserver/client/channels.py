"""The gRPC channels to one shard: calls take the newest one, and one that proved useless is replaced.

A new channel has connections of its own, and looks the shard's name up again: where an attempt brought no byte, the
shard may serve at another address by now. The caller's own thread calls gRPC, and a signal that interrupts it there may
leave a lock of its channel taken for ever: then the next call has a new one too.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from weightserver.client.threads import run_for
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS, MAX_MESSAGE_BYTES

_SERVICE = pb.DESCRIPTOR.services_by_name["WeightServer"]
_OPTIONS = [
    (ChannelOptions.SingleThreadedUnaryStream, 1),  # an answer's chunks pass through no second thread
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # what a connection may take, handshakes included: it is no pause
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_SECONDS),  # a machine that vanished answers no ping
    ("grpc.keepalive_timeout_ms", 1000 * KEEPALIVE_TIMEOUT_SECONDS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel would otherwise take the connection of the old one
    ("grpc.enable_http_proxy", 0),  # one that the environment names would read the token of a call without TLS
]
CLOSED = "the client is closed: make a new one"


def require_process(process: int) -> None:
    """Raises ValueError in a fork of the process by that id."""
    if process != os.getpid():
        raise ValueError(
            f"this client was made in another process ({process}) and cannot be used in a fork of it: make one in each "
            "process, for example in a DataLoader's worker_init_fn"
        )


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel straight to a shard, with TLS if credentials are given."""
    if credentials is None:
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, credentials, _OPTIONS)


class Channel:
    """A channel to a shard, and the methods called over it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.is_useless = False
        """Whether the next call needs a new one."""
        self.num_calls = 0
        """Of those that it has now."""
        self._channel = channel
        self.stubs = {method.name: self._stub(method) for method in _SERVICE.methods}
        self.fetch_of_one_message = self._stub(_SERVICE.methods_by_name["Fetch"], one_message=True)

    def _stub(self, method: Any, *, one_message: bool = False) -> Any:
        if method.server_streaming and not one_message:
            kind = self._channel.unary_stream
        elif method.client_streaming:
            kind = self._channel.stream_unary
        else:
            kind = self._channel.unary_unary
        return kind(
            f"/{_SERVICE.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            # Fetch answers are decoded without a copy.
            response_deserializer=None if method.name == "Fetch" else GetMessageClass(method.output_type).FromString,
        )

    def close(self) -> None:
        self._channel.close()


class Channels:
    """Those to one address. Safe to use from any thread."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self._address, self._credentials = address, credentials
        self._process, self._lock = os.getpid(), threading.Lock()
        self._is_closed = False
        self._newest = self._open()
        self._all = {self._newest}

    def _open(self) -> Channel:
        return Channel(open_channel(self._address, self._credentials))

    def take(self) -> Channel:
        """The channel for a call, which ends with `leave`.

        Raises:
            ValueError: they are closed, or were made by another process.
        """
        require_process(self._process)
        with self._lock:
            self.require_open()
            if self._newest.is_useless:
                self._newest = self._open()
                self._all.add(self._newest)
            self._newest.num_calls += 1
            return self._newest

    def leave(self, channel: Channel) -> None:
        """A useless channel is closed when it has no call left."""
        with self._lock:
            channel.num_calls -= 1
            if not channel.is_useless or channel.num_calls:
                return
            self._all.discard(channel)
        run_for(0, [channel.close])

    def require_open(self) -> None:
        if self._is_closed:
            raise ValueError(CLOSED)

    def close(self) -> None:
        """Ends calls of other threads. Their next attempts raise ValueError."""
        with self._lock:
            self._is_closed = True
            channels, self._all = self._all, set()
        for channel in channels:
            channel.close()
