"""The lease of a session: while its run is alive, no other one begins on the same shards by mistake.

It lives in memory. A shard that was restarted knows of none until the run renews it, within a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weightserver.core.errors import SessionInUseError

LEASE_SECONDS = 60.0
"""A run that has not renewed its lease for so long is taken for dead."""


@dataclass(frozen=True)
class _Held:
    session_id: bytes
    holder_id: bytes
    holder: str
    since: float
    renewed: float


class Lease:
    """Who holds the newest session. Replaced as a whole, so safe to read from any thread.

    Args:
        now: seconds of a clock that does not go back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: _Held | None = None

    def holder(self, session_id: bytes) -> str:
        """Who holds `session_id`, the newest session, and for how long; empty if nobody does who is alive."""
        held, now = self._held, self._now()
        if held is None or held.session_id != session_id or now - held.renewed > LEASE_SECONDS:
            return ""
        return f"{held.holder}, for {now - held.since:.0f} s, alive {now - held.renewed:.0f} s ago"

    def require_free(self, session_id: bytes, run: str, holder_id: bytes) -> None:
        """Raises SessionInUseError if another process than `holder_id` holds `session_id`, the newest session, of
        `run`, and is alive."""
        held, holder = self._held, self.holder(session_id)
        if held is not None and holder and held.holder_id != holder_id:
            raise SessionInUseError(
                f"run {run!r} uses these weight servers ({holder}): wait until it ends, use other servers, or take "
                "over, which ends it",
                silent_seconds=int(self._now() - held.renewed),
            )

    def renew(self, session_id: bytes, holder_id: bytes, holder: str, held_seconds: float) -> None:
        """The session's run, which has held it for so long, is alive."""
        now = self._now()
        self._held = _Held(session_id, holder_id, holder, now - held_seconds, now)

    def release(self, session_id: bytes, holder_id: bytes) -> None:
        """The session's run has ended in that process. Another one that joined the session may hold it still."""
        held = self._held
        if held is not None and (held.session_id, held.holder_id) == (session_id, holder_id):
            self._held = None
