"""A command of weightserver that kills itself with SIGKILL after a chosen call, in small pieces:
python -m tests.helpers.dying_operation MODULE:NAME[.NAME] NUMBER COMMAND ARGUMENTS..."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from operator import attrgetter
from typing import Any

from weightserver.cli import main
from weightserver.operations import backup, export
from weightserver.storage import shard_builder

PIECE_BYTES = 2_000


if __name__ == "__main__":
    place, number = sys.argv[1:3]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    if owners:
        owner = attrgetter(".".join(owners))(owner)
    original, calls = getattr(owner, name), 0

    def dying(*arguments: Any, **options: Any) -> Any:
        global calls
        result = original(*arguments, **options)
        calls += 1
        if calls == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)
    shard_builder.BATCH_BYTES = PIECE_BYTES
    backup._FILE_BYTES = PIECE_BYTES
    backup._SHARDS_AT_ONCE = 1  # no request of another shard is on its way then, and arrives later
    export._BYTES_PER_FILE = PIECE_BYTES
    main(sys.argv[3:])
