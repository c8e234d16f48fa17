"""Linear probe: L2-regularised multinomial logistic regression on standardised features (scikit-learn, L-BFGS)."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.features import FeatureSet
from trainer.evaluate.protocol import ProbeResult, percent_correct, split_folds, splits_held_out
from trainer.evaluate.settings import LinearCachedConfig

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

STRENGTHS = (1e-2, 1e-3, 1e-4, 1e-5)
"""Candidates for the strength λ in: mean cross entropy + λ/2 · |weights|²."""
MAX_BYTES = 4 * 2**30
"""Features of training or test images that `linear_cached` takes; fitting needs several times as much."""
MAX_ITERATIONS = 60
"""L-BFGS iterations for each strength, starting from the result of the stronger one. More are not worth the time: on
raw pixels (784 features, the slowest to converge) 200 change the test accuracy at the chosen λ by less than 0.1
points."""


def linear_cached(evaluation: Evaluation, config: LinearCachedConfig) -> Outcome:
    """Fits the probe to features of whole images, on rank 0, in memory; for small sets.

    Raises:
        ValueError: images without labels, fewer of them than folds, images of one class only but for those held out, or
            more features than MAX_BYTES.
    """
    ranks = evaluation.ranks
    splits = _splits(evaluation.labelled().train_labels, config.folds)  # refused before the features are computed
    found = json.dumps(asdict(_fitted(evaluation, config))) if ranks.is_first else None
    result = ProbeResult(**json.loads(ranks.broadcast_text(found)))
    on = f"{len(splits[0][1])} training images that the probe was not fitted to"
    if len(splits) > 1:
        on = f"all training images: each by a probe that was fitted to the other {len(splits) - 1} parts"
    chosen = {"lambda": result.setting, "held_out_top1": result.held_out_top1, "on": on}
    return Outcome(results={"top1": result.top1, "top5": result.top5}, chosen=chosen)


def _fitted(evaluation: Evaluation, config: LinearCachedConfig) -> ProbeResult:
    dataset, frozen = evaluation.labelled(), evaluation.frozen()
    every = [torch.arange(len(images)) for images in (dataset.train_images, dataset.test_images)]
    side, most = dataset.evaluated_side, max(map(len, every))
    if (num_bytes := 4 * most * frozen.of_images(dataset.train_images, side, every[0][:1]).shape[1]) > MAX_BYTES:
        raise ValueError(
            f"linear-cached keeps all features in memory, here {num_bytes / 2**30:.0f} GiB: use linear instead"
        )
    with evaluation.progress("features", sum(map(len, every))) as advance:
        train = frozen.of_images(dataset.train_images, side, every[0], advance=advance)
        test = frozen.of_images(dataset.test_images, side, every[1], advance=advance)
    frozen.check()
    features = FeatureSet(train=train, train_labels=dataset.train_labels, test=test, test_labels=dataset.test_labels)
    return linear_top1(features, config.folds)


def linear_top1(features: FeatureSet, folds: int | None = None) -> ProbeResult:
    """Top-1 of the test images by a probe fitted on all training images; λ is chosen on held-out training images.

    Features are standardised by the training images' mean and standard deviation. Takes about 40 s for 60,000 images
    of 1,152 features.

    Args:
        folds: parts of the training images, each of which is held out in turn; None for `splits_held_out`.

    Raises:
        ValueError: fewer training images than folds, or images of one class only but for those held out.
    """
    from sklearn.linear_model import LogisticRegression  # late: it takes a second, and most commands fit no probe

    mean, deviation = features.train.mean(dim=0), features.train.std(dim=0)
    varies = deviation > 1e-6 * features.train.abs().amax(dim=0)  # whatever the scale of the features
    scale = torch.where(varies, deviation, 1)  # a constant feature carries no information: leave it at 0
    train, test = (features.train - mean) / scale, (features.test - mean) / scale
    splits = _splits(features.train_labels, folds)
    correct, probes = dict.fromkeys(STRENGTHS, 0), {}
    for fitted, held_out in splits:
        probe = LogisticRegression(solver="lbfgs", max_iter=MAX_ITERATIONS, tol=1e-4)
        train_fitted, labels_fitted = train[fitted], features.train_labels[fitted]
        held_out_features, held_out_labels = train[held_out], features.train_labels[held_out]
        for strength in STRENGTHS:
            _fit(probe, train_fitted, labels_fitted, strength)
            correct[strength] += int((_predict(probe, held_out_features) == held_out_labels).sum())
            probes[strength] = copy.deepcopy(probe)
    best = max(STRENGTHS, key=lambda strength: correct[strength])  # the strongest of equals
    _fit(probes[best], train, features.train_labels, best)
    return ProbeResult(
        top1=percent_correct(_predict(probes[best], test), features.test_labels),
        top5=_top5(probes[best], test, features.test_labels),
        setting=best,
        held_out_top1=100 * correct[best] / sum(len(held_out) for _, held_out in splits),
    )


def _splits(labels: Tensor, folds: int | None) -> list[tuple[Tensor, Tensor]]:
    """The training images to fit to and those held out, as indexes; raises as `linear_top1` does."""
    splits = splits_held_out(len(labels)) if folds is None else split_folds(len(labels), folds)
    for fitted, _ in splits:
        if len(torch.unique(labels[fitted])) < 2:
            raise ValueError("all training images but those held out are of one class: add images of other classes")
    return splits


def _fit(probe: LogisticRegression, features: Tensor, labels: Tensor, strength: float) -> None:
    """Fits `probe`, starting from its last fit if that was to the same classes; reaching MAX_ITERATIONS is expected and
    gives no warning."""
    from sklearn.exceptions import ConvergenceWarning

    goes_on = hasattr(probe, "classes_") and np.array_equal(probe.classes_, np.unique(labels.numpy()))
    probe.set_params(C=1 / (strength * len(features)), warm_start=goes_on)
    # Matrices of few columns are bound by memory: a second thread makes the fit slower, and waits busily in the way of
    # other processes.
    with threadpool_limits(1, user_api="blas"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        probe.fit(features.numpy(), labels.numpy())


def _predict(probe: LogisticRegression, features: Tensor) -> Tensor:
    return torch.from_numpy(probe.predict(features.numpy()))


def _top5(probe: LogisticRegression, features: Tensor, labels: Tensor) -> float:
    """The share of images, in percent, whose class is among the five of the highest probability."""
    probabilities = torch.from_numpy(probe.predict_proba(features.numpy()))
    best = probabilities.topk(min(5, probabilities.shape[1])).indices
    return 100 * float((torch.from_numpy(probe.classes_)[best] == labels[:, None]).any(dim=1).double().mean())
