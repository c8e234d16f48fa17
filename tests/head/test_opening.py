"""What a head makes of its settings when it opens: the blocks of its table, classes that were added, refusals."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from tests.head.conftest import MakeHead
from tests.head.test_states import first_half
from tests.helpers.own_loop import DIM, INPUTS, NUM_CLASSES, STEPS, Encoder, learning_rate, loaded, shuffled, trained
from weightserver import AuthenticationError, LocalCluster, NoTableError, TableMismatchError, WeightClient
from weightserver.torch import ClassifierHead, Loss, Ranks, Rows, Servers
from weightserver.torch.settings import Settings

HALF = STEPS // 2


@pytest.mark.parametrize("rows", ["resident", "dense"])
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (None, 7),
        ({}, 7),
        ({"window_size": NUM_CLASSES, "window_stride": 4}, 7),
        ({"window_size": 16, "window_stride": 4}, 63),
        ({"window_size": 16, "window_stride": 4, "classes": list(range(NUM_CLASSES))}, 63),
    ],
)
def test_blocks_are_large_where_a_window_orders_the_classes(
    make_head: MakeHead, sampler: dict[str, Any] | None, expected: int, rows: str
) -> None:
    head = make_head(rows, rows_per_block=None)
    if sampler is not None:
        head.sampler(batch_size=4, **sampler)
    head.open()
    assert head.spec.rows_per_block == expected
    assert head.client is None or head.client.describe().spec.rows_per_block == expected


def test_other_users_of_the_machine_cannot_call_the_servers_of_a_head(make_head: MakeHead, tmp_path: Path) -> None:
    """They reach loopback, too: the modes of the directory would hide nothing."""
    client = make_head(servers=None, directory=tmp_path / "servers").connect()
    with (
        WeightClient([shard.address for shard in client._shards.connections()]) as other,
        pytest.raises(AuthenticationError, match="the call has no token"),
    ):
        other.drop_table()


def test_a_table_keeps_its_blocks(make_head: MakeHead) -> None:
    """Of whatever sampler the head that made it had; another number is refused."""
    head = make_head(rows_per_block=None)
    _, _, state = first_half(head)
    head.close()
    other = make_head(rows_per_block=None)
    other.sampler(batch_size=4, window_size=16)
    other.load_state_dict(state)
    other.open()
    assert other.spec.rows_per_block == 7
    other.close()
    third = make_head(rows_per_block=5)
    third.load_state_dict(state)
    with pytest.raises(TableMismatchError, match="rows_per_block=7"):
        third.open()


def test_settings_change_until_rows_are_written(tmp_path: Path, embeddings: Tensor) -> None:
    """In a head's own directory: a first try that ended early fixes nothing."""
    for weight_decay in (0.01, 0.02, 0.03):
        with ClassifierHead(NUM_CLASSES, DIM, num_negatives=12, directory=tmp_path, weight_decay=weight_decay) as head:
            if weight_decay == 0.03:
                with pytest.raises(ValueError, match="hold the rows of run 'head' up to step 1: resume it"):
                    head.open()
                break
            head(embeddings, [1, 2, 3, 4]).backward()
            head.step(0.1)
            if weight_decay == 0.02:
                head.flush()


@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_classes_are_added_to_a_state(make_head: MakeHead, cluster: LocalCluster, rows: str) -> None:
    """The rows of the others change by no bit; the new ones begin where those of a table of all classes do."""
    head, added = make_head(rows), 10
    encoder, at_half, state = first_half(head)
    undisturbed = trained(head, [loaded(shuffled(0, STEPS)[HALF:])], encoder=encoder)
    head.close()
    settings: dict[str, Any] = {"rows": rows, "rows_per_block": 3, "init_std": 0.3, "weight_decay": 0.01}
    all_classes = [NUM_CLASSES, added]
    with ClassifierHead(all_classes, DIM, num_negatives=12, servers=cluster.addresses, **settings) as larger:
        larger.load_state_dict(state)
        encoder = Encoder()
        encoder.module.load_state_dict(at_half[0])
        encoder.optimizer.load_state_dict(copy.deepcopy(at_half[1]))
        trained(larger, [loaded(shuffled(0, STEPS)[HALF:])], encoder=encoder).assert_same(undisturbed)
        assert larger.client is not None
        assert larger.client.describe().spec.num_rows == NUM_CLASSES + added
        new = [NUM_CLASSES + 3, NUM_CLASSES + 7]
        before = larger.rows(new)
        larger(encoder.module(INPUTS[:2]), new).backward()
        larger.step(learning_rate(STEPS))
        assert not torch.equal(larger.rows(new), before)
        state = larger.state_dict()
    with (
        ClassifierHead(NUM_CLASSES, DIM, num_negatives=12, servers=cluster.addresses, **settings) as smaller,
        pytest.raises(ValueError, match=r"are those of 40 \+ 10 classes, the head has 40, in another order"),
    ):
        smaller.load_state_dict(state)


def test_the_client_before_the_table_is_opened(make_head: MakeHead, client: WeightClient) -> None:
    head = make_head()
    before, used = head.client, head.connect()
    assert (before, head.connect(), head.epoch) == (None, used, 0)
    with pytest.raises(NoTableError):
        used.describe()
    head.open()
    assert (head.client, head.epoch) == (used, client.describe().epoch)
    with pytest.raises(ValueError, match="rows='dense' are in this process alone, without servers and"):
        make_head("dense").connect()


def test_groups_and_their_fields_are_the_same() -> None:
    given: dict[str, Any] = {"num_negatives": 12, "order_seed": 3}
    flat = ClassifierHead(40, 6, **given, rows="remote", momentum=0.5, temperature=0.3, num_shards=2)
    grouped = ClassifierHead(
        40, 6, **given, rows=Rows("remote"), softmax=Loss(temperature=0.3), servers=Servers(num_shards=2), momentum=0.5
    )
    assert flat._settings == grouped._settings
    with pytest.raises(TypeError, match="ClassifierHead has no setting 'momentun': did you mean momentum"):
        ClassifierHead(40, 6, num_negatives=12, momentun=0.5)  # type: ignore[call-arg]
    hints = [list(get_type_hints(group).items())[1:] for group in (Servers, Rows, Loss)]
    assert get_type_hints(Settings) == dict(itertools.chain(*hints))


def test_what_the_first_rank_returns_or_raises() -> None:
    assert Ranks().of_first(lambda: (1, {"a": None})) == [1, {"a": None}]
    with pytest.raises(OSError, match="no disk"):
        Ranks().of_first(lambda: (_ for _ in ()).throw(OSError("no disk")))
