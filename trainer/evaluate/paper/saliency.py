"""Saliency maps of conv5, and how similar those of two encoders are (paper, section 5 and figure 3).

A location's saliency is the L2 norm of its activations, divided by the sum over all locations. The similarity of two
maps is the sum over locations of the smaller of the two values: 1 for equal maps, 0 for maps that do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data import Dataset, TrainImages
from trainer.data.pixels import normalise
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.frozen import centres
from trainer.evaluate.neighbours import nearest, predict
from trainer.evaluate.options import SubjectOptions
from trainer.evaluate.paper.saliency_figures import Picture, draw_maps, draw_similarities
from trainer.evaluate.paper.saliency_maps import maps_and_features, saliency_maps, similarity, to_sum_one
from trainer.evaluate.paper.settings import SaliencyConfig
from trainer.evaluate.settings import VOTE_TEMPERATURE
from trainer.evaluate.subjects import Subject, load_subject
from weightserver.torch import gathered

MAPS_FILE, SIMILARITY_FILE = "saliency-maps.png", "saliency-similarity.png"
_BATCH_SIZE = 64


def saliency(evaluation: Evaluation, config: SaliencyConfig) -> Outcome:
    """Draws an encoder's maps of some test images; compares those of all test images with another encoder's.

    Rank 0 writes `MAPS_FILE` and, with another encoder, `SIMILARITY_FILE` beside the result. An image is classified by
    its nearest training images in the encoder's features (cosine similarity, votes at temperature 0.07), which needs no
    training. The result does not depend on the number of ranks, up to rounding.

    Raises:
        ValueError: the data set has no test images; an encoder takes other images, or does not average convolutional
            maps of several locations; the other encoder cannot be read; a picture is not a test image.
    """
    evaluation.subject.require_encoder("saliency")
    dataset, directory = evaluation.load(), evaluation.state.parent
    num_images = len(dataset.test_images)
    if not num_images:
        raise ValueError(f"{dataset.untested}: saliency maps are those of test images")
    if outside := [number for number in config.pictures if not 0 <= number < num_images]:
        raise ValueError(f"--pictures has {outside[0]}, but test images have numbers 0..{num_images - 1}")
    shown = list(config.pictures) or _random_order(num_images, config.seed)[: config.num_pictures].tolist()
    subjects = [evaluation.subject]
    if config.other is not None:
        subjects.append(load_subject(SubjectOptions(encoder=config.other)))
    computed = [_mapped(subject, evaluation, dataset.test_images) for subject in subjects]
    maps, features = [own for own, _ in computed], computed[0][1]
    correct = _correct(features, config, evaluation) if dataset.labelled else None
    noise = torch.rand(maps[-1].shape, generator=torch.Generator().manual_seed(config.seed))
    results: dict[str, float] = {}
    details: dict[str, Any] = {"random": similarity(to_sum_one(noise), maps[-1]).mean().item()}
    if correct is not None:
        results["knn_top1"] = 100 * correct.double().mean().item()
    if len(maps) > 1:
        values = similarity(*maps)
        results["similarity"] = values.mean().item()
        details |= by_similarity(values, correct, config.bins)
    if evaluation.ranks.is_first:
        draw_maps(_pictures(dataset, shown, maps), [subject.name for subject in subjects], directory / MAPS_FILE)
        if len(maps) > 1:
            draw_similarities(details["histogram"], details["accuracy"], directory / SIMILARITY_FILE)
    return Outcome(results=results, details=details)


def by_similarity(values: Tensor, correct: Tensor | None, bins: int) -> dict[str, Any]:
    """The number of images in each bin of similarities between 0 and 1, and their accuracy in percent.

    Args:
        values: each image's similarity, float32 [n].
        correct: whether it is classified correctly, bool [n]; None without labels, whose accuracy is None.
    """
    bin_of_image = (values * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_of_image, minlength=bins)
    accuracy = None
    if correct is not None:
        shares = 100 * torch.bincount(bin_of_image, weights=correct.double(), minlength=bins) / counts
        accuracy = [share if count else None for share, count in zip(shares.tolist(), counts.tolist(), strict=True)]
    return {"histogram": counts.tolist(), "accuracy": accuracy}


def _mapped(
    subject: Subject, evaluation: Evaluation, images: TrainImages, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Saliency maps float32 [n, h, w] and features float16 [n, d] of length 1 of all images, or of `ids`, int64 [n].

    Each rank computes a part of them.
    """
    encoder, config = subject.require_encoder("saliency")
    dataset, ranks = evaluation.load(), evaluation.ranks
    ids = torch.arange(len(images)) if ids is None else ids
    side = dataset.evaluated_side or images.shape[-1]
    subject.check_images(images.shape[1], side)
    if len(ids) < ranks.world_size:
        raise ValueError(f"{len(ids)} images are fewer than {ranks.world_size} ranks: start fewer ranks")
    encoder, found = encoder.to(ranks.device).eval(), []
    with evaluation.progress(f"maps of {subject.name}", len(ids)) as advance, torch.no_grad():
        for pixels in centres(images, side, ids[ranks.share(len(ids))], _BATCH_SIZE):
            views = normalise(pixels.to(ranks.device), config.pixels).contiguous(memory_format=torch.channels_last)
            with torch.autocast(ranks.device.type, torch.bfloat16, enabled=evaluation.bfloat16):
                try:
                    activations, features = maps_and_features(encoder, views)
                except ValueError as error:
                    raise ValueError(f"{subject.name} {error}") from None
            maps = saliency_maps(activations).cpu()
            if not maps.isfinite().all():
                raise ValueError(f"the maps of {subject.name} are not all finite: are its weights damaged?")
            found.append((maps, F.normalize(features.float()).half().cpu()))
            advance(len(pixels) * ranks.world_size)
    maps, features = (torch.cat(part) for part in zip(*found, strict=True))
    return gathered(maps, len(ids), ranks), gathered(features, len(ids), ranks)


def _random_order(num_images: int, seed: int) -> Tensor:
    return torch.randperm(num_images, generator=torch.Generator().manual_seed(seed))


def _correct(features: Tensor, config: SaliencyConfig, evaluation: Evaluation) -> Tensor:
    """Whether each test image is classified correctly by its neighbours: bool [M]."""
    ranks, dataset = evaluation.ranks, evaluation.load()
    searched = _random_order(len(dataset.train_images), config.seed)[: config.num_neighbour_images].sort().values
    _, bank = _mapped(evaluation.subject, evaluation, dataset.train_images, searched)
    mine = ranks.share(len(features))
    cosine, index = nearest(bank, features[mine], min(config.k, len(bank)), device=ranks.device)
    labels, wanted = dataset.train_labels[searched], dataset.test_labels
    num_classes = int(torch.cat([labels, wanted]).max()) + 1
    found = predict(cosine, labels[index], num_classes, k=config.k, temperature=VOTE_TEMPERATURE, top=1)[:, 0]
    return gathered(found, len(wanted), ranks) == wanted


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
