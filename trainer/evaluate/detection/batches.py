"""Training batches of detection: which images, their sizes and flips; functions of the seed and the step alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.cores import decode_threads
from trainer.data.pixels import PixelScale, normalise
from trainer.evaluate.detection.config import DetectConfig
from trainer.evaluate.detection.network import Size, Target
from trainer.evaluate.detection.voc import VocImage, load_pixels
from weightserver.torch import Ranks, to_device

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Visit:
    """A visit to a training image."""

    image: VocImage
    size: Size
    """Height and width of the image in this visit."""
    is_flipped: bool
    seed: int
    """Of the sampled regions."""

    def target(self, device: torch.device) -> Target:
        """The objects at the visit's size and side."""
        height, width = self.size
        scale = np.array([width / self.image.width, height / self.image.height] * 2, np.float32)
        boxes = self.image.boxes * scale
        if self.is_flipped:
            boxes = np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1)
        return Target(to_device(boxes, device), to_device(self.image.labels, device), self.seed)

    def pixels(self) -> Tensor:
        """The image, decoded: uint8 [3, height, width]."""
        pixels = load_pixels(self.image, self.size)
        return torch.from_numpy(pixels[..., ::-1].copy() if self.is_flipped else pixels)


def resized(image: VocImage, side: int, max_side: int) -> Size:
    """Height and width of an image whose shorter side becomes `side`, unless the longer would exceed `max_side`."""
    shorter, longer = sorted((image.height, image.width))
    scale = min(side / shorter, max_side / longer)
    return max(1, int(image.height * scale + 0.5)), max(1, int(image.width * scale + 0.5))


def visits(images: Sequence[VocImage], config: DetectConfig, first_step: int = 0) -> Iterator[list[Visit]]:
    """The batches from `first_step` on, without an end.

    Every image is visited once in each random order. As in Detectron2, a batch has images that are all wider than high
    or all not, which saves padding.
    """
    for step, batch in islice(enumerate(_orders(images, config)), first_step, None):
        yield [_visit(images[number], config, step, place) for place, number in enumerate(batch)]


def _orders(images: Sequence[VocImage], config: DetectConfig) -> Iterator[list[int]]:
    """Numbers of the images of each batch."""
    waiting: tuple[list[int], list[int]] = ([], [])
    for epoch in count():
        for number in np.random.default_rng([config.seed, epoch]).permutation(len(images)).tolist():
            alike = waiting[images[number].width > images[number].height]
            alike.append(number)
            if len(alike) == config.batch_size:
                yield alike.copy()
                alike.clear()


def _visit(image: VocImage, config: DetectConfig, step: int, place: int) -> Visit:
    random = np.random.default_rng([config.seed, step, place, 1])
    size = resized(image, int(random.choice(config.train_sides)), config.max_side)
    return Visit(image, size, bool(random.integers(2)), int(random.integers(2**62)))


@dataclass(frozen=True)
class Batch:
    """This rank's part of a batch, on its device."""

    images: Tensor
    """Normalised, padded to the largest image of all ranks: float32 [b, 3, H, W]."""
    sizes: list[Size]
    targets: list[Target]


def batches(
    batch_visits: Iterable[list[Visit]], pixels: PixelScale, ranks: Ranks, num_ahead: int = 32
) -> Generator[Batch, None, None]:
    """Yields this rank's part of each batch; up to `num_ahead` further images are decoded meanwhile.

    Close the generator to end its threads.
    """
    waiting: deque[tuple[list[Visit], Size]] = deque()

    def own_visits() -> Iterator[Visit]:
        for batch in batch_visits:
            largest = max(visit.size[0] for visit in batch), max(visit.size[1] for visit in batch)
            waiting.append((batch[ranks.share(len(batch))], largest))
            yield from waiting[-1][0]

    with closing(computed_ahead(Visit.pixels, own_visits(), num_ahead)) as decoded:
        while images := list(islice(decoded, len(waiting[0][0]) if waiting else 1)):
            part, largest = waiting.popleft()
            images += islice(decoded, len(part) - len(images))
            targets = [visit.target(ranks.device) for visit in part]
            yield Batch(collate(images, largest, pixels, ranks.device), [visit.size for visit in part], targets)


def collate(decoded: Sequence[Tensor], padded: Size, pixels: PixelScale, device: torch.device) -> Tensor:
    """Normalises images uint8 [3, h, w] and pads them with zeros to a height and width: float32 [b, 3, H, W]."""
    batch = torch.zeros(len(decoded), 3, *padded, device=device)
    for place, image in zip(batch, decoded, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = normalise(to_device(image, device)[None], pixels)[0]
    return batch.contiguous(memory_format=torch.channels_last)


def computed_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item], num_ahead: int
) -> Generator[_Result, None, None]:
    """function(item) of each item in order, computed by threads for up to `num_ahead` items in advance."""
    ahead: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(decode_threads(), thread_name_prefix="decode") as pool:
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) > num_ahead:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
