"""Opens the row store that the settings ask for, with its weight servers, table, schedule and session."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.display import stage
from trainer.run.checkpoint_file import (
    checkpoint_name,
    history_to_resume,
    note_history,
    remove_unfinished,
    saved_history,
)
from trainer.run.history import ImageHistory
from trainer.run.resume import run_settings, step_to_resume
from weightserver import LocalCluster, NoTableError, TableSpec, WeightClient
from weightserver.core.arrays import Float32Array
from weightserver.core.sharding import Sharding
from weightserver.torch import (
    DenseRows,
    LearningRates,
    Ranks,
    RemoteRows,
    ResidentRows,
    RowStore,
    SharedSession,
    open_new_run,
    share_of_capacity,
    share_session,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRows:
    """A row store, and the state that its run starts from."""

    store: RowStore
    history: ImageHistory
    rates: LearningRates
    """Those of all updates."""
    client: WeightClient | None = None
    """The client that holds the session; None with dense rows."""
    epoch: int = 0
    """Epoch of the session; 0 without one."""
    checkpoint_step: int | None = None
    """Number of updates in the checkpoint that the run is resumed from; None for a new run."""


def images_of_run(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> Dataset:
    """The images to train on: a run that is resumed without --extend keeps its own, whatever was added since."""
    if not config.run.resume or config.run.extend:
        return dataset
    history = history_to_resume(config.run.output / "checkpoints", config.run.resume_step) if ranks.is_first else None
    had = int(ranks.broadcast_text(str(history.num_images if history else 0)))
    before = dataset.first(had)
    if ranks.is_first and len(before.train_images) < len(dataset.train_images):
        numbers = {"images": had, "all": len(dataset.train_images)}
        _log.warning("continuing with %(images)d of %(all)d images: --extend includes all", numbers)
    return before


@contextmanager
def open_rows(
    config: TrainConfig,
    spec: TableSpec,
    range_sizes: Sequence[int],
    digests: Sequence[str] = (),
    *,
    classes: str = "",
    ranks: Ranks,
    device: torch.device,
) -> Iterator[OpenRows]:
    """Opens the store of this rank's share of the rows: the blocks that `Sharding` assigns to it.

    A resumed run finds its rows as they were at the newest checkpoint; with --extend there are also new rows for the
    images that were added since. `range_sizes` and `digests` describe the ranges in which all images were added,
    `classes` is the digest of the class map if images share classes.

    Raises:
        ValueError: settings or images that do not match, or weight servers that another run used.
        WeightServerError: weight servers that are unreachable or refuse.
    """
    length = (0, config.optimization.epochs, config.optimization.steps)
    history = ImageHistory(((0, sum(range_sizes)),), tuple(digests), classes, (length,))
    if config.rows.rows == "dense":
        sharding = Sharding(spec.rows_per_block, ranks.world_size)
        rates = LearningRates(spec, _learning_rates(config, history, ranks))
        yield OpenRows(DenseRows(spec, rates, device=device, sharding=sharding, shard=ranks.rank), history, rates)
        return
    with ExitStack() as stack:
        open_first = partial(_open_session, config, spec, range_sizes, history, ranks, stack)
        session = share_session(config.run.output.name, ranks, stack, open_first, partial(_client, config))
        client, history = session.client, ImageHistory.from_json(session.content["history"])
        given = _learning_rates(config, history, ranks)  # the same on every rank
        client.extend_schedule(0, given)
        rates = LearningRates(spec, given)
        store = (
            RemoteRows(client, device, value_bytes=spec.value_bytes)
            if config.rows.rows == "remote"
            else _resident(config, spec, rates, history, ranks, device, client)
        )
        stack.callback(store.close)
        yield OpenRows(store, history, rates, client, session.epoch, session.content["checkpoint_step"])


def _learning_rates(config: TrainConfig, history: ImageHistory, ranks: Ranks) -> Float32Array:
    rates = history.learning_rates(config.optimization)
    warmup_steps = config.optimization.warmup_steps(history.parts[0][1], len(rates))
    if ranks.is_first and warmup_steps > len(rates):
        _log.warning(
            "the run's %(steps)d steps end within its warm-up of %(warmup_steps)d: give fewer --warmup-epochs to reach "
            "--learning-rate %(learning_rate)g",
            {
                "steps": len(rates),
                "warmup_steps": warmup_steps,
                "learning_rate": config.optimization.base_learning_rate,
            },
        )
    return rates


def _resident(
    config: TrainConfig,
    spec: TableSpec,
    rates: LearningRates,
    history: ImageHistory,
    ranks: Ranks,
    device: torch.device,
    client: WeightClient,
) -> ResidentRows:
    capacity = config.resident_rows(history.num_images, None if config.sampling.labels is None else spec.num_rows)
    return ResidentRows(
        client,
        spec,
        rates,
        capacity=share_of_capacity(capacity, spec, ranks),
        prefetch_steps=config.rows.prefetch_steps,
        write_back_rows=min(config.sampling.window_stride, 1 << 14) // ranks.world_size + 1,
        device=device,
    )


def _open_session(
    config: TrainConfig,
    spec: TableSpec,
    range_sizes: Sequence[int],
    history: ImageHistory,
    ranks: Ranks,
    stack: ExitStack,
) -> SharedSession:
    """Creates or resumes the table, and opens a session on it; rank 0 only.

    The weight servers are started if none are given. `history` is that of a new run with the same images.
    """
    addresses = config.servers.addresses or start_servers(config, ranks, stack)
    client = stack.enter_context(_client(config, addresses))
    step: int | None = None
    if config.run.resume:
        epoch, step, history = _resume_table(client, config, spec, range_sizes, history)
    else:
        remedy = "resume it by --resume, or use other servers"
        epoch = open_new_run(client, spec, config.run.output.name, remedy=remedy, take_over=config.servers.take_over)
    return SharedSession(client, addresses, epoch, {"checkpoint_step": step, "history": history.to_json()})


def _resume_table(
    client: WeightClient, config: TrainConfig, spec: TableSpec, range_sizes: Sequence[int], history: ImageHistory
) -> tuple[int, int | None, ImageHistory]:
    """Opens a session, rolls the table back to the checkpoint to resume from, and adds rows for images added since.

    `history` is that of a new run with the same images. Returns the epoch, the checkpoint's step (None if the run died
    before its first) and the history of the resumed run.
    """
    files = config.run.output / "checkpoints"
    step = step_to_resume(files, client, config.run.resume_step)
    before = saved_history(files, step or 0)
    if before is None:  # it died before its first checkpoint
        before = history if history.classes else _history_of_table(client) or history
    before.check_classes(history.classes)
    history = before.extended(step or 0, range_sizes, history.digests, extend=config.run.extend)
    history = history.lengthened(step or 0, run_settings(config.run.output).optimization, config.optimization)
    _open_table(client, spec if history.classes else replace(spec, num_rows=before.num_images))
    name = config.run.output.name
    take_over = config.servers.take_over or client.describe().run == name
    epoch = client.open_session(name, force=step is not None, hold=True, take_over=take_over)
    if step is not None:
        client.rollback(checkpoint_name(step))  # all shards, whatever they held before
    remove_unfinished(files)
    note_history(files, step or 0, history)  # from now on --resume without --extend continues with all images
    _open_table(client, spec)
    return epoch, step, history


def _history_of_table(client: WeightClient) -> ImageHistory | None:
    """The history of a run that has no checkpoint: its table has a row for each image that it began with."""
    try:
        return ImageHistory(((0, client.describe().spec.num_rows),))
    except NoTableError:
        return None


def _open_table(client: WeightClient, spec: TableSpec) -> None:
    """Opens a resumed run's table, at least as large as `spec` says: tables do not shrink when a run is rolled back."""
    try:
        num_rows = client.extend_table(spec.num_rows).num_rows
    except NoTableError:
        num_rows = spec.num_rows
    except ValueError:
        num_rows = client.describe().spec.num_rows
    client.create_table(replace(spec, num_rows=num_rows))  # which refuses any other


def _client(config: TrainConfig, addresses: Sequence[str]) -> WeightClient:
    # Local servers that the run started are on loopback and need no credentials.
    security = config.servers.security.client_arguments() if config.servers.servers else {}
    return WeightClient(
        addresses,
        retry_seconds=config.servers.retry_seconds,
        connect_seconds=config.servers.wait_for_servers,
        **security,
    )


def start_servers(config: TrainConfig, ranks: Ranks, stack: ExitStack) -> list[str]:
    """Starts shards for a run on one machine and returns their addresses.

    Raises:
        ValueError: the ranks are on several machines.
    """
    if ranks.local_world_size < ranks.world_size:
        raise ValueError(
            "training on several machines needs weight servers that all machines can reach: give --servers"
        )
    with stage("starting the weight servers"):
        return stack.enter_context(LocalCluster(config.servers.num_shards, config.run.output / "servers")).addresses
