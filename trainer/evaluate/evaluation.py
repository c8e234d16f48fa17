"""One evaluation: its encoder, the device and ranks it runs on, its state on disk and its result."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from trainer.data import Dataset
from trainer.display import counting
from trainer.evaluate.encoders import LoadedEncoder
from trainer.evaluate.features import Advance, Frozen
from trainer.settings import Settings
from weightserver.common.atomic_files import atomic_write, directory_lock
from weightserver.torch import Ranks


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a protocol found."""

    results: dict[str, float]
    """Percentages by name: top1, top5, ap50, miou, ..."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """Settings that were chosen, and under "on" what they were chosen on; empty if all were given."""
    details: dict[str, Any] = field(default_factory=dict)
    """More for the result's file, such as the results by class."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, on what images, and where; the same on each rank but for `ranks`."""

    encoder: LoadedEncoder
    dataset: Dataset | None = None
    """The labelled images; protocols with a format of their own read `data_dir` instead."""
    images: dict[str, Any] = field(default_factory=dict)
    """What identifies these images, for the result: data set, folder, numbers, digest."""
    data_dir: Path | None = None
    """The folder of images that have a format of their own."""
    ranks: Ranks = field(default_factory=Ranks)
    bfloat16: bool = False
    """Whether the encoder computes in bfloat16 (autocast)."""
    state: Path
    """A directory for what an interrupted evaluation continues from; removed once the result is written. Ranks on
    several machines must share its file system."""

    def labelled(self) -> Dataset:
        """The images. Raises ValueError if they have no labels, or no test images."""
        assert self.dataset is not None, "a protocol of labelled images was given none"
        self.dataset.check_labelled(tested=True)
        return self.dataset

    def frozen(self) -> Frozen:
        """The encoder, on the device."""
        network, device = self.encoder.network, self.ranks.device
        network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # as in training, to the bit
        return Frozen(network, self.encoder.pixels, device, bfloat16=self.bfloat16)

    def folder(self, what: str) -> Path:
        """`data_dir`. Raises ValueError, which says `what` to give, without one."""
        if self.data_dir is None:
            raise ValueError(f"--data-dir is missing: give {what}")
        return self.data_dir

    def prepare_state(self) -> bool:
        """Makes the directory of the state; returns whether it existed, so that an interrupted evaluation continues.
        Raises ValueError on all ranks if one does not see it."""
        (resumed,) = self.ranks.max_over_ranks([float(self.ranks.is_first and self.state.exists())])
        if self.ranks.is_first:
            self.state.mkdir(parents=True, exist_ok=True)
        self.ranks.barrier()
        (is_unseen,) = self.ranks.max_over_ranks([float(not self.state.exists())])
        if is_unseen:
            raise ValueError(f"not all ranks see {self.state}: give --output, a folder that they share")
        return bool(resumed)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Advance]:
        """Shows a bar with the time left if a display is open; yields a function that is told of each part done."""
        with counting(description, total) as progress:
            yield progress.advance


def evaluate(
    evaluation: Evaluation, name: str, protocol: Callable[[Evaluation, Any], Outcome], config: Settings, file: Path
) -> dict[str, Any]:
    """Runs a protocol and lets rank 0 write its result to `file`; returns what the file holds, on every rank.

    Args:
        name: the protocol's name.
        config: the protocol's settings.

    Raises:
        ValueError: the encoder, the images and the settings do not fit each other.
        OSError: the result or the state cannot be written.
    """
    started = time.perf_counter()
    config.check()
    evaluation.encoder.check_finite()
    settings = asdict(config) | {"bfloat16": evaluation.bfloat16}
    with _alone(evaluation, file):
        resumed = evaluation.prepare_state()
        outcome = protocol(evaluation, config)
        result = {
            "protocol": name,
            "subject": evaluation.encoder.name,
            **outcome.results,
            "chosen": outcome.chosen,
            "settings": settings,
            **evaluation.images,
            "weights": evaluation.encoder.digest,
            "ranks": evaluation.ranks.world_size,
            "device": evaluation.ranks.device.type,
            "seconds": round(time.perf_counter() - started, 3),
            "resumed": resumed,
            "version": version("pic-weightserver"),
            "commit": source_commit(),
            **outcome.details,
        }
        if evaluation.ranks.is_first:
            text = json.dumps(result, indent=2, default=str) + "\n"
            atomic_write(file, lambda path: path.write_text(text))
            shutil.rmtree(evaluation.state, ignore_errors=True)
        evaluation.ranks.barrier()
    return result


def state_directory(directory: Path, name: str, identity: dict[str, Any]) -> Path:
    """The directory of the state of an evaluation: another one for other settings, images or weights."""
    text = json.dumps(identity, default=str, sort_keys=True)
    return directory / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.partial"


@contextmanager
def _alone(evaluation: Evaluation, file: Path) -> Iterator[None]:
    """Lets no other evaluation write `file` meanwhile. Raises ValueError on all ranks if one does."""
    with ExitStack() as stack:
        problem = ""
        if evaluation.ranks.is_first:
            try:
                stack.enter_context(directory_lock(file.with_name(f".{file.stem}.lock")))
            except OSError as error:
                problem = f"{error}, or another --name"
        if problem := evaluation.ranks.broadcast_text(problem):
            raise ValueError(problem)
        yield


def source_commit() -> str | None:
    """The commit of the checkout that this code runs from, with "+" if files differ; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")
