"""Trains and tests a detector on Pascal VOC with Detectron2, from the encoder in this directory.

    DETECTRON2_DATASETS=DIR python train.py --num-gpus 8

DIR has the folders VOC2007 and VOC2012. The configuration, detector.yaml, and the weights are those of this directory;
further settings follow the options, as in `OUTPUT_DIR out SOLVER.IMS_PER_BATCH 8`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.engine import DefaultTrainer, default_argument_parser, default_setup, launch
from detectron2.evaluation import PascalVOCDetectionEvaluator
from detectron2.layers import get_norm
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from safetensors.torch import load_file

HERE = Path(__file__).parent


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsWithNorm(Res5ROIHeads):  # type: ignore[misc]
    """Adds a BatchNorm after res5, whose maps are then averaged over each region (He et al., 1911.05722)."""

    @classmethod
    def _build_res5_block(cls, cfg: Any) -> Any:
        blocks, channels = super()._build_res5_block(cfg)
        blocks.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
        return blocks, channels


class Trainer(DefaultTrainer):  # type: ignore[misc]
    """Starts from the encoder: its last stage is part of the box head."""

    @classmethod
    def build_model(cls, cfg: Any) -> Any:
        model = super().build_model(cfg)
        load_encoder(model, load_file(HERE / "encoder.safetensors"))
        return model

    @classmethod
    def build_evaluator(cls, cfg: Any, dataset_name: str, output_folder: str | None = None) -> Any:
        return PascalVOCDetectionEvaluator(dataset_name)


def load_encoder(model: Any, tensors: dict[str, Any]) -> None:
    """Copies the encoder's weights into the backbone and the box head of a detector."""
    last = {name.removeprefix("res5."): value for name, value in tensors.items() if name.startswith("res5.")}
    model.backbone.load_state_dict({name: value for name, value in tensors.items() if not name.startswith("res5.")})
    missing, unexpected = model.roi_heads.res5.load_state_dict(last, strict=False)
    assert not unexpected
    assert all(name.startswith("norm.") for name in missing)


def main(options: Any) -> Any:
    """Trains, unless --eval-only, and tests; returns the average precisions."""
    cfg = get_cfg()
    cfg.merge_from_file(options.config_file or str(HERE / "detector.yaml"))
    cfg.merge_from_list(options.opts)
    cfg.freeze()
    default_setup(cfg, options)
    if options.eval_only:
        model = Trainer.build_model(cfg)
        DetectionCheckpointer(model, save_dir=cfg.OUTPUT_DIR).resume_or_load(cfg.MODEL.WEIGHTS, resume=True)
        return Trainer.test(cfg, model)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=options.resume)
    return trainer.train()


if __name__ == "__main__":
    options = default_argument_parser().parse_args()
    launch(
        main,
        options.num_gpus,
        num_machines=options.num_machines,
        machine_rank=options.machine_rank,
        dist_url=options.dist_url,
        args=(options,),
    )
