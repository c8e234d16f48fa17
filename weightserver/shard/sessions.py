"""Sessions of a shard: which writers it accepts. Functions of its state, and from one state to the next."""

from __future__ import annotations

import os
from dataclasses import replace

from weightserver.core.errors import FencedError, InvalidRequestError
from weightserver.storage.records import State

MAX_EPOCH_STEP = 1 << 20
"""How far a session may lie beyond the shard's newest: others may have been opened on other shards only, or before a
restore."""


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


def opened(state: State, name: str, epoch: int, session_id: bytes, *, force: bool) -> State:
    """The state in the new session `epoch`; the same state if that id has opened it.

    With `force` the timeline becomes the shard's own, until the next rollback: no other session then mistakes the
    shards for ones that had a common state.

    Raises:
        FencedError: the epoch is not newer.
        InvalidRequestError: the epoch lies too far ahead.
    """
    if epoch == state.epoch and session_id.hex() == state.session_id:
        return state
    if epoch <= state.epoch:
        raise FencedError(f"epoch {epoch} is not newer than {session_of(state)}: open the session again")
    if epoch > state.epoch + MAX_EPOCH_STEP:
        raise InvalidRequestError(
            f"epoch {epoch} is far beyond {session_of(state)}: open the one that follows the newest of all shards"
        )
    timeline = os.urandom(16).hex() if force else state.timeline
    return replace(state, epoch=epoch, session_id=session_id.hex(), run=name, timeline=timeline)


def session_of(state: State) -> str:
    """The newest session, for an error message."""
    return f"epoch {state.epoch} (run {state.run!r})"
