"""Changes of the learning rates on every shard or on none: one shard's part.

A change is prepared on all shards, then committed on shard 0, which decides it, then on the others. While it is
pending, this shard refuses requests that use learning rates which it changes, old or new, so that two shards never
move rows by different ones. If the caller dies in between, the next call settles what is pending (see
`schedule_caller`).

Requests carry a digest of the learning rates that the client knows. A client with an earlier schedule may use the steps
that have not changed since.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weightserver.core.arrays import Float32Array
from weightserver.core.errors import FencedError, InvalidRequestError, OverloadedError, TableMismatchError
from weightserver.protocol.codec import ScheduleHash
from weightserver.storage.interface import Transaction
from weightserver.storage.records import (
    end_prepared_schedule,
    get_json,
    put_json,
    read_prepared_schedule,
    write_schedule,
)

MAX_EARLIER = 64
"""Number of changes after which a client with an earlier schedule may still use its unchanged steps."""
_RECORD = "schedule"


@dataclass(frozen=True)
class Pending:
    """A change that was prepared, and neither committed nor given up."""

    change: str
    """Hexadecimal."""
    first_step: int
    """The lowest step whose learning rate it changes or adds."""
    stop_step: int
    """It has the learning rates of steps first_step … stop_step − 1."""
    digest: int = 0
    """Digest of all learning rates once it is committed; 0 while a part is missing."""


@dataclass(frozen=True)
class Part:
    """A part of a change: learning rates (float32 [n], checked) of `start_step` and later steps."""

    change: str
    start_step: int
    learning_rates: Float32Array
    is_last: bool = True

    @property
    def stop_step(self) -> int:
        return self.start_step + len(self.learning_rates)

    def first_change(self, known: Float32Array) -> int | None:
        """The lowest step whose learning rate differs from `known` (float32 [horizon]) or is missing there, or None."""
        there = known[self.start_step : self.stop_step]
        changed = np.flatnonzero(there != self.learning_rates[: len(there)])
        if len(changed):
            return self.start_step + int(changed[0])
        return self.start_step + len(there) if len(there) < len(self.learning_rates) else None


@dataclass(frozen=True)
class ScheduleState:
    """A shard's knowledge of its schedule. Immutable; operations replace it."""

    hash: ScheduleHash = field(default_factory=ScheduleHash)
    earlier: tuple[tuple[int, int], ...] = ()
    """(digest, lowest step changed since) of earlier schedules, oldest first."""
    pending: Pending | None = None
    given_up: str = ""
    """The change that this process gave up last."""

    @property
    def digest(self) -> int:
        return self.hash.digest

    def require_settled(self, num_steps: int) -> None:
        """Raises OverloadedError if a pending change touches the first `num_steps` steps; the client retries."""
        if self.pending is not None and num_steps > self.pending.first_step:
            raise OverloadedError(
                f"a change of the learning rates from step {self.pending.first_step} on is neither finished nor given "
                "up: if no other call is making it, call extend_schedule() again, which settles it"
            )

    def require_known(self, known: int, num_steps: int) -> None:
        """Raises TableMismatchError unless the first `num_steps` steps of the schedule with digest `known` (0: not
        checked) have the present learning rates."""
        if known in (0, self.digest) or (self.pending is not None and known == self.pending.digest):
            return
        for digest, changed_from in self.earlier:
            if digest == known:
                if num_steps > changed_from:
                    raise TableMismatchError(
                        f"the learning rates from step {changed_from} on were changed by another call: call describe() "
                        "to use the current ones"
                    )
                return
        raise TableMismatchError(
            "the shard does not know this client's learning rates, it missed a change or had too many since: call "
            "extend_schedule() again with the right ones, or describe() to use those of all shards"
        )

    def prepared(self, txn: Transaction, part: Part, known: Float32Array, *, reached: int) -> ScheduleState:
        """The schedule with one more part of a change; the same if the part changes nothing of `known`, float32 [n].

        Raises:
            TableMismatchError: it would change a step before `reached`.
            FencedError: another change is pending.
            InvalidRequestError: a part before this one is missing.
        """
        pending, first_change = self.pending, part.first_change(known)
        if first_change is None and (pending is None or pending.change != part.change):
            return self
        if first_change is not None and first_change < min(reached, len(known)):
            raise TableMismatchError(
                f"the learning rate of step {first_change} is {known[first_change]} and was used: "
                f"only steps from {reached} on may be rewritten"
            )
        if pending is None:
            assert first_change is not None
            pending = Pending(part.change, first_change, first_change)
        if pending.change != part.change:
            raise FencedError(
                "another call is changing the learning rates: call extend_schedule() again if these are still right"
            )
        if part.start_step > pending.stop_step or (first_change is not None and first_change < pending.first_step):
            raise InvalidRequestError("the parts of a change must be sent in the order of their steps")
        start = max(part.start_step, pending.first_step)
        write_schedule(txn, start, part.learning_rates[start - part.start_step :], prepared=True)
        pending = replace(pending, stop_step=max(pending.stop_step, part.stop_step))
        if part.is_last:
            pending = replace(pending, digest=self._with(txn, pending, known)[0].digest)
        return replace(self, pending=pending)

    def committed(self, txn: Transaction, known: Float32Array) -> tuple[ScheduleState, Float32Array]:
        """The schedule with its complete pending change; and the learning rates from its first step on, float32 [n]."""
        pending = self.pending
        assert pending is not None
        assert pending.digest
        longer, rates = self._with(txn, pending, known)
        earlier = [(digest, min(changed_from, pending.first_step)) for digest, changed_from in self.earlier]
        if self.digest:
            earlier.append((self.digest, pending.first_step))
        end_prepared_schedule(txn, commit=True)
        kept = [other for other in earlier if other[0] != longer.digest]
        return ScheduleState(longer, tuple(kept[-MAX_EARLIER:])), rates

    def without_pending(self, txn: Transaction, change: str) -> ScheduleState:
        """The schedule after `change` was given up."""
        end_prepared_schedule(txn, commit=False)
        return replace(self, pending=None, given_up=change)

    def _with(self, txn: Transaction, pending: Pending, known: Float32Array) -> tuple[ScheduleHash, Float32Array]:
        """The hash of all learning rates once `pending` is committed; and the learning rates in it, float32 [n]."""
        rates = read_prepared_schedule(txn, pending.first_step, pending.stop_step)
        before = self.hash if pending.first_step == len(known) else ScheduleHash(known[: pending.first_step])
        return before.followed_by(rates).followed_by(known[pending.stop_step :]), rates


def read_schedule_state(txn: Transaction, learning_rates: Float32Array) -> ScheduleState:
    """Reads the state; `learning_rates` (float32 [horizon]) are those that the shard stores."""
    stored: dict[str, Any] = get_json(txn, _RECORD) or {}  # a new directory has none
    pending = stored.get("pending")
    return ScheduleState(
        ScheduleHash(learning_rates),
        tuple((digest, changed_from) for digest, changed_from in stored.get("earlier", ())),
        pending and Pending(**pending),
    )


def write_schedule_state(txn: Transaction, state: ScheduleState) -> None:
    put_json(txn, _RECORD, {"earlier": state.earlier, "pending": state.pending and vars(state.pending)})
