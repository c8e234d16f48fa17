"""A run's settings, in parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from trainer.compute import ComputeConfig
from trainer.data.config import FOLDER, DataConfig, ViewsConfig
from trainer.encoder_config import ModelConfig
from trainer.loss import LossConfig
from trainer.optimization import OptimizationConfig
from trainer.rows_config import RowsConfig, ServersConfig
from trainer.run.config import ReportConfig, RunConfig
from trainer.run.directory import RUN_FORMAT
from trainer.schedule import SamplingConfig
from trainer.settings import (
    SettingError,
    Settings,
    changed,
    leaves,
    named_by_flags,
    problems_of,
    settings_of,
    unused_in,
)
from weightserver.common.object_store import is_remote, shown

if TYPE_CHECKING:
    from trainer.data.augment import Augmentation
    from weightserver.torch import NegativeSampler

_FLAT = tyro.conf.arg(name="")
"""A part whose flags are not prefixed with its name: config.rows.num_negatives is --num-negatives."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of one run, in parts. Their names are unique: they are the flags and the keys of config.json.

    Each part is defined and checked beside the module that uses it; this class adds what depends on several parts.
    """

    data: Annotated[DataConfig, _FLAT] = field(default_factory=DataConfig)
    run: Annotated[RunConfig, _FLAT] = field(default_factory=RunConfig)
    rows: Annotated[RowsConfig, _FLAT] = field(default_factory=RowsConfig)
    servers: Annotated[ServersConfig, _FLAT] = field(default_factory=ServersConfig)
    optimization: Annotated[OptimizationConfig, _FLAT] = field(default_factory=OptimizationConfig)
    sampling: Annotated[SamplingConfig, _FLAT] = field(default_factory=SamplingConfig)
    model: Annotated[ModelConfig, _FLAT] = field(default_factory=ModelConfig)
    loss: Annotated[LossConfig, _FLAT] = field(default_factory=LossConfig)
    views: Annotated[ViewsConfig, _FLAT] = field(default_factory=ViewsConfig)
    compute: Annotated[ComputeConfig, _FLAT] = field(default_factory=ComputeConfig)
    report: Annotated[ReportConfig, _FLAT] = field(default_factory=ReportConfig)

    def parts(self) -> Iterator[tuple[str, Settings]]:
        """The parts by name."""
        return ((part.name, getattr(self, part.name)) for part in fields(self))

    def settings(self) -> dict[str, Any]:
        """All settings by name, nested ones under dotted names."""
        return {name: value for _, part in self.parts() for name, value in leaves(part)}

    def with_settings(self, **values: Any) -> TrainConfig:
        """A copy with other values of settings, by name; those of encoder and augmentation may be dotted.

        Raises:
            TypeError: no setting has this name.
        """
        try:
            of_parts = {f"{PART_OF[name.partition('.')[0]]}.{name}": value for name, value in values.items()}
        except KeyError as error:
            raise TypeError(f"a run has no setting {error}") from None
        config: TrainConfig = changed(self, of_parts)
        return config

    def check(self) -> None:
        """Raises ValueError for settings out of range or that contradict each other; a line for each problem."""
        if problems := self.problems():
            raise ValueError("\n".join(map(str, problems)))

    def problems(self) -> list[SettingError]:
        """What is wrong with these settings: with those of each part or, if nothing is, between parts."""
        return self.problems_within_parts() or list(self._problems_between_parts())

    def problems_within_parts(self) -> list[SettingError]:
        """Settings out of range, and settings of a part that contradict each other."""
        return [problem for _, part in self.parts() for problem in problems_of(part)]

    def _problems_between_parts(self) -> Iterator[SettingError]:
        rows, run, sampling = self.rows, self.run, self.sampling
        if rows.rows == "dense" and run.resume is True:
            yield SettingError("--rows dense saves no checkpoints: omit --resume", "rows", "resume")
        if rows.rows == "dense" and self.servers.servers:
            yield SettingError(
                "--rows dense keeps the rows in the trainer: omit --servers, or use --rows resident", "rows", "servers"
            )
        if self.model.embedding_norm == "batch" and self.optimization.part_size < 2:
            yield SettingError(
                "--embedding-norm batch needs two images at a time: give a larger --batch-size, or fewer parts "
                "(--accumulate)",
                "embedding_norm",
                "batch_size",
            )
        if sampling.labels is not None and run.extend:
            yield SettingError(
                "--extend adds images, but --labels has no rows for new classes: omit --extend", "labels", "extend"
            )
        if self.data.dataset == FOLDER and self.data.data_dir and run.output.resolve() == self.data.data_dir.resolve():
            yield SettingError(
                f"--output {run.output} is the folder of the images: give another, which may lie in it", "output"
            )
        if not run.resume:  # a resumed run keeps its settings, even if they have no effect
            yield from (problem for _, part in self.parts() for problem in unused_in(part))

    def unused_settings(self) -> set[str]:
        """Settings that have no effect with the others."""
        return {name for _, part in self.parts() for name in part.unused_settings()}

    def augmentations(self) -> list[Augmentation]:
        """One augmentation for each view of an image.

        Raises:
            ValueError: a size or an area out of range.
        """
        return self.views.augmentations_of(self.model.encoder, compiled=self.compute.compile)

    def negative_sampler(self, num_rows: int) -> NegativeSampler:
        """The choice of a step's classes among `num_rows`."""
        from weightserver.torch import NegativeSampler

        return NegativeSampler(
            self.rows.num_negatives,
            num_rows=num_rows,
            rows_per_block=self.rows.rows_per_block,
            kind=self.rows.negatives,
            recent_share=self.rows.recent_share,
            seed=self.sampling.seed,
        )

    def check_classes(self, num_classes: int) -> None:
        """Raises SettingError unless the classes of a step fit into those of a run."""
        with named_by_flags():
            self.negative_sampler(num_classes).check(self.optimization.batch_size)

    def to_json(self) -> str:
        """The text of the run's config.json: the settings of all parts by name, with absolute paths."""
        settings = {"format": RUN_FORMAT} | {
            name: value for _, part in self.parts() for name, value in asdict(part).items() if name not in OF_ONE_START
        }
        if self.optimization.warmup_epochs is None:
            settings["warmup_fraction"] = self.optimization.fraction_of_warmup  # also if it is the default
        return json.dumps(settings, indent=2, default=_absolute) + "\n"

    @classmethod
    def of_run(cls, settings: Mapping[str, Any]) -> TrainConfig:
        """The settings in a run's config.json; those that it does not name, or of one start, have their defaults."""
        kept = {name: value for name, value in settings.items() if name not in OF_ONE_START}
        parts: dict[str, Any] = {name: settings_of(type(part), kept) for name, part in cls().parts()}
        return cls(**parts)


def _absolute(path: Path) -> str:
    """The text of an absolute path, with its links, which may lead elsewhere when the run is resumed."""
    return shown(path if is_remote(path) else path.absolute())


PART_OF = {setting.name: name for name, part in TrainConfig().parts() for setting in fields(part)}
"""The part of each setting."""
SETTINGS = [setting for _, part in TrainConfig().parts() for setting in fields(part)]
RESUMABLE = frozenset(setting.name for setting in SETTINGS if setting.metadata.get("resumable"))
"""Settings that may differ when a run is resumed: where it runs, how its rows are stored, and what it reports. The
weight servers refuse those that do not fit how they store the rows."""
OF_ONE_START = frozenset(setting.name for setting in SETTINGS if setting.metadata.get("of_one_start"))
"""Settings of one start of a run, which its config.json does not keep."""
LENGTH = frozenset(["epochs", "steps"])
"""Settings by which a resumed run may become longer."""
