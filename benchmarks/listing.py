"""Measures what listing a source takes: processor time and memory an image, of the process that lists and of one
that joins what others list.

python -m benchmarks.listing

Webdataset shards of 1,000 samples are listed, each an image and a label. Memory is the difference between the peaks of
Python's objects at two numbers of shards, since what one shard takes is the same at any number. At least two cores list
together.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from trainer.data import listing, numbered_shards
from trainer.data.reading import read_source

SAMPLES = 1_000


def write_shard(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(SAMPLES):
            for suffix, content in ((".jpg", b"image"), (".cls", b"17")):
                member = tarfile.TarInfo(f"{path.stem}{number:06d}{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def measure(directory: Path, num_shards: int) -> tuple[float, ...]:
    """Bytes of the listing, seconds of processor time alone and while others list, most bytes of Python's objects."""
    for number in range(num_shards):
        if not (path := directory / f"{number:05d}.tar").exists():
            write_shard(path)
    shards, seconds = directory / f"{{00000..{num_shards - 1:05d}}}.tar", []
    for least in (num_shards, 1):
        numbered_shards.SHARDS_A_PROCESS = least
        start = time.process_time()
        content = read_source(shards).train.listing.content
        seconds.append(time.process_time() - start)
    tracemalloc.start()
    read_source(shards)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return len(content), *seconds, most


def main() -> None:
    listing._SCANNED_BYTES = 1 << 16  # it does not grow with the number of images
    with tempfile.TemporaryDirectory() as name:
        few, many = (np.array(measure(Path(name), number)) for number in (5, 45))
    line, alone, joining, most = (many - few) / (40 * SAMPLES)
    print(f"{alone * 1e6:.0f} µs of processor time an image, of which {joining * 1e6:.1f} join what others list")
    print(f"{most:.0f} bytes an image, of which its line has {line:.0f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
