"""Evaluates an encoder by a protocol that only reproduces the paper, with the options of `pic evaluate`.

python -m experiments.paper detect --run runs/a --data-dir VOCdevkit
torchrun --nproc-per-node 8 -m -- experiments.paper segment --run runs/a --data-dir cityscapes
"""

from __future__ import annotations

import sys

from experiments.paper.settings import DetectConfig, SegmentConfig
from trainer.evaluate.__main__ import main as evaluate
from trainer.evaluate.protocols import Protocol

PROTOCOLS = {
    "detect": Protocol(
        "experiments.paper.detect:detect",
        DetectConfig(),
        "Train an object detector on Pascal VOC.",
        images="pascal-voc",
    ),
    "segment": Protocol(
        "experiments.paper.segment:segment",
        SegmentConfig(),
        "Train a semantic segmentation network on Cityscapes.",
        images="cityscapes",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line as `pic evaluate` does."""
    return evaluate(arguments, PROTOCOLS, program="experiments.paper")


if __name__ == "__main__":
    sys.exit(main())
