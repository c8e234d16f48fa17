"""A parent that starts a shard, which kills it: python -m tests.helpers.dying_parent COMMAND...

It prints the shard's process id, and reads nothing of what that says.
"""

from __future__ import annotations

import subprocess
import sys
import time

if __name__ == "__main__":
    shard = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    print(shard.pid, flush=True)
    time.sleep(60)
