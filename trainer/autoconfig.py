"""Chooses a run's settings from its images and the machine: pure functions, for `pic train FOLDER`.

The aim is a run that ends within `_BUDGET_SECONDS` and learns what it can in this time. Its encoder is the largest one
with which each image is visited often enough. Speeds are estimates: on two quiet cores of servers, decoding included,
"small" trained at 55 GFLOP/s a core with AVX-512 (64 px), and at 20 without it (32 px), so that a run took twice as
long as it was estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.data.augmentation_config import AugmentationConfig
from trainer.data.survey import ImagesSurvey
from weightserver.core.correction import MAX_STEPS

_CORE_FLOPS, _GPU_FLOPS = 40e9, 30e12
"""Operations a second of a core in float32, and of a GPU in bfloat16."""
_DECODED_PIXELS = 60e6
"""Pixels that a core decodes in a second."""
_BUDGET_SECONDS = {"cpu": 20 * 60, "gpu": 24 * 3600}
_ENOUGH_EPOCHS, _FEWEST_EPOCHS, _MOST_EPOCHS = 30, 10, 200
_SMALLEST_WINDOW, _SMALL_WINDOW = 1 << 10, 1 << 14
_LARGEST_WINDOW = {"cpu": _SMALL_WINDOW, "gpu": 1 << 17}
_BATCHES_OF_CLASSES = 4
"""Each step has the classes of this many batches if the window has up to `_SMALL_WINDOW`: with more, runs as short as
these learn more slowly, and may collapse (docs/recipes.md). Of a larger window it has half, as in the paper."""
_DECAY_OF_RUN, _PAPERS_DECAY, _LARGEST_DECAY = 0.1, 1e-4, 1e-3
"""λ·Ση of short runs, and the bounds of λ. On 2,000 images of CIFAR-10 (100 epochs, three seeds), 1e-3, where λ·Ση
is 0.08, was better than 1e-4: kNN by 3.7 ± 1.7 points (95 %), the linear probe by 1.2 ± 1.3. 1e-2 was worse (one seed).
"""
_MOST_EVALUATED = {"cpu": 200_000, "gpu": 2_000_000}
"""Up to this many images, the encoder is evaluated at the end of the run."""
_STEPS_RESERVED = 0.9
"""Share of the most possible steps that a run may take."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run may use."""

    cores: int
    memory_bytes: int
    gpu_memory_bytes: int = 0
    """Memory of one GPU; 0 without one."""
    ranks: int = 1
    """Processes that share each batch, with a GPU each if there are any."""

    @property
    def kind(self) -> str:
        return "gpu" if self.gpu_memory_bytes else "cpu"

    @property
    def flops(self) -> float:
        """Operations a second of all ranks together."""
        return self.ranks * _GPU_FLOPS if self.gpu_memory_bytes else self.cores * _CORE_FLOPS

    def holds(self, images: ImagesSurvey) -> bool:
        """Whether the encoded images stay in memory once they are read."""
        return images.total_bytes <= self.memory_bytes // 2


class Choice(NamedTuple):
    """A setting's value and the reason for it."""

    value: Any
    reason: str


class _Encoder(NamedTuple):
    """An encoder to choose from."""

    name: str
    image_size: int
    flops: float
    """Operations of one image's forward and backward pass."""
    memory_bytes: int
    """Memory of one image's activations, with their gradients."""
    fewest_images: int = 0
    stem_stride: int = 1


_ENCODERS = (
    _Encoder("resnet50", 224, 25e9, 90 << 20, fewest_images=50_000),
    _Encoder("resnet18", 224, 11e9, 30 << 20),
    _Encoder("resnet18", 128, 3.6e9, 10 << 20),
    _Encoder("small", 64, 0.3e9, 10 << 20, stem_stride=2),
    _Encoder("small", 32, 0.075e9, 3 << 20, stem_stride=2),
)
"""From the largest to the smallest; the last one is for any images."""


def choose(images: ImagesSurvey, machine: Machine, given: Mapping[str, Any]) -> dict[str, Choice]:
    """Chooses settings by name, nested ones under dotted names; those that are given keep their values.

    A choice takes those that are given into account, whatever they are. The result contains no given setting.
    """
    chosen: dict[str, Choice] = {}
    for name, choice in _choices(images, machine, given):
        if name not in given:
            chosen[name] = choice
    return chosen


def _choices(images: ImagesSurvey, machine: Machine, given: Mapping[str, Any]) -> Iterator[tuple[str, Choice]]:
    yield "dataset", _storage(images, machine)
    encoder, rate = _encoder(images, machine, given)
    if "encoder.name" not in given:
        number, unit = (machine.ranks, "GPU") if machine.gpu_memory_bytes else (machine.cores, "core")
        cause = f"about {float(f'{rate:.2g}'):,.10g} images/s on {number} {unit}{'s' * (number > 1)}"
        yield "encoder.name", Choice(encoder.name, cause)
    smallest = "the smallest; " if encoder.image_size == _ENCODERS[-1].image_size else ""
    yield "encoder.image_size", Choice(encoder.image_size, f"{smallest}images have {images.shorter_side:,} px")
    if given.get("encoder.name", encoder.name) == "small":
        yield "encoder.stem_stride", Choice(encoder.stem_stride, "four times as fast as 1")
    size = given.get("encoder.image_size", encoder.image_size)
    sigma = AugmentationConfig().at_size(size).blur_sigma
    yield "augmentation.blur_sigma", Choice(sigma, "2.0 at 224 px, in proportion to the size")
    if machine.gpu_memory_bytes:
        yield "precision", Choice("bfloat16", "twice as fast on a GPU")
    batch_size = _batch_size(images, machine, encoder, given)
    yield "batch_size", batch_size
    batch = given.get("batch_size", batch_size.value)
    base, images_of_base = (0.1, 128) if encoder.name == "small" else (0.06, 512)
    rate_of = f"{base} for {images_of_base} images, in proportion"
    learning_rate = round(base * batch / images_of_base, 6)
    yield "learning_rate", Choice(learning_rate, rate_of)
    epochs = _epochs(images, machine, rate, batch, given)
    yield "epochs", epochs
    visits = given.get("epochs", epochs.value) * images.number
    if "steps" in given:
        visits = given["steps"] * batch
    yield "weight_decay", _weight_decay(given.get("learning_rate", learning_rate) / 2 * visits / batch)
    yield from _classes_and_window(images, machine, visits, batch, given)
    rows = images.shared.num_classes if images.shared else images.number
    yield "num_shards", Choice(1 if rows < 1_000_000 else 2, f"for {rows:,} rows")
    yield from _evaluations(images, machine, visits)


def _storage(images: ImagesSurvey, machine: Machine) -> Choice:
    if images.packed:
        return Choice("packed", "as they are")
    stay = "stay" if machine.holds(images) else "do not stay"
    return Choice("folder", f"{_gigabytes(images.total_bytes)}, which {stay} in memory")


def _encoder(images: ImagesSurvey, machine: Machine, given: Mapping[str, Any]) -> tuple[_Encoder, float]:
    """The largest encoder that is fast enough, and the images that a second trains on with it.

    An encoder or size that is given leaves those of this name or size; unknown ones are taken to cost as much as the
    known one next to them.
    """
    candidates = [one for one in _ENCODERS if one.fewest_images <= images.number or "encoder.name" in given]
    name, size = given.get("encoder.name"), given.get("encoder.image_size")
    if name is not None:
        base = name.rpartition(":")[2]
        candidates = [one for one in candidates if one.name == base] or [
            one for one in candidates if one.name != "small"
        ]
    if size is not None:
        near = [one for one in candidates if one.image_size >= size] or candidates[:1]
        candidates = [_at_size(near[-1], size)]
    else:
        largest = max(images.shorter_side, candidates[-1].image_size)
        candidates = [one for one in candidates if one.image_size <= largest]
    wanted = _ENOUGH_EPOCHS * images.number / _BUDGET_SECONDS[machine.kind]
    fast = [one for one in candidates if _images_per_second(one, images, machine) >= wanted]
    encoder = (fast or candidates[-1:])[0]
    return encoder, _images_per_second(encoder, images, machine)


def _at_size(encoder: _Encoder, size: int) -> _Encoder:
    factor = (size / encoder.image_size) ** 2
    memory = max(1, round(encoder.memory_bytes * factor))
    return encoder._replace(image_size=size, flops=encoder.flops * factor, memory_bytes=memory)


def _images_per_second(encoder: _Encoder, images: ImagesSurvey, machine: Machine) -> float:
    trained, decoded = machine.flops / encoder.flops, machine.cores * _DECODED_PIXELS / images.pixels
    return min(trained, decoded) if machine.gpu_memory_bytes else 1 / (1 / trained + 1 / decoded)


def _batch_size(images: ImagesSurvey, machine: Machine, encoder: _Encoder, given: Mapping[str, Any]) -> Choice:
    """A power of two, times the parts that are asked for: enough steps an epoch for few images, and what fits memory.

    It has at least two images for each rank, so that BatchNorm can normalise.
    """
    parts = max(1, given.get("accumulate", 1))
    if machine.gpu_memory_bytes:
        fitting, most = parts * machine.ranks * machine.gpu_memory_bytes * 0.6 / encoder.memory_bytes, 512
    else:
        fitting = parts * machine.memory_bytes * 0.25 / encoder.memory_bytes
        most = 512 if images.number >= 1_000_000 else 128
    most = min(most, given.get("num_negatives", most))
    size = 2 * machine.ranks * parts
    while 2 * size <= min(most, fitting, images.number // 8):
        size *= 2
    if 2 * size > images.number // 8:
        return Choice(size, "about an eighth of the images")
    return Choice(size, "what fits into memory" if 2 * size > fitting else "enough for the encoder")


def _epochs(images: ImagesSurvey, machine: Machine, rate: float, batch: int, given: Mapping[str, Any]) -> Choice:
    budget = _BUDGET_SECONDS[machine.kind]
    possible = _STEPS_RESERVED * MAX_STEPS * max(1, batch) / images.number
    fitting = rate * budget / images.number
    epochs = max(1.0, min(max(_FEWEST_EPOCHS, min(_MOST_EPOCHS, fitting)), possible))
    epochs = min(float(f"{epochs:.2g}"), possible)
    if "steps" in given:
        return Choice(epochs, "--steps overrides it")
    seconds = epochs * images.number / rate
    reason = "as many as fit" if _FEWEST_EPOCHS < epochs < _MOST_EPOCHS else "enough" if seconds < budget else "fewest"
    return Choice(epochs, f"{reason}: takes about {_duration(seconds)}")


def _weight_decay(sum_of_rates: float) -> Choice:
    """λ by the sum of all steps' learning rates, whose mean is half of the highest one."""
    decay = float(f"{_DECAY_OF_RUN / max(sum_of_rates, _DECAY_OF_RUN):.2g}")
    if decay > _LARGEST_DECAY:
        return Choice(_LARGEST_DECAY, "the most for a short run")
    if decay < _PAPERS_DECAY:
        return Choice(_PAPERS_DECAY, "the paper's")
    return Choice(decay, f"{_DECAY_OF_RUN:g} over the whole run")


def _classes_and_window(
    images: ImagesSurvey, machine: Machine, visits: float, batch: int, given: Mapping[str, Any]
) -> Iterator[tuple[str, Choice]]:
    number, classes = images.number, images.shared.num_classes if images.shared else images.number
    size = _window_size(number, _LARGEST_WINDOW[machine.kind])
    window = given.get("window_size", max(size, given.get("window_stride", 0)))
    if images.shared and images.shared.fewest_classes(min(window, number)) < min(batch, classes):
        yield "num_negatives", Choice(classes, "all classes")
        yield "window_size", Choice(number, "all images, so that every batch has all classes")
        yield "window_stride", Choice(given.get("window_size", number), "the whole window")
        return
    most = _BATCHES_OF_CLASSES * batch if window <= _SMALL_WINDOW else window // 2
    negatives = min(classes, max(batch, min(window, most)))
    what = "classes" if images.shared else "images"
    every = f"all {what}" if negatives == classes else f"the most recent of {classes:,} {what}"
    yield "num_negatives", Choice(negatives, every)
    if window == number:
        yield "window_size", Choice(window, "all images at random: they are few")
        yield "window_stride", Choice(window, "the whole window")
        return
    yield "window_size", Choice(window, "recent images soon meet again")
    # a pass over all images takes W/S epochs; at least two passes bring rows back
    epochs = visits / number
    ratio = next((ratio for ratio in (8, 4, 2) if epochs >= 2 * ratio), 1)
    yield (
        "window_stride",
        Choice(max(1, window // ratio), f"{ratio} visits in a row; {epochs / ratio:.3g} passes in all"),
    )


def _window_size(number: int, largest: int) -> int:
    """W: a power of two of about an eighth of many images, which the paper has for ImageNet; all images if few."""
    if number < 2 * _SMALLEST_WINDOW:
        return number
    size = _SMALLEST_WINDOW
    while 2 * size <= min(largest, number // 8):
        size *= 2
    return size


def _evaluations(images: ImagesSurvey, machine: Machine, visits: float) -> Iterator[tuple[str, Choice]]:
    if not images.num_classes:
        yield "evaluate", Choice(False, "no labels")
        return
    few = images.number <= _MOST_EVALUATED[machine.kind]
    reason = "no test images with labels (test/, val/)"
    if images.num_tests or images.can_hold_out:
        tests = f"{images.num_tests:,} test images" if images.num_tests else "a tenth is held out: none in test/, val/"
        reason = tests if few else "many images: use pic evaluate later"
    yield "evaluate", Choice(few and (images.num_tests > 0 or images.can_hold_out), reason)
    every = float(f"{visits / images.number / 10:.2g}")
    if images.number >= 10 * images.num_classes and every > 0:
        yield "knn_every", Choice(every, f"{images.num_classes:,} classes: ten times a run")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{max(1, round(60 * hours))} min" if hours < 1.5 else f"{hours:,.1f} h"
