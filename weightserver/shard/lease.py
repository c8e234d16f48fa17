"""The lease of a session: while its run is alive, no other one begins on the same shards by mistake.

It lives in memory. A shard that was restarted knows of none until the run renews it, within a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weightserver.core.errors import SessionInUseError

PROCESS_BYTES = 8
"""The first bytes of a holder's id name its process: several clients of one process may hold a session."""
LEASE_SECONDS = 60.0
"""A run that has not renewed its lease for so long is taken for dead."""


@dataclass(frozen=True)
class _Held:
    session_id: bytes
    holder: str
    since: float
    renewed: float


class Lease:
    """Who holds the newest session: the run that opened it, and those that have joined it. Safe to use from any thread.

    Args:
        now: seconds of a clock that does not go back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: dict[bytes, _Held] = {}
        """The leases by the ids of their holders."""

    def _newest(self, session_id: bytes, but: bytes = b"") -> _Held | None:
        """What was renewed last for `session_id` and is alive, by another process than that of the holder `but`."""
        alive, process = self._now() - LEASE_SECONDS, but[:PROCESS_BYTES]
        held = [
            held
            for holder_id, held in list(self._held.items())
            if held.session_id == session_id and held.renewed >= alive and holder_id[:PROCESS_BYTES] != process
        ]
        return max(held, key=lambda held: held.renewed, default=None)

    def holder(self, session_id: bytes) -> str:
        """Who holds `session_id`, the newest session, and for how long; empty if nobody does who is alive."""
        held = self._newest(session_id)
        return "" if held is None else self._described(held)

    def _described(self, held: _Held) -> str:
        now = self._now()
        return f"{held.holder}, for {now - held.since:.0f} s, alive {now - held.renewed:.0f} s ago"

    def require_free(self, session_id: bytes, run: str, holder_id: bytes) -> None:
        """Raises SessionInUseError if another process than `holder_id` holds `session_id`, the newest session, of
        `run`, and is alive."""
        if (held := self._newest(session_id, but=holder_id)) is not None:
            raise SessionInUseError(
                f"run {run!r} uses these weight servers ({self._described(held)}): wait until it ends, use other "
                "servers, or take over (--take-over, take_over=True), which ends it",
                silent_seconds=int(self._now() - held.renewed),
            )

    def renew(self, session_id: bytes, holder_id: bytes, holder: str, held_seconds: float) -> None:
        """A run that has held the session for so long is alive."""
        now = self._now()
        for other, held in list(self._held.items()):
            if held.session_id != session_id or now - held.renewed > LEASE_SECONDS:
                self._held.pop(other, None)
        self._held[holder_id] = _Held(session_id, holder, now - held_seconds, now)

    def release(self, session_id: bytes, holder_id: bytes) -> None:
        """A run that held the session has ended."""
        held = self._held.get(holder_id)
        if held is not None and held.session_id == session_id:
            self._held.pop(holder_id, None)
