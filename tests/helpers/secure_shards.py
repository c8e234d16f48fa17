"""Shards with options of their own, as `weightserver serve` starts them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Served:
    """A shard that serves."""

    process: subprocess.Popen[str]
    address: str
    metrics_address: str
    log: Path


@contextmanager
def served(
    options: dict[str, list[str]], environment: dict[str, str] | None = None, inside: Sequence[str] = ()
) -> Iterator[dict[str, Served]]:
    """One shard of one for each list of options, all at a time; each on a free port, with an empty directory.

    `inside` are the first words of the command that starts it elsewhere.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for name, own in options.items():
            command = [*inside, sys.executable, "-m", "weightserver", "serve", "--announce", "--stop-with-parent"]
            command += ["--init", f"--data-dir={directory / name}", "--listen=127.0.0.1:0", "--metrics-port=0", *own]
            log = stack.enter_context((directory / f"{name}.log").open("w"))
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
            processes[name] = stack.enter_context(process)
            stack.callback(process.terminate)
        found = {}
        for name, process in processes.items():
            assert process.stdout is not None
            line, log_file = process.stdout.readline(), directory / f"{name}.log"
            assert line, log_file.read_text()
            found[name] = Served(process=process, log=log_file, **json.loads(line))
        yield found
