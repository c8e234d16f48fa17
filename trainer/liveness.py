"""Ends all ranks as soon as one of them fails or is killed.

A GPU that waits in NCCL for a lost rank waits until a timeout of many minutes, and so does the program, deaf to
signals. So each rank holds an idle connection to rank 0: the system closes it however a process ends. Rank 0 then
closes all others, and each rank ends its own process, after a grace period in which it may report a better error
itself.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from weightserver.common.logs import print_error

GRACE_SECONDS = 15.0
"""Time for a rank to end by itself after it failed, or after it learned that another rank is lost."""
_CONNECT_SECONDS = 60.0
_GREETING_SECONDS = 5.0
"""Time for a connection to identify itself as a rank; ranks do so immediately."""
_GOODBYE = b"."
"""Sent by a rank that has finished."""
_TOKEN_BYTES = 16


@contextmanager
def ending_together(
    rank: int,
    world_size: int,
    broadcast_text: Callable[[str | None], str],
    agreed: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Ends the processes of all ranks if one of them leaves this context by an error, or its process ends.

    Args:
        broadcast_text: returns rank 0's text on all ranks.
        agreed: errors that all ranks raise together to end the run.

    Raises:
        OSError: rank 0 is unreachable.
    """
    watch = _Watch(rank, _connections(rank, world_size, broadcast_text))
    watch.start()
    try:
        yield
    except agreed:
        watch.say_goodbye()
        raise
    except BaseException:
        watch.fail()
        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)  # whatever it is waiting for: threads, NCCL, a GPU
        raise
    watch.say_goodbye()


def _connections(rank: int, world_size: int, broadcast_text: Callable[[str | None], str]) -> list[socket.socket]:
    """The connection to rank 0; on rank 0, one from each other rank."""
    master = os.environ["MASTER_ADDR"]
    if rank > 0:
        port, token = broadcast_text(None).split()
        connection = socket.create_connection((master, int(port)), timeout=_CONNECT_SECONDS)
        connection.sendall(bytes.fromhex(token))
        connection.settimeout(None)
        return [connection]
    with _listener(master) as listener:
        listener.settimeout(_CONNECT_SECONDS)
        token = secrets.token_hex(_TOKEN_BYTES)
        broadcast_text(f"{listener.getsockname()[1]} {token}")
        connections: list[socket.socket] = []
        while len(connections) < world_size - 1:
            connection, _ = listener.accept()
            if _is_a_ranks(connection, token):
                connections.append(connection)
            else:  # for example a port scanner
                connection.close()
    return connections


def _is_a_ranks(connection: socket.socket, token: str) -> bool:
    connection.settimeout(_GREETING_SECONDS)
    try:
        greeting = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
    except OSError:
        return False
    connection.settimeout(None)
    return secrets.compare_digest(greeting.hex(), token)


def _listener(master: str) -> socket.socket:
    """Listens on a free port of rank 0's machine, which has the address `master` for others."""
    if master in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class _Watch(threading.Thread):
    """Waits until every peer has said goodbye, or one is lost."""

    def __init__(self, rank: int, connections: list[socket.socket]) -> None:
        super().__init__(name="liveness", daemon=True)
        self._rank = rank
        self._connections = connections
        self._is_over = threading.Event()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if not _said_goodbye(key.fileobj):
                        self._end()
                        return
                    selector.unregister(key.fileobj)

    def fail(self) -> None:
        """Tells the other ranks that this one failed; the caller ends this process."""
        self._is_over.set()
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def say_goodbye(self) -> None:
        """Says goodbye and returns once all ranks have."""
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(_GOODBYE)
        self.join(GRACE_SECONDS)
        self._is_over.set()
        for connection in self._connections:
            connection.close()

    def _end(self) -> None:
        """Ends this process, unless it ends by itself."""
        self._hang_up()
        if not self._is_over.wait(GRACE_SECONDS):
            print_error(f"trainer: rank {self._rank} ends because another rank is lost: see that rank's last message")
            sys.stderr.flush()
            os._exit(1)


def _said_goodbye(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == _GOODBYE
    except OSError:
        return False
