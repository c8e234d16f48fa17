"""The gRPC channels to one shard: calls take the newest one, and one that proved useless is replaced.

A new channel has connections of its own, and looks the shard's name up again: where an attempt brought no byte, the
shard may serve at another address by now.

The caller's own thread calls gRPC. A signal that interrupts the main thread there may leave locks of the channel taken
for ever, which only the main thread can take again. So it has a channel of its own, which it closes itself; it closes
no other. Until then its channel is kept: another thread that collected it as garbage would take the locks. And what
gRPC was doing is dropped at once, as who handles the exception may call again.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from weightserver.client.threads import outcomes
from weightserver.core.errors import WeightServerError
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS, MAX_MESSAGE_BYTES

Credentials: TypeAlias = grpc.ChannelCredentials | Callable[[], grpc.ChannelCredentials] | None
"""TLS credentials, or what makes them for each channel; without them calls are plain."""

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
_called: set[Channel] = set()
"""Channels with a call that has not returned; of the main thread, also those whose call was interrupted."""
_is_cut_off = False
"""Whether this process is a fork of one whose threads were calling, and has none of them."""


def _after_fork() -> None:
    global _is_cut_off
    _is_cut_off = _is_cut_off or bool(_called)


os.register_at_fork(after_in_child=_after_fork)


def require_grpc() -> None:
    """Raises ValueError in a process that was forked while a thread was within gRPC, whose locks nobody gives back."""
    if _is_cut_off:
        raise ValueError(
            "this process was forked while other threads called weight servers, so gRPC could hang or end it: start it "
            "by 'forkserver' or 'spawn', such as multiprocessing_context='forkserver' of a DataLoader"
        )


def open_channel(address: str, credentials: Credentials) -> grpc.Channel:
    """A channel straight to a shard, with TLS if credentials are given. Raises as `require_grpc`."""
    require_grpc()
    if credentials is None:
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, credentials() if callable(credentials) else credentials, _OPTIONS)


class Channel:
    """A channel to a shard, and the methods called over it.

    gRPC would swallow an exception of a signal's handler where it serializes messages: it is given their bytes.
    """

    def __init__(self, address: str, credentials: Credentials, *, is_main: bool) -> None:
        channel = open_channel(address, credentials)
        self.address = address
        self.is_main = is_main
        """Whether the main thread alone uses it."""
        self.is_useless = False
        """Whether the next call needs a new one."""
        self.num_calls = 0
        """Number of calls that it has now."""
        self.close = channel.close
        self._stubs = {
            method.name: (channel.stream_unary if method.client_streaming else channel.unary_unary)(_path(method))
            for method in _SERVICE.methods
        }
        self._fetch = channel.unary_stream(_path(_SERVICE.methods_by_name["Fetch"]))

    def call(self, method: str, request: Message | Iterable[Message], options: dict[str, Any]) -> tuple[bytes, Any]:
        """Makes a call that is answered by one message; returns the answer as bytes (see `answer_of`), and the call.
        Raises an exception of making the request's messages as it is.
        """
        failed: list[Exception] = []
        sent: Any = _bytes_of(request) if isinstance(request, Message) else _stream(request, failed)
        try:
            answer: tuple[bytes, Any] = self._stubs[method].with_call(sent, **options)
            return answer
        except grpc.RpcError:
            if failed:
                raise failed[0] from None
            raise

    def fetch(self, request: pb.FetchRequest, options: dict[str, Any]) -> Any:
        """Sends a request; returns the call, an iterator of the answer's messages as bytes."""
        return self._fetch(request.SerializeToString(), **options)


def answer_of(method: str, data: bytes) -> Any:
    """The message of a method's answer. Raises WeightServerError if it is none."""
    try:
        return GetMessageClass(_SERVICE.methods_by_name[method].output_type).FromString(data)
    except DecodeError:
        raise WeightServerError(f"{method} was answered by what is no answer: is it of the same version?") from None


def _path(method: Any) -> str:
    return f"/{_SERVICE.full_name}/{method.name}"


def _stream(messages: Iterable[Message], failed: list[Exception]) -> Iterator[bytes]:
    """The messages of a request; keeps an error in making them, which gRPC would tell as one of the call."""
    try:
        yield from map(_bytes_of, messages)
    except Exception as error:
        failed.append(error)
        raise


def _bytes_of(message: Message) -> bytes:
    return message.SerializeToString()


class Channels:
    """The channels to one address, which may change. Safe to use from any thread."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        require_grpc()  # here: a thread that such a process starts has ended it (Python 3.12)
        self.address, self._credentials = address, credentials
        self._lock = threading.Lock()
        self._is_closed = False
        self._newest: dict[bool, Channel] = {}
        """The newest channel of the main thread, and of the others."""
        self._all: set[Channel] = set()

    def take(self) -> Channel:
        """The channel for a call, which ends with `leave`, wherever a signal interrupts it.

        Raises:
            ValueError: they are closed.
        """
        is_main = threading.current_thread() is threading.main_thread()
        with self._lock:
            self.require_open()
            channel = self._newest.get(is_main)
            if channel is None or channel.is_useless:
                channel = Channel(self.address, self._credentials, is_main=is_main)
                self._all.add(channel)
                self._newest[is_main] = channel
            channel.num_calls += 1
            _called.add(channel)
            return channel

    def leave(self, channel: Channel, *, has_returned: bool) -> None:
        """A useless channel, as one that was interrupted, is closed when it has no call left; that of the main thread
        at once."""
        if not has_returned and channel.is_main:  # gRPC's suspended contexts hold locks of all channels
            traceback.clear_frames(sys.exc_info()[2])
        with self._lock:
            channel.num_calls -= 1
            channel.is_useless |= not has_returned
            is_called = channel.num_calls > 0 and not channel.is_main
            if not channel.is_useless and not is_called:
                _called.discard(channel)
            if not channel.is_useless or is_called:
                return
        channel.close()
        _called.discard(channel)
        self._all.discard(channel)

    def require_open(self) -> None:
        if self._is_closed:
            raise ValueError(CLOSED)

    def close(self) -> None:
        """Ends calls of other threads. Their next attempts raise ValueError."""
        with self._lock:
            self._is_closed = True
        is_main = threading.current_thread() is threading.main_thread()
        every = list(self._all)
        for channel in every:
            if channel.is_main and channel in _called and not is_main:
                start_new_thread(channel.close, ())  # which waits for ever if a lock was left taken
            elif channel.is_main:
                channel.close()
                _called.discard(channel)
        # An interrupt of the main thread in there would leave a lock taken that a call of another thread waits for.
        others = [(channel,) for channel in every if not channel.is_main]
        outcomes(lambda channel: channel.close(), others, not_main=True)
        self._all.difference_update(every)
