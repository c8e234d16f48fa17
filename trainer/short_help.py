"""The short help of commands whose parsers have more options than fit a terminal of 80 columns and 40 lines.

The options here are some of those that the command's own parser declares; tests compare them. All others print the help
of their parsers.
"""

from __future__ import annotations

_TRAIN = """\
usage: pic train FOLDER [OPTIONS]        own images: chooses all settings
       pic train PRESET [OPTIONS]        settings of a preset
       pic train --resume --output RUN   continues a run
       pic train --config FILE           reads what --print-config wrote

Trains an encoder by instance classification: every image is a class.

presets:
  fashion-mnist      60,000 images of 28 px: minutes on a CPU
  cifar-10           50,000 colour images of 32 px: half an hour on two cores
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

_EVALUATE = """\
usage: pic evaluate PROTOCOL --run RUN [OPTIONS]

Evaluates an encoder on labelled images.

protocols:
  knn                the k nearest training images vote
  linear-cached      a linear classifier on features that are computed once
  linear             the paper's linear classifier, on augmented images
  fine-tune          trains the encoder further, with labels
  semi-supervised    the same with a few labels of each class
  Others, of the paper: python -m experiments.paper --help

what to evaluate, one of
  --run RUN          a run's encoder
  --encoder FILE     an encoder's file, exported or made by pic export import
  --pixels           raw pixels, for comparison

on which images
  --dataset NAME     fashion-mnist, folder, packed, ... (default: the run's)
  --data-dir DIR     their folder (default: the run's)

The result is printed and written to RUN/evaluation/PROTOCOL.json."""

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

PAGES = {
    "train": f"{_TRAIN}\n\npic train --help-all lists every option.",
    "evaluate": f"{_EVALUATE}\n\npic evaluate PROTOCOL --help-all lists every option.",
    "serve": f"{_SERVE}\n\npic serve --help-all lists every option.",
}
"""The page of each command."""
