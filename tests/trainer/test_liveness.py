"""However a process ends, the others end soon, unless all have finished."""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer import liveness

NUM_RANKS = 3
RANK = """
import os, signal, sys, time
from pathlib import Path
import trainer.liveness
from trainer.liveness import ending_together

trainer.liveness.GRACE_SECONDS = 0.3
rank, ends, told = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def broadcast_text(text):
    if text is not None:
        told.with_suffix(".partial").write_text(text)
        told.with_suffix(".partial").rename(told)
    while not told.exists():
        time.sleep(0.01)
    return told.read_text()

class Agreed(Exception):
    pass

try:
    with ending_together(rank, 3, broadcast_text, (Agreed,)):
        print("together", flush=True)
        if ends == "all are done":
            time.sleep(0.3 * rank)
        elif ends == "all agree":
            time.sleep(0.3 * rank)
            raise Agreed
        elif ends == f"{rank} raises":
            raise ValueError("it cannot continue")
        elif ends == f"{rank} raises and hangs":
            raise KeyError("it cannot continue")
        else:
            time.sleep(100)
except Agreed:
    sys.exit(143)
except KeyError:
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("all agree", 143),
        ("2 raises and hangs", 1),
        ("0 is killed", 1),
        pytest.param("all are done", 0, marks=pytest.mark.guard),
        pytest.param("0 raises", 1, marks=pytest.mark.guard),
        pytest.param("2 is killed", 1, marks=pytest.mark.guard),
    ],
)
def test_ranks_end_together(ends: str, status: int, tmp_path: Path) -> None:
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), ends, str(tmp_path / "told")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "together\n"
        killed = int(ends[0]) if "killed" in ends else None
        if killed is not None:
            ranks[killed].send_signal(signal.SIGKILL)
        began = time.monotonic()
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert time.monotonic() - began < 60
    finally:
        for rank in ranks:
            rank.kill()
    statuses = [rank.returncode for rank in ranks]
    assert statuses == [-signal.SIGKILL if number == killed else status for number in range(NUM_RANKS)], errors
    if status == 1:
        told = [error for error in errors if "ends because another rank is lost" in error]
        assert len(told) == NUM_RANKS - 1


@pytest.mark.parametrize("silent", [False, True])
def test_other_connections_are_closed(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scanner connects to the port where rank 0 waits for the others, and resets it or stays silent."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(liveness, "_GREETING_SECONDS", 1.0 if silent else 60.0)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(liveness._connections, 0, 2, lambda text: told.put(text or "") or "")
        port, token = told.get(timeout=60).split()
        stranger = socket.create_connection(("127.0.0.1", int(port)))
        if not silent:  # a reset, not an end
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
        (to_first,) = liveness._connections(1, 2, lambda _: f"{port} {token}")
        (to_second,) = first.result(timeout=60)
    assert to_second.getpeername() == to_first.getsockname()
    for connection in (stranger, to_first, to_second):
        connection.close()
