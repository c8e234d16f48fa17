"""A command of weightserver to which something happens before a chosen call of its start:
python -m tests.helpers.at_a_point WHAT MODULE:NAME[.NAME] COMMAND ARGUMENTS...

WHAT is "orphaned" (its parent is killed), a signal's name (it gets that), or "fails" (the call raises OSError).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from operator import attrgetter
from typing import Any

from weightserver.cli import main

if __name__ == "__main__":
    what, place = sys.argv[1:3]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    if owners:
        owner = attrgetter(".".join(owners))(owner)
    original = getattr(owner, name)

    def happens(*arguments: Any, **options: Any) -> Any:
        if what == "fails":
            raise OSError(f"{place} fails")
        if what == "orphaned":
            parent = os.getppid()
            os.kill(parent, signal.SIGKILL)
            while os.getppid() == parent:
                time.sleep(0.01)
        else:
            signal.raise_signal(signal.Signals[what])
        return original(*arguments, **options)

    setattr(owner, name, happens)
    main(sys.argv[3:])
