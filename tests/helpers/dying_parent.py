"""A parent that starts a shard and is killed: python -m tests.helpers.dying_parent SECONDS COMMAND...

It prints the shard's process id, reads nothing of what that says, and kills itself after SECONDS, or waits where they
are "never".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

if __name__ == "__main__":
    seconds, *command = sys.argv[1:]
    shard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    print(shard.pid, flush=True)
    time.sleep(60 if seconds == "never" else float(seconds))
    os.kill(os.getpid(), signal.SIGKILL)
