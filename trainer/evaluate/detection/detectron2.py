"""Writes the evaluation for Detectron2: the encoder's weights, a configuration and the program that runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import nn

from trainer.evaluate.detection.config import DetectConfig
from trainer.evaluate.detection.voc import CLASSES
from trainer.export.encoders import convert
from trainer.export.model_card import DETECTRON2, LibraryEncoder
from trainer.model import EncoderConfig
from weightserver.common.atomic_files import atomic_write, require_empty

WEIGHTS, CONFIG, PROGRAM = "encoder.safetensors", "detector.yaml", "train.py"
_PROGRAM = Path(__file__).with_name("detectron2_train.py")
_MIN_DEPTH = 50
"""Detectron2's Res5ROIHeads has bottleneck blocks, as ResNets of 50 and more layers do."""


def write_detectron2(
    encoder: nn.Module, encoder_config: EncoderConfig, config: DetectConfig, output: Path
) -> list[Path]:
    """Writes three files into the new directory `output`, and returns their paths.

    Raises:
        ValueError: the encoder is no ResNet of bottleneck blocks, or the directory is in use.
        OSError: the files cannot be written.
    """
    converted = convert(encoder, encoder_config, "detectron2")
    depth = DETECTRON2[converted.name][0]
    if depth < _MIN_DEPTH:
        raise ValueError(
            f"Detectron2's box head has no blocks of {encoder_config.name!r}: omit --detectron2, or evaluate a ResNet "
            f"of {_MIN_DEPTH} layers or more"
        )
    require_empty(output)
    output.mkdir(parents=True, exist_ok=True)
    weights, yaml, program = (output / name for name in (WEIGHTS, CONFIG, PROGRAM))
    tensors = {name: tensor.contiguous() for name, tensor in converted.tensors.items()}
    atomic_write(weights, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    atomic_write(yaml, lambda path: path.write_text(_configuration(converted, config)))
    atomic_write(program, lambda path: path.write_text(_PROGRAM.read_text()))
    return [weights, yaml, program]


def _configuration(encoder: LibraryEncoder, config: DetectConfig) -> str:
    """Detectron2's configuration in YAML; what it does not set has Detectron2's default."""
    nested: dict[str, Any] = {}
    for path, value in ({"VERSION": 2} | _network(encoder, config) | _training(config)).items():
        *parents, name = path.split(".")
        part = nested
        for parent in parents:
            part = part.setdefault(parent, {})
        part[name] = value
    return "\n".join(_yaml(nested)) + "\n"


def _network(encoder: LibraryEncoder, config: DetectConfig) -> dict[str, Any]:
    depth, groups, width = DETECTRON2[encoder.name]
    mean, std = ([round(255 * number, 6) for number in numbers] for numbers in encoder.pixels)
    return {
        "MODEL.META_ARCHITECTURE": "GeneralizedRCNN",
        "MODEL.WEIGHTS": "",
        "MODEL.MASK_ON": False,
        "MODEL.PIXEL_MEAN": mean,
        "MODEL.PIXEL_STD": std,
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.RESNETS.DEPTH": depth,
        "MODEL.RESNETS.NUM_GROUPS": groups,
        "MODEL.RESNETS.WIDTH_PER_GROUP": width,
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.RESNETS.NORM": "SyncBN",
        "MODEL.ANCHOR_GENERATOR.SIZES": [list(config.anchor_sides)],
        "MODEL.RPN.BATCH_SIZE_PER_IMAGE": config.anchors_per_image,
        "MODEL.RPN.PRE_NMS_TOPK_TRAIN": config.train_proposals[0],
        "MODEL.RPN.POST_NMS_TOPK_TRAIN": config.train_proposals[1],
        "MODEL.RPN.PRE_NMS_TOPK_TEST": config.test_proposals[0],
        "MODEL.RPN.POST_NMS_TOPK_TEST": config.test_proposals[1],
        "MODEL.ROI_HEADS.NAME": "Res5ROIHeadsWithNorm",
        "MODEL.ROI_HEADS.NUM_CLASSES": len(CLASSES),
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": config.rois_per_image,
        "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": config.roi_side,
    }


def _training(config: DetectConfig) -> dict[str, Any]:
    return {
        "INPUT.FORMAT": "RGB",
        "INPUT.MIN_SIZE_TRAIN": list(config.train_sides),
        "INPUT.MAX_SIZE_TRAIN": config.max_side,
        "INPUT.MIN_SIZE_TEST": config.test_side,
        "INPUT.MAX_SIZE_TEST": config.max_side,
        "DATASETS.TRAIN": list(config.train_splits),
        "DATASETS.TEST": [config.test_split],
        "SOLVER.IMS_PER_BATCH": config.batch_size,
        "SOLVER.BASE_LR": config.learning_rate,
        "SOLVER.STEPS": list(config.learning_rate_drops),
        "SOLVER.MAX_ITER": config.iterations,
        "SOLVER.WARMUP_ITERS": config.warmup_iterations,
        "SOLVER.MOMENTUM": config.momentum,
        "SOLVER.WEIGHT_DECAY": config.weight_decay,
        "SOLVER.CHECKPOINT_PERIOD": config.save_every,
        "TEST.PRECISE_BN.ENABLED": config.precise_norm_batches > 0,
        "TEST.PRECISE_BN.NUM_ITER": config.precise_norm_batches,
        "SEED": config.seed,
    }


def _yaml(settings: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _yaml(value, indent + "  ")
        elif isinstance(value, float):
            yield f"{indent}{name}: {np.format_float_positional(value, trim='0')}"  # 1e-05 would be a string in YAML
        else:
            yield f"{indent}{name}: {json.dumps(value)}"
