"""What each kind of source is read as: its images by id, with split and label. Packs and checkpoints hold these ids."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.data.written import write_table, write_tar
from trainer.data.config import SourceOptions
from trainer.data.reading import Reading, read_source

SOURCES = """
class folders
  b/2.jpg a/10.jpg a/9.jpg B/1.jpg
  B/1.jpg=0 a/10.jpg=1 a/9.jpg=1 b/2.jpg=2
files among folders
  a.jpg a/1.jpg a/0/9.jpg z.png --stray use
  a/0/9.jpg=0 a/1.jpg=0 a.jpg=-1 z.png=-1
accents and digits
  é.jpg e.jpg 10.jpg 1.jpg Z.jpg
  1.jpg=-1 10.jpg=-1 Z.jpg=-1 e.jpg=-1 é.jpg=-1
splits
  train/b/2.jpg train/a/1.jpg Val/b/1.jpg test/b/1.jpg
  train train/a/1.jpg=0 train/b/2.jpg=1 test test/b/1.jpg=0 Val Val/b/1.jpg=0
  says Val/, test/, train/ are splits: --split none reads them as classes
splits with years
  val2017/1.jpg train2017/1.jpg
  train2017 train2017/1.jpg=-1 val2017 val2017/1.jpg=-1
  says train2017/, val2017/ are splits: --split none reads them as classes
splits with a word
  test_images/1.jpg train_images/1.jpg
  train_images train_images/1.jpg=-1 test_images test_images/1.jpg=-1
splits that are said to be classes
  test_images/1.jpg train_images/1.jpg --split none
  test_images/1.jpg=0 train_images/1.jpg=1
splits in classes
  b/train/1.jpg b/test/1.jpg a/test/1.jpg a/train/1.jpg
  train a/train/1.jpg=0 b/train/1.jpg=1 test a/test/1.jpg=0 b/test/1.jpg=1
  says each of its class folders has splits
splits in classes, together
  b/train/1.jpg b/test/1.jpg a/test/1.jpg a/train/1.jpg --split none
  a/test/1.jpg=0 a/train/1.jpg=0 b/test/1.jpg=1 b/train/1.jpg=1
class folders in a folder of each split
  train/set/b/1.jpg train/set/a/1.jpg test/set/b/1.jpg test/set/a/1.jpg
  train train/set/a/1.jpg=0 train/set/b/1.jpg=1 test test/set/a/1.jpg=0 test/set/b/1.jpg=1
class tars in their own order
  b.tar:2.jpg,1.jpg a.tar:y/1.jpg,x/1.jpg,y/2.jpg
  a.tar:y/1.jpg=0 a.tar:x/1.jpg=0 a.tar:y/2.jpg=0 b.tar:2.jpg=1 b.tar:1.jpg=1
a tar in the order of names
  set.tar:b/1.jpg,a/2.jpg,b/0.jpg,a/1.jpg
  set.tar:a/1.jpg=0 set.tar:a/2.jpg=0 set.tar:b/0.jpg=1 set.tar:b/1.jpg=1
a tar of classes beside a picture
  set.tar:b/1.jpg,a/2.jpg,a/1.jpg logo.png
  set.tar:b/1.jpg=1 set.tar:a/2.jpg=0 set.tar:a/1.jpg=0
a tar of classes beside a folder
  set.tar:b/1.jpg,a/2.jpg,a/1.jpg doc/notes.txt=x
  set.tar:b/1.jpg=1 set.tar:a/2.jpg=0 set.tar:a/1.jpg=0
tars of splits with classes
  val.tar:val/a/1.jpg,val/b/1.jpg train.tar:b/1.jpg,a/1.jpg
  train train.tar:b/1.jpg=1 train.tar:a/1.jpg=0 val val.tar:val/a/1.jpg=0 val.tar:val/b/1.jpg=1
  says its tars are read as folders: --tars shards takes them for shards
shards
  s-0001.tar:2.jpg,2.cls=5 s-0000.tar:1.jpg,1.cls=7,0.jpg,0.cls=5
  s-0000.tar:1.jpg=7 s-0000.tar:0.jpg=5 s-0001.tar:2.jpg=5
shards of splits
  imagenet-val-000000.tar:0.jpg,0.cls=1 imagenet-train-000000.tar:0.jpg,0.cls=1,1.jpg,1.cls=0
  train imagenet-train-000000.tar:0.jpg=1 imagenet-train-000000.tar:1.jpg=0 val imagenet-val-000000.tar:0.jpg=1
  says train/, val/ are splits: --split none reads them together
shards of splits numbered in two digits
  i1k-validation-00.tar:0.jpg,0.cls=1 i1k-train-0001.tar:1.jpg,1.cls=1 i1k-train-0000.tar:0.jpg,0.cls=0
  train i1k-train-0000.tar:0.jpg=0 i1k-train-0001.tar:1.jpg=1 validation i1k-validation-00.tar:0.jpg=1
shards of splits by their prefixes
  a-train-0000.tar:0.jpg,0.cls=1 b-train-0000.tar:0.jpg,0.cls=1 b-val-0000.tar:0.jpg,0.cls=1 --split b-train:b-val
  b-train b-train-0000.tar:0.jpg=1 b-val b-val-0000.tar:0.jpg=1
shards of which some have no split
  more-0000.tar:0.jpg,0.cls=1 train-0000.tar:0.jpg,0.cls=1
  more-0000.tar:0.jpg=1 train-0000.tar:0.jpg=1
  says read together: --split train:more trains on the first
numbered folders of samples
  00001/2.jpg 00001/2.txt=x 00001/2.json=x 00000/1.jpg 00000/1.txt=x 00000/1.json=x
  00000/1.jpg=-1 00001/2.jpg=-1
  says shards of samples: --tars classes takes each
numbered folders of classes
  0001/2.jpg 0001/2.txt=x 0000/1.jpg 0000/1.txt=x --tars classes
  0000/1.jpg=0 0001/2.jpg=1
a single folder of classes
  set/set/a/1.jpg set/set/b/2.jpg
  set/set/a/1.jpg=0 set/set/b/2.jpg=1
  says set/set/ is the only folder: its own folders are read
splits beside another folder
  docs/0.jpg test/0.jpg train/0.jpg val/0.jpg
  docs/0.jpg=0 test/0.jpg=1 train/0.jpg=2 val/0.jpg=3
  says train/ lies beside docs/ and is read as a class: --split train:test reads it as the training images, and
a class called train
  bus/0.jpg train/0.jpg
  bus/0.jpg=0 train/0.jpg=1
  says train/ lies beside bus/ and is read as a class: --split train reads it as the training images
tests without training images
  test/1.jpg val/1.jpg
  test/1.jpg=0 val/1.jpg=1
  says --split test:val reads the first as training images
two splits for training
  test/1.jpg train/1.jpg training/1.jpg
  test/1.jpg=0 train/1.jpg=1 training/1.jpg=2
  says --split train:training reads the first as training images
folders with names of numbers
  -1/0.jpg cat/0.jpg nan/0.jpg
  -1/0.jpg=0 cat/0.jpg=1 nan/0.jpg=2
a tar beside the folder of its name
  train/a/1.jpg train/b/1.jpg test/a/1.jpg train.tar:b.jpg --stray use
  train train/a/1.jpg=0 train/b/1.jpg=1 train.tar:b.jpg=-1 test test/a/1.jpg=0
folders of shards
  x/000000.tar:0.jpg,0.cls=3 y/z/000001.tar:1.jpg,1.cls=5
  x/000000.tar:0.jpg=3 y/z/000001.tar:1.jpg=5
a folder of shards beside class folders
  x/000000.tar:0.jpg,0.cls=3 a/1.jpg b/2.jpg
  a/1.jpg=0 b/2.jpg=1
  says 1 image beside the folders (--stray use keeps it) (x/000000.tar:0.jpg)
a sample with a mask
  s-0000.tar:0.mask.png,0.png,0.cls=7
  s-0000.tar:0.png=7
  says 1 file beside a sample's image (s-0000.tar:0.mask.png)
shards of images with texts
  00000.tar:0.jpg,0.txt=x 00001.tar:1.jpg,1.txt=x
  00000.tar:0.jpg=-1 00001.tar:1.jpg=-1
  says 2 shards of samples (webdataset)
a tar of class folders with texts
  pets.tar:pets/a/0.jpg,pets/a/0.txt=x,pets/b/0.jpg,pets/b/0.txt=x
  pets.tar:pets/a/0.jpg=0 pets.tar:pets/b/0.jpg=1
class tars in capitals
  k1.tar:0.jpg k2.TAR:0.jpg k3.Tar:0.jpg
  k1.tar:0.jpg=0 k2.TAR:0.jpg=1 k3.Tar:0.jpg=2
shards of splits in capitals
  test-000000.TAR:0.jpg,0.cls=1 train-000000.TAR:0.jpg,0.cls=2
  train train-000000.TAR:0.jpg=2 test test-000000.TAR:0.jpg=1
shards in capitals by their prefixes
  new-000000.TAR:0.jpg,0.cls=1 old-000000.TAR:0.jpg,0.cls=2 --split old:new
  old old-000000.TAR:0.jpg=2 new new-000000.TAR:0.jpg=1
"""
"""By name: files (NAME, NAME=TEXT or TAR:MEMBER,…) and options; the images, after the name of their split if there is
one; and what the reading says of it."""


def write(root: Path, file: str) -> None:
    name, _, text = file.partition("=")
    if ".tar:" in file.lower():
        name, _, members = file.partition(":")
        texts = (member.partition("=") for member in members.split(","))
        write_tar(root / name, {member: text.encode() or b"x" for member, _, text in texts})
    else:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text or "x")


def rows(reading: Reading) -> str:
    found = []
    for split in reading.splits:
        found += [split.name] if split.name else []
        found += [f"{entry.name}={entry.label}" for entry in split.listing]
    return " ".join(found)


@pytest.mark.parametrize(
    "source", re.findall(r"^\w.*(?:\n  .*)+", SOURCES, re.MULTILINE), ids=lambda source: source.partition("\n")[0]
)
def test_a_source_has_these_ids_whatever_the_order_of_writing(source: str, tmp_path: Path) -> None:
    _, given, expected, *said = source.split("\n  ")
    files, *options = given.split(" --")
    how = SourceOptions(**dict(option.split(" ") for option in options))  # type: ignore[arg-type]
    for number, written in enumerate((files.split(" "), files.split(" ")[::-1])):
        for file in written:
            write(tmp_path / str(number), file)
        reading = read_source(tmp_path / str(number), how)
        assert rows(reading) == expected
        assert all(line.removeprefix("says ") in "\n".join(reading.lines()) for line in said)


def test_labels_of_a_shard_may_come_last(tmp_path: Path) -> None:
    names = [f"{number:03d}.jpg" for number in range(150)]
    write(tmp_path, f"s.tar:{','.join(names)},000.cls=1,149.cls=2")
    labels = [1, *[-1] * 148, 2]
    assert rows(read_source(tmp_path)) == " ".join(map("s.tar:{}={}".format, names, labels))


def test_the_rows_of_a_table_are_ids(tmp_path: Path) -> None:
    for split in ("validation", "train"):
        write_table(tmp_path / f"{split}-00000-of-00001.parquet", image=[b"x", b"y"], label=["b", "a"])
    train, validation = (
        f"{split}-00000-of-00001.parquet:image[0]=1 {split}-00000-of-00001.parquet:image[1]=0"
        for split in ("train", "validation")
    )
    assert rows(read_source(tmp_path / "train-00000-of-00001.parquet")) == train
    assert rows(read_source(tmp_path)) == f"train {train} validation {validation}"
