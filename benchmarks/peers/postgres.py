"""PostgreSQL with one row of the classifier in each row of a table: bigint and bytea, moved by binary COPY."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import (
    CORRECTION,
    DIM,
    EXACTLY_ONCE,
    ROW_BYTES,
    PeerError,
    ServedPeer,
    Server,
    free_port,
    made_rows,
    missing_of,
)
from weightserver.core.arrays import Float32Array, Int64Array

_USER = "postgres"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "1GB",
    # No checkpoint and no vacuum, which would take the other peers' time.
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1d",
    "autovacuum": "off",
}
"""All others have their defaults: fsync and synchronous_commit are on."""
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_TUPLE = np.dtype(
    [("fields", ">i2"), ("id_bytes", ">i4"), ("id", ">i8"), ("row_bytes", ">i4"), ("row", f"V{ROW_BYTES}")]
)
"""Of COPY's binary format."""


def programs() -> Path | None:
    """The folder of the newest server's programs: Debian has them outside the PATH."""
    found = [Path(path).parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))
    return next((path for path in found if (path / "postgres").exists()), None)


class Postgres(ServedPeer):
    key, name, durable, does_not = "postgres", "PostgreSQL", True, (CORRECTION, EXACTLY_ONCE)
    _connection: Any = None

    @classmethod
    def missing(cls) -> str | None:
        if programs() is None:
            return "no server (apt-get install postgresql)"
        if os.geteuid() == 0 and _USER not in {entry.pw_name for entry in pwd.getpwall()}:
            return f"it does not run as root, and there is no user {_USER}"
        return missing_of(modules=["psycopg"])

    def start(self) -> None:
        import psycopg

        folder, user, data = programs(), _USER if os.geteuid() == 0 else None, self.directory / "data"
        assert folder is not None
        if user:
            shutil.chown(self.directory, user, user)
        command = [str(folder / "initdb"), "-D", str(data), "-A", "trust", "-U", _USER, "--no-sync"]
        made = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.directory,
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )
        if made.returncode:
            raise PeerError(f"initdb failed: {made.stderr.strip().rpartition(chr(10))[2]}")
        port = free_port()
        command = [str(folder / "postgres"), "-D", str(data), "-p", str(port)]
        command += [f"--{name}={value}" for name, value in _SETTINGS.items()]
        self._server = Server(command, self.directory / "log", user=user, stop_signal=signal.SIGINT)

        def answers() -> bool:
            with suppress(psycopg.OperationalError):
                self._connection = psycopg.connect(
                    f"host=127.0.0.1 port={port} user={_USER} dbname=postgres", autocommit=True
                )
            return self._connection is not None

        self._server.wait_until(answers)
        self._cursor = self._connection.cursor()
        self._cursor.execute("CREATE TABLE rows (id bigint PRIMARY KEY, row bytea NOT NULL)")
        self._cursor.execute("CREATE TEMPORARY TABLE new (id bigint, row bytea) ON COMMIT DELETE ROWS")

    def fill(self) -> None:
        for ids, rows in made_rows(self.num_rows):
            self._copy("rows", ids, rows)
        self._cursor.execute("VACUUM ANALYZE rows")
        self._cursor.execute("CHECKPOINT")

    def _copy(self, table: str, ids: Int64Array, rows: Float32Array) -> None:
        tuples = np.empty(len(ids), _TUPLE)
        tuples["fields"], tuples["id_bytes"], tuples["row_bytes"] = 2, 8, ROW_BYTES
        tuples["id"], tuples["row"] = ids, np.ascontiguousarray(rows).view(f"V{ROW_BYTES}").ravel()
        with self._cursor.copy(f"COPY {table} (id, row) FROM STDIN (FORMAT BINARY)") as copy:
            copy.write(_HEADER + tuples.tobytes() + _TRAILER)

    def fetch(self, ids: Int64Array) -> Float32Array:
        wanted = ",".join(map(str, ids.tolist()))
        query = f"SELECT id, row FROM rows WHERE id = ANY('{{{wanted}}}')"
        with self._cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT BINARY)") as copy:
            tuples = np.frombuffer(b"".join(copy), _TUPLE, count=len(ids), offset=len(_HEADER))
        out = np.empty((len(ids), DIM), np.float32)
        out.view(f"V{ROW_BYTES}").ravel()[np.searchsorted(ids, tuples["id"])] = tuples["row"]
        return out

    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        """One transaction. An upsert, because the planner reads the whole table for an UPDATE of scattered rows."""
        with self._connection.transaction():
            self._copy("new", ids, rows)
            self._cursor.execute(
                "INSERT INTO rows SELECT id, row FROM new ON CONFLICT (id) DO UPDATE SET row = excluded.row"
            )

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
