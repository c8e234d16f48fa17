"""A sequential model of the weight server: a dictionary of float64 rows that follow SGD, step by step."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tests.helpers.histories import Call
from tests.helpers.row_model import Row, RowModel
from weightserver import FencedError, NoTableError, StepError, TableSpec
from weightserver.core.arrays import Float64Array

TOLERANCE = 1e-5
"""Tolerance between float32 and float64, relative to a row's scale."""
FETCHES = ("fetch", "fetch_state")
CHECKPOINT_CHANGES = ("checkpoint", "release", "rollback")
_FENCED, _NO_CHECKPOINT, _TOO_LATE = FencedError.__name__, NoTableError.__name__, StepError.__name__

Key = tuple[int, str]
"""An operation's: number of the call, and kind."""


@dataclass(frozen=True)
class State:
    """The contents of one shard; immutable."""

    rows: dict[int, Row]
    epoch: int = 0
    checkpoints: Mapping[str, dict[int, Row]] = field(default_factory=dict)
    """Retained, oldest first."""

    @functools.cached_property
    def made_by(self) -> Hashable:
        """Equal for equal states: the calls that made each row, now and in each checkpoint."""

        def makers(rows: dict[int, Row]) -> Hashable:
            return tuple([(row.written_by, row.pushed_by) for row in rows.values()])

        return makers(self.rows), self.epoch, tuple((name, makers(rows)) for name, rows in self.checkpoints.items())


@dataclass(frozen=True, eq=False)
class Operation:
    """The effect of one call on one shard."""

    call: Call
    kind: str
    """The client's method, or `superseded`: the shard is in another epoch than the caller."""
    rows: dict[int, list[int]]
    """row of this shard -> its places in the call."""
    certain: bool
    """Whether it was answered; otherwise it may take effect at any later time, or never."""
    reads: frozenset[Hashable]
    writes: frozenset[Hashable]
    adds: frozenset[Hashable]
    """Rows, "epoch" and "checkpoints" that it reads, replaces, or adds to."""

    @property
    def key(self) -> Key:
        return self.call.number, self.kind

    def commutes(self, other: Operation) -> bool:
        """Whether their order makes no difference, as for items that both only read, or both add to."""
        return not (
            self.writes & (other.reads | other.writes | other.adds)
            or other.writes & (self.reads | self.adds)
            or self.adds & other.reads
            or other.adds & self.reads
        )


def operations_of(call: Call, shard: int, rows_of_shard: frozenset[int]) -> list[Operation]:
    """The operations that the call performed, or may have performed, on this shard."""
    rows: dict[int, list[int]] = {}
    for place, row in enumerate(call.arguments.get("rows", ())):
        if row in rows_of_shard:
            rows.setdefault(row, []).append(place)
    if "rows" in call.arguments and not rows:
        return []
    joins, refused_here = call.arguments.get("join") is not None, call.refused_by(shard)

    def operation(kind: str, rows: dict[int, list[int]], *, certain: bool) -> Operation:
        epoch, checkpoints = frozenset[Hashable](["epoch"]), frozenset[Hashable](["checkpoints"])
        nothing, mine, every = frozenset[Hashable](), frozenset[Hashable](rows), frozenset[Hashable](rows_of_shard)
        match kind:
            case "fetch" | "fetch_state":
                reads, writes, adds = checkpoints if call.arguments.get("checkpoint") else mine, nothing, nothing
            case "push_gradients":
                reads, writes, adds = epoch, nothing, mine
            case "write_state":
                reads, writes, adds = epoch | mine, nothing if refused_here and certain else mine, nothing
            case "superseded":
                reads, writes, adds = epoch, nothing, nothing
            case "open_session":
                reads, writes, adds = epoch, nothing if joins else epoch, nothing
            case "checkpoint":
                reads, writes, adds = epoch | every, checkpoints, nothing
            case "release":
                reads, writes, adds = epoch, checkpoints, nothing
            case "rollback":
                reads, writes, adds = epoch | checkpoints, every | checkpoints, nothing
            case _:
                raise ValueError(f"{call}: no such method is known here")
        return Operation(call, kind, rows, certain, reads, writes, adds)

    if call.outcome == "done" or (refused_here and call.outcome != _FENCED):
        return [operation(call.kind, rows, certain=True)]
    found = [operation("superseded", {}, certain=True)] if refused_here else []
    if call.kind in FETCHES or joins:
        return found
    if call.kind == "open_session":
        raise ValueError(f"{call}: the epoch that it would have opened is unknown")
    return [*found, operation(call.kind, rows, certain=False)]


class Model:
    """The effects of operations on states, and the answers that states explain."""

    def __init__(self, spec: TableSpec, learning_rates: npt.ArrayLike) -> None:
        self.rows = RowModel(spec, learning_rates)

    def initial(self, rows: Iterable[int]) -> State:
        """The state of a new shard with these rows."""
        mine = list(rows)
        return State(dict(zip(mine, self.rows.initial(mine), strict=True)))

    def extended(self, state: State, rows: Iterable[int]) -> State:
        """A state whose table and checkpoints also have these rows, never written."""
        new = self.initial(rows).rows
        checkpoints = {name: kept | new for name, kept in state.checkpoints.items()}
        return replace(state, rows=state.rows | new, checkpoints=checkpoints)

    def pushed(self, row: Row, step: int, gradient: Float64Array, call: int) -> Row:
        """The row with update `step`'s gradient added by a call."""
        return self.rows.pushed(row, step, gradient)._replace(pushed_by=row.pushed_by | {call})

    def apply(self, state: State, operation: Operation) -> State | None:
        """The state after the operation, or None if its answer is impossible."""
        call, kind = operation.call, operation.kind
        if kind in ("fetch", "fetch_state"):
            return state if self._explains(state, operation) else None
        if kind == "superseded":
            return state if state.epoch != call.epoch else None
        if kind == "open_session" and call.arguments.get("join") is None:
            return replace(state, epoch=call.epoch) if state.epoch < call.epoch else None
        if call.outcome == _NO_CHECKPOINT:  # the client asks before it sends anything
            return state if call.arguments["name"] not in state.checkpoints else None
        if state.epoch != call.epoch:
            return None
        match kind:
            case "open_session":
                return state
            case "push_gradients":
                return self._push(state, operation)
            case "write_state":
                return self._write(state, operation)
            case _:
                return _change_checkpoints(state, kind, call.arguments["name"])

    def _push(self, state: State, operation: Operation) -> State:
        given, rows = operation.call.arguments, dict(state.rows)
        for row, places in operation.rows.items():
            for place in places:
                rows[row] = self.pushed(rows[row], given["step"], given["gradients"][place], operation.call.number)
        return replace(state, rows=rows)

    def _write(self, state: State, operation: Operation) -> State | None:
        given, rows = operation.call.arguments, dict(state.rows)
        older = any(given["last_step"][place] < rows[row].last_step for row, (place,) in operation.rows.items())
        if operation.certain and operation.call.outcome == _TOO_LATE:
            return state if older else None
        if older:
            return None
        for row, (place,) in operation.rows.items():
            weight, momentum, last_step = (given[name][place] for name in ("weight", "momentum_buffer", "last_step"))
            rows[row] = Row(weight, momentum, last_step, operation.call.number, frozenset())
        return replace(state, rows=rows)

    def _explains(self, state: State, operation: Operation) -> bool:
        """Whether a fetch in this state gives this answer."""
        outcome, step = operation.call.outcome, operation.call.arguments.get("step")
        rows = seen(state, operation)
        if rows is None:
            return outcome == _NO_CHECKPOINT
        if step is not None and any(row.last_step > step for row in rows.values()):
            return outcome == _TOO_LATE
        return outcome == "done" and all(
            self.agrees(rows[row], operation, place) for row, places in operation.rows.items() for place in places
        )

    def agrees(self, row: Row, operation: Operation, place: int) -> bool:
        """Whether a fetch of `row`, with last_step ≤ its step, gives the answer at `place`."""
        answer, step = operation.call.result, operation.call.arguments.get("step")
        row = row if step is None else self.rows.at(row, step)
        if "last_step" in answer and answer["last_step"][place] != row.last_step:
            return False
        allowed = TOLERANCE * (1 + max(np.abs(row.weight).max(), np.abs(row.momentum_buffer).max()))
        return all(
            bool((np.abs(answer[name][place] - getattr(row, name)) <= allowed).all())
            for name in ("weight", "momentum_buffer")
            if name in answer
        )


def seen(state: State, operation: Operation) -> dict[int, Row] | None:
    """The rows that a fetch reads; None if there is no such checkpoint."""
    checkpoint = operation.call.arguments.get("checkpoint", "")
    rows = state.checkpoints.get(checkpoint) if checkpoint else state.rows
    return None if rows is None else {row: rows[row] for row in operation.rows}


def _change_checkpoints(state: State, kind: str, name: str) -> State | None:
    """Takes a checkpoint, returns to one, or forgets one."""
    retained = dict(state.checkpoints)
    if kind == "checkpoint":
        retained[name] = state.rows
        return replace(state, checkpoints=retained)
    if kind == "release":
        retained.pop(name, None)
        return replace(state, checkpoints=retained)
    if name not in retained:
        return None
    while next(reversed(retained)) != name:
        retained.popitem()
    return replace(state, rows=retained[name], checkpoints=retained)
