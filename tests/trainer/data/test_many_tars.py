"""Generated packs of more tars than a process may open, and of ten million images."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.made_pack import LENGTH, make_pack
from trainer.data.packed import PackedImages

ROOT = Path(__file__).parents[3]
OPEN = """
import sys
from pathlib import Path
import numpy as np
from trainer.data import load_dataset

def memory():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

before = memory()
opened = load_dataset("packed", Path(sys.argv[1]), image_size=224)
print(memory() - before)
ids = np.arange(10_000_000)
assert (opened.train_labels.numpy() == (ids + (ids % 100 == 0)) % 1_000).all()
"""


@pytest.fixture
def few_files() -> Iterator[int]:
    """Limits this process to a hundred more open files; yields how many it has open."""
    before, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, hard))
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.guard
def test_more_tars_than_files_may_be_open(few_files: int, tmp_path: Path) -> None:
    """Successive rows are in different tars."""
    directory = make_pack(tmp_path / "made", num_images=2_200, num_tars=1_100)
    images = PackedImages(directory)
    rows = np.random.default_rng(0).permutation(2_200).tolist()
    with ThreadPoolExecutor(32) as pool:
        contents = list(pool.map(images.read_row, rows))
    assert [content[:8] for content in contents] == [row.to_bytes(8) for row in rows]
    assert {len(content) for content in contents} == {LENGTH}
    ids = np.arange(2_200)
    shown = ids + (ids % 100 == 0)
    assert np.array_equal(images.replaced(ids), ids[::100])
    assert np.array_equal(images.labels(), shown % 1_000)
    assert len(os.listdir("/proc/self/fd")) < few_files + 50


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads the memory from Linux's /proc")
def test_ten_million_images_in_five_thousand_tars(tmp_path: Path) -> None:
    """A rank opens them with 100 MB in addition to its imports."""
    directory = make_pack(tmp_path / "made", num_images=10_000_000, num_tars=5_000)
    ran = subprocess.run([sys.executable, "-c", OPEN, directory], cwd=ROOT, check=True, capture_output=True, text=True)
    assert float(ran.stdout) < 100
    for path in directory.iterdir():
        path.unlink()  # 400 MB would stay until pytest forgets the directory
