"""The peer: plain PyTorch, with every row a parameter on the device like the encoder's, and one SGD for both.

python -m benchmarks.gpu.plain PRESET --OPTIONS: takes the trainer's arguments, and writes metrics.jsonl and
summary.json into --output as it does. The classes are the first --num-negatives images, all of them on each rank, as in
the paper's comparison with all rows (Section 4); their gradients are averaged with the encoder's. There are no weight
servers, no window and no checkpoints. The views are the trainer's, so that only the rows differ.
"""

from __future__ import annotations

import json
import resource
import time
from contextlib import closing

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.arguments import parse_config
from trainer.compute import set_matmul_precision
from trainer.config import TrainConfig
from trainer.data.augment import Augmentation
from trainer.data.prefetch import Visits, views_ahead
from trainer.distributed import process_group
from trainer.model import build_model
from trainer.run.prometheus import peak_gpu_bytes
from trainer.run_dataset import dataset_of
from trainer.schedule import visit_uniforms
from weightserver.torch import Loss, Ranks


class PlainClassifier(nn.Module):
    """Encoder, head and K rows; images and labels to the loss."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.model = build_model(
            config.model.encoder, config.model.dim, seed=config.sampling.seed, head_layers=config.model.head_layers
        )
        self.model.encoder_in_bfloat16 = config.compute.precision == "bfloat16"
        self.rows = nn.Parameter(
            torch.randn(config.rows.num_negatives, config.model.dim) * config.rows.init_std
        )  # (K, D)
        self.loss = Loss(temperature=config.loss.temperature)

    def forward(self, views: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.model(views), self.rows, labels)
        return loss


def visits_of(config: TrainConfig, ranks: Ranks) -> list[Visits]:
    """Yields this rank's slice of each step's batch: random images of the first K."""
    num_steps, share = (
        config.optimization.num_steps(config.rows.num_negatives),
        ranks.share(config.optimization.batch_size),
    )
    shape = (num_steps, config.optimization.batch_size)
    images = np.random.default_rng(config.sampling.seed).integers(0, config.rows.num_negatives, shape)[:, share]
    uniforms = visit_uniforms(
        config.sampling.seed, np.arange(images.size).reshape(images.shape), Augmentation.num_uniforms
    )
    return [Visits(*of_step) for of_step in zip(images, uniforms[:, None], strict=True)]


def main(arguments: list[str] | None = None) -> None:
    config = parse_config(arguments)
    with process_group(torch.device(config.compute.device)) as ranks:
        device = ranks.device
        set_matmul_precision("tf32" if config.compute.precision == "tf32" else "ieee")
        dataset = dataset_of(config)
        classifier = PlainClassifier(config).to(device)
        classifier.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parallel = (
            DistributedDataParallel(classifier, broadcast_buffers=False, gradient_as_bucket_view=True)
            if ranks.world_size > 1
            else classifier
        )
        optimizer = torch.optim.SGD(
            classifier.parameters(),
            lr=config.optimization.learning_rate,
            momentum=config.optimization.momentum,
            weight_decay=config.optimization.weight_decay,
            fused=device.type == "cuda",
        )
        images, augmentations = dataset.train_images.to(device), config.augmentations()
        visits = visits_of(config, ranks)
        labels = torch.from_numpy(np.stack([batch.images for batch in visits])).to(device)  # (steps, b): nothing waits
        records, started = [], time.perf_counter()
        with closing(views_ahead(images, visits, augmentations, device)) as views:
            for step, (seen, batch_labels) in enumerate(zip(views, labels, strict=True)):
                optimizer.zero_grad()
                loss = parallel(seen.contiguous(memory_format=torch.channels_last), batch_labels)
                loss.backward()
                optimizer.step()
                if (step + 1) % config.report.log_every == 0:
                    value, now = loss.item(), time.perf_counter()
                    records.append({"step": step, "loss": value, "seconds": now - started})
                    started = now
        if ranks.is_first:
            config.run.output.mkdir(parents=True)
            (config.run.output / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            peak = peak_gpu_bytes(device) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            (config.run.output / "summary.json").write_text(json.dumps({"peak_memory_bytes": peak}) + "\n")


if __name__ == "__main__":
    main()
