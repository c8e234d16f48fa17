"""Sessions of a shard: which writers it accepts."""

from __future__ import annotations

from weightserver.core.errors import FencedError
from weightserver.storage.records import State


def check_epoch(state: State, epoch: int, session_id: bytes | None = None) -> None:
    """Raises FencedError unless `epoch`, with `session_id` if given, is the shard's session."""
    if epoch < state.epoch:
        raise FencedError(f"session {epoch} was superseded by {session_of(state)}: this writer must stop")
    if epoch > state.epoch or not state.session_id:  # a restored shard must not accept the writers of before
        raise FencedError(f"session {epoch} is not known, the newest is {session_of(state)}: open a session first")
    if session_id is not None and session_id.hex() != state.session_id:
        raise FencedError(
            f"session {epoch} of this shard is another one, {session_of(state)}: are all addresses of one cluster? "
            "Open a session first"
        )


def session_of(state: State) -> str:
    """The newest session, for an error message."""
    return f"epoch {state.epoch} (run {state.run!r})"
