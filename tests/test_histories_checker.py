"""The checker of histories notices those that have no order.

Real ones, which it accepts, are in tests/integration/test_histories.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.histories import History, Recorder
from tests.helpers.linearizability import NotLinearizableError, check
from weightserver import TableSpec, WeightClient

# A row's weight is the negative sum of its gradients. Rows 0, 1, 4, 5 live on shard 0, rows 2, 3, 6, 7 on shard 1.
SPEC = TableSpec(num_rows=8, dim=1, momentum=0, weight_decay=0, init_std=0, rows_per_block=2)
RATES = np.ones(20)
ALL = list(range(SPEC.num_rows))


class Script:
    """Writes a history by hand. Calls belong to session 1 by default; each begins and ends at the given times."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.done(self.begin(WeightClient.open_session, "operator", 0, name="run"), epoch=1)

    def begin(self, method: Callable[..., Any], client: str = "writer", epoch: int = 1, **arguments: Any) -> int:
        return self.recorder.begin(client, method, epoch, **arguments).number

    def push(self, rows: list[int], gradient: float = 1, *, step: int = 0, **who: Any) -> int:
        gradients = np.full((len(rows), 1), gradient)
        return self.begin(WeightClient.push_gradients, rows=rows, gradients=gradients, step=step, **who)

    def write(self, rows: list[int], weight: float, last_step: int, **who: Any) -> int:
        values = np.full((len(rows), 1), weight)
        return self.begin(
            WeightClient.write_state,
            rows=rows,
            weight=values,
            momentum_buffer=0 * values,
            last_step=[last_step] * len(rows),
            **who,
        )

    def fetch(self, rows: list[int], *, step: int = 20, **more: Any) -> int:
        return self.begin(WeightClient.fetch, "reader", 0, rows=rows, step=step, **more)

    def change(self, method: Callable[..., Any], name: str = "kept", **who: Any) -> int:
        return self.begin(method, name=name, **who)

    def done(self, call: int, weight: list[Any] | None = None, **result: Any) -> None:
        """Ends the call with the rows that a fetch returns; a number stands for a row of one value."""
        if weight is not None:
            result["weight"] = [value if isinstance(value, list) else [value] for value in weight]
        self.recorder.note("end", call, outcome="done", result=result)

    def unknown(self, call: int) -> None:
        self.recorder.note("end", call, outcome="unknown", message="ShardUnavailableError: shard 0 at x did not answer")

    def again(self, call: int) -> None:
        self.recorder.note("again", call)

    def refused(self, call: int, error: str, shard: int = 0) -> None:
        self.recorder.note("end", call, outcome=error, message=f"shard {shard} at x: no")

    def seen(self, rows: list[int], weight: list[Any], **how: Any) -> None:
        """A fetch that nothing is concurrent with."""
        self.done(self.fetch(rows, **how), weight)

    def pushed(self, rows: list[int], gradient: float = 1, **how: Any) -> None:
        self.done(self.push(rows, gradient, **how))

    def changed(self, method: Callable[..., Any], name: str = "kept", **who: Any) -> None:
        self.done(self.change(method, name, **who))

    def opened(self, epoch: int) -> None:
        self.done(self.begin(WeightClient.open_session, "operator", 0, name="run"), epoch=epoch)


def written(path: Path, write: Writer) -> Path:
    """The file of a history."""
    with Recorder(path / "history.jsonl", SPEC, 2, RATES) as recorder:
        write(Script(recorder))
    return recorder.path


Writer = Callable[[Script], None]
HAVE_NONE: list[Writer] = []


def has_none(write: Writer) -> Writer:
    HAVE_NONE.append(write)
    return write


@has_none
def a_push_made_again_counts_twice(h: Script) -> None:
    push = h.push([0])
    h.unknown(push)
    h.again(push)
    h.done(push)
    h.seen([0], [-2])


@has_none
def a_failed_push_counts_twice(h: Script) -> None:
    h.unknown(h.push([0]))
    h.seen([0], [-1])
    h.seen([0], [-2])


@has_none
def a_read_is_stale(h: Script) -> None:
    h.pushed([0])
    h.seen([0], [-1])
    h.pushed([0], 10)
    h.seen([0], [-1])


@has_none
def reads_go_back_under_a_concurrent_push(h: Script) -> None:
    push = h.push([0])
    h.seen([0], [-1])
    h.seen([0], [0])
    h.done(push)


@has_none
def two_rows_of_concurrent_pushes_disagree_on_the_order(h: Script) -> None:
    one, other = h.push([0], 1), h.push([0], 10)
    fetches = [h.fetch([0]), h.fetch([0])]
    h.done(fetches[0], [-1])
    h.done(fetches[1], [-10])
    h.done(one)
    h.done(other)


@has_none
def a_push_is_seen_before_it_was_made(h: Script) -> None:
    h.seen([0], [-1])
    h.pushed([0])


@has_none
def half_of_a_failed_push_is_seen(h: Script) -> None:
    h.unknown(h.push([2, 7]))
    h.seen([2], [0])
    h.seen([7], [-1])
    h.seen([2], [0])


@has_none
def half_of_a_write_is_seen(h: Script) -> None:
    h.done(h.write([0, 1], 3, 1))
    write = h.write([0, 1], 7, 2)
    h.seen([0, 1], [3, 7])
    h.done(write)


@has_none
def a_fetch_is_no_snapshot(h: Script) -> None:
    pushes = [h.push([0], 1), h.push([4], 10)]
    fetches = [h.fetch([0, 4]), h.fetch([0, 4])]
    h.done(fetches[0], [-1, 0])
    h.done(fetches[1], [0, -10])
    for push in pushes:
        h.done(push)


@has_none
def an_older_state_replaces_a_newer_one(h: Script) -> None:
    h.pushed([0], step=4)
    h.done(h.write([0], 7, 4))


@has_none
def a_write_is_refused_without_reason(h: Script) -> None:
    h.pushed([0], step=4)
    h.refused(h.write([0], 7, 5), "StepError")


@has_none
def a_refused_write_takes_effect(h: Script) -> None:
    h.pushed([0], step=4)
    h.changed(WeightClient.checkpoint)
    h.pushed([0], step=6)
    h.refused(h.write([0], 7, 5), "StepError")
    h.changed(WeightClient.rollback)
    h.seen([0], [7])


@has_none
def a_fetch_is_refused_without_reason(h: Script) -> None:
    h.pushed([0], step=4)
    h.refused(h.fetch([0], step=5), "StepError")


@has_none
def a_fetch_of_the_past_is_answered(h: Script) -> None:
    h.pushed([0], step=4)
    h.seen([0], [-1], step=4)


@has_none
def a_push_of_an_older_session_is_acknowledged(h: Script) -> None:
    h.opened(2)
    h.pushed([0])


@has_none
def a_failed_push_of_an_older_session_takes_effect_later(h: Script) -> None:
    h.unknown(h.push([0]))
    h.opened(2)
    h.seen([0], [0])
    h.seen([0], [-1])


@has_none
def a_fenced_push_takes_effect_later(h: Script) -> None:
    push = h.push([0])
    h.opened(2)
    h.seen([0], [0])
    h.refused(push, "FencedError")
    h.seen([0], [-1])


@has_none
def a_push_of_the_newest_session_is_fenced(h: Script) -> None:
    h.opened(2)
    h.refused(h.push([0], epoch=2), "FencedError")


@has_none
def an_older_session_is_joined(h: Script) -> None:
    h.opened(2)
    h.done(h.begin(WeightClient.open_session, "late", 1, name="run", join=1), epoch=1)


@has_none
def a_checkpoint_holds_a_later_push(h: Script) -> None:
    h.changed(WeightClient.checkpoint)
    h.pushed([0])
    h.seen([0], [-1], checkpoint="kept")


@has_none
def a_checkpoint_lacks_an_earlier_push(h: Script) -> None:
    h.pushed([0])
    h.changed(WeightClient.checkpoint)
    h.pushed([0])
    h.changed(WeightClient.rollback)
    h.seen([0], [0])


@has_none
def a_checkpoint_cannot_be_found(h: Script) -> None:
    h.changed(WeightClient.checkpoint)
    h.refused(h.fetch([0], checkpoint="kept"), "NoTableError")


@has_none
def a_failed_rollback_comes_after_a_later_write_of_its_writer(h: Script) -> None:
    h.changed(WeightClient.checkpoint)
    h.unknown(h.change(WeightClient.rollback))
    h.pushed([0])
    h.seen([0], [-1])
    h.seen([0], [0])


@has_none
def a_failed_checkpoint_is_taken_after_a_later_write_of_its_writer(h: Script) -> None:
    h.unknown(h.change(WeightClient.checkpoint))
    h.pushed([0])
    h.seen([0], [-1], checkpoint="kept")


@has_none
def a_failed_push_comes_after_a_rollback_of_its_writer(h: Script) -> None:
    h.changed(WeightClient.checkpoint)
    h.unknown(h.push([0]))
    h.changed(WeightClient.rollback)
    h.seen([0], [0])
    h.seen([0], [-1])


@pytest.mark.parametrize("write", HAVE_NONE, ids=lambda write: write.__name__)
def test_is_refused(write: Writer, tmp_path: Path) -> None:
    path = written(tmp_path, write)
    with pytest.raises(NotLinearizableError, match="nothing explains"):
        check(path)


def test_a_refusal_says_what_cannot_be_ordered(tmp_path: Path) -> None:
    def write(h: Script) -> None:
        h.pushed([0], 1)
        h.push([0, 4], 10, client="other")
        h.seen([0, 4], [-11, 0])

    with pytest.raises(NotLinearizableError) as refused:
        check(written(tmp_path, write))
    lines = str(refused.value).splitlines()
    assert "#3 fetch(rows=[0, 4], step=20) by reader: done (lines 7–8)" in lines[1]
    assert "#2 push_gradients(rows=[0, 4], step=0) by other in session 1: unknown (line 6)" in lines[-1]


def test_a_history_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    def write(h: Script) -> None:
        h.pushed([0, 1, 2])
        h.pushed([1, 1], 2, step=3)  # a repeated row adds up
        h.seen(ALL, [-1, -5, -1, 0, 0, 0, 0, 0])

    path = written(tmp_path, write)
    path.write_text(path.read_text()[:-5])
    assert [call.outcome for call in History.load(path).calls] == ["done", "done", "done", "unknown"]
    assert check(path).num_calls == 4
