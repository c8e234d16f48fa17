"""Saliency maps of conv5, and how similar those of two encoders are (paper, section 5 and figure 3).

A location's saliency is the L2 norm of its activations, divided by the sum over all locations. The similarity of two
maps is the sum over locations of the smaller of the two values: 1 for equal maps, 0 for maps that do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data import Dataset, TrainImages
from trainer.data.pixels import normalise
from trainer.evaluate.frozen import centres
from trainer.evaluate.neighbours import nearest, predict
from trainer.evaluate.progress import Progress, no_progress
from trainer.evaluate.saliency_figures import Picture, draw_maps, draw_similarities
from trainer.evaluate.saliency_maps import maps_and_features, saliency_maps, similarity, to_sum_one
from trainer.model import EncoderConfig, load_encoder
from trainer.settings import Settings, check_at_least
from weightserver.torch import Ranks, gathered

MAPS_FILE, SIMILARITY_FILE = "saliency-maps.png", "saliency-similarity.png"
_BATCH_SIZE = 64
_VOTE_TEMPERATURE = 0.07


@dataclass(frozen=True, kw_only=True)
class SaliencyConfig(Settings):
    """Settings of the saliency maps."""

    other: Path | None = None
    """Encoder file whose maps are compared, from this trainer or `python -m trainer.export import`."""
    num_pictures: int = 6
    """Test images to draw with their maps, chosen by --seed."""
    pictures: tuple[int, ...] = ()
    """Numbers of the test images to draw instead, from 0."""
    bins: int = 20
    """Bins of similarity between 0 and 1, for the histogram and for the accuracy."""
    k: int = 20
    """Neighbours by which an image is classified, to compare accuracy with similarity."""
    num_neighbour_images: int = 50_000
    """Training images to search for neighbours, chosen by --seed; all if there are fewer."""
    seed: int = 0
    """Seed of the images to draw, the images to search and the random maps."""

    def check(self) -> None:
        check_at_least(self, 1, "num_pictures", "bins", "k", "num_neighbour_images")


@dataclass(frozen=True, kw_only=True)
class MappedEncoder:
    """An encoder whose maps are computed: "small", or a convolutional one of torchvision or timm."""

    name: str
    """Its name in figures and messages."""
    encoder: nn.Module
    config: EncoderConfig


@dataclass(frozen=True, kw_only=True)
class Similarities:
    """Similarity of the two encoders' maps on the test images."""

    mean: float
    other_image: float
    """Mean similarity of the encoder's map and the other's map of another image, for reference."""
    histogram: list[int]
    """Number of images in each bin."""
    accuracy: list[float | None] | None
    """Percentage of correctly classified images in each bin, None for an empty bin; None without labels."""
    more_similar_accuracy: float | None
    """The same of the half of the images whose maps are more similar."""
    less_similar_accuracy: float | None
    """The same of the other half."""


@dataclass(frozen=True, kw_only=True)
class SaliencyResult:
    """Statistics of the maps."""

    random: float
    """Mean similarity of maps of uniform random numbers and the other encoder's maps, or the only one's."""
    knn_top1: float | None
    """Accuracy of the kNN classification in percent; None without labels."""
    similarities: Similarities | None
    """None without another encoder."""


def saliency(
    encoder: MappedEncoder,
    dataset: Dataset,
    config: SaliencyConfig,
    directory: Path,
    ranks: Ranks | None = None,
    *,
    bfloat16: bool = False,
    progress: Progress = no_progress,
) -> SaliencyResult:
    """Draws an encoder's maps of some test images; compares those of all test images with another encoder's.

    An image is classified by its nearest training images in the encoder's features (cosine similarity, votes at
    temperature 0.07), which needs no training. The result does not depend on the number of ranks, up to rounding.

    Args:
        directory: where rank 0 writes `MAPS_FILE` and, with another encoder, `SIMILARITY_FILE`.
        bfloat16: whether the encoders compute in bfloat16 (autocast).

    Raises:
        ValueError: the data set has no test images; an encoder takes other images, or does not average convolutional
            maps of several locations; the other encoder cannot be read; a picture is not a test image.
    """
    ranks = ranks or Ranks()
    encoders = [encoder, *_other(config)]
    if not len(dataset.test_images):
        raise ValueError(f"{dataset.untested}: saliency maps are those of test images")
    shown = _shown_images(config, len(dataset.test_images))
    mappers = [_Mapper(source, dataset, ranks, progress, bfloat16=bfloat16) for source in encoders]
    tested = torch.arange(len(dataset.test_images))
    computed = [mapper.maps_and_features(dataset.test_images, tested) for mapper in mappers]
    maps, features = [own for own, _ in computed], computed[0][1]
    correct = _correct(mappers[0], features, dataset, config, ranks) if dataset.labelled else None
    similarities = _similarities(maps[0], maps[1], correct, config.bins) if len(maps) > 1 else None
    noise = torch.rand(maps[-1].shape, generator=torch.Generator().manual_seed(config.seed))
    result = SaliencyResult(
        random=similarity(to_sum_one(noise), maps[-1]).mean().item(),
        knn_top1=None if correct is None else 100 * correct.double().mean().item(),
        similarities=similarities,
    )
    if ranks.is_first:
        names = [source.name for source in encoders]
        draw_maps(_pictures(dataset, shown, maps), names, directory / MAPS_FILE)
        if similarities:
            draw_similarities(similarities.histogram, similarities.accuracy, directory / SIMILARITY_FILE)
    return result


class _Mapper:
    """Computes an encoder's maps and features of a data set's images, each rank a part of them."""

    def __init__(
        self, source: MappedEncoder, dataset: Dataset, ranks: Ranks, progress: Progress, *, bfloat16: bool
    ) -> None:
        side = dataset.evaluated_side or dataset.test_images.shape[-1]
        channels = dataset.test_images.shape[1]
        if (source.config.in_channels, source.config.image_size) != (channels, side):
            raise ValueError(
                f"{source.name} is for {source.config.in_channels}-channel {source.config.image_size} px images, but "
                f"the data set has {channels}-channel {side} px ones: choose another data set"
            )
        self._source, self._side, self._ranks = source, side, ranks
        self._progress, self._bfloat16 = progress, bfloat16
        self._encoder = source.encoder.to(ranks.device).eval()

    def maps_and_features(self, images: TrainImages, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Saliency maps float32 [n, h, w] and features float16 [n, d] of length 1, of images `ids` (int64 [n])."""
        if len(ids) < self._ranks.world_size:
            raise ValueError(f"{len(ids)} images are fewer than {self._ranks.world_size} ranks: start fewer ranks")
        parts, mine = [], ids[self._ranks.share(len(ids))]
        with self._progress(f"maps of {self._source.name}", len(ids)) as advance:
            for pixels in centres(images, self._side, mine, _BATCH_SIZE):
                parts.append(self._computed(pixels))
                advance(len(pixels) * self._ranks.world_size)
        maps, features = (torch.cat(part) for part in zip(*parts, strict=True))
        return gathered(maps, len(ids), self._ranks), gathered(features, len(ids), self._ranks)

    @torch.no_grad()
    def _computed(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        device = self._ranks.device
        images = normalise(pixels.to(device), self._source.config.pixels)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bfloat16):
            try:
                maps, features = maps_and_features(self._encoder, images.contiguous(memory_format=torch.channels_last))
            except ValueError as error:
                raise ValueError(f"{self._source.name} {error}") from None
        found = saliency_maps(maps).cpu()
        if not found.isfinite().all():
            raise ValueError(f"the maps of {self._source.name} are not all finite: are its weights damaged?")
        return found, F.normalize(features.float()).half().cpu()


def _other(config: SaliencyConfig) -> list[MappedEncoder]:
    if config.other is None:
        return []
    encoder, encoder_config = load_encoder(config.other)
    return [MappedEncoder(name=str(config.other), encoder=encoder, config=encoder_config)]


def _shown_images(config: SaliencyConfig, num_images: int) -> list[int]:
    """The numbers of the test images to draw."""
    if outside := [number for number in config.pictures if not 0 <= number < num_images]:
        raise ValueError(f"--pictures has {outside[0]}, but test images have numbers 0..{num_images - 1}")
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(config.seed))
    return list(config.pictures) or order[: config.num_pictures].tolist()


def _correct(mapper: _Mapper, features: Tensor, dataset: Dataset, config: SaliencyConfig, ranks: Ranks) -> Tensor:
    """Whether each test image is classified correctly by its neighbours: bool [M]."""
    order = torch.randperm(len(dataset.train_images), generator=torch.Generator().manual_seed(config.seed))
    searched = order[: config.num_neighbour_images].sort().values
    _, bank = mapper.maps_and_features(dataset.train_images, searched)
    mine = ranks.share(len(features))
    cosine, index = nearest(bank, features[mine], min(config.k, len(bank)), device=ranks.device)
    labels, wanted = dataset.train_labels[searched], dataset.test_labels
    num_classes = int(torch.cat([labels, wanted]).max()) + 1
    setting = (config.k, _VOTE_TEMPERATURE)
    found = predict(cosine, labels[index], num_classes, [setting], top=1)[setting][:, 0]
    return gathered(found, len(wanted), ranks) == wanted


def _similarities(maps: Tensor, others: Tensor, correct: Tensor | None, bins: int) -> Similarities:
    values = similarity(maps, others)
    bin_of_image = (values * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_of_image, minlength=bins)
    accuracy = more_similar = less_similar = None
    if correct is not None:
        shares = 100 * torch.bincount(bin_of_image, weights=correct.double(), minlength=bins) / counts
        accuracy = [share if count else None for share, count in zip(shares.tolist(), counts.tolist(), strict=True)]
        by_similarity = 100 * correct[values.argsort(descending=True, stable=True)].double()
        half = len(values) // 2
        more_similar, less_similar = by_similarity[:half].mean().item(), by_similarity[half:].mean().item()
    return Similarities(
        mean=values.mean().item(),
        other_image=similarity(maps, others.roll(len(others) // 2, dims=0)).mean().item(),  # often of another class
        histogram=counts.tolist(),
        accuracy=accuracy,
        more_similar_accuracy=more_similar,
        less_similar_accuracy=less_similar,
    )


def _pictures(dataset: Dataset, shown: Sequence[int], maps: Sequence[Tensor]) -> list[Picture]:
    side = dataset.evaluated_side
    (pixels,) = centres(dataset.test_images, side, torch.tensor(shown), len(shown))
    found = []
    for number, image in zip(shown, pixels, strict=True):
        title = f"image {number}"
        if len(maps) > 1:
            title += f", similarity {similarity(maps[0][number, None], maps[1][number, None]).item():.2f}"
        found.append(Picture(title=title, image=image, maps=[own[number] for own in maps]))
    return found
