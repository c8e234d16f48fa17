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


Writer = Callable[[Script], object]


def written(path: Path, write: Writer) -> Path:
    """The file of a history."""
    with Recorder(path / "history.jsonl", SPEC, 2, RATES) as recorder:
        write(Script(recorder))
    return recorder.path


checkpoint, rollback = WeightClient.checkpoint, WeightClient.rollback
HAVE_NONE: dict[str, Writer] = {
    "a push made again counts twice": lambda h: (
        [h.unknown(push := h.push([0])), h.again(push), h.done(push), h.seen([0], [-2])]
    ),
    "a failed push counts twice": lambda h: [h.unknown(h.push([0])), h.seen([0], [-1]), h.seen([0], [-2])],
    "a read is stale": lambda h: [h.pushed([0]), h.seen([0], [-1]), h.pushed([0], 10), h.seen([0], [-1])],
    "reads go back under a concurrent push": lambda h: (
        [push := h.push([0]), h.seen([0], [-1]), h.seen([0], [0]), h.done(push)]
    ),
    "two rows of concurrent pushes disagree on the order": lambda h: [
        pushes := [h.push([0], 1), h.push([0], 10)],
        fetches := [h.fetch([0]), h.fetch([0])],
        h.done(fetches[0], [-1]),
        h.done(fetches[1], [-10]),
        h.done(pushes[0]),
        h.done(pushes[1]),
    ],
    "a push is seen before it was made": lambda h: [h.seen([0], [-1]), h.pushed([0])],
    "half of a failed push is seen": lambda h: (
        [h.unknown(h.push([2, 7])), h.seen([2], [0]), h.seen([7], [-1]), h.seen([2], [0])]
    ),
    "half of a write is seen": lambda h: (
        [h.done(h.write([0, 1], 3, 1)), write := h.write([0, 1], 7, 2), h.seen([0, 1], [3, 7]), h.done(write)]
    ),
    "a fetch is no snapshot": lambda h: [
        pushes := [h.push([0], 1), h.push([4], 10)],
        fetches := [h.fetch([0, 4]), h.fetch([0, 4])],
        h.done(fetches[0], [-1, 0]),
        h.done(fetches[1], [0, -10]),
        h.done(pushes[0]),
        h.done(pushes[1]),
    ],
    "an older state replaces a newer one": lambda h: [h.pushed([0], step=4), h.done(h.write([0], 7, 4))],
    "a write is refused without reason": lambda h: (
        [h.pushed([0], step=4), h.refused(h.write([0], 7, 5), "StepError")]
    ),
    "a refused write takes effect": lambda h: [
        h.pushed([0], step=4),
        h.changed(checkpoint),
        h.pushed([0], step=6),
        h.refused(h.write([0], 7, 5), "StepError"),
        h.changed(rollback),
        h.seen([0], [7]),
    ],
    "a fetch is refused without reason": lambda h: (
        [h.pushed([0], step=4), h.refused(h.fetch([0], step=5), "StepError")]
    ),
    "a fetch of the past is answered": lambda h: [h.pushed([0], step=4), h.seen([0], [-1], step=4)],
    "a push of an older session is acknowledged": lambda h: [h.opened(2), h.pushed([0])],
    "a failed push of an older session takes effect later": lambda h: (
        [h.unknown(h.push([0])), h.opened(2), h.seen([0], [0]), h.seen([0], [-1])]
    ),
    "a fenced push takes effect later": lambda h: (
        [push := h.push([0]), h.opened(2), h.seen([0], [0]), h.refused(push, "FencedError"), h.seen([0], [-1])]
    ),
    "a push of the newest session is fenced": lambda h: [h.opened(2), h.refused(h.push([0], epoch=2), "FencedError")],
    "an older session is joined": lambda h: (
        [h.opened(2), h.done(h.begin(WeightClient.open_session, "late", 1, name="run", join=1), epoch=1)]
    ),
    "a checkpoint holds a later push": lambda h: (
        [h.changed(checkpoint), h.pushed([0]), h.seen([0], [-1], checkpoint="kept")]
    ),
    "a checkpoint lacks an earlier push": lambda h: (
        [h.pushed([0]), h.changed(checkpoint), h.pushed([0]), h.changed(rollback), h.seen([0], [0])]
    ),
    "a checkpoint cannot be found": lambda h: (
        [h.changed(checkpoint), h.refused(h.fetch([0], checkpoint="kept"), "NoTableError")]
    ),
    "a failed rollback comes after a later write of its writer": lambda h: [
        h.changed(checkpoint),
        h.unknown(h.change(rollback)),
        h.pushed([0]),
        h.seen([0], [-1]),
        h.seen([0], [0]),
    ],
    "a failed checkpoint is taken after a later write of its writer": lambda h: (
        [h.unknown(h.change(checkpoint)), h.pushed([0]), h.seen([0], [-1], checkpoint="kept")]
    ),
    "a failed push comes after a rollback of its writer": lambda h: [
        h.changed(checkpoint),
        h.unknown(h.push([0])),
        h.changed(rollback),
        h.seen([0], [0]),
        h.seen([0], [-1]),
    ],
}


@pytest.mark.parametrize("name", HAVE_NONE)
def test_is_refused(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, HAVE_NONE[name])
    with pytest.raises(NotLinearizableError, match="nothing explains"):
        check(path)


def test_a_refusal_says_what_cannot_be_ordered(tmp_path: Path) -> None:
    path = written(tmp_path, lambda h: [h.pushed([0]), h.push([0, 4], 10, client="other"), h.seen([0, 4], [-11, 0])])
    with pytest.raises(NotLinearizableError) as refused:
        check(path)
    lines = str(refused.value).splitlines()
    assert "#3 fetch(rows=[0, 4], step=20) by reader: done (lines 7–8)" in lines[1]
    assert "#2 push_gradients(rows=[0, 4], step=0) by other in session 1: unknown (line 6)" in lines[-1]


def test_a_history_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    """And a row that is twice in a push adds up."""
    all_rows, values = list(range(SPEC.num_rows)), [-1, -5, -1, 0, 0, 0, 0, 0]
    path = written(tmp_path, lambda h: [h.pushed([0, 1, 2]), h.pushed([1, 1], 2, step=3), h.seen(all_rows, values)])
    path.write_text(path.read_text()[:-5])
    assert [call.outcome for call in History.load(path).calls] == ["done", "done", "done", "unknown"]
    assert check(path).num_calls == 4
