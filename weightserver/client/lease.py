"""Holds the lease of a session: renews it while the client lives, and notices when another run has taken it over."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from _thread import start_new_thread

from weightserver.client.connection import ShardConnection
from weightserver.client.writer import Session
from weightserver.common.processes import process_name
from weightserver.core.errors import FencedError, WeightServerError
from weightserver.protocol._generated import weight_server_pb2 as pb

_RENEWAL_SECONDS = 1.0
_CLOSE_SECONDS = 1.0


class HeldLease:
    """The lease of a session at shard 0, which is the first that every session is opened on.

    A thread of its own renews it until `release`, or until nothing refers to this object.
    """

    def __init__(self, shard: ShardConnection, session: Session) -> None:
        self.lost: FencedError | None = None
        """Why the session is no longer this client's, if it is not."""
        self._shard, self._session, self._since = shard, session, time.monotonic()
        self._running = threading.Lock()  # not an Event, as `release` runs in the main thread: see threads.py
        self._running.acquire()
        weakref.finalize(self, _release, self._running)
        self.renew()
        start_new_thread(_renew, (weakref.ref(self), self._running))

    def renew(self) -> None:
        """Tells the shard that the session is in use."""
        try:
            self._shard.call("OpenSession", self._request())
        except FencedError as error:
            self.lost = error
        except (WeightServerError, ValueError, RuntimeError):  # the next call of the trainer says so
            pass

    def release(self) -> None:
        """Ends the lease, as far as the shard can be reached now."""
        _release(self._running)
        if self.lost is None:
            self._shard.tell("OpenSession", self._request(leave=True), _CLOSE_SECONDS)

    def _request(self, *, leave: bool = False) -> pb.OpenSessionRequest:
        holder = pb.Holder(name=process_name(), held_seconds=time.monotonic() - self._since)
        session = self._session
        return pb.OpenSessionRequest(
            epoch=session.epoch, session_id=session.session_id, join=True, holder=holder, leave=leave
        )


def _release(running: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # released already
        running.release()


def _renew(reference: weakref.ref[HeldLease], running: threading.Lock) -> None:
    while not running.acquire(timeout=_RENEWAL_SECONDS):
        lease = reference()
        if lease is None or lease.lost is not None:
            return
        lease.renew()
        del lease
