"""kNN evaluations during training, of a sample of the training images that is balanced over classes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.distributed import with_first_ranks_buffers
from trainer.evaluate.features import encode
from trainer.evaluate.knn import leave_one_out_knn_top1
from trainer.model import PICModel, build_model
from weightserver.torch import Ranks

NUM_IMAGES = 10_000
"""Training images in the sample; all of them if there are fewer."""
_IMAGES_OF_A_CLASS = 10
"""Fewest images of each class in the sample, of those that have as many."""
_BATCH_SIZE = 128
"""Images that a rank decodes and encodes at once."""


class KnnProbe:
    """Evaluates the encoder when that is due; all ranks call `observe` together and share the work.

    The images are the same at every evaluation. Memory is bounded whatever their number: 0.3 GB at 224 px and 2,048
    features, for a batch of pixels and the features of the sample, and the encoder's activations of a batch.
    """

    def __init__(self, model: PICModel, dataset: Dataset, ranks: Ranks, *, seed: int) -> None:
        self._model = model
        self._dataset = dataset
        self._ranks = ranks
        self._seed = seed
        self._initial: dict[str, float] = {}
        self._images = balanced_sample(dataset.train_labels, NUM_IMAGES, seed)
        self._labels = dataset.train_labels[self._images]

    def observe_beginning(self) -> None:
        """Evaluates the encoder as it was before the run's first step; the next `observe` returns it too."""
        encoder = build_model(self._model.config, seed=self._seed).encoder
        encoder.to(self._ranks.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._initial = {f"initial_{name}": top1 for name, top1 in self._evaluated(encoder).items()}

    def observe(self, *, due: bool) -> dict[str, float]:
        """Evaluates the encoder if that is due: knn_top1 in percent, and initial_knn_top1 at the run's first record, on
        rank 0 only."""
        found, self._initial = self._initial, {}
        return found | self._evaluated(self._model.encoder) if due else found

    def _evaluated(self, encoder: nn.Module) -> dict[str, float]:
        features = self._features(encoder)
        top1 = leave_one_out_knn_top1(features, self._labels) if self._ranks.is_first else 0.0
        self._ranks.barrier()  # so that no rank waits for rank 0 in its next step
        return {"knn_top1": top1} if self._ranks.is_first else {}

    def _features(self, encoder: nn.Module) -> Tensor:
        """Features float32 [n, d] of the sample by rank 0's encoder, on the CPU; each rank computes a share of them."""
        data = self._dataset
        features = torch.zeros(len(self._images), self._model.feature_dim)
        mine = self._ranks.share(len(self._images))
        ids, pixels = self._images[mine], self._model.config.pixels
        with with_first_ranks_buffers(encoder, self._ranks):
            features[mine] = encode(
                encoder, data.train_images, data.evaluated_side, pixels, ids=ids, batch_size=_BATCH_SIZE
            )
        if self._ranks.world_size > 1:
            dist.all_reduce(features)  # exact: all ranks except one add zeros
        return features


def balanced_sample(labels: Tensor, num_images: int, seed: int) -> Tensor:
    """Ids int64 of `num_images` images, of each class as many as of any other, or all that it has; chosen by `seed`.

    Labels are int64 [N]. If the classes do not divide the number, some have one more. All images if there are fewer. Of
    many classes only some are taken, with ten images each, or all that they have: an image needs others of its class
    among its neighbours.
    """
    classes, sizes = torch.unique(labels, return_counts=True)
    if len(labels) <= num_images or len(classes) <= num_images // _IMAGES_OF_A_CLASS or sizes.max() == 1:
        return _of_each_class(labels, num_images, seed)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    order = order[sizes[order] > 1]
    taken = sizes[order].clamp(max=_IMAGES_OF_A_CLASS).cumsum(0)
    drawn = classes[order[: int((taken < num_images).sum()) + 1]]
    ids = torch.isin(labels, drawn).nonzero()[:, 0]
    return ids[_of_each_class(labels[ids], num_images, seed)]


def _of_each_class(labels: Tensor, num_images: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]  # random within each class
    sizes = labels.bincount()
    turn = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[by_class]]  # 0, 1, ... within each class
    shuffled = torch.randperm(len(labels), generator=generator)  # so that any classes may have one more
    return by_class[shuffled[turn[shuffled].argsort(stable=True)[:num_images]]]
