"""Checks a recorded history: is there an order of its calls that the sequential model explains, answer for answer?

It checks the linearizability (Herlihy and Wing, 1990) of every shard: in that order a call takes effect as a whole
at one instant between its beginning and its end. So nothing acknowledged may be lost or come late, nothing may count
twice, nothing may be seen by halves or before it was sent. The unit is what one call does on one shard:

- A push or state write changes its rows of a shard at once. Nothing is promised across shards, so every shard is an
  object of its own; a history is linearizable if each object's is.
- A fetch sees its rows of a shard at one instant. That is promised for each message of about 1 MiB; histories are to
  hold no larger ones.
- A checkpoint, rollback or release is an operation on all rows of a shard; opening a session one on its epoch, and a
  write of another epoch cannot take effect. Each checkpoint call is to have a name of its own.
- A refusal is an answer: a StepError needs a row that has seen more, a FencedError another epoch, a NoTableError a
  checkpoint that is not there. What a shard refused changes nothing there, neither then nor later. Only a FencedError
  leaves open whether an earlier attempt of its call took effect before the newer session.
- A call that failed otherwise (ShardUnavailableError, a client that died), and what a refused call did on the shards
  that its error does not name, may take effect at any time after it began, or never. A push or state write made again
  is one operation from the first beginning to the last end. A failed checkpoint, rollback or release comes too late
  after a later write of its writer; a failed push or state write after a later rollback of its writer.

Orders are searched for as by Wing and Gong (1993) and Lowe (2017). Only ends decide, one after another: a call takes
effect at its end or, before that, ahead of another to which it matters, because the two do not commute; pushes commute
with each other. What was tried in vain (a state, known by the calls that made it, and the calls that took effect ahead
of their ends) is not tried again.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tests.helpers.histories import Call, History, rows_of_shard
from tests.helpers.sequential_model import (
    CHECKPOINT_CHANGES,
    FETCHES,
    Key,
    Model,
    Operation,
    State,
    operations_of,
)


class NotLinearizableError(AssertionError):
    """No order of the calls explains their answers."""


@dataclass(frozen=True)
class Checked:
    """The calls that a successful check covered."""

    num_calls: int
    num_operations: int
    """Calls, each shard's part counted."""
    outcomes: Counter[tuple[str, str]]
    """How many calls of each (method, outcome), and how many of each (method, `made again`)."""
    num_tried: int
    """Configurations that the search came through; at least one for each end."""


def check(path: Path) -> Checked:
    """Checks the history in a file, shard by shard.

    Raises:
        NotLinearizableError: no order explains it; says which calls cannot be ordered.
    """
    history = History.load(path)
    shards = [_ShardCheck(history, shard) for shard in range(history.num_shards)]
    for shard in shards:
        shard.run()
    return Checked(
        len(history.calls),
        sum(shard.num_operations for shard in shards),
        Counter((call.kind, call.outcome) for call in history.calls)
        + Counter((call.kind, "made again") for call in history.calls if call.made_again),
        sum(shard.num_tried for shard in shards),
    )


class _Configuration(NamedTuple):
    """The state that one order of the calls leads to."""

    state: State
    early: frozenset[Key]
    """Operations that took effect, and whose end is yet to come."""
    spent: frozenset[Key]
    """Operations that took effect, and have no end."""

    def after(self, operation: Operation, state: State) -> _Configuration:
        """The state after the operation."""
        key = frozenset([operation.key])
        if operation.certain:
            return _Configuration(state, self.early | key, self.spent)
        return _Configuration(state, self.early, self.spent | key)


class _Configurations:
    """The configurations seen so far. One that differs from an earlier one only by more spent operations is skipped,
    because operations without an end may be omitted; unless `exact`."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._met: dict[Hashable, list[frozenset[Hashable]]] = {}

    def add(self, new: _Configuration, burden: frozenset[Hashable] = frozenset()) -> bool:
        """False where it brings nothing new; a burden counts like what was spent."""
        alike, burden = self._met.setdefault((new.state.made_by, new.early), []), burden | new.spent
        if burden in alike or (not self._exact and any(lighter < burden for lighter in alike)):
            return False
        alike.append(burden)
        return True


class _End(NamedTuple):
    """The end of an operation."""

    operation: Operation
    others: dict[Key, Operation]
    """Those that can take effect ahead of it: begun, and neither ended nor over."""

    def is_over(self, other: Operation, configuration: _Configuration) -> bool:
        """Whether one of the others has taken effect, or something has that leaves it too late."""
        done = configuration.early | configuration.spent
        return other.key in done or any(_leaves_too_late(self.others[key], other) for key in done)


class _ShardCheck:
    """The search for an order of one shard's operations."""

    def __init__(self, history: History, shard: int) -> None:
        self._history, self._shard = history, shard
        self._rows = frozenset(rows_of_shard(history.spec, history.num_shards, shard))
        self._model = Model(history.spec, history.learning_rates)
        self.num_operations = self.num_tried = 0
        self._ends = self._all_ends()
        self._fetches_of = defaultdict[str, list[Operation]](list)
        for operation, _ in self._ends:
            if (checkpoint := operation.call.arguments.get("checkpoint")) and operation.call.outcome == "done":
                self._fetches_of[checkpoint].append(operation)

    def _all_ends(self) -> list[_End]:
        ends: list[_End] = []
        operations: dict[int, list[Operation]] = {}
        under_way: dict[Key, Operation] = {}
        wanted = {name for call in self._history.calls if (name := _checkpoint_wanted_by(call))}
        for event, call in self._history.events:
            if event == "begin":
                operations[call.number] = operations_of(call, self._shard, self._rows)
                if call.kind == "checkpoint" and call.outcome == "unknown" and call.arguments["name"] not in wanted:
                    operations[call.number] = []  # it makes no difference to anybody
                under_way |= {operation.key: operation for operation in operations[call.number]}
                self.num_operations += len(operations[call.number])
                continue
            for ended in operations[call.number]:
                if ended.certain:
                    del under_way[ended.key]
                    ends.append(_End(ended, dict(under_way)))
                    under_way = {key: one for key, one in under_way.items() if not _leaves_too_late(ended, one)}
        return ends

    # ---- the search

    def run(self) -> None:
        start = _Configuration(self._model.initial(sorted(self._rows)), frozenset(), frozenset())
        to_try = [iter([start])]  # before each end
        met = [_Configurations() for _ in self._ends]
        furthest = 0
        while to_try:
            configuration, number = next(to_try[-1], None), len(to_try) - 1
            if configuration is None:
                to_try.pop()
                continue
            if number == len(self._ends):
                return
            end = self._ends[number]
            configuration = configuration._replace(spent=configuration.spent.intersection(end.others))
            if met[number].add(configuration):
                self.num_tried += 1
                furthest = max(furthest, number)
                to_try.append(self._after(end, configuration))
        raise NotLinearizableError(self._explanation(self._ends[furthest]))

    def _after(self, end: _End, start: _Configuration) -> Iterator[_Configuration]:
        """The configurations that an end can leave; those first for which least was taken ahead of it."""
        operation, call, key = end.operation, end.operation.call, frozenset([end.operation.key])
        if operation.key in start.early:
            yield start._replace(early=start.early - key)
            return
        if (at_once := self._take(operation, start)) is not None:
            yield at_once._replace(early=at_once.early - key)
        others = {key: other for key, other in end.others.items() if not end.is_over(other, start)}
        if operation.kind in FETCHES and call.outcome == "done":
            self._leave_out_what_its_answer_excludes(end, start, others)
        for before in self._in_every_order(end, start, others.values()):
            if (after := self._take(operation, before)) is not None:
                yield after._replace(early=after.early - key)

    def _take(self, operation: Operation, before: _Configuration) -> _Configuration | None:
        """The state after an operation that takes effect; None if its answer would differ from the recorded one.

        Of a checkpoint it is known already what it will be found to hold.
        """
        state = self._model.apply(before.state, operation)
        if state is None:
            return None
        if operation.kind == "checkpoint":
            for fetch in self._fetches_of[operation.call.arguments["name"]]:
                for row in fetch.rows.keys() & state.rows.keys():
                    if self._model.apply(_row_alone(state, row), _on_row(fetch, row)) is None:
                        return None
        return before.after(operation, state)

    def _in_every_order(
        self, end: _End, start: _Configuration, others: Iterable[Operation], *, exact: bool = False
    ) -> Iterator[_Configuration]:
        """The configurations after some of the others took effect first, in all orders that differ.

        Each of them takes effect as late as it can: it may not swap its place with something that follows it.
        """
        others = _that_matter(end.operation, others)
        met = _Configurations(exact=exact)
        waiting = deque([(start, frozenset[Operation]())])
        while waiting:
            configuration, too_early = waiting.popleft()
            if not too_early:
                yield configuration
            for other in others:
                if not end.is_over(other, configuration) and (further := self._take(other, configuration)):
                    still = frozenset(one for one in too_early if _may_swap(one, other))
                    still |= {other} if _may_swap(other, end.operation) else set()
                    if met.add(further, still):
                        waiting.append((further, still))

    def _leave_out_what_its_answer_excludes(
        self, end: _End, start: _Configuration, others: dict[Key, Operation]
    ) -> None:
        """Takes away what one row of a fetch, looked at alone, shows not to have come before it: nearly all that did
        not, and with it nearly all of the search."""
        for row in end.operation.rows:
            fetch = _End(_on_row(end.operation, row), end.others)
            alone = start._replace(state=_row_alone(start.state, row))
            touching = [_on_row(other, row) for other in others.values() if row in other.rows or not other.rows]
            possible = set[Key]()
            for before in self._in_every_order(fetch, alone, touching, exact=True):
                if self._take(fetch.operation, before) is not None:
                    possible |= before.early | before.spent
            for other in touching:
                if other.rows and not other.commutes(fetch.operation) and other.key not in possible:
                    del others[other.key]

    def _explanation(self, end: _End) -> str:
        call = end.operation.call
        lines = [f"{self._history.path}: on shard {self._shard} nothing explains", f"    {call}"]
        lines += [f"    {call.message or call.result}"]
        matter = _that_matter(end.operation, end.others.values())
        lines += ["Tried before it in every order, because under way or of unknown outcome:"] if matter else []
        return "\n".join([*lines, *(f"    {other.call}" for other in matter)])


def _that_matter(operation: Operation, others: Iterable[Operation]) -> list[Operation]:
    """The operations whose earlier effect could change this one's answer, directly or through others."""
    matter = [operation]
    for one in matter:  # grows meanwhile
        matter += [other for other in others if not _may_swap(other, one)]
        others = [other for other in others if _may_swap(other, one)]
    return matter[1:]


def _may_swap(one: Operation, other: Operation) -> bool:
    """Whether it makes no difference in which order they take effect."""
    return one.commutes(other) and not _leaves_too_late(one, other) and not _leaves_too_late(other, one)


def _on_row(operation: Operation, row: int) -> Operation:
    """The operation's effect on one row, if it has rows."""
    return replace(operation, rows={row: operation.rows[row]}) if operation.rows else operation


def _row_alone(state: State, row: int) -> State:
    checkpoints = {name: {row: rows[row]} for name, rows in state.checkpoints.items()}
    return replace(state, rows={row: state.rows[row]}, checkpoints=checkpoints)


def _leaves_too_late(later: Operation, failed: Operation) -> bool:
    """Whether the failed operation can take no effect any more once the later one has."""
    if failed.certain or not (later.writes or later.adds):
        return False
    if later.kind == "open_session":
        return failed.call.epoch < later.call.epoch
    return (
        (later.call.client, later.call.epoch) == (failed.call.client, failed.call.epoch)
        and failed.call.lines[-1] < later.call.lines[0]
        and (failed.kind in CHECKPOINT_CHANGES or later.kind == "rollback")
    )


def _checkpoint_wanted_by(call: Call) -> str | None:
    """The name of the checkpoint that the call needs, if it does."""
    if call.kind in FETCHES:
        return call.arguments.get("checkpoint")
    return call.arguments["name"] if call.kind in ("release", "rollback") else None
