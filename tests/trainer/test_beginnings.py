"""Rows that begin at their image's embedding: exactly where the formula says, in every store, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.small_run import EVERY, losses, small_run
from trainer.loop import train
from weightserver.torch import ClassifierHead, Ranks
from weightserver.torch.beginnings import Beginnings

pytestmark = pytest.mark.usefixtures("one_thread")

N, D, B, K, NORM, RATE, DECAY, TEMPERATURE = 60, 8, 6, 20, 0.3, 0.1, 1e-2, 0.5


def batches() -> list[Tensor]:
    """Classes of 40 batches in any order, some of them twice in a batch; classes 50 … 59 come late."""
    generator = torch.Generator().manual_seed(1)
    early = [torch.randint(0, 50, (B,), generator=generator) for _ in range(20)]
    return early + [torch.randint(0, N, (B,), generator=generator) for _ in range(20)]


def by_dense_sgd(images: Tensor, encoder: nn.Module) -> tuple[list[float], Tensor]:
    """The oracle: all rows in one parameter of torch.optim.SGD; a class that is met begins at its first embedding."""
    rows = nn.Parameter(torch.zeros(N, D))
    rows.grad = torch.zeros_like(rows)
    of_rows = torch.optim.SGD([rows], lr=RATE, momentum=0.9, weight_decay=DECAY)
    of_encoder = torch.optim.SGD(encoder.parameters(), lr=RATE)
    met: set[int] = set()
    recent: list[int] = []  # classes that were met, the latest last
    found = []
    for ids in batches():
        embeddings = encoder(images[ids])
        for image, label in enumerate(ids.tolist()):
            if label not in met:
                rows.data[label] = NORM * F.normalize(embeddings[image].detach(), dim=0)
            met.add(label)
            recent = [other for other in recent if other != label] + [label]
        active = torch.tensor(sorted(recent[-K:]))
        logits = F.normalize(embeddings) @ F.normalize(rows[active]).T / TEMPERATURE
        loss = F.cross_entropy(logits, torch.searchsorted(active, ids))
        of_encoder.zero_grad()
        of_rows.zero_grad(set_to_none=False)
        loss.backward()
        of_encoder.step()
        of_rows.step()
        found.append(loss.item())
    return found, rows.detach()


@pytest.mark.parametrize("store", ["resident", "dense"])
def test_rows_begin_where_their_image_is(store: Literal["resident", "dense"], tmp_path: Path) -> None:
    """Rows of zeros stay zeros in SGD until they begin, so the oracle's rows need no momentum of their own there.

    Both round differently; 40 steps enlarge 2^-24 less than a hundredfold.
    """
    torch.manual_seed(2)
    images, encoder = torch.randn(N, 5), nn.Linear(5, D)
    start = {name: value.clone() for name, value in encoder.state_dict().items()}
    expected, expected_rows = by_dense_sgd(images, encoder)
    encoder.load_state_dict(start)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=RATE)
    settings: dict[str, Any] = {
        "num_negatives": K,
        "weight_decay": DECAY,
        "temperature": TEMPERATURE,
        "rows_per_block": 7,
    }
    with ClassifierHead(
        N, D, init="embedding", init_norm=NORM, rows=store, directory=tmp_path / "rows", **settings
    ) as head:
        found = []
        for ids in batches():
            loss = head(encoder(images[ids]), ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            head.step(learning_rate=RATE)
            found.append(loss.item())
        met = torch.cat(batches()).unique()
        rows = head.rows(met)
    np.testing.assert_allclose(found, expected, rtol=0, atol=100 * 2.0**-24)
    np.testing.assert_allclose(rows.numpy(), expected_rows[met].numpy(), rtol=0, atol=100 * 2.0**-24)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_an_embedding_without_a_direction_begins_at_random(value: float) -> None:
    """A step that overflowed is skipped, and leaves rows that can be trained."""
    embeddings = torch.randn(2, D, generator=torch.Generator().manual_seed(0))
    embeddings[0] = value
    with (
        ClassifierHead(N, D, num_negatives=K, init="embedding", init_norm=NORM, rows="dense") as head,
        ClassifierHead(N, D, num_negatives=K, rows="dense") as at_random,
    ):
        head(embeddings.requires_grad_(), [3, 4]).backward()
        head.skip(0.0)
        rows = head.rows([3, 4])
        torch.testing.assert_close(rows[0], at_random.rows([3])[0])
        torch.testing.assert_close(rows[1], NORM * F.normalize(embeddings[1].detach(), dim=0))


@pytest.mark.parametrize("announces", [True, False])
def test_a_batch_that_is_repeated_begins_anew(announces: bool) -> None:
    """At the embeddings of the attempt that counts; at none if it is skipped."""
    ids, (nothing, images) = [3, 4], torch.randn(2, 2, D, generator=torch.Generator().manual_seed(0))
    for repeats in (True, False):
        with ClassifierHead(N, D, num_negatives=K, init="embedding", init_norm=NORM, rows="dense") as head:
            at_random = head.rows(ids)
            if announces:
                head.announce(ids)
            head(nothing.clone().requires_grad_(), ids).backward()
            head.zero_grad()
            if repeats:
                head(images.clone().requires_grad_(), ids).backward()
            head.skip(0.0)
            expected = NORM * F.normalize(images) if repeats else at_random
            torch.testing.assert_close(head.rows(ids), expected, rtol=0, atol=1e-6)


def test_a_rank_without_active_rows_begins_none() -> None:
    """All of a step's rows may be in blocks of other ranks, as in the first steps."""
    beginnings = Beginnings(np.zeros(0, bool), NORM)
    beginnings.add(0, torch.ones(2, D), torch.zeros(0, D), np.array([-1, -1]), Ranks())
    positions, rows = beginnings.begun(torch.zeros(0, D))
    assert (len(positions), rows.shape) == (0, (0, D))


@pytest.mark.guard  # three runs: ten seconds
def test_runs_begin_alike_in_every_store_and_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init": "embedding", "steps": 2 * EVERY}
    train(small_run(tmp_path / "whole", **settings))
    train(small_run(tmp_path / "dense", **settings, rows="dense", checkpoint_every=0))
    np.testing.assert_allclose(losses(tmp_path / "whole"), losses(tmp_path / "dense"), rtol=0, atol=1e-5)
    short = small_run(tmp_path / "part", **settings)

    def stop(step: int) -> None:
        if step == EVERY + 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(short, on_step=stop)
    train(small_run(tmp_path / "part", **settings, resume=True))
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")[0] < losses(tmp_path / "whole")[-1], (
        "the first classes are few, and at their images"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": "embeddings"}, "init must be 'random' or 'embedding', got 'embeddings'"),
        ({"init": "embedding", "rows": "remote"}, "use rows='resident'"),
        ({"init": "embedding", "init_norm": 0.0}, "give a positive init_norm"),
        ({"init": "embedding", "init_std": 0.0}, "give a positive init_norm"),
    ],
)
def test_impossible_beginnings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassifierHead(N, D, num_negatives=K, **settings)
