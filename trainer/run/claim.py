"""A run's claim to its directory: config.json, written by rank 0."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.config import TrainConfig
from trainer.run.checkpoint_file import saved_steps, set_newer_aside
from trainer.run.directory import CONFIG_FILE, METRICS_FILE, RESULT_FILES, read_metrics
from trainer.run.resume import check_local_servers, check_same_run, update_settings
from weightserver.common.atomic_files import atomic_write, make_directory, sync, write_synced


class DirectoryClaim:
    """Claims the directory of a new run, or checks that of a run to be resumed; on ranks other than 0 it does nothing.

    A context manager. A new run that fails before its first checkpoint or step releases the directory, so that the same
    command can be repeated. Interrupted in its first checkpoint, it can be resumed.

    Raises:
        ValueError: a directory that another run used, or that cannot be written.
    """

    def __init__(self, config: TrainConfig, num_images: int, *, is_first: bool) -> None:
        self._config = config
        self._num_images = num_images
        self._is_first = is_first
        self._is_kept = False

    def __enter__(self) -> Self:
        if self._is_first:
            if self._config.run.resume:
                check_same_run(self._config, self._num_images)
                self._is_kept = True
            else:
                _claim(self._config)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        output = self._config.run.output
        has_begun = any((output / "checkpoints").glob("step-*"))  # the weight servers may keep a checkpoint
        if kind is not None and self._is_first and not self._is_kept and not has_begun:
            (output / CONFIG_FILE).unlink(missing_ok=True)

    def keep(self) -> None:
        """Keeps the directory even if the run fails from now on."""
        self._is_kept = True

    def prepare(self, start_step: int, num_steps: int) -> None:
        """Keeps the directory and removes from its records what the run will repeat, from `start_step` on.

        Results stay if no step of the run's `num_steps` remains.
        """
        self.keep()
        if not self._is_first:
            return
        output = self._config.run.output
        if self._config.run.resume:
            update_settings(self._config)
            results = [output / name for name in RESULT_FILES if start_step < num_steps]  # the run will write new ones
            set_newer_aside(output / "checkpoints", start_step, results, output / METRICS_FILE)
        _forget_from(output / METRICS_FILE, start_step)


def _claim(config: TrainConfig) -> None:
    """Creates the run's directory and writes config.json."""
    check_local_servers(config)
    path = config.run.output / CONFIG_FILE
    files = [config.run.output / name for name in (METRICS_FILE, *RESULT_FILES)]
    found = [file.name for file in files if file.exists()]
    if not path.exists() and (found or saved_steps(config.run.output / "checkpoints")):
        raise ValueError(
            f"{config.run.output} holds {found[0] if found else 'checkpoints'} of a run whose {path.name} is missing: "
            "restore it to resume that run, or choose another --output"
        )
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        make_directory(config.run.output)
        try:
            write_synced(partial, lambda new: new.write_text(config.to_json()))
            _rename_if_free(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        try:
            sync(config.run.output)
        except OSError:
            path.unlink()
            raise
    except OSError as error:
        if path.exists():
            raise ValueError(
                f"{config.run.output} holds another run: choose another --output, delete it, or continue it by --resume"
            ) from None
        raise ValueError(
            f"--output {config.run.output} cannot be used ({error.strerror}): choose another directory"
        ) from None


def _rename_if_free(source: Path, target: Path) -> None:
    """Renames a file to one that does not exist, as one change. Raises FileExistsError if it does."""
    try:
        target.hardlink_to(source)
    except FileExistsError:
        raise
    except OSError:  # the file system has no links: a kill between these two lines leaves an empty file
        target.touch(exist_ok=False)
        source.replace(target)


def _forget_from(path: Path, step: int) -> None:
    """Removes the records of `step` and later from a metrics.jsonl, and a record that was cut off."""
    records = read_metrics(path) if path.exists() else iter(())

    def write(new: Path) -> None:
        with new.open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records if record["step"] < step)

    atomic_write(path, write)
