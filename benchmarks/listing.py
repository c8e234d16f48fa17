"""Measures what listing a source takes: processor time an image, and memory an image of the process.

python -m benchmarks.listing

Webdataset shards of 1,000 samples are listed, each an image and a label. Memory is the difference between the peaks of
Python's objects at two numbers of shards, since what one shard takes is the same at any number.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
import tracemalloc
from pathlib import Path

from trainer.data.reading import read_source

SAMPLES = 1_000


def write_shard(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(SAMPLES):
            for suffix, content in ((".jpg", b"image"), (".cls", b"17")):
                member = tarfile.TarInfo(f"{path.stem}{number:06d}{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def measure(directory: Path, num_shards: int) -> tuple[int, float, int]:
    """Bytes of the listing, seconds of processor time, and most bytes of Python's objects."""
    for number in range(num_shards):
        if not (path := directory / f"{number:05d}.tar").exists():
            write_shard(path)
    start = time.process_time()
    listing = read_source(directory).train.listing
    seconds = time.process_time() - start
    tracemalloc.start()
    read_source(directory)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return len(listing.content), seconds, most


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        (few_bytes, few_seconds, few), (many_bytes, many_seconds, many) = (measure(Path(name), n) for n in (5, 15))
    images = 10 * SAMPLES
    print(f"{(many_seconds - few_seconds) / images * 1e6:.0f} µs of processor time an image")
    print(f"{(many - few) / images:.0f} bytes an image, of which its line has {(many_bytes - few_bytes) / images:.0f}")


if __name__ == "__main__":
    main()
