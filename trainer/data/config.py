"""Settings of the images and of the views that are made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from trainer.data.augmentation_config import AugmentationConfig
from trainer.data.decode import DEFAULT_RENDERING, Rendering, background_colour
from trainer.encoder_config import EncoderConfig
from trainer.settings import (
    SettingError,
    Settings,
    check_at_least,
    check_positive,
    flag,
    named_by_flags,
    resumable,
    settings_of,
)
from weightserver.common.object_store import shown

if TYPE_CHECKING:
    from trainer.data.augment import Augmentation

TRAINING = ("train", "training")
TESTS = ("test", "testing", "val", "validation", "valid", "dev")
"""Lower-case words in the names of splits; of several tests, the first counts."""
SIZES = {"fashion-mnist": 60_000, "cifar-10": 50_000}
"""Numbers of training images in data sets that are known by name."""
FOLDER, PACKED = "folder", "packed"
DECODED = (FOLDER, PACKED)
"""Data sets whose images are decoded for each use."""
_USUAL = {
    "alpha": "show",
    "background": "white",
    "max_megapixels": DEFAULT_RENDERING.max_megapixels,
    "cache_gib": 100.0,
}
"""Values of options that are not said."""
_OF_PIXELS = ("pixel_range", "alpha", "max_megapixels", "background")
KNOWS_LABELS = "knows_labels"
"""In the metadata of weights that were trained on labels."""


def split_of(name: str) -> str:
    """The word in a name that says which split it is: train of train2017 or imagenet-train; empty without just one."""
    words = [word for word in re.split(r"[\W\d_]+", name.lower()) if word in TRAINING + TESTS]
    return words[0] if len(words) == 1 else ""


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Settings):
    """How a folder, archive or list of images is to be read where it can be read in several ways; None is not said."""

    split: str | None = None
    """Which folders of --data-dir are splits, if their names do not say it: TRAIN or TRAIN:TEST, names of folders, or
    none if all folders are classes."""
    stray: Literal["use", "ignore"] | None = None
    """Images that lie beside class folders: use keeps them without a label, ignore leaves them out. Without it few of
    them are left out, and a folder with many of them has images without labels."""
    tars: Literal["classes", "shards"] | None = None
    """What the tars of a folder are, or folders 00000, … of images with texts: a class each, as ImageNet's synsets, or
    shards of samples (webdataset, img2dataset)."""
    label_key: str | None = None
    """Where a sample of a shard has its label: the suffix of a member (default cls), or a field of its .json."""
    image_column: str | None = None
    """Column of a list or table that has the images' paths, or the images; or a pattern that makes paths of columns, as
    'train/{id}.jpg'."""
    label_column: str | None = None
    """Column of a list or table that has the labels."""
    pixel_range: tuple[float, float] | None = None
    """Values that are black and white in images of more than 8 bits; without it, those of 16 bits. 0 4095 for 12."""
    alpha: Literal["show", "ignore"] | None = None
    """Whether a fourth channel is the pixels' opacity (show, without this option), or something else that is left out
    (ignore)."""
    max_megapixels: float | None = None
    """Largest image that is decoded (179 without this option); a larger JPEG that is not progressive is decoded at part
    of its size, any other counts as broken."""
    background: str | None = None
    """What transparent pixels show: a colour, as white (without this option) or '#8090a0', or none for the colours that
    they hide."""
    max_broken: int | None = resumable(None)
    """Broken images that a run or a pack may have; without it 100, or one percent if that is more."""
    broken_list: Path | None = resumable(None)
    """File to which the path of each broken image is added, once, with the reason."""
    cache_dir: Path | None = resumable(None)
    """For images in a bucket (s3://…): folder on a local disk that keeps what was read of them. The ranks of a machine
    share it; it has room for a window of images at least."""
    cache_gib: float | None = resumable(None)
    """Most that --cache-dir keeps of packs (100 without this option): what was used longest ago leaves first. Also the
    size of the largest source that is copied to its folder sources, which you remove yourself."""

    @property
    def of_pixels(self) -> SourceOptions:
        """The options that say how pixels become colours, which an encoder's images share whatever their source."""
        return SourceOptions(**{name: getattr(self, name) for name in _OF_PIXELS})

    @property
    def given(self) -> dict[str, Any]:
        """The options that are said, by name, without those about broken images and the cache."""
        return {
            one.name: value
            for one in fields(SourceOptions)
            if not one.metadata.get("resumable") and (value := getattr(self, one.name)) is not None
        }

    @property
    def said(self) -> str:
        """The options that are said, as flags."""
        return ", ".join(_text(name, value) for name, value in self.given.items())

    def differing(self, others: SourceOptions, *, apart_from: Collection[str] = ()) -> str:
        """The options that have another value in `others`, as flags with both values; empty if there are none."""
        names = (name for name in {**self.given, **others.given} if name not in apart_from)
        pairs = ((name, usual(name, getattr(self, name)), usual(name, getattr(others, name))) for name in names)
        return ", ".join(f"{_text(name, own)}, not {_text(name, other)}" for name, own, other in pairs if own != other)

    def of_pack(self, directory: Path, packed: SourceOptions) -> Self:
        """These options, with those of a pack about pixels that are not said.

        Raises:
            ValueError: options are given by which the pack's source was not read.
        """
        if differing := packed.differing(replace(packed, **self.given), apart_from=_OF_PIXELS):
            raise ValueError(
                f"{shown(directory)} was packed with {differing}: omit that, or pack its source again with it"
            )
        return replace(self, **packed.of_pixels.given | self.of_pixels.given)

    def rendering(self) -> Rendering:
        """How pixels become colours. Raises ValueError for a background that is no colour."""
        colour = None if self.alpha == "ignore" else background_colour(usual("background", self.background))
        return Rendering(colour, self.pixel_range, usual("max_megapixels", self.max_megapixels))

    def limit_of_broken(self, num_images: int) -> int:
        """Number of broken images, of `num_images`, beyond which a run or a pack ends."""
        return max(100, num_images // 100) if self.max_broken is None else self.max_broken

    @property
    def cache_bytes(self) -> int:
        """--cache-gib, in bytes."""
        return int(usual("cache_gib", self.cache_gib) * 2**30)

    def in_cache(self, *below: str) -> Path:
        """A place below --cache-dir. Raises ValueError if that is not given."""
        if self.cache_dir is None:
            raise ValueError("images in a bucket need a folder on a disk for what is read of them: give --cache-dir")
        return self.cache_dir.joinpath(*below)

    def check(self) -> None:
        check_at_least(self, 0, "max_broken")
        if self.cache_gib is not None:
            check_positive(self, "cache_gib")
        if self.max_megapixels is not None:
            check_positive(self, "max_megapixels")
        try:
            self.rendering()
        except ValueError as error:
            raise SettingError(f"--background: {error}", "background") from None
        if self.pixel_range and not self.pixel_range[0] < self.pixel_range[1]:
            raise SettingError(f"--pixel-range must rise, got {self.pixel_range}", "pixel_range")


def usual(name: str, value: Any) -> Any:
    """The value of an option, also of one that is not said."""
    return _USUAL.get(name) if value is None else value


def _text(name: str, value: Any) -> str:
    if value is None:
        return f"no {flag(name)}"
    return f"{flag(name)} {' '.join(f'{number:g}' for number in value) if isinstance(value, tuple) else value}"


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceOptions):
    """The data set."""

    dataset: str = "fashion-mnist"
    """Name of the data set: fashion-mnist, cifar-10, idx, folder, packed or synthetic."""
    num_images: int | None = None
    """N: the number of images of the synthetic data set, up to 10⁹; the first N of fashion-mnist,
    cifar-10 or idx, whose evaluation uses all images and labels."""
    data_dir: Path | None = resumable(None)
    """Folder with the data set's files; of a pack also in a bucket, s3://BUCKET/PACK. Without it the usual places are
    searched, then the files are downloaded."""
    decode_threads: int | None = resumable(None)
    """Threads of each rank that decode images. Without it: the rank's share of the cores that the machine, the
    process's affinity and its cgroup allow, at most 16."""

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """How a file of weights says that its images became colours; the defaults if it does not say it."""
        try:
            found = {name: json.loads(metadata[name]) for name in _OF_PIXELS if name in metadata}
        except ValueError as error:
            raise ValueError(f"how its images became colours cannot be read ({error}): export it again") from None
        return settings_of(cls, found)

    def metadata(self, *, knows_labels: bool) -> dict[str, str]:
        """How pixels become colours, and whether labels were trained on, for the metadata of a file of weights."""
        found = {name: json.dumps(getattr(self, name)) for name in _OF_PIXELS}
        return found | ({KNOWS_LABELS: "true"} if knows_labels else {})

    def check(self) -> None:
        super().check()
        check_at_least(self, 1, "decode_threads")

    def unused_settings(self) -> dict[str, str]:
        names = ("decode_threads", *(one.name for one in fields(SourceOptions)))
        return {} if self.dataset in DECODED else dict.fromkeys(names, "--dataset packed or folder")


@dataclass(frozen=True, kw_only=True)
class ViewsConfig(Settings):
    """The views of an image in one update."""

    views: int = 1
    """Views of each image in an update; their losses are averaged (paper: 1; Table 5 compares with 2)."""
    view_size: int | None = None
    """Side of a view in pixels. Without it: --encoder.image-size, the size that evaluations use."""
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    """The random augmentation of each visit to an image."""

    def check(self) -> None:
        check_at_least(self, 1, "views", "view_size")
        with named_by_flags("augmentation"):
            self.augmentation.check()

    def augmentations_of(self, encoder: EncoderConfig, *, compiled: bool) -> list[Augmentation]:
        """One augmentation for each view of an image."""
        from trainer.data.augment import Augmentation, Unchanged

        if encoder.name == "none":  # a run that measures the path of the rows
            return [Unchanged(encoder.image_size, encoder.pixels)] * self.views
        side = self.view_size or encoder.image_size
        return [Augmentation(self.augmentation, side, encoder.pixels, compiled=compiled)] * self.views
