"""Files to which a run appends its records, each at once: metrics.jsonl, and an event file of TensorBoard.

TensorBoard's own writer works in a thread, which prints a traceback where a disk is full.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from weightserver.common.atomic_files import make_directory

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class Appended:
    """A file to which is appended until `stack` closes it; what fails is an OSError that names it."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        stack.callback(self._named, self._file.close)  # a network's disk may be found full only now

    def write(self, content: bytes) -> None:
        while content:  # only a part of it may fit
            content = content[self._named(self._file.write, content) :]

    def _named(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            raise OSError(f"{self._path} cannot be written ({error.strerror})") from None


def lines_of(path: Path, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    """A function that appends a record to a metrics.jsonl."""
    lines = Appended(path, stack)
    return lambda record: lines.write(json.dumps(record).encode() + b"\n")


def events_of(directory: Path, start_step: int, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    """A function that writes a record to a new event file; what earlier ones have from `start_step` on does not count
    any more."""
    make_directory(directory)
    # TensorBoard reads files in the order of their names: this is the last one, also if the clock was set back
    earlier = [int(found[1]) for path in directory.iterdir() if (found := _EVENTS.match(path.name))]
    number = max([int(time.time()), *(one + 1 for one in earlier)])
    path = directory / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"
    events = RecordWriter(Appended(path, stack))

    def write(step: int, **content: Any) -> None:
        events.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())

    write(start_step, file_version="brain.Event:2")
    write(start_step, session_log=SessionLog(status=SessionLog.START))

    def to_board(record: dict[str, Any]) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in record.items() if key != "step"]
        write(record["step"], summary=Summary(value=values))

    return to_board
