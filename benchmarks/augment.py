"""Compares augmentation, with crops in decoding threads and the rest per batch, with a DataLoader's processes.

python -m benchmarks.augment [--rounds 7] [--images 256] [--output benchmarks/results]

Views of 224 px by the paper's augmentation, of JPEGs of 500×375 pixels and about 100 kB, as in ImageNet: everything
before the encoder, which is on the GPU if there is one, else on the CPU. `ours` crops while it decodes, with a thread
per core, and does the rest per batch on the device; decoding is two batches ahead. `squares` is the earlier way: centre
squares of 256 px are decoded, and cropped on the device without antialiasing. The peer is the usual way:
torchvision.transforms.v2 on one image at a time, in the two processes of a DataLoader. Both parts of `ours` are timed
alone too: on a GPU they overlap.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import Timing, at_least, draw_bars, in_turn, write_results
from trainer.data import load_dataset
from trainer.data.augment import Augmentation, AugmentationConfig
from trainer.data.decoded_images import DecodedImages
from trainer.data.prefetch import Visits, views_ahead
from trainer.schedule import visit_uniforms
from trainer.torchvision_schemas import import_module

SIDE, WIDTH, HEIGHT, BATCH_SIZE, NUM_WORKERS = 224, 500, 375, 64, 2
CONFIG = AugmentationConfig()


def picture(number: int) -> Image.Image:
    """Noise whose amplitude falls with its frequency, as a photograph's does."""
    random = np.random.default_rng(number)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None, None], np.fft.rfftfreq(WIDTH)[:, None])
    spectrum = np.fft.rfft2(random.standard_normal((HEIGHT, WIDTH, 3)), axes=(0, 1)) / (frequency + 1 / WIDTH)
    pixels = np.fft.irfft2(spectrum, (HEIGHT, WIDTH), axes=(0, 1))
    return Image.fromarray((128 + 50 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))


def theirs(files: list[Path], device: torch.device) -> Callable[[], None]:
    """The same augmentation by torchvision."""
    v2 = import_module("torchvision.transforms.v2")
    colour = (CONFIG.brightness, CONFIG.contrast, CONFIG.saturation, CONFIG.hue)
    kernel_size = SIDE // 10 // 2 * 2 + 1
    transform = v2.Compose([
        v2.RandomResizedCrop(SIDE, scale=(CONFIG.min_scale, CONFIG.max_scale), antialias=True),
        v2.RandomHorizontalFlip(CONFIG.flip_probability),
        v2.RandomApply([v2.ColorJitter(*colour)], CONFIG.jitter_probability),
        v2.RandomGrayscale(CONFIG.grey_probability),
        v2.RandomApply([v2.GaussianBlur(kernel_size, CONFIG.blur_sigma)], CONFIG.blur_probability),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.5] * 3),
    ])  # fmt: skip

    class Views(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> Tensor:
            view: Tensor = transform(Image.open(files[index]).convert("RGB"))
            return view

    loader = DataLoader(
        Views(),
        BATCH_SIZE,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        multiprocessing_context="fork",  # they inherit the imports of torchvision
        pin_memory=device.type == "cuda",
    )
    return lambda: done([batch.to(device, non_blocking=True) for batch in loader])


def done(views: list[Tensor]) -> None:
    """Waits for the device."""
    assert all(view.shape[1:] == (3, SIDE, SIDE) for view in views)
    if views[0].is_cuda:
        torch.cuda.synchronize()


def ours(directory: Path, num_images: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls of our own code on the images of a directory."""
    augment = Augmentation(CONFIG, SIDE)
    uniforms = visit_uniforms(0, np.arange(num_images), Augmentation.num_uniforms)
    ids: list[NDArray[np.int64]] = np.array_split(np.arange(num_images), -(-num_images // BATCH_SIZE))
    visits = [Visits(batch, uniforms[None, batch]) for batch in ids]
    images = load_dataset("folder", directory, image_size=SIDE).train_images.to(device)
    assert isinstance(images, DecodedImages)
    numbers = [one.uniforms[0] for one in visits]

    def crops() -> list[Tensor]:
        return [images.crops(one.images, [augment], one.uniforms)[0] for one in visits]

    cropped = crops()

    def squares() -> None:
        with ThreadPoolExecutor(1) as pool:
            batches = pool.map(images.__getitem__, map(torch.from_numpy, ids))
            done([augment(batch, own) for batch, own in zip(batches, numbers, strict=True)])

    def finish() -> None:
        done([augment.finish(crops, own) for crops, own in zip(cropped, numbers, strict=True)])

    return {
        "ours": lambda: done(list(views_ahead(images, visits, [augment], device))),
        "squares": squares,
        "of ours: decoding and cropping": lambda: done(crops()),
        "of ours: the rest": finish,
    }


def as_table(num_images: int, num_bytes: float, device: torch.device, times: dict[str, Timing]) -> str:
    lines = [f"{num_images} JPEGs of {num_bytes / 1e3:.0f} kB; on {device.type}, {BATCH_SIZE} images a batch.", ""]
    lines += ["| | images/s | time for all of them | relative to ours |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {num_images / time.p50:,.0f} | {time} | {time.p50 / times['ours'].p50:.2f} |"
        for name, time in times.items()
    ]
    return "\n".join([*lines, "", "![Images a second](augment.png)"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=7)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    device, num_images = torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.images
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{number:05d}.jpg" for number in range(num_images)]
        for number, file in enumerate(files):
            picture(number).save(file, quality=85)
        peer = theirs(files, device)
        peer()  # forks its processes before there are threads
        calls = {**ours(Path(directory), num_images, device), "torchvision, 2 processes": peer}
        times = in_turn(calls, rounds=arguments.rounds, warm_up=1)
        num_bytes = sum(file.stat().st_size for file in files) / num_images
    rates = {name: num_images / time.p50 for name, time in times.items()}
    write_results(
        arguments.output,
        "augment",
        f"python -m benchmarks.augment --rounds {arguments.rounds} --images {num_images}",
        {"jpeg_bytes": num_bytes, "device": device.type, "times": times, "images_per_second": rates},
        as_table(num_images, num_bytes, device, times),
    )
    draw_bars(arguments.output / "augment.png", rates, "images/s")


if __name__ == "__main__":
    main()
