"""One session for all ranks of a run: rank 0 opens it, the others join."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from weightserver import WeightClient, WeightServerError
from weightserver.torch.ranks import Ranks


@dataclass(frozen=True)
class SharedSession:
    """A session as rank 0 opened it, and a rank's own client, which has joined it."""

    client: WeightClient
    addresses: Sequence[str]
    epoch: int
    content: dict[str, Any] = field(default_factory=dict)
    """What else rank 0 tells the other ranks, as JSON values."""


def share_session(
    run: str,
    ranks: Ranks,
    stack: ExitStack,
    open_first: Callable[[], SharedSession],
    make_client: Callable[[Sequence[str]], WeightClient],
) -> SharedSession:
    """Opens a session on rank 0 by `open_first`, and joins it on every other rank; all ranks call it.

    Args:
        run: name of the session.
        stack: closes the clients that are made here.
        make_client: makes a client of the shards at these addresses.

    Raises:
        ValueError: rank 0 failed; its own error is raised there.
    """
    message: dict[str, Any] = {}
    failure: Exception | None = None
    if ranks.is_first:
        try:
            session = open_first()
            shared = {"addresses": list(session.addresses), "epoch": session.epoch, "content": session.content}
            message = shared | {"marks": session.client.marks()}
        except (ValueError, OSError, WeightServerError) as error:
            failure, message = error, {"error": str(error)}
    message = json.loads(ranks.broadcast_text(json.dumps(message)))
    if failure is not None:
        raise failure
    if "error" in message:
        raise ValueError(f"rank 0 failed: {message['error']}")
    if ranks.is_first:
        return session
    client = stack.enter_context(make_client(message["addresses"]))
    client.expect(message["marks"])
    client.open_session(run, join=message["epoch"])
    return SharedSession(client, message["addresses"], message["epoch"], message["content"])
