"""A head's state_dict rolls back its rows and what was recently visited, in this process or a new one."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.head.conftest import MakeHead
from tests.helpers.own_loop import NUM_CLASSES, STEPS, Encoder, Images, Result, loaded, shuffled, trained
from weightserver import LocalCluster, WeightClient
from weightserver.torch import ClassifierHead

BATCHES = loaded(shuffled(0, STEPS))
HALF = STEPS // 2
RATE = 0.3
WINDOW: dict[str, Any] = {"window_size": 16, "window_stride": 4, "batch_size": 4}


def continued(head: ClassifierHead, encoder: Encoder, *, sampler: bool = False) -> Result:
    """The second half of the steps."""
    if sampler:
        loader = DataLoader(Images(), batch_sampler=head.sampler(**WINDOW))
        return trained(head, [head.announced(loader)] * 2, encoder=encoder)
    return trained(head, [head.announced(BATCHES[HALF:])], encoder=encoder)


def first_half(head: ClassifierHead, *, sampler: bool = False) -> tuple[Encoder, Any, Any]:
    """Trains half of the steps; returns the encoder, its state and the head's state there."""
    encoder = Encoder()
    loader = DataLoader(Images(), batch_sampler=head.sampler(**WINDOW)) if sampler else BATCHES
    trained(head, [head.announced(loader)], steps=HALF, encoder=encoder)
    return encoder, copy.deepcopy((encoder.module.state_dict(), encoder.optimizer.state_dict())), head.state_dict()


def restored(state: Any) -> Encoder:
    encoder, state = Encoder(), copy.deepcopy(state)  # torch's optimizer keeps the tensors that it is given
    encoder.module.load_state_dict(state[0])
    encoder.optimizer.load_state_dict(state[1])
    return encoder


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_a_state_is_saved_with_the_model(make_head: MakeHead, tmp_path: Path, how: str) -> None:
    head = make_head()
    encoder, at_half, _ = first_half(head)
    model = nn.ModuleDict({"encoder": encoder.module, "head": head})
    if how == "torch":
        torch.save(model.state_dict(), tmp_path / "model")
    else:
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model")
    undisturbed = continued(head, encoder)
    head.close()
    loaded_state = (
        torch.load(tmp_path / "model", weights_only=True)
        if how == "torch"
        else safetensors.torch.load_file(tmp_path / "model")
    )
    other, encoder = make_head(), restored(at_half)
    nn.ModuleDict({"encoder": encoder.module, "head": other}).load_state_dict(loaded_state)
    continued(other, encoder).assert_same(undisturbed)


def test_an_unused_heads_state(make_head: MakeHead) -> None:
    head = make_head()
    state = head.state_dict()
    head.load_state_dict(state)
    assert trained(head, [BATCHES]).losses


def test_rows_do_not_return_to_an_unused_heads_state(make_head: MakeHead) -> None:
    """It names no rows; a checkpoint before the first step does."""
    head = make_head()
    unused = head.state_dict()
    head.checkpoint()
    state, before = head.state_dict(), head.rows(range(NUM_CLASSES))
    trained(head, [BATCHES], steps=2)
    with pytest.raises(ValueError, match=r"cannot return after 2 steps: call head.checkpoint\(\) before state_dict"):
        head.load_state_dict(unused)
    head.load_state_dict(state)
    assert torch.equal(head.rows(range(NUM_CLASSES)), before)


def test_each_step_has_one_checkpoint(make_head: MakeHead, client: WeightClient) -> None:
    head = make_head()
    first_half(head)
    head.state_dict()
    kept = head.checkpoint("mine")
    assert (kept.name, kept.step) == ("mine", HALF)
    head.state_dict()
    assert {known.name for known in client.checkpoints()} == {f"step-{HALF:012d}", "mine"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            b"",
            r"the weight servers hold no table, not that of checkpoint .step-.*. \(step 7\): give the servers or the",
        ),
        (b"\xff" * 40, "the head's state is damaged, of another version, or not one of a ClassifierHead"),
    ],
)
def test_states_that_do_not_fit(make_head: MakeHead, client: WeightClient, change: bytes, match: str) -> None:
    head = make_head()
    _, _, state = first_half(head)
    head.close()
    client.drop_table()
    other = make_head()
    if change:
        state["_extra_state"] = torch.tensor(list(change), dtype=torch.uint8)

    def load() -> None:
        other.load_state_dict(state)
        other.rows([0])

    with pytest.raises(ValueError, match=match):
        load()


def test_another_order_of_the_rows_is_refused(make_head: MakeHead) -> None:
    head = make_head()
    _, _, state = first_half(head)
    head.close()
    with pytest.raises(ValueError, match="order of order_seed=0, the head that of 5: give it the same order_seed"):
        make_head(order_seed=5).load_state_dict(state)


def test_another_number_of_classes_is_refused(make_head: MakeHead, client: WeightClient, cluster: LocalCluster) -> None:
    """Also where the table was extended: each class would have another class's row."""
    head = make_head()
    _, _, state = first_half(head)
    head.close()
    client.open_session("extension", force=True)
    client.extend_table(NUM_CLASSES + 5)
    larger = ClassifierHead(NUM_CLASSES + 5, head.spec.dim, num_negatives=12, servers=cluster.addresses)
    with larger, pytest.raises(ValueError, match="are those of 40 classes, the head has 45, in another order: give it"):
        larger.load_state_dict(state)


def test_dense_rows_have_no_state(make_head: MakeHead) -> None:
    head = make_head("dense")
    trained(head, [BATCHES])
    with pytest.raises(ValueError, match="rows='dense' are in this process alone, without servers and saved states"):
        head.state_dict()


def test_a_state_of_other_rows_changes_nothing(make_head: MakeHead, tmp_path: Path) -> None:
    """It is refused before the servers are left; of a head that was not used, when it opens."""
    other = make_head()
    _, _, state = first_half(other)
    dense, encoder = make_head("dense"), Encoder()
    trained(dense, [BATCHES], steps=2, encoder=encoder)
    with ClassifierHead(NUM_CLASSES, 6, num_negatives=12, directory=tmp_path / "rows") as head:
        trained(head, [BATCHES], steps=2, encoder=encoder)
        for used, match in ((dense, "rows='dense' are in this process alone"), (head, "hold another table than that")):
            before = used.rows(range(NUM_CLASSES))
            with pytest.raises(ValueError, match=match):
                used.load_state_dict(state)
            assert used.num_steps == 2
            trained(used, [BATCHES[2:]], steps=3, encoder=encoder)
            assert not torch.equal(used.rows(range(NUM_CLASSES)), before)


@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_rows_of_bfloat16_are_saved_between_steps(make_head: MakeHead, rows: str) -> None:
    """Resident ones are rounded where they are saved: a run that resumes there is the one that goes on."""
    head, encoder = make_head(rows, dtype="bfloat16"), Encoder()
    trained(head, [BATCHES], steps=HALF, encoder=encoder)
    ids, batch = BATCHES[HALF]
    loss = head(encoder.module(batch), ids)
    if rows == "resident":
        with pytest.raises(ValueError, match=r"rows of bfloat16 are saved between steps: call checkpoint"):
            head.state_dict()
        head.forget_announced(in_progress=True)
        state = head.state_dict()
        loss = head(encoder.module(batch), ids)
    else:
        state = head.state_dict()
    loss.backward()
    head.step(RATE)
    expected = head.rows(range(NUM_CLASSES))
    head.load_state_dict(state)
    again = head(encoder.module(batch), ids)
    again.backward()
    head.step(RATE)
    assert torch.equal(again, loss)
    assert torch.equal(head.rows(range(NUM_CLASSES)), expected)


def test_heads_are_neither_copied_nor_pickled(make_head: MakeHead) -> None:
    for make_copy in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: copy the encoder, and save its state_dict"):
            make_copy(make_head())


@pytest.mark.guard
def test_a_state_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedded shards in a directory: their process ends with the head, and the next one serves it again. The directory
    is where the head was made, wherever the process goes afterwards."""
    settings: dict[str, Any] = {"num_negatives": 12, "num_shards": 2}
    monkeypatch.chdir(tmp_path)
    with ClassifierHead(NUM_CLASSES, 6, run="a", **settings) as head:
        monkeypatch.chdir("/")
        encoder, at_half, state = first_half(head)
        torch.save(state, tmp_path / "state")
        undisturbed = continued(head, encoder)
    with ClassifierHead(NUM_CLASSES, 6, directory=tmp_path / "rows" / "a", **settings) as head:
        head.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        continued(head, restored(at_half)).assert_same(undisturbed)


def test_a_state_after_close_is_not_left_empty(make_head: MakeHead) -> None:
    """It would be saved with the model, without what names the rows."""
    head = make_head()
    trained(head, [loaded(shuffled(0, 3))], steps=3)
    head.close()
    with pytest.raises(ValueError, match=r"the head is closed: make another one and load_state_dict\(\)"):
        head.state_dict()
    other = make_head("dense")
    other.close()
    assert not len(other.state_dict()["_extra_state"])
