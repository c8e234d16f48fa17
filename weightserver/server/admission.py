"""Admission of calls: bounds what a shard takes on at a time, so that no load makes it grow or stall.

- Calls: gRPC runs `MAX_THREADS` at a time, in the order in which they arrived, lets `MAX_CALLS` wait or run, and
  refuses further ones at once (RESOURCE_EXHAUSTED).
- Memory: what requests and their answers hold (`request_memory`).
- Silence: a call whose caller neither sends nor receives a message is cancelled, and much sooner while others wait.

A shard's memory stays below

    BASE_BYTES + limit of `RequestMemory` + MAX_THREADS · 3 · largest message
        + 2 · SCHEDULE_BYTES_PER_STEP · horizon

where the third term is messages as they arrive: received, parsed, and the field being processed. Writes of this
project's clients have messages of 1 MiB, any message at most `MAX_REQUEST_BYTES`. The last one is the learning rates
that were used, and those that a fetch brought last.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from weightserver.common.malloc import own_bytes, return_free_memory
from weightserver.common.stages import call_clock
from weightserver.common.version import __version__
from weightserver.core.errors import InvalidRequestError, WeightServerError
from weightserver.protocol.codec import VERSION_KEY
from weightserver.protocol.status import error_metadata, status_of
from weightserver.server.request_memory import RequestMemory

BASE_BYTES = 384 << 20
"""A shard without requests, gRPC's memory for connections and waiting calls, and what malloc keeps."""
MAX_THREADS = 64
"""Calls at a time that are being received, executed or answered."""
MAX_CALLS = 1024
"""Calls at a time that have a thread or wait for one."""
_KEPT_BYTES = 160 << 20
"""Free memory of the allocator beyond this, and beyond what requests hold, is returned to the kernel."""
_PRESSED_SECONDS = 1.0
"""How long a caller may be silent while others wait."""
_LOOK_SECONDS = 0.25
"""How often the watch looks at every call."""


class WatchedCall:
    """A call from the time it has a thread until its answer was taken."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context
        self.has_thread = True
        self.is_silent = False
        """Whether the call waits for its caller."""
        self.looks = 0
        """How often the watch has found it so, one time after the other."""

    def wait(self) -> None:
        self.looks = 0
        self.is_silent = True


class StallWatch:
    """Cancels calls whose caller is silent.

    Silence is counted in looks of one thread, not in time: while the process is stopped or starved, nobody looks.

    Args:
        stall_seconds: how long a caller may neither send nor receive a message.
        on_cut_off: called for each call that is cancelled because its caller was silent.
    """

    def __init__(
        self, memory: RequestMemory, *, stall_seconds: float = math.inf, on_cut_off: Callable[[], None] = lambda: None
    ) -> None:
        self._memory = memory
        self._stall_seconds = stall_seconds
        self._on_cut_off = on_cut_off
        self._calls: set[WatchedCall] = set()

    @property
    def num_running(self) -> int:
        """Calls that have a thread."""
        return sum(call.has_thread for call in list(self._calls))

    def start(self) -> None:
        """Starts the thread that cuts silent callers off and returns free memory, for as long as the process lives."""
        threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    @contextmanager
    def watched(self, context: grpc.ServicerContext) -> Iterator[WatchedCall]:
        """Watches a call from now on until its answer was taken. Its handler answers all errors but that its caller is
        gone."""
        call = WatchedCall(context)
        self._calls.add(call)
        try:
            if not context.add_callback(lambda: self._calls.discard(call)):
                self._calls.discard(call)
                raise CancelledError
            yield call
        except CancelledError:
            context.abort(grpc.StatusCode.CANCELLED, "the caller is gone")
        finally:
            call.has_thread = False
            call.wait()

    def _watch(self) -> None:
        seconds = min(self._stall_seconds / 4, _LOOK_SECONDS)
        while True:
            time.sleep(seconds)
            pressed = self._memory.num_waiting or self.num_running >= MAX_THREADS or len(self._calls) > MAX_CALLS
            allowed = min(_PRESSED_SECONDS, self._stall_seconds) if pressed else self._stall_seconds
            self.look(round(allowed / seconds))
            if own_bytes() > _KEPT_BYTES + self._memory.used_bytes:
                gc.collect()  # exceptions keep frames, which keep the arrays of failed calls
                return_free_memory()  # malloc keeps what requests have freed

    def look(self, most: int) -> None:
        """Looks at every call; cancels those whose caller was silent at more than `most` looks."""
        for call in list(self._calls):
            call.looks += call.is_silent
            if call.is_silent and call.looks > most:
                call.is_silent = False
                call.context.cancel()
                self._on_cut_off()


def abort(
    context: grpc.ServicerContext, error: WeightServerError, trailer: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    """Ends the call with the error's status."""
    context.set_trailing_metadata(((VERSION_KEY, __version__), *trailer, *error_metadata(error)))
    context.abort(status_of(type(error)), str(error))
    raise AssertionError("abort() raises")


def requests(received: Iterator[bytes], call: WatchedCall, parse: Callable[[bytes], Any]) -> Iterator[Any]:
    """The call's messages."""
    clock = call_clock()
    while True:
        stage = clock.start("receive")
        call.wait()
        try:
            data = next(received, None)
        except grpc.RpcError as error:
            error.__traceback__ = None  # gRPC keeps the error in a cycle, with everything that its frames hold
            raise CancelledError from None
        finally:
            call.is_silent = False
            clock.start(stage)
        if data is None:
            return
        try:
            message = parse(data)
        except DecodeError:
            raise InvalidRequestError("the message cannot be parsed: does the client have the same version?") from None
        yield message
