"""A head evaluates and predicts as a dense matrix of all classes does, and is unchanged by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.head.conftest import MakeHead, drop_table
from tests.head.test_exact import WINDOW, windows
from tests.head.test_states import continued, first_half, restored
from tests.helpers.own_loop import (
    DIM,
    INPUTS,
    NUM_CLASSES,
    SETTINGS,
    STEPS,
    TEMPERATURE,
    Encoder,
    Images,
    Result,
    loaded,
    shuffled,
    trained,
)
from tests.helpers.torchrun import ROOT
from weightserver import LocalCluster, NoTableError, WeightClient
from weightserver.torch import ClassifierHead, Evaluation, looking

STORES = ["dense", "resident", "remote"]
EVERY_STORE = pytest.mark.parametrize("rows", STORES)
QUERIES = torch.randn(23, DIM, generator=torch.Generator().manual_seed(9))
IDS = torch.from_numpy(np.random.default_rng(9).integers(NUM_CLASSES, size=23))


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "_ROWS_AT_A_TIME", 7)
    monkeypatch.setattr(looking, "_LOGITS_AT_A_TIME", 50)


def expected(weight: Tensor, classes: list[int], own: list[list[int]]) -> Evaluation:
    """By the definition, of `classes` in any order."""
    logits = F.normalize(QUERIES) @ F.normalize(weight[classes]).T / TEMPERATURE
    targets = torch.zeros_like(logits)
    for image, of_image in enumerate(own):
        for class_ in of_image:
            targets[image, classes.index(class_)] = 1 / len(of_image)
    hits = [
        [targets[image, ranked[:k]].any().item() for image, ranked in enumerate(logits.argsort(descending=True))]
        for k in (1, 5)
    ]
    return Evaluation(F.cross_entropy(logits, targets).item(), *map(float, map(np.mean, hits)))


@EVERY_STORE
def test_loss_and_accuracy_and_predictions(make_head: MakeHead, rows: str) -> None:
    """Before the first step, and after some, in eval and in train mode; with rows on their way to the servers."""
    head, encoder = make_head(rows, capacity=20) if rows == "resident" else make_head(rows), Encoder()
    coming = [head.announced(loaded(shuffled(3, STEPS)))]
    own = [[class_] for class_ in IDS.tolist()]
    visited: list[int] = []
    for steps in (0, 5):
        if steps:
            trained(head, coming, steps=steps, encoder=encoder)
            visited = [class_ for batch in shuffled(3, STEPS)[:steps] for class_ in batch]
        head.train(steps == 0)
        with torch.no_grad() if steps else torch.inference_mode():
            found = head.evaluate(QUERIES, IDS)
            recent = head.evaluate(QUERIES, IDS, classes="recent")
            given = head.evaluate(QUERIES, IDS, classes=[*IDS.tolist(), 0, 1])
            nearest = head.predict(QUERIES, 3)
            among = head.predict(QUERIES, 2, classes=[5, 9, 2])
        head.train()
        weight = head.rows(range(NUM_CLASSES))
        active = list(dict.fromkeys(reversed(visited)))[: SETTINGS["num_negatives"]]
        assert found == pytest.approx(expected(weight, list(range(NUM_CLASSES)), own), rel=1e-5)
        assert recent == pytest.approx(expected(weight, sorted({*active, *IDS.tolist()}), own), rel=1e-5)
        assert given == pytest.approx(expected(weight, sorted({0, 1, *IDS.tolist()}), own), rel=1e-5)
        cosines = F.normalize(QUERIES) @ F.normalize(weight).T
        assert torch.equal(nearest, cosines.topk(3).indices)
        assert torch.equal(among, torch.tensor([5, 9, 2])[cosines[:, [5, 9, 2]].topk(2).indices])


def test_several_classes_of_an_image(make_head: MakeHead) -> None:
    head = make_head("dense", margin="cosface")  # which the loss here leaves out
    several = torch.stack([IDS, (IDS + 7) % NUM_CLASSES], dim=1)
    several[::3, 1] = -1
    own = [[class_ for class_ in classes if class_ >= 0] for classes in several.tolist()]
    weight = head.rows(range(NUM_CLASSES))
    found = head.evaluate(QUERIES, several)
    assert found == pytest.approx(expected(weight, list(range(NUM_CLASSES)), own), rel=1e-5)
    repeated = torch.cat([several, several[:, :1]], dim=1)
    assert head.evaluate(QUERIES, repeated) == found, "a class given twice counts once"


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ("dense", {}),
        ("resident", {"dtype": "bfloat16"}),
        pytest.param("remote", {}, marks=pytest.mark.guard),
    ],
)
def test_training_is_the_same_to_the_last_bit(
    make_head: MakeHead, client: WeightClient, rows: str, settings: dict[str, Any]
) -> None:
    """Whenever the head is looked at; also before it is used, and in the middle of a step."""
    results = list[Result]()
    for looks in (True, False):
        if looks is False and rows != "dense":
            client.drop_table()
        head, encoder, result = make_head(rows, **settings), Encoder(), Result()

        def look_at_times(head: ClassifierHead = head, looks: bool = looks) -> None:
            if looks and head.num_steps in (0, 3):
                head.eval()
                head.evaluate(QUERIES, IDS)
                head.evaluate(QUERIES, IDS, classes="recent")
                head.predict(QUERIES, 2)
                head.train()

        look_at_times()
        for ids, batch in head.announced(windows(head)):
            look_at_times()
            loss = head(encoder.module(batch), ids)
            look_at_times()
            loss.backward()
            look_at_times()
            encoder.update(0.1)
            head.step(0.3)
            result.losses.append(loss.item())
        result.rows, result.encoder = head.rows(range(NUM_CLASSES)), encoder.weight()
        results.append(result)
        head.close()
    results[0].assert_same(results[1])


def look(head: ClassifierHead) -> list[Any]:
    """All that can be looked at, in eval mode."""
    head.eval()
    looked: list[Any] = [head.evaluate(QUERIES, IDS), head.evaluate(QUERIES, IDS, classes="recent")]
    looked += [head.predict(QUERIES, 3).tolist(), head.rows(range(NUM_CLASSES)).tolist()]
    head.train()
    return looked


@pytest.mark.parametrize("run", ["faces", "another"])
def test_a_saved_state_is_looked_at_beside_the_run_that_goes_on(
    make_head: MakeHead, client: WeightClient, run: str
) -> None:
    """It is read as it was; no bit of the run changes, and no checkpoint goes."""
    head = make_head(run="faces")
    encoder, _, _ = first_half(head)
    looked, undisturbed = look(head), continued(head, encoder)
    client.drop_table()
    head = make_head(run="faces")
    encoder, at_half, state = first_half(head)
    validator = make_head(run=run)
    validator.load_state_dict(state)
    assert look(validator) == looked
    continued(head, encoder).assert_same(undisturbed)
    last = head.state_dict()
    head.close()
    before = client.describe(), client.checkpoints()
    assert look(validator) == looked
    validator.load_state_dict(last)
    assert torch.equal(validator.rows(range(NUM_CLASSES)), undisturbed.rows)
    validator.load_state_dict(state)
    assert (client.describe(), client.checkpoints()) == before
    continued(validator, restored(at_half)).assert_same(undisturbed)
    assert [kept.step for kept in client.checkpoints()] == [STEPS // 2]


def test_a_state_that_cannot_be_looked_at(make_head: MakeHead, client: WeightClient, cluster: LocalCluster) -> None:
    """One line says why, and the servers go on."""
    head = make_head()
    _, _, state = first_half(head)
    for num_classes, dim, match in (
        (NUM_CLASSES, 5, "the state's rows have 6 values, the head has dim=5: give that"),
        ([NUM_CLASSES, 3], DIM, r"hold the rows of 40 classes, the head has 43: open\(\) the head, which"),
    ):
        with ClassifierHead(num_classes, dim, num_negatives=12, servers=cluster.addresses) as other:
            other.load_state_dict(state)
            with pytest.raises(ValueError, match=match):
                other.predict(torch.zeros(1, dim))
    with pytest.raises(ValueError, match="hold the rows of run 'head' up to step 7: resume it"):
        make_head().predict(QUERIES)
    client.join_newest_session()
    client.release(client.checkpoints()[0].name)
    late = make_head()
    late.load_state_dict(state)
    with pytest.raises(ValueError, match=r"do not hold checkpoint .* of this state, only \[\]: load another state"):
        late.predict(QUERIES)
    head(INPUTS[:4, :DIM].requires_grad_(), [1, 2, 3, 4]).backward()
    head.step(0.1)


@pytest.mark.parametrize("rows", ["resident", "dense"])
def test_looking_before_the_sampler_is_made_chooses_no_blocks(
    client: WeightClient, cluster: LocalCluster, rows: Any
) -> None:
    """Those of the table decide which negatives are sampled together."""
    settings: dict[str, Any] = {"num_negatives": 200, "negatives": "uniform", "rows": rows}
    with ClassifierHead(2_000, DIM, **settings, servers=None if rows == "dense" else cluster.addresses) as head:
        head.evaluate(QUERIES, IDS)
        with pytest.raises(NoTableError):
            client.describe()
        head.sampler(window_size=400, window_stride=100, batch_size=16)
        head.open()
        assert head.spec.rows_per_block == 63


def test_a_head_in_eval_mode_does_not_train(make_head: MakeHead, embeddings: Tensor) -> None:
    head = make_head("dense").eval()
    calls: list[Callable[[], Any]] = [
        lambda: head(embeddings, [1, 2, 3, 4]),
        lambda: head.step(0.1),
        lambda: head.skip(0.1),
        lambda: head.step_of([1]).__enter__(),
    ]
    refused = r"the head is in eval mode, in which it does not train: call train\(\), or evaluate"
    for call in calls:
        with pytest.raises(ValueError, match=refused):
            call()
    head.train()
    head(embeddings, [1, 2, 3, 4]).backward()
    head.step(0.1)


def test_what_does_not_fit_is_refused(make_head: MakeHead) -> None:
    head = make_head("dense")
    with pytest.raises(ValueError, match=r"class \d+ of an image is not among the classes given: add it, or leave it"):
        head.evaluate(QUERIES, IDS, classes=[1, 2])
    with pytest.raises(ValueError, match="classes must be 'all', 'recent', or integers"):
        head.evaluate(QUERIES, IDS, classes="given")
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.40, the number of classes to choose among, got 41"):
        head.predict(QUERIES, 41)
    with pytest.raises(TypeError, match=r"k must be an integer, got 2\.5"):
        head.predict(QUERIES, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"embeddings must have shape \(23, 6\)"):
        head.predict(QUERIES[:, :5])
    spoiled = QUERIES.clone()
    spoiled[2, 3] = float("nan")
    for call in (lambda: head.evaluate(spoiled, IDS), lambda: head.predict(spoiled)):
        with pytest.raises(ValueError, match=r"^the embedding of image 2 is infinite or NaN: look for the step"):
            call()


@pytest.mark.guard
@pytest.mark.timeout(600)
def test_two_ranks_look_as_one(of_ranks: Path) -> None:
    """Each at images of its own, more on one than on the other; no rank has the other's rows."""
    parts = [torch.load(of_ranks / f"looked-{rank}", weights_only=True) for rank in range(2)]
    one = looked_at("dense", [], slice(None))
    for rows in STORES:
        for part in parts:
            np.testing.assert_allclose(part[rows]["found"], one["found"], rtol=1e-5)
        assert torch.equal(torch.cat([part[rows]["nearest"] for part in parts]), one["nearest"])
        assert all(part[rows]["exchanged"].count(QUERIES.shape) == 1 for part in parts)


def looked_at(rows: Any, servers: list[str], mine: slice) -> dict[str, Any]:
    with ClassifierHead(NUM_CLASSES, DIM, rows=rows, servers=None if rows == "dense" else servers, **SETTINGS) as head:
        encoder, found = Encoder(), [tuple(head.evaluate(QUERIES[mine], IDS[mine]))]
        loader = DataLoader(Images(), batch_sampler=head.sampler(**WINDOW))
        for ids, batch in head.announced(loader):
            head(encoder.module(batch), ids).backward()
            head.step(0.3)
            if head.num_steps % 4 == 1:
                for classes in ("all", "recent"):
                    found.append(tuple(head.evaluate(QUERIES[mine], IDS[mine], classes=classes)))
                if dist.is_initialized():  # the second rank has no image, and no place for a second class
                    images = (QUERIES, torch.stack([IDS, IDS], dim=1)) if dist.get_rank() == 0 else (QUERIES[:0], [])
                    found[-1] = tuple(head.evaluate(*images, classes="recent"))
        exchanged, all_reduce = [], dist.all_reduce

        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> None:
            exchanged.append(tensor.shape)
            all_reduce(tensor, *arguments, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dist, "all_reduce", counted)
            nearest = head.predict(QUERIES[mine], 3)
        if rows != "dense":
            head.checkpoint()
            with ClassifierHead(NUM_CLASSES, DIM, servers=servers, **SETTINGS) as other:
                other.load_state_dict(head.state_dict())
                assert torch.equal(other.predict(QUERIES[mine], 3), nearest)
                dist.barrier()
        return {"found": found, "nearest": nearest, "exchanged": exchanged}


def as_rank(directory: Path, servers: list[str]) -> None:
    mine = slice(0, 15) if dist.get_rank() == 0 else slice(15, None)
    looked = {}
    for rows in STORES:
        looked[rows] = looked_at(rows, servers, mine)
        drop_table(servers)
    torch.save(looked, directory / f"looked-{dist.get_rank()}")


_MANY = """
import resource, sys, torch
from weightserver.torch import ClassifierHead
N, D = 1_500_000, 64
with ClassifierHead(N, D, num_negatives=64, directory=sys.argv[1]) as head:
    embeddings = torch.randn(8, D, requires_grad=True)
    head(embeddings, range(8)).backward()
    head.step(0.1)
    head.evaluate(embeddings[:1], [3], classes=[3])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nearest = head.predict(embeddings, 2)
    head.evaluate(embeddings, range(8))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert nearest.shape == (8, 2)
assert grown < N * D * 4 / 1024 / 4, grown
"""


@pytest.mark.slow
def test_the_rows_need_not_fit_into_memory(tmp_path: Path) -> None:
    """It takes less than a quarter of their 384 MB."""
    done = subprocess.run(
        [sys.executable, "-c", _MANY, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
