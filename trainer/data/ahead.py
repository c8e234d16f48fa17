"""The next batch's images are decoded while a step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from trainer.data.datasets import TrainImages
from trainer.data.stored import DecodedImages

_BATCHES_AHEAD = 2


def batches_ahead(images: TrainImages, ids: Iterable[Tensor]) -> Generator[Tensor, None, None]:
    """The images uint8 [b, C, H, W] of each of `ids` (int64 [b]), in turn; two batches ahead where they are decoded.

    `ids` are drawn in the caller's thread. What a batch raises is raised in its turn. Close it to end the thread.
    """
    if not isinstance(images, DecodedImages):
        yield from map(images.__getitem__, ids)
        return
    ahead: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        try:
            for batch in ids:
                ahead.append(pool.submit(images.__getitem__, batch))
                if len(ahead) > _BATCHES_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
