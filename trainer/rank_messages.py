"""One message from all ranks of a run: the store of torchrun's agent, which outlives them, notes what was said.

Rank 0 may show a display on the terminal that the ranks share, and erases what is in its place: the others speak when
that display has ended.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.display import erase

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CONNECT_SECONDS = 3.0
_WAIT_SECONDS = 2.0
_ANY = "said"
_FREE = "free"


class RankLostError(Exception):
    """Another rank failed or did not answer in time."""


def is_first_to_say(message: str) -> bool:
    """Whether no other rank of this start has said the same; also true if that cannot be known."""
    with suppress(RuntimeError, ValueError):
        if (store := _store()) is not None:
            store.add(_ANY, 1)
            _wait_for_the_terminal(store)
            return int(store.add(hashlib.sha256(message.encode()).hexdigest(), 1)) == 1
    return True


def someone_said() -> bool:
    """Whether any rank of this start says something within two seconds; false if that cannot be known."""
    with suppress(RuntimeError, ValueError):
        if (store := _store()) is not None:
            _wait_for_the_terminal(store)
            store.wait([_ANY], timedelta(seconds=_WAIT_SECONDS))
            return True
    return False


def leave_the_terminal() -> None:
    """Ends this rank's display: another rank failed, and says why."""
    erase()
    with suppress(RuntimeError, ValueError):
        if _is_first() and (store := _store()) is not None:
            store.add(_FREE, 1)


def _wait_for_the_terminal(store: Store) -> None:
    """Waits until rank 0 has no display any more, but not for long: it may be lost."""
    if _is_first():
        store.add(_FREE, 1)
        return
    with suppress(RuntimeError):
        store.wait([_FREE], timedelta(seconds=_WAIT_SECONDS))


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


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
