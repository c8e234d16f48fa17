"""What a run is: every setting, its default and its meaning; the presets; the command line made from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from trainer.data.augment import AugmentationConfig
from trainer.model import EncoderConfig
from weightserver.addresses import is_loopback

_MAX_STEPS = 100_000_000


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run."""

    # ---- what to train on, and where the results go
    dataset: str = "fashion-mnist"
    """Name of the data set."""
    data_dir: Path | None = None
    """Folder with the data set's files; without one they are looked for, and downloaded where need be."""
    output: Path = Path("runs/fashion-mnist")
    """The run's own directory: config.json, metrics.jsonl, summary.json, tensorboard/, encoder.safetensors."""

    # ---- who holds the rows
    rows: Literal["remote", "dense"] = "remote"
    """remote: on the weight servers. dense: all in this process's memory, moved by plain SGD."""
    servers: str | None = None
    """Addresses of all weight servers, host:port,host:port; without any, local ones are started for the run."""
    num_shards: int = 2
    """Local weight servers to start where no --servers are given; their rows are kept in the run's directory."""
    insecure: bool = False
    """Take --servers on other machines without TLS."""
    resume: bool = False
    """Go on with the run in --output (not in this version)."""

    # ---- how long
    epochs: float = 6.0
    """Length of the run: visits for each image, on average."""
    steps: int | None = None
    """Length of the run in updates, instead of epochs."""

    # ---- instance classification
    batch_size: int = 128
    """B, images in each update."""
    num_negatives: int = 1024
    """K, the most recently visited rows, which are the classes of a step; the batch's own are among them."""
    window_size: int = 1024
    """W, images in the sliding window."""
    window_stride: int = 128
    """S, by how many images the window moves once all its images were visited. Epoch order is S = W = N."""
    temperature: float = 0.2
    """τ, by which cosines are divided."""
    correction: bool = True
    """Whether rows that are not active follow momentum and weight decay (no: the paper's ablation)."""

    # ---- optimisation: one SGD for encoder, head and rows
    learning_rate: float = 0.1
    """Base learning rate η, reached after the warm-up; then a cosine to 0, step by step."""
    warmup_fraction: float = 0.1
    """Part of the run in which the learning rate rises linearly from η/100 to η (paper: 5 of 200 epochs)."""
    momentum: float = 0.9
    """m."""
    weight_decay: float = 1e-4
    """λ, on everything, as in the paper."""

    # ---- model
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """The network whose features are wanted."""
    dim: int = 128
    """D, length of an embedding and of a row."""
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    """What happens to an image at each visit."""

    # ---- rows as they are stored
    init_std: float = 0.01
    """Standard deviation of a row's initial values."""
    rows_per_block: int = 63
    """Rows that the weight servers store together."""

    # ---- randomness and reports
    seed: int = 0
    """Seed of the encoder, the initial rows, the order within windows and the augmentations."""
    order_seed: int = 0
    """Seed of the order of the images, in which the window slides."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    knn_every: float = 0.0
    """Epochs between kNN evaluations on held-out training images; 0 for none."""
    evaluate: bool = True
    """Whether to end with the kNN and linear evaluations."""

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other, or that this version cannot do."""
        if self.resume:
            raise ValueError("--resume is not in this version: it comes with checkpoints; start in another --output")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "this version trains with one process: start it with --nproc-per-node 1, or without torchrun"
            )
        if self.rows == "dense" and self.servers:
            raise ValueError("--rows dense keeps the rows in this process: leave --servers away, or use --rows remote")
        for address in self.server_addresses:
            if not is_loopback(address) and not self.insecure:
                raise ValueError(
                    f"--servers {address} is on another machine and this version has no TLS: "
                    "give --insecure on a network you trust"
                )
        for name in ("num_shards", "batch_size", "log_every", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("epochs", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("learning_rate", "knn_every"):
            if not 0 <= getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be finite and not negative, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed must lie in 0..2^64-1, got {self.seed}")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"--warmup-fraction must lie in 0..1, got {self.warmup_fraction}")

    @property
    def server_addresses(self) -> list[str]:
        return [address.strip() for address in self.servers.split(",")] if self.servers else []

    def num_steps(self, num_images: int) -> int:
        """Updates of the run; ValueError where their learning rates alone would fill the memory."""
        steps = self.steps if self.steps is not None else max(1, round(self.epochs * num_images / self.batch_size))
        if steps > _MAX_STEPS:
            raise ValueError(f"the run would take {steps:.3g} steps, at most {_MAX_STEPS:,} are possible: choose fewer")
        return steps

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str) + "\n"


PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "fashion-mnist": (
        "Fashion-MNIST, 60,000 images of 28×28: minutes on a CPU",
        TrainConfig(
            encoder=EncoderConfig(stem_stride=2, pool_size=3),  # small centred images: where things are says much
            augmentation=AugmentationConfig(min_scale=0.5, blur_probability=0.0),
            window_stride=64,
        ),
    ),
}


def parse_config(arguments: Sequence[str] | None = None) -> TrainConfig:
    """The config that a command line, PRESET --OPTIONS, asks for; exits where it cannot be parsed."""
    config: TrainConfig = tyro.extras.overridable_config_cli(
        PRESETS, prog="python -m trainer", description="Train an encoder by instance classification.", args=arguments
    )
    return config
