"""Histories: each call of some clients as it begins and as it ends, one JSON line each, in the order of these events.

The first line says what the table is. Floats are exact: float32 values become the same float64 and come back digit for
digit. `linearizability.check` reads such a file and needs no server.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightserver import (
    ClusterError,
    FencedError,
    NoTableError,
    OverloadedError,
    RowState,
    ShardUnavailableError,
    StepError,
    TableSpec,
)

UNKNOWN_OUTCOME = (ShardUnavailableError, OverloadedError, ClusterError)
"""Errors of calls that may have taken effect, or wait for another call of their client, and may be made again."""
_REFUSALS = (FencedError, NoTableError, StepError)
_VALUES = ("gradients", "weight", "momentum_buffer")


def rows_of_shard(spec: TableSpec, num_shards: int, shard: int) -> list[int]:
    """Blocks are dealt round-robin."""
    return [row for row in range(spec.num_rows) if row // spec.rows_per_block % num_shards == shard]


@dataclass
class Call:
    """One call of the client; a push or state write with all its repetitions, which the client recognises."""

    number: int
    client: str
    """One name for each writer."""
    kind: str
    """Name of the client's method."""
    epoch: int
    """The caller's session; the one opened, for open_session."""
    arguments: dict[str, Any]
    outcome: str = "unknown"
    """`done`, `unknown`, or the name of the error with which it was refused."""
    result: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    lines: list[int] = field(default_factory=list)
    """Of the file: where it began, ended, was made again."""
    made_again: bool = False

    @property
    def refused(self) -> bool:
        return self.outcome not in ("done", "unknown")

    def refused_by(self, shard: int) -> bool:
        """Whether the error comes from this shard, as it says itself."""
        if not self.refused:
            return False
        if keeping := re.search(r"only shards \[([\d, ]+)\] keep checkpoint", self.message):
            return str(shard) not in keeping[1].split(", ")
        named = re.search(r"shard (\d+) (?:at|has)|no shard|the shards", self.message)
        if named is None:
            raise ValueError(f"call {self.number} was refused by an error that names no shard: {self.message}")
        return named.group(0) == "no shard" or named.group(1) == str(shard)

    def __str__(self) -> str:
        short = {name: value for name, value in self.arguments.items() if name not in _VALUES}
        arguments = ", ".join(f"{name}={value!r}" for name, value in short.items())
        session = f" in session {self.epoch}" if self.epoch else ""
        lines = f"lines {self.lines[0]}–{self.lines[-1]}" if len(self.lines) > 1 else f"line {self.lines[0]}"
        return f"#{self.number} {self.kind}({arguments}) by {self.client}{session}: {self.outcome} ({lines})"


@dataclass(frozen=True)
class History:
    """The contents of a file."""

    path: Path
    spec: TableSpec
    num_shards: int
    learning_rates: list[float]
    calls: list[Call]
    """In the order in which they began."""
    events: list[tuple[str, Call]]
    """("begin", call) and, where the outcome is known, ("end", call), in the order in which they happened."""

    @classmethod
    def load(cls, path: Path) -> History:
        """Reads a file; a last line that was never finished is left out."""
        lines = path.read_text().splitlines(keepends=True)
        about = json.loads(lines[0])
        calls: dict[int, Call] = {}
        events: dict[int, tuple[str, Call]] = {}  # by line
        for number, line in enumerate(lines[1:], start=2):
            if not line.endswith("\n"):
                break
            event = json.loads(line)
            key = event["call"]
            if event["event"] == "begin":
                arguments = _arrays(event["arguments"])
                calls[key] = Call(key, event["client"], event["kind"], event["epoch"], arguments)
                events[number] = "begin", calls[key]
            elif event["event"] == "end":
                calls[key].outcome, calls[key].message = event["outcome"], event.get("message", "")
                calls[key].result = _arrays(event.get("result", {}))
                calls[key].epoch = calls[key].result.get("epoch", calls[key].epoch)
            else:
                calls[key].made_again = True
            calls[key].lines.append(number)
        for call in calls.values():
            if call.outcome != "unknown":
                events[call.lines[-1]] = "end", call
        return cls(
            path,
            TableSpec(**about["table"]),
            about["num_shards"],
            about["learning_rates"],
            list(calls.values()),
            [events[number] for number in sorted(events)],
        )


class Recorder:
    """Writes a history as it happens. Safe to use from any thread; a context manager."""

    def __init__(
        self, path: Path, spec: TableSpec, num_shards: int, learning_rates: npt.ArrayLike, **about: Any
    ) -> None:
        self.path = path
        self.num_calls = self.num_unknown = 0
        """Calls begun, and ends of calls whose outcome is unknown."""
        self._file = path.open("w")
        self._lock = threading.Lock()
        self._started = time.monotonic()
        rates = np.asarray(learning_rates, np.float32).tolist()
        self._put(table=asdict(spec), num_shards=num_shards, learning_rates=rates, **about)

    def begin(self, client: str, method: Callable[..., Any], epoch: int = 0, **arguments: Any) -> RecordedCall:
        """Takes note that a client's method is about to be called in its session, with its arguments by name."""
        with self._lock:
            number = self.num_calls
            self.num_calls += 1
            self._put(
                event="begin",
                call=number,
                seconds=self._seconds(),
                client=client,
                kind=method.__name__,
                epoch=epoch,
                arguments={name: _plain(value) for name, value in arguments.items()},
            )
        return RecordedCall(self, number, functools.partial(method, **arguments))

    def note(self, event: str, call: int, **what: Any) -> None:
        """Takes note of what happens to a call."""
        with self._lock:
            self.num_unknown += what.get("outcome") == "unknown"
            self._put(event=event, call=call, seconds=self._seconds(), **what)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._started, 6)

    def _put(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._file.close()


class RecordedCall:
    """A call whose beginning is recorded. One that is never run is one whose client died."""

    def __init__(self, recorder: Recorder, number: int, method: Callable[[], Any]) -> None:
        self.number = number
        self._recorder, self._method = recorder, method
        self._runs = 0

    def run(self) -> Any:
        """Makes the call and records what came of it; made again, it is the same call."""
        if self._runs:
            self._recorder.note("again", self.number)
        self._runs += 1
        try:
            result = self._method()
        except _REFUSALS as error:
            self._end(outcome=type(error).__name__, message=str(error))
            raise
        except BaseException as error:
            self._end(outcome="unknown", message=f"{type(error).__name__}: {error}")
            raise
        self._end(outcome="done", result=_answer(result))
        return result

    def _end(self, **what: Any) -> None:
        self._recorder.note("end", self.number, **what)


def _answer(result: Any) -> dict[str, Any]:
    """The answer of a client's method, by name."""
    if isinstance(result, RowState):
        return {name: _plain(value) for name, value in vars(result).items()}
    if isinstance(result, np.ndarray):
        return {"weight": _plain(result)}
    return {} if result is None else {"epoch": result}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _arrays(values: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(value, np.float64) if name in _VALUES else value for name, value in values.items()}
