"""Reads the directory of tars and zip files: their members, and samples of shards in webdataset's form.

A sample is the members whose names are the same up to the first dot of the last part: an image, and what belongs to it,
as its class in KEY.cls. Source: https://github.com/webdataset/webdataset, "The WebDataset Format".
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainer.data.decode import may_begin_picture
from trainer.data.label_texts import label_text
from trainer.data.left_out import LeftOut, Reason, is_image
from weightserver.common.object_store import copy_range, is_remote, shown

IN_ZIP = -3
"""Offset of a zip's member, which is found by its name."""
_NUMBERED = re.compile(r"(.*?)[-_.]?(\d{3,})")
_NUMBER = re.compile(r"([-_.]?\d+-of)?[-_.]?\d+$")


class ArchiveError(ValueError):
    """An archive that cannot be listed."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


class Member(NamedTuple):
    """A file in an archive, and the place of its bytes."""

    name: str
    offset: int
    length: int


def members(path: Path, shown: str, left_out: LeftOut) -> dict[str, Member]:
    """The files of an archive that are not hidden, by plain name in its order; of several with one name, the last one.

    Raises:
        ArchiveError: not a complete tar or zip file.
    """
    found: dict[str, Member] = {}
    for name, member in _stored(path, shown, left_out):
        if any(part.startswith(".") for part in name.split("/")):
            left_out.add(Reason.HIDDEN, f"{shown}:{member.name}")
        elif member.length == 0:
            left_out.add(Reason.EMPTY, f"{shown}:{member.name}")
        else:
            if name in found:
                left_out.add(Reason.REPEATED, f"{shown}:{member.name}")
            found[name] = member
    return found


def _stored(path: Path, shown: str, left_out: LeftOut) -> Iterator[tuple[str, Member]]:
    """Plain name and place of each file; hard links lead to what they name, symbolic ones are left out."""
    is_zip = not is_tar(path) and zipfile.is_zipfile(path)  # a tar's last member may be a zip
    try:
        yield from _of_zip(path, shown, left_out) if is_zip else _of_tar(path, shown, left_out)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - foreign bytes can make a reader raise anything, as OverflowError
        with path.open("rb") as file:
            is_compressed = file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))
        if is_compressed:
            problem = "is a compressed archive, which cannot be read in any order: unpack it"
        else:
            kind = "zip file" if is_zip else "tar"
            problem = f"is not a complete {kind} ({error}): fetch it again, or move it away"
        raise ArchiveError(str(path), problem) from None


def is_tar(path: Path) -> bool:
    """Whether a file begins as a tar, also as a damaged one."""
    try:
        return tarfile.is_tarfile(path)
    except (ValueError, OverflowError):
        return True


def _of_tar(path: Path, shown: str, left_out: LeftOut) -> Iterator[tuple[str, Member]]:
    places: dict[str, Member] = {}
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in headers(tar):
            name, target = _plain(member.name), None
            if member.isreg() and not member.issparse():
                target = Member(member.name, member.offset_data, member.size)
            elif member.islnk() and (linked := places.get(_plain(member.linkname))):
                target = linked._replace(name=member.name)
            if target:
                places[name] = target
                yield name, target
            elif member.issym() or member.islnk():
                other = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
                left_out.add(Reason.LINKED if other in places else Reason.MISSING, f"{shown}:{member.name}")
            elif not member.isdir():
                left_out.add(Reason.SPECIAL, f"{shown}:{member.name}")
        _check_end(file, tar.offset)


def headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of a tar, which would keep them all. Raises TarError after one of negative size, which leads some
    versions of Python back to the members before it, for ever."""
    for member in tar:
        if tar.offset <= member.offset:
            raise tarfile.ReadError(f"damaged at byte {member.offset:,}")
        tar.members.clear()  # type: ignore[attr-defined]
        yield member


def _check_end(file: BinaryIO, offset: int) -> None:
    """Raises TarError if a tar goes on where `tarfile` has found no further header. What follows the end in the same
    record may be anything (POSIX, pax)."""
    file.seek(offset)
    is_header = any(file.read(tarfile.BLOCKSIZE))
    file.seek((offset // tarfile.RECORDSIZE + 1) * tarfile.RECORDSIZE)
    if is_header or any(part.strip(b"\0") for part in iter(lambda: file.read(1 << 20), b"")):
        raise tarfile.ReadError(f"damaged at byte {offset:,}, or the first of several in one file")


def _of_zip(path: Path, shown: str, left_out: LeftOut) -> Iterator[tuple[str, Member]]:
    infos = _opened_zip(*version(path)).infolist()
    from_windows = not any("/" in info.filename for info in infos)  # whose older programs wrote backslashes
    for info in infos:
        name = info.filename.replace("\\", "/") if from_windows else info.filename
        if stat.S_ISLNK(info.external_attr >> 16) or info.flag_bits & 1:  # a link, or an encrypted file
            left_out.add(Reason.DAMAGED, f"{shown}:{info.filename}")
        elif not name.endswith("/"):
            yield _plain(name), Member(info.filename, IN_ZIP, info.file_size)


def _plain(name: str) -> str:
    """The name of a member as a path below the archive."""
    plain = posixpath.normpath(name).lstrip("/")
    return name if name == plain else plain  # mostly the same: kept once


def version(path: Path) -> tuple[str, int, int]:
    """Path, length and time of a file: what identifies its content where it is kept open."""
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns


@lru_cache(16)
def _opened_zip(path: str, *_: int) -> zipfile.ZipFile:
    """A zip file, by its `version`."""
    return zipfile.ZipFile(path)


def read_single(path: Path) -> bytes:
    """The bytes of a file. Raises OSError if they cannot be read, or it is none: a pipe is waited for, and a device may
    have no end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a file")
        return file.read()


def read_member(path: Path, member: Member, most: int | None = None) -> bytes:
    """The bytes of a member, the first `most` of them.

    Raises:
        OSError: they cannot be read.
        ValueError: the tar was replaced since it was listed, or a bucket refuses it.
    """
    length = member.length if most is None else min(most, member.length)
    if member.offset == IN_ZIP:
        try:
            with _opened_zip(*version(path)).open(member.name) as file:
                return file.read(length)  # up to its end, where its checksum is compared
        except (MemoryError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - foreign bytes can make a decoder raise anything, as LZMAError
            raise OSError(f"damaged in its zip file ({error})") from None
    start, content = member.offset - tarfile.BLOCKSIZE, io.BytesIO()
    if is_remote(path):
        copy_range(path, start, member.offset + length, content)
    else:
        with path.open("rb") as tar:
            tar.seek(start)
            content.write(tar.read(tarfile.BLOCKSIZE + length))
    content.seek(0)
    if _size_in(content.read(tarfile.BLOCKSIZE)) != member.length:
        raise ValueError(
            f"{shown(path)} is another tar than was listed, without {member.name} at its place: put the earlier one "
            "back, or list and pack the images again"
        )
    return content.read()


def _size_in(header: bytes) -> int:
    """Length of a member by the block before it; −1 if that is no header."""
    try:
        return tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape").size
    except tarfile.HeaderError:
        return -1


def images_in(path: Path, shown: str, found: Mapping[str, Member], left_out: LeftOut) -> Iterator[tuple[str, Member]]:
    """The members that are images, by suffix or content, with their names."""
    for name, member in found.items():
        if reason := _reason_against(path, member, found.keys(), left_out):
            left_out.add(reason, f"{shown}:{member.name}")
        else:
            yield name, member


def samples_in(
    path: Path, shown: str, found: Mapping[str, Member], left_out: LeftOut, label_key: str | None
) -> Iterator[tuple[Member, str]]:
    """The images of a shard's samples, each with its label as a text: empty without one.

    Of several images of a sample, as KEY.png and KEY.mask.png, the first with the fewest suffixes is the sample's.
    """
    samples: dict[str, list[tuple[str, Member]]] = {}
    for name, member in found.items():
        key, suffix = _key(name)
        samples.setdefault(key, []).append((suffix, member))
    for sample in samples.values():
        images = [one for one in sample if is_image(one[1].name)]
        images = images or [one for one in sample if not _reason_against(path, one[1], set(), left_out)]
        if not images:
            list(images_in(path, shown, dict(sample), left_out))  # which names each with its reason
            continue
        _, image = min(images, key=lambda one: one[0].count("."))
        beside = {suffix: member for suffix, member in sample if member != image}
        label, used = _label(path, shown, beside, label_key)
        for suffix, member in beside.items():
            left_out.add(Reason.LABEL if suffix == used else Reason.SIDECAR, f"{shown}:{member.name}")
        left_out.suffixes |= beside.keys()
        yield image, label


def _label(path: Path, shown: str, beside: Mapping[str, Member], label_key: str | None) -> tuple[str, str]:
    """The label of a sample, and the suffix of the member that has it; empty without one."""
    key = label_key or "cls"
    if key in beside:
        return " ".join(read_member(path, beside[key]).decode(errors="replace").split()), key
    if label_key and "json" in beside:
        fields = None
        with suppress(ValueError, RecursionError):
            fields = json.loads(read_member(path, beside["json"]))
        if isinstance(fields, dict) and fields.get(label_key) is not None:
            return label_text(fields[label_key], f"{shown}:{beside['json'].name}"), "json"
    return "", ""


def are_shards(tars: Sequence[Path]) -> bool:
    """Whether tars hold samples: the first one has other files beside images, or they are numbered 0000, 0001, …"""
    numbered = [_NUMBERED.fullmatch(path.stem) for path in tars]
    kinds: dict[str, bool] = {}
    are_samples, has_pairs = any(numbered), False
    try:
        with tarfile.open(tars[0], "r:") as tar:
            for member in headers(tar):  # the labels may come last
                key, _ = _key(_plain(member.name))
                if member.isfile() and not posixpath.basename(key).startswith("."):
                    kind = is_image(member.name)
                    has_pairs = has_pairs or kinds.setdefault(key, kind) != kind
                    # what lies beside the images of folders, as .txt or .xml, makes no samples
                    in_no_folder = is_image(member.name) and key.startswith("/")
                    are_samples = are_samples or in_no_folder or member.name.endswith(".cls")
                    if has_pairs and are_samples:
                        return True
    except (tarfile.TarError, OSError, ValueError, OverflowError):
        return False  # it is named when it is read
    numbers: dict[str, list[int]] = {}
    for found in filter(None, numbered):
        numbers.setdefault(found[1], []).append(int(found[2]))
    in_turn = all(sorted(found) == list(range(len(found))) for found in numbers.values())
    return in_turn and all(found and len(found[2]) > 3 for found in numbered)  # class000 may be a class


def prefix_of(shard: str) -> str:
    """The name of a numbered shard without its number: train of train-000000.tar."""
    return _NUMBER.sub("", posixpath.splitext(shard)[0])


def _key(name: str) -> tuple[str, str]:
    folder, _, last = name.rpartition("/")
    key, _, suffix = last.partition(".")
    return f"{folder}/{key}", suffix.lower()


def _reason_against(path: Path, member: Member, beside: Set[str], left_out: LeftOut) -> Reason | None:
    def opened() -> io.BytesIO:
        start = read_member(path, member, 16)
        return io.BytesIO(read_member(path, member) if may_begin_picture(start) else start)  # others may be large

    return left_out.reason_against(member.name, opened, beside)
