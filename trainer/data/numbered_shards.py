"""Lists the samples of numbered shards, several at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.cores import usable_cores
from trainer.data.archives import ArchiveError
from trainer.data.bucket_sources import whole
from trainer.data.config import SourceOptions
from trainer.data.left_out import LeftOut
from trainer.data.tree import Folder, add_archive
from weightserver.common.object_store import shown

SHARDS_A_PROCESS = 16
"""Fewer are not worth the start of another process."""
_LOOK_SECONDS = 0.5


def add_shards(top: Folder, paths: Sequence[Path], options: SourceOptions, left_out: LeftOut) -> None:
    """Adds the samples of tars, on disks or in a bucket, in their order; processes on all cores of this rank list them.

    Raises:
        ValueError: a tar that is not complete; a bucket that refuses or does not answer; a disk of --cache-dir that
            cannot be written.
    """
    from joblib import Parallel, delayed

    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    jobs = max(1, min(cores, len(paths) // SHARDS_A_PROCESS))
    processes = Parallel(jobs, return_as="generator", initializer=_end_with, initargs=(os.getpid(),))
    for folder, others in processes(delayed(_listed)(path, options) for path in paths):
        top.take(folder)
        top.own = top.own or folder.own
        left_out.merge(others)


def _listed(path: Path, options: SourceOptions) -> tuple[Folder, LeftOut]:
    left_out = LeftOut()
    folder = Folder("", left_out)
    with whole(path, options) as file:
        try:
            add_archive(folder, file, path.name, left_out, options, tree=False)
        except ArchiveError as error:
            raise ArchiveError(shown(path), error.problem) from None
    return folder, left_out


def _end_with(caller: int) -> None:
    """Lets this process end soon after the one that started it, which may be killed: joblib's wait for more work."""

    def watch() -> None:
        while os.getppid() == caller:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ending with the caller").start()
