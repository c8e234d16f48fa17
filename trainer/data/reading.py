"""Reads a source of images: what kind it is, its splits, classes and order, and what became of every file in it.

A source is a folder, an archive, numbered archives (shards), or a list. Everything that uses images reads them here.
Ids follow the order of names: folders and files by the code points of their names, members of a class's tar or of a
shard and lines of a list in their own order.
"""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from trainer.data.archives import are_shards, is_tar
from trainer.data.bucket_sources import check_numbered, local_source, numbered
from trainer.data.config import TESTS, TRAINING, SourceOptions, split_of
from trainer.data.label_texts import MISSING_TEXTS, label_number
from trainer.data.left_out import LeftOut, Reason, is_image, is_table, name_of_class, printable, quoted
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.lists import add_list, add_tables
from trainer.data.numbered_shards import add_shards
from trainer.data.tree import Folder, Walk, add_archive, is_output, path_in
from trainer.settings import flag
from weightserver.common.object_store import is_remote, shown

_NAMED = 5
"""Most classes that the reading names."""
_SHARDS, _COLUMNS = ("label_key", "tars"), ("image_column", "label_column")
_NEEDS = {"label_key": "shards of samples", "tars": "tars", **dict.fromkeys(_COLUMNS, "columns")}
"""What options need to have an effect."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The images of a source, or of one of its splits."""

    name: str
    """Empty if the source has no splits."""
    source: str
    """The source that it is; of a split, its folder."""
    listing: Listing
    classes: tuple[str, ...]
    """Names by number; empty without labels, or if labels are only numbers."""
    counts: Counter[int]
    """Number of images of each label; `NO_LABEL` for those without."""

    @property
    def labelled(self) -> bool:
        """Whether any image has a label."""
        return any(label != NO_LABEL for label in self.counts)

    @property
    def kind_of_labels(self) -> str:
        return kind_of_labels(self.labelled, self.classes)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a source is read as."""

    source: Path
    kind: str
    splits: tuple[Split, ...]
    """The training images first, then the test images to evaluate on, if any, then splits that are not used."""
    left_out: LeftOut
    notes: tuple[str, ...]
    """Lines that say what was decided, and by which option it is decided otherwise."""

    @property
    def train(self) -> Split:
        return self.splits[0]

    @property
    def test(self) -> Split | None:
        return self.splits[1] if len(self.splits) > 1 else None

    def lines(self) -> list[str]:
        """The reading for people: kind, images and classes of each split, what is left out, and what was decided."""
        lines = []
        for split in self.splits:
            name = f"{split.name}/" if split.name else self.kind
            lines.append(f"{name}: {counted(split.counts.total(), 'image')}, {_labels(split)}")
        if self.train.name:
            lines.insert(0, f"{self.kind}, in {counted(len(self.splits), 'split')}")
        used, left = sum(split.counts.total() for split in self.splits), sum(self.left_out.counts.values())
        if left:
            lines.append(f"{used + left:,} files: {counted(used, 'image')}, {left:,} left out")
            lines.append(self.left_out.line(self.source))
        if self.left_out.by_content:
            names = (entry.name for split in self.splits for entry in split.listing if not is_image(entry.name))
            if first := next(names, None):
                number = 1 + sum(1 for _ in names)
                lines.append(f"used by content: {counted(number, 'file')}, for example {printable(first)}")
        return [*lines, *self.notes]


def kind_of_labels(labelled: bool, classes: Sequence[str]) -> str:
    """The kind of labels, as messages name it."""
    return ("labels by name" if classes else "labels by number") if labelled else "no labels"


def read_source(source: Path, options: SourceOptions | None = None) -> Reading:
    """Reads a source; one in a bucket is copied into --cache-dir first if it is not too large for that.

    Raises:
        ValueError: no such source, one that cannot be read, or one without images.
    """
    options, left_out, notes = options or SourceOptions(), LeftOut(), list[str]()
    if options.tars == "classes" and numbered(source):
        raise ValueError(f"--tars classes: {shown(source)} is read as shards of samples: give the folder of the tars")
    given, source = source, local_source(source, options)
    top, kind, used = _found(source, options, left_out, notes)
    for name, what in _NEEDS.items():
        if name in options.given and name not in used:
            notes.append(f"{flag(name)} {options.given[name]} has no effect: there are no {what}")
    folders, above = _splits(top, options, left_out, notes)
    found = list[Split]()
    for name, folder in folders.items():
        named = bool(found and found[0].classes)
        listed, counts, kinds = _listed(folder, options, left_out, notes, named=named)
        if listed:
            root, place = (one if source.is_dir() else one.parent for one in (given, source))
            found.append(
                Split(
                    name=name,
                    source=shown(given / above / name),
                    listing=Listing(listed, root, place),
                    classes=kinds,
                    counts=counts,
                )
            )
    if options.split is None and len(found) > 2 and not found[1].labelled and any(one.labelled for one in found[2:]):
        unlabelled = found[1].name
        found[1:] = sorted(found[1:], key=lambda one: not one.labelled)
        notes.append(f"{unlabelled}/ has no labels: {found[1].name}/ is for evaluation")
    notes += [
        f"{split.name}/ is not used to train or evaluate: --split {found[0].name}:{split.name} evaluates on it"
        for split in found[2:]
    ]
    if not found:
        why = f" ({line})" if (line := left_out.line(given)) else ""
        raise ValueError(f"no images in {shown(given)}{why}: give a folder, an archive or a list of images")
    if found[0].labelled and (without := found[0].counts[NO_LABEL]):
        have = "has" if without == 1 else "have"
        notes.append(f"{counted(without, 'image')} {have} no label: training uses all, evaluations and probes do not")
    if "label_key" in used and not any(split.labelled for split in found):
        notes += _note_of_keys(options, left_out)
    kind = kind or ("images in class folders" if found[0].classes else "images without labels")
    return Reading(source=given, kind=kind, splits=tuple(found), left_out=left_out, notes=tuple(dict.fromkeys(notes)))


def check_source(source: Path) -> None:
    """Looks whether a source is there; asks no bucket.

    Raises:
        ValueError: it, or one of its numbered files, is missing.
    """
    if is_remote(source) or source.is_dir():
        return
    if paths := numbered(source):
        check_numbered(source, paths, set(source.parent.glob("*")))  # one request of a file system on a network
    elif not source.is_file():
        raise ValueError(f"no such folder or list of images: {source}")


def _found(
    source: Path, options: SourceOptions, left_out: LeftOut, notes: list[str]
) -> tuple[Folder, str, tuple[str, ...]]:
    """All images of a source, its kind if its folders do not tell it, and the options that only some kinds use.

    Raises:
        ValueError: no such source, or one that cannot be read.
    """
    check_source(source)
    if source.is_dir():
        return _found_in(source, options, left_out, notes)
    top = Folder("", left_out)
    if paths := numbered(source):
        if is_remote(source):
            notes.append(
                f"{shown(source)} is larger than --cache-gib: its images are read there, one by one, at each use"
            )
        add_shards(top, paths, options, left_out)
        return top, f"{counted(len(paths), 'shard')} of samples (webdataset)", _SHARDS
    if is_table(source.name):
        notes += add_tables(top, source.parent, [source.name], options, left_out)
        return top, "a table of images", _COLUMNS
    if is_tar(source) or zipfile.is_zipfile(source):
        is_shard = options.tars == "shards" or (options.tars is None and are_shards([source]))
        add_archive(top, source, source.name, left_out, options if is_shard else None, tree=True)
        return (top, "a shard of samples (webdataset)", _SHARDS) if is_shard else (top, "", ("tars",))
    kind, said = add_list(top, source, options, left_out)
    notes += said
    return top, kind, () if kind == "a list" else _COLUMNS


def _found_in(
    source: Path, options: SourceOptions, left_out: LeftOut, notes: list[str]
) -> tuple[Folder, str, tuple[str, ...]]:
    if is_output(source):
        raise ValueError(
            f"{source} is the directory of a run or a pack: give a folder of images, or --resume --output {source} to "
            "resume a run"
        )
    walk = Walk(source, left_out, options)
    top = walk.folder()
    if walk.tables and not top.count():
        notes += add_tables(top, source, walk.tables, options, left_out)
        return top, f"{counted(len(walk.tables), 'table')} of images", _COLUMNS
    for table in walk.tables:
        left_out.add(Reason.TABLE, table)
    notes += walk.notes
    if walk.num_shards:
        return top, f"{counted(walk.num_shards, 'shard')} of samples (webdataset)", _SHARDS
    return top, "", ("tars",) if walk.has_tars else ()


def _splits(top: Folder, options: SourceOptions, left_out: LeftOut, notes: list[str]) -> tuple[dict[str, Folder], str]:
    """The splits by name, or all images under an empty name; and the path of the folder that has them."""
    above = ""
    while True:
        outer, top = top, _by_split(top, options, left_out, notes)
        folders = {folder.name: folder for folder in top.folders()}
        if wanted := _names_of_splits(folders, options, notes, together=top is not outer):
            for name in folders.keys() - set(wanted):
                left_out.add(Reason.OTHER_SPLIT, os.path.join(above, name), folders[name].count())
            _place_strays(top, folders[wanted[0]], options, left_out)
            return {name: _looked_into(folders[name]) for name in wanted}, above
        only = next(iter(folders.values())) if len(folders) == 1 else None
        if only is None or only.loose or (top.loose and not _are_strays(top, only, options)):
            return {"": top}, ""
        _place_strays(top, only, options, left_out)
        above, top = os.path.join(above, only.name), only
        notes.append(f"{above}/ is the only folder: its own folders are read")


def _by_split(top: Folder, options: SourceOptions, left_out: LeftOut, notes: list[str]) -> Folder:
    """Folders of splits that have the class folders, instead of class folders that all have the splits."""
    classes = [(folder, [split.name for split in folder.folders()]) for folder in top.folders()]
    names = {name for _, splits in classes for name in splits}
    train = {name for name in names if split_of(name) in TRAINING}
    if (
        len(classes) < 2
        or len(train) != 1
        or len(names) < 2
        or not all(map(split_of, names))
        or options.split == "none"
    ):
        return top
    if any(folder.loose or not train <= set(splits) for folder, splits in classes):
        return top
    notes.append("each of its class folders has splits")
    turned = Folder(top.name, left_out)
    turned.take(top)
    for folder, _ in classes:
        for split in folder.folders():
            into = turned.folder(split.name)
            split.name = folder.name
            into.add_folder(split)
    return turned


def _looked_into(folder: Folder) -> Folder:
    """The folder itself, or, if it has nothing but one folder of folders, that."""
    while len(inside := folder.folders()) == 1 and not folder.loose and not inside[0].loose:
        folder = inside[0]
    return folder


def _place_strays(top: Folder, folder: Folder, options: SourceOptions, left_out: LeftOut) -> None:
    """Adds the images beside the folders in `top` to one of these, or leaves them out."""
    if top.loose and options.stray == "use":
        folder.take(top)
    elif top.loose:
        left_out.add(Reason.STRAY, top.first_loose(), top.loose)


def _are_strays(top: Folder, only: Folder, options: SourceOptions) -> bool:
    """Whether images beside a folder of class folders are few, or said to be strays."""
    classes = only.folders()
    few = bool(classes) and top.loose <= only.count() / len(classes)
    return bool(classes) and (options.stray is not None or few)


def _names_of_splits(
    folders: Mapping[str, Folder], options: SourceOptions, notes: list[str], *, together: bool
) -> list[str]:
    """Which folders are splits: that of the training images, then tests; empty if none is."""
    own_labels = together or all(folder.own_labels for folder in folders.values())
    otherwise = "together" if own_labels else "as classes"
    if options.split == "none":
        return []
    if options.split is not None:
        wanted = list(dict.fromkeys(options.split.split(":")))
        if missing := [name for name in wanted if name not in folders]:
            raise ValueError(
                f"--split {options.split}: there is no folder {missing[0]} with images, but "
                f"{', '.join(folders) or 'none'}"
            )
        return wanted
    others = [name for name in folders if not split_of(name)]
    train = [name for name in folders if (name.lower() if others else split_of(name)) in TRAINING]
    if len(train) != 1:
        if len(folders) > 1 and not others:
            which = "several are" if train else "none is"
            first, second, *_ = sorted(folders, key=lambda name: name not in train)
            notes.append(
                f"{', '.join(f'{name}/' for name in folders)} have names of splits, but {which} for training: read "
                f"{otherwise}: --split {first}:{second} reads the first as training images"
            )
        return []
    tests = sorted((name for name in folders if split_of(name) in TESTS), key=lambda name: TESTS.index(split_of(name)))
    if others:
        notes.append(
            f"{train[0]}/ lies beside {others[0]}/ and is read {'with it' if own_labels else 'as a class'}: "
            f"--split {':'.join([*train, *tests[:1]])} reads it as the training images"
            + (f", and {tests[0]}/ as the test images" if tests else "")
        )
        return []
    if len(folders) == 1:
        notes.append(f"{train[0]}/ is a split: --split none reads it as a class")
    else:
        notes.append(f"{', '.join(f'{name}/' for name in folders)} are splits: --split none reads them {otherwise}")
    return [*train, *tests]


def _listed(
    folder: Folder, options: SourceOptions, left_out: LeftOut, notes: list[str], *, named: bool
) -> tuple[bytes, Counter[int], tuple[str, ...]]:
    """The listing of a split's images, the number of those of each label, and the names of the labels, by number.

    The images are then gone from the folder: each is kept once, as its line. Labels are those of the class folders if
    there are any, otherwise the images' own: numbers if all of them are, unless the training images' labels are names
    (`named`).
    """
    by_folder, strays = _class_folders(folder, options, notes)
    texts = Counter[str]()
    for place, text, rest in folder.lines():
        if by_folder and not place and not strays:
            left_out.add(Reason.STRAY, path_in(rest))
        else:
            texts[place if by_folder else text] += 1
    numbers = {text: label_number(text) for text in texts}
    missing = sorted(text for text in numbers if text.lower() in MISSING_TEXTS)
    classes: tuple[str, ...] = ()
    if by_folder or named or any(number is None for text, number in numbers.items() if text not in missing):
        if missing and not by_folder:
            notes.append(f"label {missing[0]!r} is read as a class: an image without a label has an empty one")
        names = sorted(text for text, number in numbers.items() if (text if by_folder else number != NO_LABEL))
        notes += _note_of_none(numbers.keys() - set(names))
        one = next((text for text in names if numbers[text] is not None), None)
        other = next((text for text in names if numbers[text] is None), None)
        if not by_folder and one and other:
            notes.append(
                f"labels are names, because {quoted(other)!r} is no number: {one!r} is the name of a class too"
            )
        classes = tuple(names)
        numbers = {text: number for number, text in enumerate(classes)}
    else:
        notes += _note_of_none({text for text, number in numbers.items() if number in (None, NO_LABEL)})
    labels = {text: NO_LABEL if (number := numbers.get(text)) is None else number for text in texts}
    content, counts = BytesIO(), Counter[int]()
    for place, text, rest in folder.lines(forget=True):
        if place or strays or not by_folder:
            content.write(b"%d\t%s\n" % (labels[place if by_folder else text], rest))
    for text, number in texts.items():
        counts[labels[text]] += number
    return content.getvalue(), counts, classes


def _note_of_keys(options: SourceOptions, left_out: LeftOut) -> Iterator[str]:
    """A line if samples have no labels, but files that may have them."""
    suffixes = sorted(left_out.suffixes)
    if suffixes or options.label_key:
        key = f"by --label-key {options.label_key}" if options.label_key else "in .cls"
        beside = ", ".join(f".{suffix}" for suffix in suffixes[:_NAMED]) + ", …" * (len(suffixes) > _NAMED)
        yield (
            f"no sample has a label {key}; beside the images are {beside or 'no files'}: --label-key takes labels from "
            "another suffix, as target.cls, or from a field at the top of .json"
        )


def _note_of_none(texts: Set[str]) -> Iterator[str]:
    """A line if other texts than the usual ones say that an image has no label."""
    if unusual := sorted(texts - {"", "-1"}):
        yield f"labels that are missing or negative are none: {', '.join(map(name_of_class, unusual[:_NAMED]))}"


def _class_folders(folder: Folder, options: SourceOptions, notes: list[str]) -> tuple[bool, bool]:
    """Whether the folders in a folder are classes, and whether images beside them are used."""
    folders = folder.classes()
    loose = folder.count() - sum(one.count() for one in folders)
    if not folders or not loose:
        return bool(folders), True
    beside = f"{counted(loose, 'image')} beside {counted(len(folders), 'folder')}"
    if options.stray is None and (len(folders) == 1 or loose > (folder.count() - loose) / len(folders)):
        notes.append(f"{beside}: read as images without labels: --stray ignore or use takes the folders for classes")
        return False, True
    if options.stray == "use":
        notes.append(f"{beside}, used without labels (--stray use)")
    return True, options.stray == "use"


def counted(number: int, noun: str, ending: str = "s") -> str:
    """A number of things for people: 1 image, 2 images."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def _labels(split: Split) -> str:
    """The labels of a split for people."""
    if not split.labelled:
        return "no labels"
    number = len(split.counts.keys() - {NO_LABEL})
    if number == 1:
        return "all of one class, which is no label"
    names = [name for label, name in enumerate(split.classes) if label in split.counts]
    shown = f" ({', '.join(map(name_of_class, names[:_NAMED]))}{', …' * (number > _NAMED)})" if names else ""
    without = f", {split.counts[NO_LABEL]:,} without a label" if split.counts[NO_LABEL] else ""
    return f"{number:,} classes{shown}{without}"
