"""Settings to start from, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer.compute import ComputeConfig
from trainer.config import TrainConfig
from trainer.data.augmentation_config import AugmentationConfig
from trainer.data.config import DataConfig, ViewsConfig
from trainer.encoder_config import EncoderConfig, ModelConfig
from trainer.loss import LossConfig
from trainer.optimization import OptimizationConfig
from trainer.rows_config import RowsConfig
from trainer.run.config import ReportConfig, RunConfig
from trainer.schedule import SamplingConfig

# The paper's settings for ImageNet-1K (Section 4.1, and Experimental Settings in its appendix), eight GPUs sharing a
# batch of 512; for ImageNet-11K "the same pre-training setting [...] with only dataset changed".
# docs/paper-to-code.md lists them one by one.
_IMAGENET = TrainConfig(
    data=DataConfig(dataset="packed"),
    run=RunConfig(output=Path("runs/imagenet-1k")),
    rows=RowsConfig(num_negatives=65_536),
    optimization=OptimizationConfig(
        epochs=200.0, warmup_epochs=5.0, batch_size=512, learning_rate=0.06, momentum=0.9, weight_decay=1e-4
    ),
    sampling=SamplingConfig(window_size=131_072, window_stride=16_384),
    model=ModelConfig(encoder=EncoderConfig(name="resnet50", in_channels=3, image_size=224)),
    loss=LossConfig(temperature=0.2),
    compute=ComputeConfig(precision="bfloat16"),
    report=ReportConfig(evaluate=False),
)

_FASHION_MNIST = TrainConfig(
    sampling=SamplingConfig(window_stride=64),
    # small centred images: positions are informative
    model=ModelConfig(encoder=EncoderConfig(stem_stride=2, pool_size=3)),
    views=ViewsConfig(augmentation=AugmentationConfig(min_scale=0.5, blur_probability=0.0)),
)
# ResNet-18's shape at a quarter of its width, for two cores; two passes of the window.
_CIFAR_10 = TrainConfig(
    data=DataConfig(dataset="cifar-10"),
    run=RunConfig(output=Path("runs/cifar-10")),
    rows=RowsConfig(num_negatives=512),
    optimization=OptimizationConfig(epochs=16.0, weight_decay=5e-4),
    sampling=SamplingConfig(window_size=4096, window_stride=512),
    model=ModelConfig(encoder=EncoderConfig(in_channels=3, image_size=32, width=16, blocks=(2, 2, 2, 2))),
    views=ViewsConfig(augmentation=AugmentationConfig(blur_probability=0.0)),  # blurs more than 32 px have to lose
)
# A sixth of the images, so that rows leave the window and return several times within minutes; few classes a step and a
# strong decay, so that it matters where they return to. In so short a run an encoder of two stages, whose features keep
# more of the images' layout, is better than one of three, and takes 0.6 of its time.
_DEMO = TrainConfig(
    data=DataConfig(num_images=10_000),
    run=RunConfig(output=Path("runs/demo")),
    rows=RowsConfig(num_negatives=128),
    optimization=OptimizationConfig(epochs=32.0, weight_decay=3e-3),
    sampling=SamplingConfig(window_size=2048, window_stride=256),
    model=ModelConfig(encoder=replace(_FASHION_MNIST.model.encoder, blocks=(1, 1), pool_size=4)),
    views=_FASHION_MNIST.views,
)
PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "fashion-mnist": ("Fashion-MNIST, 60,000 images of 28×28: minutes on a CPU", _FASHION_MNIST),
    "demo": ("10,000 images of Fashion-MNIST, with the settings of `make demo`", _DEMO),
    "cifar-10": ("CIFAR-10, 50,000 images of 32×32: half an hour on two cores", _CIFAR_10),
    "imagenet-1k": (
        "packed ImageNet-1K, as in the paper: ResNet-50, 512 images a step, 200 epochs; give --data-dir",
        _IMAGENET,
    ),
    "imagenet-11k": (
        "packed ImageNet-11K or 22K, or any other large set: the same recipe for 100 epochs, the paper's longest for "
        "ImageNet-11K (its others: --epochs 25, --epochs 50); give --data-dir",
        _IMAGENET.with_settings(output=Path("runs/imagenet-11k"), epochs=100.0),
    ),
    "images": (
        "a folder of your own images: all settings that are not given are chosen from the images and the machine; give "
        "--data-dir",
        TrainConfig(
            data=DataConfig(dataset="folder"),
            run=RunConfig(output=Path("runs/images")),
            model=ModelConfig(encoder=EncoderConfig(in_channels=3, image_size=64, stem_stride=2)),
            report=ReportConfig(evaluate=False),
        ),
    ),
    "synthetic": (
        "generated images without labels, in any number: to measure rows at scale",
        TrainConfig(
            data=DataConfig(dataset="synthetic", num_images=1_000_000),
            run=RunConfig(output=Path("runs/synthetic")),
            rows=RowsConfig(num_negatives=65_536),
            optimization=OptimizationConfig(steps=1_000, batch_size=512, learning_rate=0.06),
            sampling=SamplingConfig(window_size=131_072, window_stride=16_384),
            model=ModelConfig(encoder=EncoderConfig(in_channels=3, image_size=32, stem_stride=2)),
            report=ReportConfig(evaluate=False),
        ),
    ),
}
