"""The help of the command `pic`: a page for each command, with what most users need.

Each page fits a terminal of 80 columns and 40 lines. The options here are some of those that the command's own parser
declares; tests compare them.
"""

from __future__ import annotations

import re

_TRAIN = """\
usage: pic train FOLDER [OPTIONS]        own images: chooses all settings
       pic train PRESET [OPTIONS]        settings of a preset
       pic train --resume --output RUN   continues a run
       pic train --config FILE           reads what --print-config wrote

Trains an encoder by instance classification: every image is a class.

presets:
  fashion-mnist      60,000 images of 28 px: minutes on a CPU
  imagenet-1k        the paper's settings for packed images; give --data-dir
  imagenet-11k       the same for larger sets; give --data-dir
  synthetic          generated images, to measure the rows at any scale

options:
  --output DIR       directory of the run (default: runs/FOLDER)
  --epochs N         visits to each image; --steps N counts updates instead
  --batch-size B     images in each update
  --learning-rate R  of the encoder and the rows
  --num-negatives K  number of classes that a step compares
  --encoder.name E   small, torchvision:NAME or timm:NAME
  --encoder.image-size PX
                     side of the views
  --device D         cpu, cuda or cuda:N (default: a GPU if there is one)
  --precision P      float32, tf32 or bfloat16
  --servers A,B      weight servers that run already, host:port each
  --seed N           seed of everything that is random
  --print-config     write the settings as TOML, and do not train

Several GPUs: torchrun --nproc-per-node 8 -m trainer FOLDER --output RUN"""

_REPORT = """\
usage: pic report RUN [OPTIONS]

Writes one HTML page about a run: curves, results, nearest neighbours.

options:
  --output FILE      the page (default: RUN/report.html)
  --data-dir DIR     where the images are now (default: as in the run)
  --images N         images among which neighbours are searched (default: 10000)"""

_EVALUATE = """\
usage: pic evaluate PROTOCOL --run RUN [OPTIONS]

Evaluates an encoder on labelled images.

protocols:
  knn                the k nearest training images vote
  linear-cached      a linear classifier on features that are computed once
  linear             the paper's linear classifier, on augmented images
  fine-tune          trains the encoder further, with labels
  semi-supervised    the same with a few labels of each class
  Others, of the paper: pic evaluate --help-all

what to evaluate, one of
  --run RUN          a run's encoder
  --encoder FILE     an encoder's file, or an exported directory
  --model NAME       torchvision:NAME or timm:NAME, with --weights FILE
  --pixels           raw pixels, for comparison

on which images
  --dataset NAME     fashion-mnist, folder, packed, ... (default: the run's)
  --data-dir DIR     their folder (default: the run's)

The result is printed and written to RUN/evaluation/PROTOCOL.json."""

_EMBED = """\
usage: pic embed RUN IMAGES --output FILE [OPTIONS]

Computes the features of images with a trained encoder.

  RUN                a run, an encoder's file, or an exported directory
  IMAGES             a folder of images, a list of paths, or packed images

options:
  --output FILE      a new .npz, .csv or .parquet: path and vector of each image
  --checkpoint NAME  step-..., a checkpoint of the run (default: its end)
  --device D         cpu, cuda or cuda:N (default: a GPU if there is one)"""

_EXPORT = """\
usage: pic export encoder RUN --format LIBRARY --output DIR
       pic export rows RUN --output DIR
       pic export import FILE --model NAME --output FILE

Exports a run's encoder for another library, or its rows with the names of their
images; imports an encoder of another trainer.

options of encoder:
  --format LIBRARY   timm, torchvision or detectron2
  --checkpoint NAME  step-..., a checkpoint of the run (default: its end)
  --licence NAME     licence of the weights, for the model card

options of import:
  --model NAME       torchvision:NAME or timm:NAME
  --prefix PART      which encoder of several, as encoder_k or teacher"""

_DUPLICATES = """\
usage: pic duplicates RUN [OPTIONS]

Finds pairs of training images that are nearly the same, by their rows.

options:
  --threshold C      smallest cosine of a pair (default: 0.98)
  --most-pairs N     number of pairs to write (default: 10000)
  --checkpoint NAME  compare the rows of this checkpoint

Writes RUN/duplicates.json, which pic report shows as pictures."""

_PACK = """\
usage: pic pack SOURCE PACKED [OPTIONS]

Packs images into large files, in the order in which training visits them.
Repeat the command to continue after an interruption.

  SOURCE             a folder of images, of class folders or of tars, or a list

options:
  --extend           add images to a pack
  --no-labels        discard labels
  --max-broken N     number of broken images that is tolerated
  --threads N        decoding threads"""

_VERIFY = """\
usage: pic verify PACKED

Compares packed files with their checksums.
weightserver verify does so with the directories of weight servers."""

_INSPECT = """\
usage: pic inspect SOURCE [OPTIONS]

Says what a source of images is read as, and what its images
are: splits, classes, every file left out, sizes, duplicates, broken images.

options:
  --split TRAIN:TEST   folders that are splits, or none
  --stray use|ignore   images beside class folders
  --tars classes|shards
  --label-key NAME     where samples of shards have their labels
  --image-column, --label-column NAME   of a CSV list or JSON lines"""

_PREVIEW = """\
usage: pic preview SOURCE [OPTIONS]

Draws views of some images as training would see them.

options:
  --run RUN          as this run does (default: the paper's and weak ones)
  --output FILE      the picture (default: preview.png)
  --image-size PX    side of a view
  --images N         number of images (default: 4)
  --views N          views of each image (default: 8)"""

_SERVE = """\
usage: pic serve --data-dir DIR [OPTIONS]

Serves one shard of a classifier's rows until SIGTERM.

options:
  --init             create a new, empty shard
  --shard I          number of this shard, from 0 (default: 0)
  --num-shards N     shards in the cluster (default: 1)
  --listen ADDRESS   host:port (default: 127.0.0.1:50051)
  --metrics-port P   serve metrics for Prometheus
  --tls-cert FILE    serve TLS; with --tls-key FILE
  --token-file FILE  a token that calls must carry

weightserver --help lists the commands for those who operate servers."""

_DEMO = """\
usage: pic demo [OPTIONS]

Trains on 10,000 images of Fashion-MNIST, then again without weight update
correction, and prints a table: about ten minutes on two cores.

options:
  --epochs N         visits to each image (default: 32)
  --data-dir DIR     where the files of Fashion-MNIST are
  --output DIR       directory of the run
  --resume           continue an interrupted demo"""

_PAGES = {
    "train": _TRAIN,
    "demo": _DEMO,
    "report": _REPORT,
    "evaluate": _EVALUATE,
    "embed": _EMBED,
    "export": _EXPORT,
    "duplicates": _DUPLICATES,
    "inspect": _INSPECT,
    "pack": _PACK,
    "verify": _VERIFY,
    "preview": _PREVIEW,
    "serve": _SERVE,
}
_HAS_WORD = {"evaluate": " PROTOCOL", "export": " encoder"}
"""What precedes --help-all in the commands that have commands of their own."""
PAGES = {
    name: f"{page}\n\npic {name}{_HAS_WORD.get(name, '')} --help-all lists every option."
    for name, page in _PAGES.items()
}
"""The page of each command."""
_GROUPS = {
    "train": ("train", "demo"),
    "look at a run": ("report", "evaluate", "duplicates"),
    "use an encoder": ("embed", "export"),
    "prepare images": ("inspect", "preview", "pack", "verify"),
    "servers": ("serve",),
}


def overview() -> str:
    """The help of `pic` itself: each command with the first sentence of its page."""
    lines = ["usage: pic COMMAND ...", "", "Trains image encoders without labels: every image is a class.", ""]
    for group, names in _GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<12}{_summary(name)}" for name in names), ""]
    lines += [
        "begin with:",
        "  pic train pictures/",
        "",
        "pic COMMAND --help says more. Commands for operators: weightserver --help",
    ]
    return "\n".join(lines)


def _summary(name: str) -> str:
    text = " ".join(_PAGES[name].split("\n\n")[1].split())
    return re.split(r"[,:.;](?: |$)", text)[0]
