"""Checkpoints of a run: the rows on the weight servers, and one file for everything else, of the same step."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict

import torch
from safetensors.torch import save_file
from torch import nn

from trainer.config import TrainConfig
from trainer.display import stage
from trainer.run.checkpoint_file import (
    FORMAT,
    HEAD,
    IMAGES,
    RESUME_STEP,
    STEM,
    begun_path,
    checkpoint_name,
    file_path,
    saved_steps,
    set_aside,
    steps_on_both,
    tensors_to_save,
)
from trainer.run.run_images import RunImages
from trainer.run.totals import TOTALS, Totals, Usage
from weightserver import FencedError, NoTableError, WeightClient
from weightserver.common.atomic_files import make_directory, sync, write_synced
from weightserver.torch import ClassifierHead, Ranks, SavedRows

_log = logging.getLogger(__name__)


class Checkpoints:
    """Saves a run's step-consistent checkpoints and deletes old ones.

    In this order: the directory records that the checkpoint was begun; the head's rows are kept on every shard; the
    file is written and renamed into place; older files are removed and their checkpoints released. A run that dies
    anywhere in between resumes from its newest file, whose head's state names the shards' checkpoint by its identity,
    so that it matches no other. Files that belong to none of the shards' checkpoints are left alone.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        head: ClassifierHead,
        images: RunImages,
        usage: Usage,
        *,
        on_saved: Callable[[], None],
    ) -> None:
        self._directory = config.run.output / "checkpoints"
        self._keep = config.run.keep_checkpoints
        self._metadata = {"format": FORMAT, IMAGES: images.to_json()}
        if config.run.resume_step is not None:
            self._metadata[RESUME_STEP] = str(config.run.resume_step)
        self._ranks = ranks
        self._head = head
        self._usage = usage
        self._on_saved = on_saved

    @stage("saving a checkpoint")
    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Saves the state after `step` updates; every rank calls it. Does nothing with dense rows."""
        if (client := self._head.client) is None:
            return
        if not torch.stack([tensor.isfinite().all() for tensor in model.state_dict().values()]).all():
            raise ValueError(
                f"the encoder's weights overflowed before step {step}, which is not saved: try a lower --learning-rate"
            )
        if self._ranks.is_first:
            self._begin(step)
        try:
            self._head.checkpoint(checkpoint_name(step))
            totals = self._usage.now()  # with the rows of the last steps, which are written by now
            if self._ranks.is_first:
                self._write(step, model, optimizer, totals)
        except (OSError, RuntimeError):  # a full disk, a lost rank
            if self._ranks.is_first and not file_path(self._directory, step).exists():
                with contextlib.suppress(NoTableError):
                    client.release(checkpoint_name(step))  # it is useless without its file
                begun_path(self._directory, step).unlink(missing_ok=True)
            raise
        self._on_saved()
        if self._ranks.is_first:
            self._forget_old(client)
            _log.info("checkpoint saved", extra={"checkpoint": checkpoint_name(step), "step": step})

    def _begin(self, step: int) -> None:
        """Marks the checkpoint as begun: from now on, a shards' checkpoint without a file means that the run died."""
        begun = begun_path(self._directory, step)
        make_directory(begun.parent)
        write_synced(begun, lambda path: None)
        sync(begun.parent)

    def _write(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, totals: Totals) -> None:
        """Writes the file of the head's newest checkpoint, completely or not at all."""
        path, state, client = file_path(self._directory, step), self._head.get_extra_state(), self._head.client
        assert client is not None
        saved = SavedRows.from_state(state)
        partial = path.with_suffix(f".{saved.checkpoint_id}.partial")
        tensors = tensors_to_save(model, optimizer) | {HEAD: state}
        metadata = self._metadata | {"step": str(step), TOTALS: json.dumps(asdict(totals))}
        try:
            write_synced(partial, lambda new: save_file(tensors, new, metadata=metadata))
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(f"{partial} cannot be written ({error})") from None
        if not saved.is_among(kept := client.checkpoints()):
            partial.unlink(missing_ok=True)
            raise FencedError(f"checkpoint {saved.name} was undone: another trainer has resumed this run")
        if path.exists() and step not in steps_on_both(self._directory, kept):  # put there by someone else
            set_aside(self._directory, [path])
        partial.replace(path)
        sync(path.parent)
        begun_path(self._directory, step).unlink(missing_ok=True)

    def _forget_old(self, client: WeightClient) -> None:
        ours = steps_on_both(self._directory, client.checkpoints())
        for step in ours[: -self._keep]:
            file_path(self._directory, step).unlink()
        with_file = set(map(checkpoint_name, saved_steps(self._directory)))  # also of one that cannot be read just now
        for name in sorted(client.describe().checkpoint_names - with_file):
            if STEM.fullmatch(name):  # a run's, including those that a failure left on some of the shards
                client.release(name)
