"""Holds the lease of a session: renews it while the client lives, and notices when another run has taken it over."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from _thread import start_new_thread

from weightserver.client import threads
from weightserver.client.connection import ShardConnection
from weightserver.client.writer import Session
from weightserver.common import processes
from weightserver.core.errors import FencedError, NoTableError
from weightserver.protocol._generated import weight_server_pb2 as pb

_RENEWAL_SECONDS = 1.0
_CLOSE_SECONDS = 1.0

_held: weakref.WeakSet[HeldLease] = weakref.WeakSet()
os.register_at_fork(after_in_child=_held.clear)


class HeldLease:
    """The lease of a session at shard 0, which is the first that every session is opened on.

    A thread of its own renews it until `release`, the end of the process, or until nothing refers to this object.
    """

    def __init__(self, shard: ShardConnection, session: Session) -> None:
        self.lost: FencedError | None = None
        """Why the session is no longer this client's, if it is not."""
        self._shard, self._session, self._since = shard, session, time.monotonic()
        self._holder_id = processes.process_id()[:8] + os.urandom(8)  # see `Holder`
        self._running = threading.Lock()  # not an Event, as `release` runs in the main thread: see threads.py
        self._running.acquire()
        self._turn = threading.Lock()
        """Held while it is renewed, so that no renewal follows the end."""
        _held.add(self)
        _end_all_at_exit()
        threads.outside_main(self.renew)
        start_new_thread(_renew, (weakref.ref(self), self._running))

    def holds(self, session: Session) -> bool:
        """Whether it is the lease of this session, as far as is known."""
        return self.lost is None and self._session.session_id == session.session_id

    def renew(self) -> None:
        """Tells the shard that the session is in use, unless it has ended."""
        with self._turn:
            if not self._running.locked():
                return
            try:
                self._shard.call("OpenSession", self._request())
            except FencedError as error:
                self.lost = error
            except NoTableError:
                self.lost = FencedError("another client has dropped the table, and with it this session")
            except Exception:  # noqa: BLE001 - also of a token's or credentials' own: the trainer's next call says so
                pass

    def release(self) -> None:
        """Ends the lease, as far as the shard can be reached now. Safe to repeat."""
        try:
            self._running.release()
        except RuntimeError:  # it has ended before
            return
        threads.outside_main(self._leave)

    def _leave(self) -> None:
        if self.lost is None and self._turn.acquire(timeout=_CLOSE_SECONDS):
            self._turn.release()
            self._shard.tell("OpenSession", self._request(leave=True), _CLOSE_SECONDS)

    def _request(self, *, leave: bool = False) -> pb.OpenSessionRequest:
        session, held_seconds = self._session, time.monotonic() - self._since
        holder = pb.Holder(name=processes.process_name(), id=self._holder_id, held_seconds=held_seconds)
        return pb.OpenSessionRequest(
            epoch=session.epoch, session_id=session.session_id, join=True, holder=holder, leave=leave
        )


@functools.cache
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """A script that ends by an exception may be started again at once."""
    for lease in list(_held):
        lease.release()


def _renew(reference: weakref.ref[HeldLease], running: threading.Lock) -> None:
    while not running.acquire(timeout=_RENEWAL_SECONDS):
        lease = reference()
        if lease is None or lease.lost is not None:
            return
        lease.renew()
        del lease
    running.release()
