"""A command of weightserver to which something happens at a chosen call:
python -m tests.helpers.at_a_point WHAT MODULE:NAME[.NAME] COMMAND ARGUMENTS...

WHAT happens before the first call: "orphaned" (its parent is killed), a signal's name (it gets that), or "fails" (the
call raises OSError). If it is a number, the command is killed after that call, and its files are of small pieces.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import time
from operator import attrgetter
from typing import Any

from weightserver.cli import main
from weightserver.operations import backup, export
from weightserver.storage import shard_builder

if __name__ == "__main__":
    what, place = sys.argv[1:3]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    if owners:
        owner = attrgetter(".".join(owners))(owner)
    original, numbers = getattr(owner, name), itertools.count(1)

    def happens(*arguments: Any, **options: Any) -> Any:
        if what == "fails":
            raise OSError(f"{place} fails")
        if what == "orphaned":
            parent = os.getppid()
            os.kill(parent, signal.SIGKILL)
            while os.getppid() == parent:
                time.sleep(0.01)
        elif not what.isdecimal():
            signal.raise_signal(signal.Signals[what])
        result = original(*arguments, **options)
        if str(next(numbers)) == what:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, happens)
    if what.isdecimal():
        shard_builder.BATCH_BYTES = backup._FILE_BYTES = export._BYTES_PER_FILE = 2_000
        backup._SHARDS_AT_ONCE = 1  # no request of another shard is on its way then, and arrives later
    main(sys.argv[3:])
