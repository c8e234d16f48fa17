"""Makes JPEGs to train on, and measures how many of them threads decode and crop per second.

python -m benchmarks.gpu.jpegs DIRECTORY SIDE SECONDS THREADS[,THREADS...] OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from trainer.data.augment import Augmentation, AugmentationConfig
from trainer.data.decoded_images import DecodedImages
from trainer.data.reading import read_source
from trainer.schedule import visit_uniforms

_BATCH_SIZE = 128
_WIDTH, _HEIGHT = 500, 375


def make_tree(root: Path, num_files: int, num_images: int) -> None:
    """Makes `num_images` pictures of 500×375 pixels: `num_files` files, and hard links to them."""
    files = root / "images" / "0000"
    files.mkdir(parents=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(_write, files), range(num_files)))
    for copy in range(1, -(-num_images // num_files)):
        folder = root / "images" / f"{copy:04d}"
        folder.mkdir()
        for name in os.listdir(files):
            os.link(files / name, folder / name)


def picture(number: int) -> Image.Image:
    """Noise whose amplitude falls with its frequency, as a photograph's does."""
    random = np.random.default_rng(number)
    frequency = np.hypot(np.fft.fftfreq(_HEIGHT)[:, None, None], np.fft.rfftfreq(_WIDTH)[:, None])
    spectrum = np.fft.rfft2(random.standard_normal((_HEIGHT, _WIDTH, 3)), axes=(0, 1)) / (frequency + 1 / _WIDTH)
    pixels = np.fft.irfft2(spectrum, (_HEIGHT, _WIDTH), axes=(0, 1))
    return Image.fromarray((128 + 50 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))


def _write(directory: Path, number: int) -> None:
    picture(number).save(directory / f"{number:05d}.jpg", quality=85)


def rate(directory: Path, side: int, seconds: float, threads: int) -> float:
    """Images per second that a number of threads decode and crop for training."""
    listing = read_source(directory).train.listing
    images, augment = DecodedImages(listing, side, threads=threads), Augmentation(AugmentationConfig(), side)
    batch = np.arange(min(_BATCH_SIZE, len(listing)))
    uniforms = visit_uniforms(0, batch[None], Augmentation.num_uniforms)
    images.crops(batch, [augment], uniforms)  # the threads start, and the files are cached
    started, num_batches = time.perf_counter(), 0
    while (taken := time.perf_counter() - started) < seconds:
        images.crops(batch, [augment], uniforms)
        num_batches += 1
    return num_batches * len(batch) / taken


def main() -> None:
    directory, side, seconds, numbers, out = sys.argv[1:]
    rates = {number: rate(Path(directory), int(side), float(seconds), int(number)) for number in numbers.split(",")}
    Path(out).write_text(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()
