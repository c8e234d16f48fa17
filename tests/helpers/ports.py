"""Free ports on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(number: int) -> Iterator[list[int]]:
    """Different ports on which servers that set SO_REUSEADDR can listen, and which nothing else is given meanwhile."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:  # bound, but not listening
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]
