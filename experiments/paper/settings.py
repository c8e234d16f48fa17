"""Settings of the protocols that reproduce the paper's further results."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.evaluate.settings import TrainingConfig
from trainer.settings import check_at_least, check_positive, flag


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(TrainingConfig):
    """How a network on the encoder is trained for a number of steps."""

    iterations: int
    """Number of training steps."""
    learning_rate: float
    """Initial learning rate."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    save_every: int = 500
    """Steps after which the state is saved, so that an interrupted evaluation continues there."""

    def check(self) -> None:
        check_at_least(self, 1, "iterations", "save_every")
        check_positive(self, "learning_rate")
        super().check()


@dataclass(frozen=True, kw_only=True)
class DetectConfig(NetworkConfig):
    """Settings of detection on Pascal VOC; the defaults are the paper's and, where it gives none, those of MoCo's
    configuration of Detectron2, which it follows."""

    train_splits: tuple[str, ...] = ("voc_2007_trainval", "voc_2012_trainval")
    """Splits to train on, voc_YEAR_SPLIT: ImageSets/Main/SPLIT.txt of the folder VOCYEAR."""
    test_split: str = "voc_2007_test"
    """The split to test on."""
    iterations: int = 24_000
    """Number of training steps."""
    batch_size: int = 16
    """Images in a step, of all ranks together."""
    learning_rate: float = 0.02
    """Learning rate of SGD, for a batch of 16."""
    learning_rate_drops: tuple[int, ...] = (18_000, 22_000)
    """Steps at which the learning rate is multiplied by 0.1."""
    warmup_iterations: int = 100
    """Steps over which the learning rate rises linearly from a thousandth."""
    weight_decay: float = 1e-4
    """λ of all parameters but those of BatchNorm, which have none in Detectron2."""
    train_sides: tuple[int, ...] = tuple(range(480, 801, 32))
    """Shorter sides of training images in pixels; one is drawn for each image."""
    test_side: int = 800
    """Shorter side of test images in pixels."""
    max_side: int = 1333
    """Maximum of the longer side in pixels; an image that would exceed it becomes smaller."""
    anchor_sides: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Square roots of the anchors' areas in pixels; each has the ratios 1:2, 1:1 and 2:1."""
    anchors_per_image: int = 256
    """Anchors of an image in the proposal network's loss."""
    rois_per_image: int = 512
    """Regions of an image in the box head's loss."""
    roi_side: int = 14
    """Side of a region's features, before conv5 halves it."""
    train_proposals: tuple[int, int] = (12_000, 2_000)
    """Best proposals of a training image before and after non-maximum suppression."""
    test_proposals: tuple[int, int] = (6_000, 1_000)
    """Best proposals of a test image before and after non-maximum suppression."""
    precise_norm_batches: int = 200
    """Training batches over which BatchNorm statistics are averaged before the test; 0 keeps the running averages."""

    def check(self) -> None:
        super().check()
        check_at_least(self, 1, "test_side", "max_side", "anchors_per_image", "rois_per_image")
        check_at_least(self, 2, "roi_side")
        check_at_least(self, 0, "warmup_iterations", "precise_norm_batches")
        for name in ("train_sides", "anchor_sides", "train_proposals", "test_proposals"):
            values: tuple[int, ...] = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{flag(name)} must be one or more positive numbers, got {values}")
        drops = self.learning_rate_drops
        if list(drops) != sorted(set(drops)):
            raise ValueError(f"--learning-rate-drops must be steps in ascending order, got {drops}")
        if not self.train_splits:
            raise ValueError("--train-splits must name at least one split, such as voc_2007_trainval")


@dataclass(frozen=True, kw_only=True)
class SegmentConfig(NetworkConfig):
    """Settings of the segmentation protocol; the defaults are the paper's (appendix, Experimental Settings)."""

    iterations: int = 60_000
    """Number of training steps."""
    batch_size: int = 8
    """Crops in a step, of all ranks together."""
    crop_size: int = 769
    """Side of a training crop, in pixels."""
    min_scale: float = 0.5
    """Smallest factor by which a training image is scaled."""
    max_scale: float = 2.0
    """Largest factor by which a training image is scaled."""
    learning_rate: float = 0.01
    """Initial learning rate; it falls to 0 by a cosine."""

    def check(self) -> None:
        super().check()
        check_at_least(self, 1, "crop_size")
        check_positive(self, "min_scale", "max_scale")
        if self.min_scale > self.max_scale:
            raise ValueError(f"--min-scale {self.min_scale} is above --max-scale {self.max_scale}: exchange them")
