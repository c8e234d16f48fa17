"""Changes of a shard's checkpoints, as pure functions from one state to the next."""

from __future__ import annotations

from dataclasses import replace

from weightserver.core.checkpoints import ShardCheckpoint, require_readable
from weightserver.core.errors import InvalidRequestError
from weightserver.storage.records import MAX_CHECKPOINTS, State


def find(state: State, name: str) -> ShardCheckpoint | None:
    return next((kept for kept in state.checkpoints if kept.name == name), None)


def taken(state: State, name: str, step: int, checkpoint_id: bytes, mark: str, *, num_rows: int) -> State:
    """The state with a new checkpoint of its rows before update `step`; later writes go to a new generation.

    Raises:
        InvalidRequestError: the shard retains too many checkpoints.
        StepError: rows may have seen more updates.
    """
    _require_room(state)
    require_readable(name, step, state.clock)
    state = replace(state, clock=step)  # its rows are read by the learning rates before its step, which stay
    checkpoint = ShardCheckpoint(
        name,
        step,
        checkpoint_id,
        (mark,),
        generation=state.generation,
        rows_stored=state.rows_stored,
        num_rows=num_rows,
    )
    return replace(state, generation=state.generation + 1, checkpoints=(*state.checkpoints, checkpoint))


def taken_again(state: State, kept: ShardCheckpoint, step: int, checkpoint_id: bytes, mark: str) -> State:
    """The state in which `kept` has that id and mark; its rows stay.

    Raises:
        InvalidRequestError: it was taken at another step.
    """
    if kept.step != step:
        raise InvalidRequestError(f"checkpoint {kept.name!r} was taken at step {kept.step}: choose another name")
    again = replace(kept, checkpoint_id=checkpoint_id, marks=(mark,))
    checkpoints = tuple(again if other is kept else other for other in state.checkpoints)
    return replace(state, checkpoints=checkpoints)


def rolled_back(state: State, kept: ShardCheckpoint, timeline: str) -> State:
    """The state after returning to `kept`, without later checkpoints. Epoch and schedule stay."""
    return replace(
        state,
        clock=kept.step,
        rows_stored=kept.rows_stored,
        generation=kept.generation + 1,
        written=min(state.written, kept.generation),
        timeline=timeline,
        checkpoints=tuple(other for other in state.checkpoints if other.generation <= kept.generation),
    )


def released(state: State, name: str) -> State:
    """The state without that checkpoint."""
    if find(state, name) is None:
        return state
    return replace(state, checkpoints=tuple(other for other in state.checkpoints if other.name != name))


def copied(state: State, source: ShardCheckpoint, name: str) -> State:
    """The state that retains `source` under `name` too.

    Raises:
        InvalidRequestError: the name is that of another checkpoint, or the shard retains too many.
    """
    copy = replace(source, name=name)
    if (known := find(state, name)) is not None:
        if vars(known) == vars(copy):
            return state
        raise InvalidRequestError(f"checkpoint {name!r} is another one than {source.name!r}: choose another name")
    _require_room(state)
    position = state.checkpoints.index(source) + 1
    return replace(state, checkpoints=(*state.checkpoints[:position], copy, *state.checkpoints[position:]))


def _require_room(state: State) -> None:
    if len(state.checkpoints) >= MAX_CHECKPOINTS:
        oldest = ", ".join(repr(kept.name[:60]) for kept in state.checkpoints[:5])
        raise InvalidRequestError(
            f"the shard retains {len(state.checkpoints)} checkpoints, the most there may be: release some, the oldest "
            f"are {oldest}"
        )
