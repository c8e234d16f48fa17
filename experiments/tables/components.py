"""Tables about components, and about labelled classes instead of instances."""

from __future__ import annotations

from itertools import pairwise

from experiments.cells import AFTER, Cell, Claim, Evaluation, Table
from experiments.tables.common import BASE, EPOCH_ORDER, IMAGES, SUPERVISED, in_epoch_order, papers

_ALL = "all three"
_POOLED, _ONE_POSITION = "features of one position", {"pool_size": 1}
_LONGER, _TWICE = "80 epochs", 80.0
_HEAD = (
    "That the preset's features keep positions is not the reason: averaged over the whole image, they gain nothing by "
    "the head either. Twice as many epochs are a line of their own. Not tried: a hidden layer wider than the features."
)
COMPONENTS = Table(
    name="components",
    title="Components",
    source="Table 1",
    text=(
        "Without one component each: an inner product instead of the cosine, a linear head instead of two layers, and "
        "no jitter and grey (images of one channel have no colour to jitter, so this is brightness and contrast). The "
        "preset's features are averages over 3 × 3 parts of the image; those of one position, as ResNet-50's, over the "
        "whole of it."
    ),
    cells=(
        in_epoch_order(_ALL),
        in_epoch_order("without cosine softmax", softmax="plain"),
        in_epoch_order("without two-layer head", head_layers=1),
        in_epoch_order("without strong augmentation", augmentation={"strong": False}),
        in_epoch_order(_POOLED, encoder=_ONE_POSITION),
        in_epoch_order(f"{_POOLED}, without two-layer head", encoder=_ONE_POSITION, head_layers=1),
        in_epoch_order(_LONGER, epochs=_TWICE),
        in_epoch_order(f"{_LONGER}, without two-layer head", epochs=_TWICE, head_layers=1),
    ),
    paper=papers(
        {
            _ALL: 66.2,
            "without cosine softmax": 46.5,
            "without two-layer head": 60.5,
            "without strong augmentation": 62.3,
            _POOLED: 66.2,
            f"{_POOLED}, without two-layer head": 60.5,
        }
    ),
    claims=(
        *(
            Claim(
                text=f"{name} raises accuracy",
                weights={_ALL: 1, f"without {name}": -1},
                tried=_HEAD if name == "two-layer head" else "",
            )
            for name in ("cosine softmax", "two-layer head", "strong augmentation")
        ),
        *(
            Claim(text=text, weights={cell: 1, f"{cell}, without two-layer head": -1}, tried=_HEAD)
            for text, cell in (
                ("two-layer head raises accuracy of features of one position", _POOLED),
                ("two-layer head raises accuracy in 80 epochs", _LONGER),
            )
        ),
        *(
            Claim(
                text=f"cosine softmax matters more than {name}",
                weights={f"without {name}": 1, "without cosine softmax": -1},
            )
            for name in ("two-layer head", "strong augmentation")
        ),
    ),
    seeds=2,  # the trials do not tell the spread of another encoder
)

_PARTITIONS = (80, 640, 2_500)
_CLUSTERS = (
    "Tried: five numbers of classes. Those between are clusters of the features of an encoder that has learnt the "
    "labels, and lose little by it; what shows is the step to one image a class."
)
_DIVIDED = Cell(
    row="10 classes",
    settings=SUPERVISED,
    evaluations=(Evaluation(name="partition", arguments=("partition", *map(str, _PARTITIONS)), quick=()),),
)
PARTITION = Table(
    name="partition",
    title="Classes between labels and instances",
    source="Appendix, Compared to Supervised Classification with Varying Classes",
    text=(
        "Each labelled class divided by clustering the features of the encoder trained on the labels. The paper shows "
        "its numbers as a figure only: the more classes, the lower the linear accuracy."
    ),
    cells=(
        _DIVIDED,
        *(
            Cell(
                row=f"{number:,} classes",
                settings=BASE
                | EPOCH_ORDER
                | {"labels": f"{AFTER}/evaluation/partition-{number}.npy", "num_negatives": min(number, 512)},
                after=_DIVIDED,
            )
            for number in _PARTITIONS
        ),
        in_epoch_order(f"{IMAGES:,} classes"),
    ),
    claims=tuple(
        Claim(
            text=f"{fewer:,} classes are better than {more:,}",
            weights={f"{fewer:,} classes": 1, f"{more:,} classes": -1},
            tried=_CLUSTERS,
        )
        for fewer, more in pairwise((10, *_PARTITIONS, IMAGES))
    ),
)
