"""Runs a weight server on this machine: real shard processes on loopback, for tests and single-node runs."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from weightserver.common.atomic_files import PRIVATE_FILE, atomic_write, make_directory, make_private
from weightserver.common.closing import Closing
from weightserver.common.processes import end_process
from weightserver.common.security import TOKEN_VARIABLE
from weightserver.core.errors import ShardUnavailableError

_MARKER = "cluster.json"
_START_SECONDS = 60.0
_LOOKED_AT_BYTES = 10_000_000
"""Bytes of a data file for which a start may take another second: it looks at every block, anywhere on the disk."""
_STOP_SECONDS = 30.0
_STOP_SIGNAL = signal.SIGINT  # --ignore-sigterm may be among the options


def _reserved_port() -> socket.socket:
    """Reserves a free loopback port, which stays this process's while the shard that listens there is down.

    The socket does not listen: the kernel gives the port to no connection and to no server that asks for any port,
    while a server that names it and sets SO_REUSEADDR, as gRPC and the metrics server do, may listen there.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _remove(directory: Path, process: int) -> None:
    """Removes a cluster's temporary directory, unless in a fork of its process, which may end before it."""
    if process == os.getpid():
        shutil.rmtree(directory, ignore_errors=True)


class LocalCluster(Closing):
    """Starts `num_shards` shard processes on free loopback ports, and stops them when closed. A context manager.

    The shards also stop when this process dies. Shard K keeps its data in `directory`/shard-K and its log in
    `directory`/shard-K.log; an existing directory is served again. `directory`/cluster.json records whether all shards
    have started once: {"num_shards": n, "finished": bool}. Afterwards a shard whose data are missing is refused rather
    than replaced by an empty one.

    Args:
        directory: where the shards keep their data; by default a temporary directory that is deleted when closed.
        serve_options: additional options of `weightserver serve` for every shard.
        token: that clients must send; without one, all users of this machine can read and change the rows.

    Raises:
        ValueError: `num_shards` is not positive.
        ShardUnavailableError: a shard did not start; the message ends with the last line of its log.
    """

    addresses: list[str]
    """host:port of every shard, in shard order."""
    metrics_addresses: list[str]
    """host:port of every shard's /metrics, in shard order."""
    processes: list[subprocess.Popen[str]]
    """The shards' processes, in shard order."""
    _program: ClassVar[list[str]] = [sys.executable, "-m", "weightserver"]

    def __init__(
        self,
        num_shards: int = 1,
        directory: str | Path | None = None,
        *,
        serve_options: Sequence[str] = (),
        token: str | None = None,
    ) -> None:
        if num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, got {num_shards}")
        self._process = os.getpid()
        self._serve_options = list(serve_options)
        self._token = token
        self.directory = Path(tempfile.mkdtemp(prefix="weightserver-") if directory is None else directory)
        self._remove = None if directory else weakref.finalize(self, _remove, self.directory, self._process)
        make_directory(self.directory)
        self.processes, self.addresses, self.metrics_addresses = [], [], []
        self._reserved_ports: list[tuple[socket.socket, socket.socket]] = []
        try:
            finished = self._is_finished()
            if not finished:
                self._mark(num_shards, finished=False)
            self._reserved_ports = [(_reserved_port(), _reserved_port()) for _ in range(num_shards)]
            # Starts all at once, then waits for each.
            for shard in range(num_shards):
                self.processes.append(self._start(shard, num_shards, init=not finished))
            for shard, process in enumerate(self.processes):
                address, metrics_address = self._wait_until_serving(shard, process)
                self.addresses.append(address)
                self.metrics_addresses.append(metrics_address)
            self._mark(num_shards, finished=True)
        except BaseException:
            self.close()
            raise

    def restart(self, shard: int) -> None:
        """Stops a shard with SIGINT if it runs, and starts it again at the same address with the same data."""
        if self._process != os.getpid():
            raise ValueError(f"this cluster was started by process {self._process}: restart its shards there")
        if not 0 <= shard < len(self.processes):
            raise ValueError(f"there is no shard {shard}: the cluster has shards 0..{len(self.processes) - 1}")
        self._stop(self.processes[shard])
        process = self._start(shard, len(self.processes))
        self.processes[shard] = process
        self._wait_until_serving(shard, process)

    def close(self) -> None:
        """Stops the shards. Safe to repeat. In a forked process it does nothing."""
        if self._process != os.getpid():
            return
        for process in self.processes:
            process.send_signal(_STOP_SIGNAL)
        for process in self.processes:
            self._stop(process)
        for port in itertools.chain(*self._reserved_ports):
            port.close()
        if self._remove is not None:
            self._remove()

    def _log(self, shard: int) -> Path:
        return self.directory / f"shard-{shard}.log"

    def _is_finished(self) -> bool:
        """Whether all shards have started once. Data without a marker, as of restored shards, mean that they have."""
        marker = self.directory / _MARKER
        if not marker.exists():
            return any(self.directory.glob("shard-*/data.mdb"))
        try:
            return json.loads(marker.read_text())["finished"] is True
        except (ValueError, LookupError, TypeError):
            return True

    def _mark(self, num_shards: int, *, finished: bool) -> None:
        text = json.dumps({"num_shards": num_shards, "finished": finished}) + "\n"
        marker = self.directory / _MARKER
        if not marker.exists() or marker.read_text() != text:
            atomic_write(marker, lambda path: path.write_text(text))

    def _start(self, shard: int, num_shards: int, *, init: bool = False) -> subprocess.Popen[str]:
        port, metrics_port = (reserved.getsockname()[1] for reserved in self._reserved_ports[shard])
        command = [*self._program, "serve", "--announce", "--stop-with-parent"]
        command += ["--data-dir", str(self.directory / f"shard-{shard}"), "--listen", f"127.0.0.1:{port}"]
        command += ["--shard", str(shard), "--num-shards", str(num_shards), "--metrics-port", str(metrics_port)]
        command += [*(["--init"] if init else []), *self._serve_options]
        # a token in the environment of this process is for other shards
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        environment |= {TOKEN_VARIABLE: self._token} if self._token else {}
        log_file = self._log(shard)
        make_private(log_file)
        with os.fdopen(os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE), "a") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C in the caller does not stop its shards
            )

    def _wait_until_serving(self, shard: int, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Returns the (address, metrics address) that the shard announces."""
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda out=process.stdout: lines.put(out.readline()), daemon=True).start()
        data = self.directory / f"shard-{shard}" / "data.mdb"
        seconds = _START_SECONDS + (data.stat().st_size if data.exists() else 0) / _LOOKED_AT_BYTES
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            late = f"shard {shard} did not start within {seconds:.0f} s: see {self._log(shard)}"
            raise ShardUnavailableError(late) from None
        if not line:
            last = self._log(shard).read_text().strip().rpartition("\n")[2]
            raise ShardUnavailableError(f"shard {shard} did not start: {last or 'its log is empty'}")
        announced = json.loads(line)
        return announced["address"], announced["metrics_address"]

    def _stop(self, process: subprocess.Popen[str]) -> None:
        end_process(process, seconds=_STOP_SECONDS, ask=_STOP_SIGNAL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
