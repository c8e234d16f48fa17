"""Non-maximum suppression and RoIAlign: torchvision's, or the same in torch where its library cannot be loaded.

torchvision's wheels on PyPI are linked against CUDA, so that their library cannot be loaded with a CPU-only torch
(`trainer.torchvision_schemas`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.torchvision_schemas import declare_missing_schemas, import_module

_CHUNK = 64
"""Regions that are aligned at once."""


def non_maximum_suppression(boxes: Tensor, scores: Tensor, threshold: float, groups: Tensor | None = None) -> Tensor:
    """Indexes of the boxes that overlap no better box of their group by more than `threshold`, best first: int64.

    Args:
        boxes: edges, float32 [n, 4].
        scores: float32 [n].
        groups: int64 [n]; None if all belong to one.
    """
    if groups is not None and len(boxes):  # far apart, so that groups do not overlap
        boxes = boxes + (groups * (boxes.max() - boxes.min() + 1))[:, None].to(boxes)
    if declare_missing_schemas() is None:
        kept: Tensor = import_module("torchvision.ops").nms(boxes, scores, threshold)
        return kept
    return _greedy(boxes, scores, threshold)


def roi_align(maps: Tensor, boxes: list[Tensor], side: int, scale: float) -> Tensor:
    """Averages features over a grid of side × side bins of each box (He et al., 1703.06870), aligned to half pixels.

    Each bin averages samples about one feature apart, as in Detectron2's ROIAlignV2.

    Args:
        maps: float32 [B, C, H, W].
        boxes: edges in pixels on each of the B images, float32 [n_b, 4].
        scale: features per pixel.

    Returns:
        float32 [sum of n_b, C, side, side].
    """
    if declare_missing_schemas() is None:
        align = import_module("torchvision.ops").roi_align
        aligned: Tensor = align(maps, boxes, side, spatial_scale=scale, sampling_ratio=-1, aligned=True)
        return aligned
    parts = [
        _aligned(image, part * scale - 0.5, side)
        for image, on_image in zip(maps, boxes, strict=True)
        for part in torch.split(on_image, _CHUNK)
    ]
    return torch.cat(parts) if parts else maps.new_empty(0, maps.shape[1], side, side)


def _greedy(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    remaining, kept = torch.arange(len(boxes), device=boxes.device), list[Tensor]()
    while len(remaining):
        best, remaining = remaining[:1], remaining[1:]
        kept.append(best)
        overlaps = import_module("torchvision.ops").box_iou(boxes[best], boxes[remaining])[0]
        remaining = remaining[overlaps <= threshold]
    return order[torch.cat(kept)] if kept else order


def _aligned(features: Tensor, boxes: Tensor, side: int) -> Tensor:
    """One image's regions: features [C, H, W] and boxes [n, 4] in its pixels to [n, C, side, side].

    Bilinear interpolation and averages are separable: a matrix for the rows, and one for the columns.
    """
    height, width = features.shape[-2:]
    rows = _interpolation(boxes[:, 1], boxes[:, 3], side, height)  # (n, side, H)
    columns = _interpolation(boxes[:, 0], boxes[:, 2], side, width)  # (n, side, W)
    return torch.einsum("nph,chw,nqw->ncpq", rows, features, columns)


def _interpolation(start: Tensor, end: Tensor, side: int, length: int) -> Tensor:
    """Weights of `length` features in each of `side` bins between start and end, [n] each: [n, side, length]."""
    bin_size = (end - start) / side
    num_samples = bin_size.ceil().clamp(min=0)  # of each bin
    index = torch.arange(int(num_samples.max()) if len(start) else 0, device=start.device)  # (S,)
    bins = torch.arange(side, device=start.device)
    within = (index + 0.5) / num_samples.clamp(min=1)[:, None]  # (n, S)
    position = start[:, None, None] + (bins[:, None] + within[:, None]) * bin_size[:, None, None]  # (n, side, S)
    counted = (index < num_samples[:, None])[:, None] & (position >= -1) & (position <= length)
    offset = position.clamp(0, length - 1)[..., None] - torch.arange(length, device=start.device)
    weights = (1 - offset.abs()).clamp(min=0) * counted[..., None]  # (n, side, S, length)
    return weights.sum(dim=2) / num_samples.clamp(min=1)[:, None, None]
