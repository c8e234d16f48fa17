"""The head of a run: of a new one, or as it was at the checkpoint that the run is resumed from."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from trainer.classes import RunClasses
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.display import stage
from trainer.run.checkpoint_file import HEAD, load, remove_unfinished, saved_images
from trainer.run.resume import step_to_resume
from trainer.run.run_images import RunImages
from weightserver import NoTableError, WeightClient
from weightserver.torch import ClassifierHead, Loss, Ranks, Rows, Servers

_log = logging.getLogger(__name__)


def head_of(config: TrainConfig, classes: RunClasses, ranks: Ranks) -> ClassifierHead:
    """The head that the settings describe; its servers are called when it is opened."""
    security = config.servers.security.client_arguments() if config.servers.servers else {}
    head = ClassifierHead(
        classes.rows.sizes,
        config.model.dim,
        num_negatives=config.rows.num_negatives,
        servers=Servers(
            config.servers.servers,
            num_shards=1 if config.servers.servers else config.servers.num_shards,
            take_over=config.servers.take_over,
            retry_seconds=config.servers.retry_seconds,
            connect_seconds=config.servers.wait_for_servers,
            **security,
        ),
        run=config.run.name,
        directory=None if config.servers.servers else config.run.output / "servers",
        rows=Rows(
            config.rows.rows,
            momentum=config.optimization.momentum if config.rows.row_momentum is None else config.rows.row_momentum,
            weight_decay=config.optimization.weight_decay,
            correction=config.rows.correction,
            seed=config.sampling.seed,
            init_std=config.rows.init_std,
            learning_rate_factor=config.rows.row_learning_rate,
            dtype=config.rows.row_precision,
            rows_per_block=config.rows.rows_per_block,
            capacity=config.rows.capacity,
            prefetch_steps=config.rows.prefetch_steps,
        ),
        negatives=config.rows.negatives,
        recent_share=config.rows.recent_share if config.rows.negatives == "both" else None,
        softmax=_loss(config),
        order_seed=config.sampling.order_seed,
    )
    return head.to(ranks.device)


def _loss(config: TrainConfig) -> Loss:
    """The loss of the settings, without those that have no effect with the others."""
    if config.loss.softmax == "plain":
        return Loss("plain")
    margin_size = config.loss.margin_size if config.loss.margin != "none" else None
    return Loss("cosine", config.loss.temperature, config.loss.margin, margin_size)


@dataclass(frozen=True)
class Opened:
    """A run whose head is open."""

    images: RunImages
    step: int | None = None
    """Step of the checkpoint from which the run resumes; None for a new run."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The checkpoint's tensors, by their names in its file."""
    has_grown: bool = False
    """Whether it has more images than at the checkpoint."""


def open_head(head: ClassifierHead, config: TrainConfig, dataset: Dataset, classes: RunClasses, ranks: Ranks) -> Opened:
    """Opens the head of a new run, or at the newest checkpoint of a run that is resumed; with --extend there are also
    new rows for the images that were added since. Only rank 0 needs the run's directory.

    Raises:
        ValueError: settings or images that do not match, or weight servers that another run used.
        WeightServerError: weight servers that are unreachable or refuse.
    """
    num_images = len(dataset.train_images)
    opened = Opened(RunImages(num_images, num_images, dataset.digests, classes.digest))
    if config.rows.rows != "dense" and not config.servers.servers:
        with stage("starting the weight servers"):
            head.connect()
    if config.run.resume:
        client = head.connect()
        found = ranks.of_first(partial(_to_resume, client, config, opened.images, dataset.ranges))
        opened = Opened(RunImages.from_json(found["images"]), found["step"], has_grown=found["has_grown"])
    if opened.step is not None:
        tensors = load(config.run.output / "checkpoints", opened.step, ranks)
        head.set_extra_state(tensors[HEAD])
        opened = replace(opened, tensors=tensors)
    head.open()
    if config.run.resume and ranks.is_first:
        remove_unfinished(config.run.output / "checkpoints")
    return opened


def _to_resume(client: WeightClient, config: TrainConfig, images: RunImages, ranges: tuple[int, ...]) -> dict[str, Any]:
    """The step to resume from, None for a run that died before its first checkpoint, the run's images then, and whether
    they are more than in the checkpoint.

    `images` are those of a new run with all images. Raises ValueError as `open_head`.
    """
    files, has_grown = config.run.output / "checkpoints", False
    step = step_to_resume(files, client, config.run.resume_step)
    if step is not None:
        saved = saved_images(files, step)
        images = saved.resumed(ranges, images.digests, images.classes, extend=config.run.extend)
        has_grown = images != saved
    else:
        with contextlib.suppress(NoTableError):
            if client.describe().run == (name := config.run.name):  # nothing was written; it begins again
                client.open_session(
                    name, force=True, take_over=config.servers.take_over
                )  # refused while that run lives
                client.drop_table()
    return {"step": step, "images": images.to_json(), "has_grown": has_grown}
