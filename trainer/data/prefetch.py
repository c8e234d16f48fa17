"""Decodes the views of the next batches while the caller computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.augment import Augmentation
from trainer.data.dataset import TrainImages
from trainer.data.decoded_images import DecodedImages
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.torch import to_device

_BATCHES_AHEAD = 2


@dataclass(frozen=True)
class Visits:
    """Visits to b images, each with V views."""

    images: Int64Array
    """int64 [b]."""
    uniforms: Float32Array
    """Uniform numbers of each view: float32 [V, b, Augmentation.num_uniforms]."""


def views_ahead(
    images: TrainImages, visits: Iterable[Visits], augmentations: Sequence[Augmentation], device: torch.device | str
) -> Generator[Tensor, None, None]:
    """For each of `visits`, yields the view by each augmentation: float32 [b, C, image_size, image_size] on `device`.

    Stored images are decoded once per visit, two batches ahead. `visits` are drawn in the caller's thread. A batch's
    error is raised in its turn. Close the generator to end its thread.
    """
    device = torch.device(device)
    if not isinstance(images, DecodedImages):
        for visited in visits:
            ids = torch.from_numpy(visited.images)
            batch = images[to_device(ids, device) if isinstance(images, Tensor) else ids]
            for augment, uniforms in zip(augmentations, visited.uniforms, strict=True):
                yield augment(batch, uniforms)
        return

    def finished(visited: Visits, cropped: Future[list[Tensor]]) -> Generator[Tensor, None, None]:
        for augment, crops, uniforms in zip(augmentations, cropped.result(), visited.uniforms, strict=True):
            yield augment.finish(crops, uniforms)

    ahead: deque[tuple[Visits, Future[list[Tensor]]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        try:
            for visited in visits:
                ahead.append((visited, pool.submit(images.crops, visited.images, augmentations, visited.uniforms)))
                if len(ahead) > _BATCHES_AHEAD:
                    yield from finished(*ahead.popleft())
            while ahead:
                yield from finished(*ahead.popleft())
        finally:
            pool.shutdown(cancel_futures=True)
