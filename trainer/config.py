"""A run's settings, the presets, and the command line made from them."""

from __future__ import annotations

import difflib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

from trainer.compute import ComputeConfig
from trainer.data.augmentation_config import AugmentationConfig
from trainer.data.config import DataConfig, ViewsConfig
from trainer.encoder_config import EncoderConfig, ModelConfig
from trainer.loss import LossConfig
from trainer.optimization import OptimizationConfig
from trainer.rows_config import RowsConfig, ServersConfig
from trainer.run.config import ReportConfig, RunConfig
from trainer.run.directory import CONFIG_FILE, RUN_FORMAT, read_settings
from trainer.schedule import SamplingConfig
from trainer.settings import (
    SettingError,
    Settings,
    changed,
    flag,
    leaves,
    problems_of,
    set_help_texts,
    settings_of,
    unused_in,
)
from trainer.wrong_arguments import parsed_or_exit
from weightserver.common.atomic_files import EMPTY_PATH
from weightserver.common.logs import print_error

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
        rows, run, sampling, views = self.rows, self.run, self.sampling, self.views
        if rows.rows == "dense" and run.resume is True:
            yield SettingError("--rows dense saves no checkpoints: omit --resume", "rows", "resume")
        if rows.rows == "dense" and self.servers.servers:
            yield SettingError(
                "--rows dense keeps the rows in the trainer: omit --servers, or use --rows resident", "rows", "servers"
            )
        if views.cutmix and rows.init == "embedding":
            yield SettingError(
                "--cutmix shows two images at once, at which no row of --init embedding can begin: omit one of them",
                "cutmix",
                "init",
            )
        if views.cutmix and self.report.online_probe:
            yield SettingError(
                "--cutmix shows two images at once, but --online-probe learns one label of each: omit one of them",
                "cutmix",
                "online_probe",
            )
        if sampling.labels is not None and run.extend:
            yield SettingError(
                "--extend adds images, but --labels has no rows for new classes: omit --extend", "labels", "extend"
            )
        if sampling.image_order is not None and run.extend:
            yield SettingError(
                "--extend adds images, but --image-order has no places for them: omit --extend", "image_order", "extend"
            )
        if views.small_crops and views.small_crop_size >= self.side_of_views:
            yield SettingError(
                f"--small-crop-size {views.small_crop_size} is not below the {self.side_of_views} px of a view: "
                "give a smaller one",
                "small_crop_size",
            )
        if not run.resume:  # a resumed run keeps its settings, even if they have no effect
            yield from (problem for _, part in self.parts() for problem in unused_in(part))
            if problem := views.problem_of_areas():
                yield SettingError(problem, "view_scale")

    def unused_settings(self) -> set[str]:
        """Settings that have no effect with the others."""
        return {name for _, part in self.parts() for name in part.unused_settings()}

    @property
    def side_of_views(self) -> int:
        """Side of a view in pixels."""
        return self.model.encoder.image_size if self.views.view_size is None else self.views.view_size

    def augmentations(self) -> list[Augmentation]:
        """One augmentation for each view of an image, then one for each of its small crops.

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
            only_met=self.rows.init == "embedding",
            seed=self.sampling.seed,
        )

    def to_json(self) -> str:
        """The text of the run's config.json: the settings of all parts by name."""
        settings = {"format": RUN_FORMAT} | {
            name: value for _, part in self.parts() for name, value in asdict(part).items()
        }
        del settings["resume_step"]  # concerns one start, not the run
        if self.optimization.warmup_epochs is None:
            settings["warmup_fraction"] = self.optimization.fraction_of_warmup  # also if it is the default
        return json.dumps(settings, indent=2, default=str) + "\n"

    @classmethod
    def of_run(cls, settings: Mapping[str, Any]) -> TrainConfig:
        """The settings in a run's config.json; those that it does not name have their defaults."""
        parts: dict[str, Any] = {name: settings_of(type(part), settings) for name, part in cls().parts()}
        return cls(**parts)


def unused_settings(settings: Mapping[str, Any]) -> set[str]:
    """Names of the settings in a run's config.json that had no effect with the others."""
    optimization = (config := TrainConfig.of_run(settings)).optimization
    unused = config.unused_settings()
    if optimization.steps is not None:
        unused.add("epochs")
    unused.add("warmup_fraction" if optimization.warmup_epochs is not None else "warmup_epochs")
    return unused


PART_OF = {setting.name: name for name, part in TrainConfig().parts() for setting in fields(part)}
"""The part of each setting."""
_FIELDS = [setting for _, part in TrainConfig().parts() for setting in fields(part)]
RESUMABLE = frozenset(setting.name for setting in _FIELDS if setting.metadata.get("resumable"))
"""Settings that may differ when a run is resumed: where it runs, how its rows are stored, and what it reports. The
weight servers refuse those that do not fit how they store the rows."""
LENGTH = frozenset(["epochs", "steps"])
"""Settings by which a resumed run may become longer."""


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

_DESCRIPTION = """Train an encoder by instance classification.

Instead of a preset:
  FOLDER                 train on a folder of your own images
  --resume --output RUN  resume a run with all of its settings
  --config FILE          read the settings that --print-config wrote"""
_OF_FILES = "--print-config writes the settings as TOML, and --config FILE reads them."


def parse_config(
    arguments: Sequence[str] | None = None,
    *,
    default: TrainConfig | None = None,
) -> TrainConfig:
    """Parses a command line, PRESET --OPTIONS; exits with status 2 if it is invalid.

    With --resume, all settings that are not given are those of the run in --output, and the preset may be omitted.
    `default` replaces the preset's settings.
    """
    for settings in (*(type(part) for _, part in TrainConfig().parts()), EncoderConfig, AugmentationConfig):
        set_help_texts(settings)
    arguments = _with_correction_named(sys.argv[1:] if arguments is None else arguments)
    _refuse_empty_paths(arguments)
    preset = arguments[0] if arguments else ""
    if preset in PRESETS:
        config = _parsed(preset, default or PRESETS[preset][1], arguments[1:])
        return _parsed(preset, _of_run(config, arguments), arguments[1:]) if _is_there(config) else config
    if any(argument.partition("=")[0] == "--resume" for argument in arguments) and preset.startswith("-"):
        config = _parsed("", TrainConfig(), arguments)
        if _is_there(config):
            return _parsed("", _of_run(config, arguments), arguments)
        print_error(f"trainer: {config.run.output} holds no run to resume: give its --output, or a preset to start one")
        sys.exit(2)
    if preset and not preset.startswith("-"):
        _refuse_preset(preset)

    def parse(options: list[str]) -> TrainConfig:
        return tyro.extras.overridable_config_cli(PRESETS, prog="pic train", description=_DESCRIPTION, args=options)

    return parsed_or_exit(parse, arguments, command="trainer")


def _parsed(preset: str, default: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    what = f"Train on {PRESETS[preset][0].partition(':')[0]}." if preset else "Resume a run."  # is not wrapped
    what += f"\n{_OF_FILES}"

    def parse(options: list[str]) -> TrainConfig:
        return tyro.cli(
            TrainConfig,
            prog=f"pic train {preset}".rstrip(),
            description=what,
            args=options,
            default=_without_other_warmup(default, options),
            config=(tyro.conf.AvoidSubcommands,),
        )

    return parsed_or_exit(parse, arguments, command="trainer")


def _is_there(config: TrainConfig) -> bool:
    """Whether a run is to be resumed whose settings can be read; others are refused later."""
    if not config.run.resume or not (config.run.output / CONFIG_FILE).exists():
        return False
    try:
        return bool(read_settings(config.run.output))
    except ValueError:
        return False


def _of_run(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The settings of the run in the --output of `config`, as defaults for the command line that resumes it."""
    stored = TrainConfig.of_run(read_settings(config.run.output))
    given = {argument.partition("=")[0] for argument in arguments}
    if "--epochs" in given and "--steps" not in given:
        stored = stored.with_settings(steps=None)  # which would override them
    return stored.with_settings(output=config.run.output, resume=False, resume_step=None, extend=False)


def _refuse_preset(preset: str) -> NoReturn:
    near = difflib.get_close_matches(preset, [*PRESETS, "report"], n=1)
    hint = f"did you mean {near[0]}?" if near else f"give a folder that exists, or one of {', '.join(PRESETS)}"
    print_error(f"trainer: unknown preset {preset!r}: {hint}")
    sys.exit(2)


def _refuse_empty_paths(arguments: Sequence[str]) -> None:
    """Exits if a path is empty, for example because a variable is not set: it would mean the current folder."""
    paths = {flag(setting.name) for setting in _FIELDS if "Path" in str(setting.type)}
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_assigned, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in paths and (value if is_assigned else following) == "":
            print_error(f"trainer: {name}: {EMPTY_PATH}")
            sys.exit(2)


def _with_correction_named(arguments: Sequence[str]) -> list[str]:
    """Replaces --correction and --no-correction, flags of earlier versions, by --correction=exact and =none."""
    named = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        flag = argument.replace("_", "-")
        if flag == "--no-correction":
            argument = "--correction=none"
        elif flag == "--correction" and following.startswith("-"):
            argument = "--correction=exact"
        named.append(argument)
    return named


def _without_other_warmup(default: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """A preset without its own warm-up if the command line gives one in another unit."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--warmup-fraction" in given:
        default = default.with_settings(warmup_epochs=None)
    if "--warmup-epochs" in given:
        default = default.with_settings(warmup_fraction=None)
    return default
