"""What a head refuses: one clear line each, and the next correct call continues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.head.conftest import MakeHead
from tests.helpers.own_loop import DIM, NUM_CLASSES, Dense, Encoder, Images, loaded, shuffled, trained
from weightserver.torch import ClassifierHead, WindowSampler


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([1, 2, 3, 40], ValueError, r"class 40 does not exist: the head has classes 0..39"),
        ([1, 2, 3, -1], ValueError, r"class -1 does not exist: the head has classes 0..39"),
        ([[1, -2]] * 4, ValueError, "class -2 does not exist"),
        (torch.ones(4, dtype=torch.bool), TypeError, "classes must be integers, got bool"),
        (["a"] * 4, TypeError, "classes must be integers, got <U1"),
        (np.zeros((4, 1, 1), int), ValueError, r"classes must have shape \(b,\), or \(b, P\) .*, got \(4, 1, 1\)"),
        (np.full((4, 2), -1), ValueError, "image 0 of the batch has no class: give each at least one"),
        (np.eye(4, NUM_CLASSES, dtype=int), ValueError, r"classes look one-hot, .*: give targets.argmax\(1\)"),
        ([], ValueError, r"classes must have shape \(b,\), or \(b, P\) .*, got \(0,\)"),
        (torch.ones(4, dtype=torch.bfloat16), TypeError, "classes must be integers, got torch.bfloat16"),
        ([1, 2, 3], ValueError, r"embeddings must have shape \(3, 6\), one row for each class given, got \(4, 6\)"),
        (np.array([1, 2, 3, 2**64 - 1], np.uint64), ValueError, "class 18446744073709551615 does not exist"),
    ],
)
def test_classes(embeddings: torch.Tensor, ids: Any, error: type[Exception], match: str) -> None:
    """Refused before the step begins: other classes may follow."""
    with ClassifierHead(NUM_CLASSES, DIM, num_negatives=12, rows="dense") as head:
        with pytest.raises(error, match=match) as raised:
            head(embeddings, ids)
        assert "\n" not in str(raised.value)
        head(embeddings, [1, 2, 3, 4]).backward()
        head.step(0.1)


def test_embeddings(embeddings: torch.Tensor) -> None:
    with ClassifierHead(NUM_CLASSES, DIM, num_negatives=12, rows="dense") as head:
        with pytest.raises(ValueError, match=r"embeddings must have shape \(4, 6\), .*, got \(4, 5\)"):
            head(embeddings[:, :5], [1, 2, 3, 4])
        for bad in (embeddings.detach().numpy(), embeddings.long(), embeddings.to(torch.complex64)):
            with pytest.raises(TypeError, match=r"embeddings must be a tensor of floats, got (float32|torch\.\w+)$"):
                head(bad, [1, 2, 3, 4])
        with pytest.raises(ValueError, match=r"embeddings are on meta, the head is on cpu: call head.to\(\) before"):
            head(embeddings.to("meta"), [1, 2, 3, 4])
        with pytest.raises(ValueError, match="the loss of a training step: call it with gradients"), torch.no_grad():
            head(embeddings, [1, 2, 3, 4])
        head(embeddings, [1, 2, 3, 4]).backward()
        head.step(0.1)
        with pytest.raises(ValueError, match="the head's rows are on cpu: move the head before its first use"):
            head.to("meta")(embeddings.to("meta"), [1, 2, 3, 4])


def test_the_order_of_calls(embeddings: torch.Tensor) -> None:
    """A step needs forward, backward and a learning rate; each error leaves the step as it was."""
    with ClassifierHead(NUM_CLASSES, DIM, num_negatives=12, rows="dense") as head:
        with pytest.raises(ValueError, match=r"step\(\) without a forward pass: call head\(embeddings, ids\) first"):
            head.step(0.1)
        with pytest.raises(ValueError, match=r"no step was announced: call head\(embeddings, ids\), or announce\(ids"):
            head.skip(0.1)
        loss = head(embeddings, [1, 2, 3, 4])
        with pytest.raises(ValueError, match=r"step\(\) without a backward pass: call loss.backward\(\) first"):
            head.step(0.1)
        loss.backward()
        with pytest.raises(ValueError, match=r"learning rate of step 0 is not known: give step\(learning_rate=...\)"):
            head.step()
        for bad in (-0.1, float("nan"), float("inf"), 1e39):
            with pytest.raises(ValueError, match=r"the learning rate of step 0 must be a finite number ≥ 0, got "):
                head.step(bad)
        with pytest.raises(TypeError, match=r"learning_rate must be a number, got '0\.1'"):
            head.step("0.1")  # type: ignore[arg-type]
        head.step(torch.tensor(0.1))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="without a forward pass"):
            head.step(0.1)
        assert head.num_steps == 1


def test_rates_that_contradict_those_given_in_advance(embeddings: torch.Tensor) -> None:
    with ClassifierHead(NUM_CLASSES, DIM, num_negatives=12, rows="dense", learning_rates=[0.1]) as head:
        head(embeddings, [1, 2, 3, 4]).backward()
        with pytest.raises(ValueError, match=r"rate of step 0 was given as 0.1, got 0.2: omit it, or give no learning"):
            head.step(0.2)
        head.step(0.1)
        head(embeddings, [1, 2, 3, 4]).backward()
        head.step(0.2)  # beyond those that were given


@pytest.mark.parametrize("rows", ["dense", "resident", "remote"])
def test_other_classes_than_were_announced(make_head: MakeHead, rows: str) -> None:
    """The announced ones may still follow, and nothing is lost."""
    head, encoder, batches = make_head(rows), Encoder(), shuffled(0, 14)
    for ids, batch in head.announced(loaded(batches[:1])):
        others = (ids + 1) % NUM_CLASSES
        with pytest.raises(
            ValueError, match=r"the classes .* are not those that were announced for step 0 \(.*call st"
        ):
            head(encoder.module(batch), others)
        head(encoder.module(batch), ids).backward()
        head.step(0.4)
        encoder.update(0.4)
    result = trained(head, [head.announced(loaded(batches[1:]))], encoder=encoder)
    torch.testing.assert_close(result.rows, Dense(head).trained(batches).rows, rtol=0, atol=2e-5)


def test_step_before_all_announced_batches(make_head: MakeHead) -> None:
    head, encoder = make_head("dense"), Encoder()
    first, second = loaded(shuffled(1, 2))
    head.announce(first[0], second[0])
    head(encoder.module(first[1]), first[0]).backward()
    with pytest.raises(
        ValueError, match=r"step\(\) after 1 of the 2 batches that were announced for step 0: call it a"
    ):
        head.step(0.1)
    head(encoder.module(second[1]), second[0]).backward()
    head.step(0.1)


def test_batches_of_a_step(make_head: MakeHead) -> None:
    head = make_head("dense")
    with pytest.raises(ValueError, match=r"batches of a step must be equally large, on every rank, got 3 to 4 classes"):
        head.announce([1, 2, 3], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="a step needs at least one batch"):
        head.announce()
    with pytest.raises(ValueError, match="num_negatives is 12, but a batch may contain 13 classes: choose at least as"):
        head.announce(range(13))
    head.announce(range(12))


def test_a_capacity_that_is_too_small(make_head: MakeHead) -> None:
    head = make_head(capacity=11)
    with pytest.raises(
        ValueError, match=r"11 resident rows are too few: step 3 needs 1 more; raise --capacity \(a head"
    ):
        trained(head, [head.announced(loaded(shuffled(0, 14)))])
    other = make_head(capacity=14)
    other.sampler(batch_size=4)
    with pytest.raises(
        ValueError, match="capacity is 14, but the 8 steps that are requested in advance need 40: raise it"
    ):
        next(other.announcements(range(4)))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rows": "remote", "capacity": 30}, "capacity is a number of resident rows, but rows='remote': omit one"),
        ({"softmax": "plain", "temperature": 0.1}, "temperature divides cosines, but softmax='plain': omit one"),
        ({"servers": "127.0.0.1:1", "num_shards": 2}, "servers are given, but directory and num_shards are of a "),
        ({"servers": "127.0.0.1:1", "directory": "rows"}, "servers are given, but directory and num_shards are of a "),
        ({"rows": "sparse"}, "rows must be 'resident', 'remote' or 'dense', got 'sparse'"),
        ({"softmax": "arc"}, "softmax must be 'cosine' or 'plain', got 'arc'"),
        ({"temperature": 0}, "temperature must be positive, got 0"),
        ({"num_negatives": 41}, "num_negatives is 41, but there are only 40 classes: choose fewer"),
        ({"rows": "dense", "servers": "ws0:1"}, "rows='dense' keeps the rows in this process: omit servers"),
        ({"rows": "dense", "correction": "paper"}, "rows='dense' leave no gap to correct: use correction=True"),
        ({"servers": "ws0"}, "ws0"),
        ({"num_negatives": 16.0}, "num_negatives must be an integer, got 16.0"),
        ({"num_shards": 1.5}, "num_shards must be an integer, got 1.5"),
        ({"order_seed": "a"}, "order_seed must be an integer, got 'a'"),
        ({"capacity": 14.0}, "capacity must be an integer, got 14.0"),
        ({"capacity": 0}, "capacity must be at least 1 row, got 0: omit it"),
        ({"temperature": "5"}, "temperature must be a number, got '5'"),
        ({"margin": "cosface", "margin_size": "a"}, "margin_size must be a number, got 'a'"),
        ({"timeout_seconds": "a"}, "timeout_seconds must be a number, got 'a'"),
        ({"learning_rate_factor": 0.0}, "learning_rate_factor must be positive, got 0"),
        ({"learning_rate_factor": "a"}, "learning_rate_factor must be a number, got 'a'"),
        ({"negatives": "both", "recent_share": "a"}, "recent_share must be a number, got 'a'"),
        ({"servers": 5}, 'servers must be addresses "host:port,host:port" or a list of them, got 5'),
        ({"servers": [5]}, r"servers must be addresses .* or a list of them, got \[5\]"),
        ({"servers": "ws0:1", "insecure": "False"}, "insecure must be True or False, got 'False'"),
        ({"take_over": "no"}, "take_over must be True or False, got 'no'"),
        ({"num_shards": 0}, r"num_shards must lie in 1\.\.inf, got 0"),
        ({"run": 5}, "run must be a text and directory a path, got 5 and None"),
        ({"directory": 5}, "run must be a text and directory a path, got 'head' and 5"),
        ({"recent_share": 0.3}, "recent_share is for negatives both, got negatives recent: omit it"),
    ],
)
def test_settings(settings: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"num_negatives": 12} | settings
    with pytest.raises((TypeError, ValueError), match=match):
        ClassifierHead(NUM_CLASSES, DIM, **given)


@pytest.mark.parametrize(
    ("num_classes", "match"),
    [
        ([], "num_classes must be an integer or a list of integers, got an empty list"),
        ("40", "num_classes must be an integer, got '40'"),
        (40.0, r"num_classes must be an integer, got 40\.0"),
        ([40, 0], r"num_classes must lie in 1\.\.inf, got 0"),
    ],
)
def test_numbers_of_classes(num_classes: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        ClassifierHead(num_classes, DIM, num_negatives=12)


@pytest.mark.parametrize("num_classes", [[40, 5], (40, 5), np.array([40, 5]), torch.tensor([40, 5])])
def test_numbers_of_classes_that_were_added(num_classes: Any) -> None:
    assert ClassifierHead(num_classes, DIM, num_negatives=12).order.sizes == (40, 5)


@pytest.mark.parametrize("given", [0.1, [[0.1]], [-0.1], [float("nan")], ["a"], [1e6]])
def test_learning_rates_given_in_advance(make_head: MakeHead, given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"learning.rate"):
        make_head("dense", learning_rates=given)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1 on each of 1 ranks, got 0"),
        ({"batch_size": 4, "batches_per_step": 0}, "batches_per_step must be at least 1, got 0"),
        ({"batch_size": 4.0}, "batch_size must be an integer, got 4.0"),
        ({"batch_size": 4, "batches_per_step": 1.0}, "batches_per_step must be an integer, got 1.0"),
        ({"batch_size": 4, "window_size": 8.0}, "window_size must be an integer, got 8.0"),
        ({"batch_size": 4, "window_stride": 8.0}, "window_stride must be an integer, got 8.0"),
        ({"batch_size": 4, "seed": "a"}, "seed must be an integer, got 'a'"),
        ({"batch_size": 4, "order": 40.0}, "order must be an integer, got 40.0"),
        ({"batch_size": 4, "window_size": 41}, r"window_size must lie in 1..40, the number of images, got 41"),
        ({"batch_size": 4, "window_size": 8, "window_stride": 9}, r"window_stride must lie in 1..8, the window size"),
    ],
)
def test_samplers(settings: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        WindowSampler(**{"order": NUM_CLASSES} | settings)


def test_numbers_of_numpy_are_integers() -> None:
    sampler = WindowSampler(np.int64(NUM_CLASSES), batch_size=4, seed=np.int64(0))  # type: ignore[arg-type]
    assert list(sampler) == list(WindowSampler(NUM_CLASSES, batch_size=4))


def test_batches_without_a_first_element(make_head: MakeHead) -> None:
    batches = [{"ids": torch.arange(4), "images": torch.zeros(4, DIM)}]
    head = make_head("dense")
    with pytest.raises(
        TypeError, match=r"a batch is a dict, not a tuple or list .* ids_of=lambda batch: batch\['ids'\]"
    ):
        list(head.announced(batches))
    assert list(head.announced(batches, ids_of=lambda batch: batch["ids"])) == batches


def test_batches_of_a_step_that_the_sampler_does_not_draw(make_head: MakeHead) -> None:
    head = make_head("dense")
    loader = DataLoader(Images(), batch_sampler=head.sampler(batch_size=4))
    with pytest.raises(
        ValueError, match=r"batches_per_step is 2, that of the loader's sampler 1: give it to sampler\("
    ):
        head.announced(loader, batches_per_step=2)
    with pytest.raises(ValueError, match="batches_per_step must be at least 1, got 0"):
        head.announced(loaded(shuffled(0, 4)), batches_per_step=0)
    with pytest.raises(TypeError, match=r"batches_per_step must be an integer, got 1\.5"):
        head.announced(loaded(shuffled(0, 4)), batches_per_step=1.5)  # type: ignore[arg-type]
