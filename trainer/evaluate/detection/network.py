"""Faster R-CNN on the fourth stage of a ResNet (C4), as in Detectron2 with MoCo's BatchNorm after the fifth.

The backbone ends with conv4, of a sixteenth of the image's side. A network proposes regions (Ren et al., 1506.01497);
conv5 and a BatchNorm turn the features of each into maps, whose averages classify the region and refine its box. In the
paper's words, "the box prediction head consists of conv5 stage (including global pooling) followed by a BatchNorm
layer"; MoCo's code, which the paper's experiments follow, normalises the maps before they are averaged, and so do we.

All constants are Detectron2's defaults; in particular boxes are regressed with an L1 loss, anchors are not rounded, and
class scores come with a box for each class. Losses are sums over the images, so that several ranks can share a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.evaluate.detection.config import DetectConfig
from trainer.evaluate.detection.operators import non_maximum_suppression, roi_align
from trainer.evaluate.resnet import ResNetStages
from trainer.torchvision_schemas import import_module

STRIDE = 16
"""Pixels per feature of conv4."""
_ASPECT_RATIOS = (0.5, 1.0, 2.0)
_PROPOSAL_OVERLAP = 0.7
_DETECTION_OVERLAP = 0.5
_MIN_SCORE = 0.05
_MAX_DETECTIONS = 100
_REGION_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
_ANCHOR_WEIGHTS = (1.0, 1.0, 1.0, 1.0)

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Target:
    """The objects on a training image."""

    boxes: Tensor
    """float32 [n, 4]; n is at least 1."""
    labels: Tensor
    """int64 [n]."""
    seed: int
    """Determines which anchors and regions are sampled."""


@dataclass(frozen=True)
class Losses:
    """Losses of some images, as sums over anchors and regions."""

    anchors: Tensor
    regions: Tensor
    num_regions: int


@dataclass(frozen=True)
class Detected:
    """Detections on an image, best first."""

    boxes: Tensor
    """float32 [n, 4]."""
    scores: Tensor
    """float32 [n]."""
    labels: Tensor
    """int64 [n]."""


class FasterRCNN(nn.Module):
    """The detector. Its new layers' weights are drawn from torch's generator.

    Args:
        stages: of a ResNet; they become part of the detector.
        num_classes: number of classes, without the background.
    """

    def __init__(self, stages: ResNetStages, config: DetectConfig, num_classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(stages.stem, stages.conv2, stages.conv3, stages.conv4)
        self.proposals = ProposalNetwork(stages.conv4_channels, config)
        self.box_head = BoxHead(stages.conv5, stages.conv5_channels, config, num_classes)

    def forward(
        self, images: Tensor, sizes: Sequence[Size], targets: Sequence[Target] | None = None
    ) -> Losses | list[Detected]:
        """Losses in training mode, otherwise the detections on each image.

        Args:
            images: normalised and padded at the bottom and on the right with zeros: float32 [B, 3, H, W].
            sizes: of the images without their padding.
            targets: in training mode.
        """
        features = self.backbone(images)
        proposed, anchor_loss = self.proposals(features, sizes, targets)
        if targets is None:
            detected: list[Detected] = self.box_head.detect(features, proposed, sizes)
            return detected
        region_loss, num_regions = self.box_head(features, proposed, targets)
        return Losses(anchor_loss, region_loss, num_regions)


class ProposalNetwork(nn.Module):
    """Scores anchors at each feature, and moves the best to where objects may be."""

    def __init__(self, channels: int, config: DetectConfig) -> None:
        super().__init__()
        self._config = config
        self.head = import_module("torchvision.models.detection.rpn").RPNHead(
            channels, len(config.anchor_sides) * len(_ASPECT_RATIOS)
        )
        detection = import_module("torchvision.models.detection._utils")
        self._coder = detection.BoxCoder(_ANCHOR_WEIGHTS)
        self._matcher = detection.Matcher(0.7, 0.3, allow_low_quality_matches=True)

    def forward(
        self, features: Tensor, sizes: Sequence[Size], targets: Sequence[Target] | None
    ) -> tuple[list[Tensor], Tensor]:
        """Proposals [n, 4] on each image, and the loss; 0 without targets."""
        [scores], [shifts] = self.head([features])
        batch, _, height, width = scores.shape
        scores = scores.permute(0, 2, 3, 1).flatten(1).float()  # (B, H·W·A)
        shifts = shifts.view(batch, -1, 4, height, width).permute(0, 3, 4, 1, 2).reshape(batch, -1, 4).float()
        anchors = self.anchors(height, width, features.device)
        proposed = [
            self._select(of_image, moved, anchors, size)
            for of_image, moved, size in zip(scores.detach(), shifts.detach(), sizes, strict=True)
        ]
        loss = scores.new_zeros(())
        for image, target in enumerate(targets or ()):
            loss = loss + self._loss(scores[image], shifts[image], anchors, target)
        return proposed, loss

    def anchors(self, height: int, width: int, device: torch.device) -> Tensor:
        """Boxes around each feature of a map: float32 [height · width · A, 4]."""
        halves = torch.tensor(
            [
                (side / math.sqrt(ratio) / 2, side * math.sqrt(ratio) / 2)
                for side in self._config.anchor_sides
                for ratio in _ASPECT_RATIOS
            ],
            device=device,
        )  # (A, 2)
        down, right = (torch.arange(count, device=device) * STRIDE for count in (height, width))
        centres = torch.stack(torch.meshgrid(right, down, indexing="xy"), dim=-1).view(-1, 1, 2)
        return torch.cat([centres - halves, centres + halves], dim=-1).view(-1, 4)

    def _select(self, scores: Tensor, shifts: Tensor, anchors: Tensor, size: Size) -> Tensor:
        """The best anchors of an image, moved, without those that overlap a better one."""
        before, after = self._config.train_proposals if self.training else self._config.test_proposals
        scores, best = scores.topk(min(before, len(scores)))
        boxes = _clipped(self._coder.decode_single(shifts[best], anchors[best]), size)
        kept = _not_empty(boxes)
        boxes, scores = boxes[kept], scores[kept]
        return boxes[non_maximum_suppression(boxes, scores, _PROPOSAL_OVERLAP)[:after]]

    def _loss(self, scores: Tensor, shifts: Tensor, anchors: Tensor, target: Target) -> Tensor:
        matches = _match(self._matcher, target.boxes, anchors)
        number = self._config.anchors_per_image
        positive, negative = sample(matches >= 0, matches == -1, number, number // 2, target.seed)
        chosen = torch.cat([positive, negative])
        wanted = (matches[chosen] >= 0).float()
        wanted_shifts = self._coder.encode_single(target.boxes[matches[positive]], anchors[positive])
        classified = F.binary_cross_entropy_with_logits(scores[chosen], wanted, reduction="sum")
        return classified + F.l1_loss(shifts[positive], wanted_shifts, reduction="sum")


class BoxHead(nn.Module):
    """conv5, a BatchNorm and an average over each region; then classes, the last the background, and boxes."""

    def __init__(self, conv5: nn.Module, channels: int, config: DetectConfig, num_classes: int) -> None:
        super().__init__()
        self._config, self._num_classes = config, num_classes
        self.conv5 = conv5
        self.norm = nn.BatchNorm2d(channels)
        self.classes = nn.Linear(channels, num_classes + 1)
        self.boxes = nn.Linear(channels, 4 * num_classes)
        for layer, std in ((self.classes, 0.01), (self.boxes, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        detection = import_module("torchvision.models.detection._utils")
        self._coder = detection.BoxCoder(_REGION_WEIGHTS)
        self._matcher = detection.Matcher(0.5, 0.5, allow_low_quality_matches=False)

    def forward(self, features: Tensor, proposed: Sequence[Tensor], targets: Sequence[Target]) -> tuple[Tensor, int]:
        """The loss of a sample of the proposals and objects, and the sample's size."""
        sampled = [self._sample(boxes, target) for boxes, target in zip(proposed, targets, strict=True)]
        regions, labels, shifts = map(torch.cat, zip(*sampled, strict=True))
        scores, predicted = self._predict(features, [boxes for boxes, _, _ in sampled])
        positive = (labels < self._num_classes).nonzero().squeeze(1)
        of_class = predicted[positive, labels[positive]]
        classified = F.cross_entropy(scores, labels, reduction="sum")
        return classified + F.l1_loss(of_class, shifts[positive], reduction="sum"), len(regions)

    def detect(self, features: Tensor, proposed: Sequence[Tensor], sizes: Sequence[Size]) -> list[Detected]:
        """The detections on each image."""
        scores, shifts = self._predict(features, proposed)
        counts = [len(boxes) for boxes in proposed]
        by_image = torch.split(scores.softmax(dim=1), counts), torch.split(shifts, counts)
        return [self._select(*part) for part in zip(*by_image, proposed, sizes, strict=True)]

    def _predict(self, features: Tensor, regions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Scores [n, classes + 1] and shifts [n, classes, 4] of the regions of all images."""
        maps = roi_align(features.float(), list(regions), self._config.roi_side, 1 / STRIDE)
        averages = self.norm(self.conv5(maps)).mean(dim=(2, 3))
        return self.classes(averages).float(), self.boxes(averages).float().view(len(maps), -1, 4)

    def _sample(self, proposed: Tensor, target: Target) -> tuple[Tensor, Tensor, Tensor]:
        """Regions [n, 4], a quarter of them of objects, their labels [n] and the shifts [n, 4] to the objects."""
        proposed = torch.cat([proposed, target.boxes])
        matches = _match(self._matcher, target.boxes, proposed)
        number = self._config.rois_per_image
        positive, negative = sample(matches >= 0, matches < 0, number, number // 4, target.seed + 1)
        chosen = torch.cat([positive, negative])
        labels = torch.cat([target.labels[matches[positive]], torch.full_like(negative, self._num_classes)])
        nearest = target.boxes[matches[chosen].clamp(min=0)]
        return proposed[chosen], labels, self._coder.encode_single(nearest, proposed[chosen])

    def _select(self, scores: Tensor, shifts: Tensor, regions: Tensor, size: Size) -> Detected:
        """An image's detections, without those that overlap a better one of their class."""
        scores = scores[:, :-1]
        region, label = (scores > _MIN_SCORE).nonzero(as_tuple=True)
        boxes = _clipped(self._coder.decode_single(shifts[region, label], regions[region]), size)
        kept = _not_empty(boxes)
        boxes, found, label = boxes[kept], scores[region, label][kept], label[kept]
        kept = non_maximum_suppression(boxes, found, _DETECTION_OVERLAP, label)[:_MAX_DETECTIONS]
        return Detected(boxes[kept], found[kept], label[kept])


def sample(positive: Tensor, negative: Tensor, number: int, max_positive: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indexes of random positives, and of random negatives that fill the sample up to `number`.

    Args:
        positive, negative: bool [n].
        seed: determines the sample, on any device.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(mask: Tensor, count: int) -> Tensor:
        indexes = mask.nonzero().squeeze(1)
        return indexes[torch.randperm(len(indexes), generator=generator)[:count].to(indexes.device)]

    positives = pick(positive, max_positive)
    return positives, pick(negative, number - len(positives))


def _match(matcher: Any, objects: Tensor, boxes: Tensor) -> Tensor:
    """The object of each box, −1 for the background and −2 for boxes between: int64 [n]."""
    matches: Tensor = matcher(import_module("torchvision.ops").box_iou(objects, boxes))
    return matches


def _clipped(boxes: Tensor, size: Size) -> Tensor:
    clipped: Tensor = import_module("torchvision.ops").clip_boxes_to_image(boxes, size)
    return clipped


def _not_empty(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
