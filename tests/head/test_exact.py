"""A loop of one's own trains exactly as dense torch.optim.SGD over all classes does, wherever the rows are."""

from __future__ import annotations

import itertools
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
    STEPS,
    Dense,
    Encoder,
    Images,
    learning_rate,
    loaded,
    shuffled,
    trained,
)
from weightserver import WeightClient
from weightserver.torch import ClassifierHead, WindowSampler

STORES = pytest.mark.parametrize("rows", ["dense", "resident", "remote"])
WINDOW: dict[str, Any] = {"window_size": 16, "window_stride": 4, "batch_size": BATCH_SIZE, "seed": 3}


def windows(head: ClassifierHead) -> DataLoader[Any]:
    return DataLoader(Images(), batch_sampler=head.sampler(**WINDOW))


def drawn(sampler: WindowSampler, steps: range) -> list[list[int]]:
    return [sampler.images(step, 0).tolist() for step in steps]


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


@pytest.mark.parametrize("correction", ["exact", "paper"])
def test_a_step_that_is_forgotten_changes_no_bit(make_head: MakeHead, client: WeightClient, correction: str) -> None:
    """Of the rows that were corrected for it: other batches are given instead."""
    found = []
    for rows in ("remote", "resident"):
        head, encoder = make_head(rows, correction=correction), Encoder()
        for (ids, batch), (others, unused) in zip(loaded(shuffled(5, STEPS)), loaded(shuffled(6, STEPS)), strict=True):
            if rows == "resident":
                head(encoder.module(unused), others).backward()
                head.forget_announced(in_progress=True)
                encoder.optimizer.zero_grad()
            head(encoder.module(batch), ids).backward()
            encoder.update(rate := learning_rate(head.num_steps))
            head.step(rate)
        found.append(head.rows(range(NUM_CLASSES)))
        head.close()
        client.drop_table()
    assert torch.equal(*found)


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


def test_rows_and_overflows_are_float32_whatever_the_default(make_head: MakeHead) -> None:
    head, encoder, scaler = make_head(), Encoder(), torch.amp.GradScaler("cpu")
    torch.set_default_dtype(torch.float64)
    try:
        scaler.scale(head(encoder.module(INPUTS[:BATCH_SIZE]), torch.arange(BATCH_SIZE))).backward()
        head.step(0.1, scaler=scaler, optimizer=encoder.optimizer)
        scaler.step(encoder.optimizer)
        scaler.update()
    finally:
        torch.set_default_dtype(torch.float32)
    assert head.num_steps == 1


def test_workers_load_the_batches(make_head: MakeHead) -> None:
    """Processes that are forked while the head's threads run."""
    head = make_head()
    loader = DataLoader(Images(), batch_sampler=head.sampler(**WINDOW), num_workers=2)
    sampler: Any = loader.batch_sampler
    dense = Dense(head)
    dense.visits = list(itertools.chain(*drawn(sampler, range(-20, 0))))
    expected = dense.trained(drawn(sampler, range(STEPS)))
    trained(head, itertools.repeat(head.announced(loader))).assert_close(expected)


def test_ids_of_many_types(make_head: MakeHead, embeddings: torch.Tensor) -> None:
    head = make_head("dense")
    types = ([1, 2, 3, 1], np.array([1, 2, 3, 1], np.uint8), torch.tensor([1, 2, 3, 1], dtype=torch.int32))
    for view, ids in enumerate(types):
        head(embeddings, ids, view=view).backward()
    head.step(0.1)
    assert head.num_steps == 1
