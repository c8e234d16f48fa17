"""The optimizer of encoder and projection head, the length of a run, and its learning rates. The rows have SGD."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainer.settings import SettingError, Settings, check_at_least, check_not_negative, check_of_table, check_positive
from weightserver.core.correction import MAX_STEPS

if TYPE_CHECKING:
    import torch

_DEFAULT_WARMUP_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig(Settings):
    """Batches, the length of the run, and the optimizer of encoder and projection head.

    The rows always have SGD, in closed form, so that idle ones cost nothing; its settings are here and in `RowsConfig`.
    """

    epochs: float = 6.0
    """Length of the run: visits to each image, on average."""
    steps: int | None = None
    """Length of the run in updates; overrides --epochs."""
    batch_size: int = 128
    """B, images in each update, on all ranks together."""
    accumulate: int = 1
    """Number of equal parts of a batch whose gradients are accumulated before the update: less memory for the same B.
    BatchNorm sees one part at a time."""
    optimizer: Literal["sgd", "adamw", "lars", "lamb"] = "sgd"
    """Optimizer of the encoder and its projection head: sgd or adamw of PyTorch, lars or lamb of timm. The rows keep
    SGD. Another optimizer than sgd wants other --learning-rate and --row-learning-rate."""
    learning_rate: float = 0.1
    """Base learning rate η, reached after the warm-up; then a cosine to 0, step by step."""
    warmup_epochs: float | None = None
    """Epochs in which the learning rate rises linearly from η/100 to η, whatever the length of the run (paper: 5). An
    epoch counts the images that the run started with."""
    warmup_fraction: float | None = None
    """The warm-up as a fraction of the run; overrides --warmup-epochs. Without both it is 0.1."""
    momentum: float = 0.9
    """m of sgd and lars; adamw and lamb do not use it. With every optimizer that of the rows, unless --row-momentum is
    given."""
    weight_decay: float = 1e-4
    """λ, on all parameters and on the rows, as in the paper; adamw's is decoupled from its gradients."""

    def check(self) -> None:
        check_at_least(self, 1, "batch_size", "accumulate", "steps")
        check_positive(self, "epochs")
        check_not_negative(self, "learning_rate")
        check_of_table(self, "momentum", "weight_decay")
        self._check_parts()
        check_not_negative(self, "warmup_epochs")
        if not 0 <= self.fraction_of_warmup <= 1:
            raise SettingError(f"--warmup-fraction must lie in 0..1, got {self.warmup_fraction}", "warmup_fraction")

    def _check_parts(self) -> None:
        if self.batch_size % self.accumulate:
            raise SettingError(
                f"--batch-size {self.batch_size} is not a multiple of --accumulate {self.accumulate}: "
                "parts must be equal",
                "batch_size",
                "accumulate",
            )
        if self.part_size < (world_size := int(os.environ.get("WORLD_SIZE", "1"))):
            raise SettingError(
                f"--batch-size {self.batch_size} in {self.accumulate} parts (--accumulate) leaves some of {world_size} "
                f"ranks without images in a part of {self.part_size}: give larger batches, fewer parts or fewer ranks",
                "batch_size",
                "accumulate",
            )

    @property
    def part_size(self) -> int:
        """Images of all ranks in one part of a batch."""
        return self.batch_size // self.accumulate

    def num_steps(self, num_images: int) -> int:
        """Number of updates of the run. Raises ValueError if their learning rates alone would fill the memory."""
        steps = self.steps if self.steps is not None else self.epochs * num_images / self.batch_size
        if steps > MAX_STEPS:
            raise ValueError(f"the run would take {steps:.3g} steps, at most {MAX_STEPS:,} are possible: choose fewer")
        return max(1, round(steps))

    @property
    def fraction_of_warmup(self) -> float:
        """The warm-up as a fraction of the run, unless it is given in epochs."""
        return _DEFAULT_WARMUP_FRACTION if self.warmup_fraction is None else self.warmup_fraction

    def warmup_steps(self, num_images: int, num_steps: int) -> int:
        """Number of warm-up updates of a run that starts with `num_images` images and takes `num_steps` updates.

        It may exceed the length of the run, which then ends within its warm-up.

        Raises:
            ValueError: it exceeds the length of any run.
        """
        if self.warmup_epochs is None or self.warmup_fraction is not None:
            return round(self.fraction_of_warmup * num_steps)
        steps = self.warmup_epochs * num_images / self.batch_size
        if steps > MAX_STEPS:
            raise ValueError(
                f"--warmup-epochs {self.warmup_epochs:g} would take {steps:.3g} steps, at most {MAX_STEPS:,} are "
                "possible: choose fewer"
            )
        return round(steps)

    def optimizer_of(self, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """The --optimizer of a model's parameters, one group; its learning rate is set before each update.

        LARS and LAMB adapt each layer's step to the norm of its weights; timm's do without weight decay only if told.
        """
        import torch

        from trainer.torchvision_schemas import import_module

        parameters, decay = model.parameters(), self.weight_decay
        match self.optimizer:
            case "sgd":
                fused = device.type == "cuda"
                return torch.optim.SGD(parameters, momentum=self.momentum, weight_decay=decay, fused=fused)
            case "adamw":
                return torch.optim.AdamW(parameters, weight_decay=decay)
            case "lars":
                optimizer = import_module("timm.optim").Lars(
                    parameters, momentum=self.momentum, weight_decay=decay, always_adapt=True
                )
            case "lamb":
                optimizer = import_module("timm.optim").Lamb(parameters, weight_decay=decay, always_adapt=True)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer
