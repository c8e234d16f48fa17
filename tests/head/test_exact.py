"""A loop of one's own trains exactly as dense torch.optim.SGD over all classes does, wherever the rows are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.head.conftest import MakeHead
from tests.helpers.own_loop import (
    BATCH_SIZE,
    INPUTS,
    NUM_CLASSES,
    NUM_NEGATIVES,
    STEPS,
    Dense,
    Encoder,
    Images,
    Result,
    learning_rate,
    loaded,
    shuffled,
    trained,
)
from weightserver import WeightClient
from weightserver.torch import ClassifierHead, WindowSampler

STORES = pytest.mark.parametrize("rows", ["dense", "resident", "remote"])
WINDOW: dict[str, Any] = {"window_size": 16, "window_stride": 4, "batch_size": BATCH_SIZE, "seed": 3}


def windows(head: ClassifierHead, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Images(), batch_sampler=head.sampler(**WINDOW | settings))


def drawn(sampler: WindowSampler, *, steps: int = STEPS) -> list[list[int]]:
    """The batches of the first steps."""
    return [sampler.images(step, part).tolist() for step in range(steps) for part in range(sampler.batches_per_step)]


def expected_of_windows(head: ClassifierHead, sampler: WindowSampler, **settings: Any) -> Result:
    dense = Dense(head)
    dense.begin_with(sampler)
    return dense.trained(drawn(sampler), batches_per_step=sampler.batches_per_step, **settings)


@STORES
@pytest.mark.parametrize("announces", [True, False])
def test_windows(make_head: MakeHead, rows: str, announces: bool) -> None:
    """Several epochs: each iteration continues after the last finished step."""
    head = make_head(rows)
    loader = windows(head)
    epochs = itertools.repeat(head.announced(loader) if announces else loader)
    trained(head, epochs).assert_close(expected_of_windows(head, loader.batch_sampler))  # type: ignore[arg-type]


@STORES
@pytest.mark.parametrize("announces", [True, False])
def test_any_classes_in_any_order(make_head: MakeHead, rows: str, announces: bool) -> None:
    """Repeated ones too, within a batch and between batches."""
    head, batches = make_head(rows), shuffled(0, STEPS, repeated=True)
    epoch: Iterable[Any] = loaded(batches)
    epoch = head.announced(epoch) if announces else epoch
    trained(head, [epoch]).assert_close(Dense(head).trained(batches))


@STORES
def test_accumulated_windows_with_two_views(make_head: MakeHead, rows: str) -> None:
    head = make_head(rows)
    loader = windows(head, batches_per_step=2)
    expected = expected_of_windows(head, loader.batch_sampler, views=2)  # type: ignore[arg-type]
    trained(head, itertools.repeat(head.announced(loader)), batches_per_step=2, views=2).assert_close(expected)


@pytest.mark.parametrize("rows", ["dense", "resident"])
def test_accumulated_batches_of_any_classes(make_head: MakeHead, rows: str) -> None:
    """The same batch twice in a step as well; a batch that makes no whole step is left out."""
    head, batches = make_head(rows), shuffled(1, 2 * STEPS + 1)
    batches[3] = batches[2]
    announced = head.announced(loaded(batches), batches_per_step=2)
    assert len(announced) == 2 * STEPS
    trained(head, [announced], batches_per_step=2).assert_close(Dense(head).trained(batches, batches_per_step=2))


def test_windows_then_any_classes(make_head: MakeHead) -> None:
    """The classes that the windows visited last are still recent."""
    head, batches = make_head(), shuffled(2, 4)
    loader = windows(head)
    encoder = Encoder()
    first = trained(head, [head.announced(loader)], steps=5, encoder=encoder)
    result = trained(head, [head.announced(loaded(batches))], steps=9, encoder=encoder)
    dense = Dense(head)
    dense.begin_with(loader.batch_sampler)  # type: ignore[arg-type]
    expected = dense.trained(drawn(loader.batch_sampler, steps=5) + batches, steps=9)  # type: ignore[arg-type]
    Result(first.losses + result.losses, result.rows, result.encoder).assert_close(expected)


def test_any_classes_after_small_windows(make_head: MakeHead) -> None:
    """The rows of a sampler that is no longer used are fewer than those of other batches."""
    head, batches = make_head(), shuffled(3, STEPS)
    head.sampler(batch_size=BATCH_SIZE, window_size=12, window_stride=1)
    result = trained(head, [head.announced(loaded(batches))])
    result.assert_close(Dense(head).trained(batches))


@pytest.mark.parametrize("capacity", [None, 14, NUM_NEGATIVES])
def test_steps_that_are_announced_earlier_than_their_rows_are_requested(
    make_head: MakeHead, capacity: int | None
) -> None:
    """And further ones before those, or before their rows fit: a row is not in use before it has arrived."""
    head, batches = make_head(capacity=capacity), shuffled(3, STEPS)

    def announced() -> Iterator[Any]:
        for number, batch in enumerate(loaded(batches)):
            for ids in {0: batches[:5], 3: batches[5:9], 7: batches[9:]}.get(number, []):
                head.announce(ids)
            yield batch

    trained(head, [announced()]).assert_close(Dense(head).trained(batches))


def test_batches_of_several_sizes(make_head: MakeHead) -> None:
    """As a loader's last batch may be smaller."""
    head, batches = make_head(), shuffled(4, 6)
    batches[2] = batches[2][:1]
    batches[5] = batches[5][:3]
    trained(head, [head.announced(loaded(batches))], steps=6).assert_close(Dense(head).trained(batches, steps=6))


@STORES
def test_rows_have_learning_rates_of_their_own(make_head: MakeHead, rows: str) -> None:
    """The encoder's are the steps', also over gaps that are corrected."""
    head, batches = make_head(rows, learning_rate_factor=3.0), shuffled(7, STEPS)
    expected = Dense(head, factor=3.0).trained(batches)
    trained(head, [head.announced(loaded(batches))]).assert_close(expected)
    with pytest.raises(ValueError, match="learning_rate_factor must be positive, got 0"):
        make_head(rows, learning_rate_factor=0.0)


@STORES
def test_a_plateau_scheduler_is_the_same_as_rates_given_in_advance(
    make_head: MakeHead, client: WeightClient, rows: str
) -> None:
    """To the last bit: a rate is needed no earlier than the step that uses it."""
    batches = loaded(shuffled(5, STEPS))
    told: list[float] = []
    head, encoder = make_head(rows, learning_rate_factor=0.7), Encoder()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(encoder.optimizer, factor=0.5, patience=2)
    for ids, batch in head.announced(batches):
        loss = head(encoder.module(batch), ids)
        loss.backward()
        encoder.optimizer.step()
        head.step(learning_rate=encoder.optimizer.param_groups[0]["lr"])
        encoder.optimizer.zero_grad()
        told.append(encoder.optimizer.param_groups[0]["lr"])
        plateau.step(1.0)  # no progress
    rows_told = head.rows(range(NUM_CLASSES))
    assert len(set(told)) > 3
    head.close()
    client.drop_table()
    given, encoder = make_head(rows, learning_rates=told, learning_rate_factor=0.7), Encoder()
    for step, (ids, batch) in enumerate(batches):
        given(encoder.module(batch), ids).backward()
        encoder.update(told[step])
        given.step()
    assert torch.equal(given.rows(range(NUM_CLASSES)), rows_told)


@pytest.mark.parametrize("settings", [{"correction": False}, {"momentum": 0.0}, {"softmax": "plain"}])
def test_settings_of_rows_and_loss(make_head: MakeHead, settings: dict[str, Any]) -> None:
    """Resident rows are those of a dense head, whose store has its own tests."""
    batches = loaded(shuffled(6, STEPS))
    dense = trained(make_head("dense", **settings), [batches])
    trained(make_head(**settings), [batches]).assert_close(dense)


@STORES
def test_smoothed_labels(make_head: MakeHead, rows: str) -> None:
    head, batches = make_head(rows, label_smoothing=0.2), shuffled(6, STEPS)
    trained(head, [loaded(batches)]).assert_close(Dense(head, label_smoothing=0.2).trained(batches))


@STORES
def test_a_temperature_of_each_step(make_head: MakeHead, rows: str) -> None:
    head, encoder = make_head(rows), Encoder()
    dense = Dense(head)
    for step, (ids, batch) in enumerate(loaded(shuffled(6, STEPS))):
        dense.visits += ids.tolist()
        dense.temperature = 0.3 / (1 + step)
        embeddings = encoder.module(batch).detach().requires_grad_()
        loss = head(embeddings, ids, temperature=dense.temperature)
        expected = dense.loss(embeddings.detach(), ids.tolist())
        torch.testing.assert_close(loss, expected, rtol=2e-5, atol=0)
        loss.backward()
        expected.backward()
        head.step(learning_rate(step))
        dense.update(learning_rate(step))
    torch.testing.assert_close(head.rows(range(NUM_CLASSES)), dense.weight.detach(), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        head(embeddings, ids, temperature=0.0)


def test_rows_in_the_middle_change_nothing(make_head: MakeHead) -> None:
    """Also between forward and step, for classes in any order, some of them twice."""
    head, batches, encoder = make_head(), shuffled(7, STEPS), Encoder()
    dense = Dense(head)
    for step, (ids, batch) in enumerate(head.announced(loaded(batches))):
        dense.visits += ids.tolist()
        dense.loss(encoder.module(batch), ids.tolist()).backward()
        encoder.optimizer.zero_grad()
        before = dense.weight.detach().clone()
        head(encoder.module(batch), ids).backward()
        torch.testing.assert_close(head.rows([7, 3, 3]), before[[7, 3, 3]], rtol=0, atol=1e-5)
        head.step(learning_rate(step))
        dense.update(learning_rate(step))
        encoder.update(learning_rate(step))
        torch.testing.assert_close(head.rows(ids), dense.weight.detach()[ids], rtol=0, atol=1e-5)


def test_under_autocast_the_loss_is_that_of_the_rounded_embeddings(make_head: MakeHead) -> None:
    head, encoder = make_head("dense"), Encoder()
    ids = torch.arange(BATCH_SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = encoder.module(INPUTS[:BATCH_SIZE])
        loss = head(embeddings, ids)
    assert (embeddings.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    dense = Dense(head)
    dense.visits += ids.tolist()
    torch.testing.assert_close(loss, dense.loss(embeddings.float(), ids.tolist()))
    loss.backward()
    head.step(0.1)


def test_workers_load_the_batches(make_head: MakeHead) -> None:
    """Processes that are forked while the head's threads run."""
    head = make_head()
    loader = DataLoader(Images(), batch_sampler=head.sampler(**WINDOW), num_workers=2)
    expected = expected_of_windows(head, loader.batch_sampler)  # type: ignore[arg-type]
    trained(head, itertools.repeat(head.announced(loader))).assert_close(expected)


def test_ids_of_many_types(make_head: MakeHead, embeddings: torch.Tensor) -> None:
    head = make_head("dense")
    types = ([1, 2, 3, 1], np.array([1, 2, 3, 1], np.uint8), torch.tensor([1, 2, 3, 1], dtype=torch.int32))
    for view, ids in enumerate(types):
        head(embeddings, ids, view=view).backward()
    head.step(0.1)
    assert head.num_steps == 1


@pytest.mark.parametrize("negatives", ["recent", "both"])
def test_steps_that_grow(make_head: MakeHead, negatives: str) -> None:
    """The first step, of one image as in a dry run, does not limit later ones, whether a sampler draws them or not."""
    settings = {"num_negatives": 20, "negatives": negatives}
    rows = []
    for store in ("dense", "resident"):
        head, encoder = make_head(store, **settings), Encoder()
        trained(head, [loaded([[3]])], steps=1, encoder=encoder)
        large = shuffled(1, 5, batch_size=9)
        trained(head, [head.announced(loaded(large))], steps=6, encoder=encoder)
        loader = DataLoader(Images(), batch_sampler=head.sampler(batch_size=10))
        trained(head, [head.announced(loader)] * 2, steps=12, encoder=encoder)
        rows.append(head.rows(range(NUM_CLASSES)))
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=2e-5)
