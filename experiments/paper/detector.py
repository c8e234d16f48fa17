"""torchvision's Faster R-CNN on the fourth stage of a ResNet (C4), with MoCo's BatchNorm after the fifth.

The backbone ends with conv4, of a sixteenth of the image's side. A network proposes regions (Ren et al., 1506.01497);
conv5 and a BatchNorm turn the features of each into maps, whose averages classify the region and refine its box. In the
paper's words, "the box prediction head consists of conv5 stage (including global pooling) followed by a BatchNorm
layer"; MoCo's code, which the paper's experiments follow, normalises the maps before they are averaged, and so do we.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.paper.resnet import resnet_stages
from experiments.paper.settings import DetectConfig
from experiments.paper.voc import CLASSES
from trainer.model import EncoderConfig
from trainer.torchvision_schemas import declare_missing_schemas, import_module

_STRIDE = 16
"""Pixels per feature of conv4."""
_ASPECT_RATIOS = (0.5, 1.0, 2.0)


def build_detector(encoder: nn.Module, encoder_config: EncoderConfig, config: DetectConfig) -> Any:
    """The untrained detector of colour images in 0..1, with the encoder's weights; class 0 is the background.

    Raises:
        ValueError: the encoder is not a ResNet for colour images.
    """
    stages = resnet_stages(encoder, encoder_config)
    library = import_module("torchvision.models.detection.faster_rcnn")
    if declare_missing_schemas() is not None:
        import_module("torchvision.ops.boxes").nms = greedy_nms
    pixels = encoder_config.pixels.channels(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        predictor = library.FastRCNNPredictor(stages.conv5_channels, len(CLASSES) + 1)
        for layer, std in ((predictor.cls_score, 0.01), (predictor.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        stages.backbone.out_channels = stages.conv4_channels  # type: ignore[assignment]
        detector = library.FasterRCNN(
            stages.backbone,
            min_size=config.train_sides,
            max_size=config.max_side,
            image_mean=list(pixels.mean),
            image_std=list(pixels.std),
            rpn_anchor_generator=library.AnchorGenerator((config.anchor_sides,), (_ASPECT_RATIOS,)),
            rpn_pre_nms_top_n_train=config.train_proposals[0],
            rpn_post_nms_top_n_train=config.train_proposals[1],
            rpn_pre_nms_top_n_test=config.test_proposals[0],
            rpn_post_nms_top_n_test=config.test_proposals[1],
            rpn_batch_size_per_image=config.anchors_per_image,
            box_batch_size_per_image=config.rois_per_image,
            box_head=nn.Sequential(
                stages.conv5, nn.BatchNorm2d(stages.conv5_channels), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            ),
            box_predictor=predictor,
        )
    detector.roi_heads.box_roi_pool = _AlignedPool(config.roi_side)
    for predicting in (detector.rpn.head, predictor):  # else autocast would round boxes to bfloat16: by up to 4 pixels
        predicting.register_forward_hook(_in_float32)
    return detector


def _in_float32(module: nn.Module, inputs: object, output: tuple[Any, ...]) -> tuple[Any, ...]:
    """The output of a network's head, tensors or lists of tensors."""
    return tuple(part.float() if isinstance(part, Tensor) else [each.float() for each in part] for part in output)


class _AlignedPool(nn.Module):
    """RoIAlign (He et al., 1703.06870) aligned to half pixels, as in Detectron2; torchvision's own pooling is not."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self._side = side

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: object) -> Tensor:
        """Features [n, C, side, side] of the boxes, edges in pixels, on each of the images."""
        (maps,) = features.values()
        library = import_module("torchvision.ops.roi_align")
        regions = library.convert_boxes_to_roi_format(boxes)
        substitute = library._roi_align.__wrapped__  # torchvision's own, not compiled
        align = torch.ops.torchvision.roi_align if declare_missing_schemas() is None else substitute
        pooled: Tensor = align(maps.float(), regions, 1 / _STRIDE, self._side, self._side, 2, True)
        return pooled


def greedy_nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indexes of the boxes that overlap no better box by more than `threshold`, best first: int64.

    Does what `torchvision.ops.nms` does where torchvision's operators cannot be loaded: its wheels on PyPI are linked
    against CUDA, so that they need a torch of CUDA (`trainer.torchvision_schemas`).

    Args:
        boxes: edges, float32 [n, 4].
        scores: float32 [n].
    """
    order = scores.argsort(descending=True, stable=True)
    remaining, kept = order, list[Tensor]()
    while len(remaining):
        best, remaining = remaining[:1], remaining[1:]
        kept.append(best)
        overlaps = import_module("torchvision.ops").box_iou(boxes[best], boxes[remaining])[0]
        remaining = remaining[overlaps <= threshold]
    return torch.cat(kept) if kept else order
