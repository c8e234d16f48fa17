"""One message from all ranks of a run: the store of torchrun's agent, which outlives them, notes what was said."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CONNECT_SECONDS = 3.0
_WAIT_SECONDS = 2.0
_ANY = "said"


class RankLostError(Exception):
    """Another rank failed or did not answer in time."""


def is_first_to_say(message: str) -> bool:
    """Whether no other rank of this start has said the same; also true if that cannot be known."""
    with suppress(RuntimeError, ValueError):
        if (store := _store()) is not None:
            store.add(_ANY, 1)
            return int(store.add(hashlib.sha256(message.encode()).hexdigest(), 1)) == 1
    return True


def someone_said() -> bool:
    """Whether any rank of this start says something within two seconds; false if that cannot be known."""
    with suppress(RuntimeError, ValueError):
        if (store := _store()) is not None:
            store.wait([_ANY], timedelta(seconds=_WAIT_SECONDS))
            return True
    return False


def _store() -> Store | None:
    """The agent's store; None if torchrun did not start this process as one of several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_CONNECT_SECONDS),
        wait_for_workers=False,
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"messages-{start}", store)
