"""A shard on a real LMDB directory against the model of rows, after any sequence of writes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.row_model import Row, RowModel
from tests.helpers.schedules import naming
from weightserver.core.errors import FencedError, InvalidRequestError, NoTableError, StepError
from weightserver.core.spec import TableSpec
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=12, dim=2, momentum=0.8, weight_decay=0.05, rows_per_block=5, init_std=1.0)
HORIZON = 24
RATES = np.linspace(0.4, 0.02, HORIZON, dtype=np.float32)
WRITER = b"w" * 16
MODEL = RowModel(SPEC, RATES)
MAX_ROWS = 18
"""Of a table that grew."""
some_rows = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=6, unique=True)
steps = st.integers(0, HORIZON - 1)
seeds = st.integers(0, 2**32 - 1)


class ShardAgainstModel(RuleBasedStateMachine):
    """Each rule makes one change on both sides; the invariant compares everything that can be read."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="weightserver-model-"))
        self.epoch, self.sequence = 1, 0
        self.sent: list[tuple[WriteHeader, list[int], npt.NDArray[np.float32]]] = []
        self.open()
        self.create()

    def open(self) -> None:
        self.storage = LmdbStorage(self.directory)
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.committer = Committer(self.shard.batch)

    def close(self) -> None:
        self.committer.close()
        self.storage.close()

    def create(self) -> None:
        self.committer.submit(lambda batch: self.shard.create_table(batch, SPEC)).result(60)
        self.committer.submit(lambda batch: self.shard.open_session(batch, "run", self.epoch, WRITER)).result(60)
        self.rows = MODEL.initial(range(SPEC.num_rows))
        self.written: set[int] = set()
        self.clock = 0
        self.checkpoints: dict[str, tuple[list[Row], set[int], int, int]] = {}  # oldest first

    def header(self, step: int) -> WriteHeader:
        self.sequence += 1
        return WriteHeader(self.epoch, WRITER, WRITER, self.sequence, step, naming(RATES))

    def push(self, header: WriteHeader, rows: list[int], gradients: npt.NDArray[np.float32]) -> bool:
        return self.committer.submit(
            lambda batch: self.shard.push_gradients(batch, header, np.array(rows), gradients)
        ).result(60)

    @rule(rows=some_rows, step=steps, seed=seeds)
    def push_at_any_time(self, rows: list[int], step: int, seed: int) -> None:
        rows = self.there(rows)
        gradients = np.random.default_rng(seed).standard_normal((len(rows), SPEC.dim)).astype(np.float32)
        header = self.header(step)
        assert self.push(header, rows, gradients) is True
        self.sent.append((header, rows, gradients))
        self.newest = header.sequence
        for row, gradient in zip(rows, gradients.astype(np.float64), strict=True):
            self.rows[row] = MODEL.pushed(self.rows[row], step, gradient)
        self.written |= set(rows)
        self.clock = max(self.clock, step + 1)

    def there(self, rows: list[int]) -> list[int]:
        """The rows, wrapped to the table's size, sorted and distinct."""
        return sorted({row % len(self.rows) for row in rows})

    @rule(num_rows=st.integers(SPEC.num_rows, MAX_ROWS))
    def extend_table(self, num_rows: int) -> None:
        extension = self.committer.submit(lambda batch: self.shard.extend_table(batch, num_rows, self.epoch))
        if num_rows < len(self.rows):
            with pytest.raises(InvalidRequestError, match="can only become larger"):
                extension.result(60)
            return
        assert extension.result(60) is (num_rows > len(self.rows))
        for rows in [self.rows, *(rows for rows, *_ in self.checkpoints.values())]:
            rows += MODEL.initial(range(len(rows), num_rows))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 2**16))
    def send_one_again(self, which: int) -> None:
        header, rows, gradients = self.sent[which % len(self.sent)]
        if header.sequence == self.newest:
            assert self.push(header, rows, gradients) is False
            return
        with pytest.raises(FencedError, match=f"write {header.sequence} of this writer is settled"):
            self.push(header, rows, gradients)

    @rule(rows=some_rows, ahead=st.integers(-3, 5), seed=seeds)
    def write_state(self, rows: list[int], ahead: int, seed: int) -> None:
        rows = self.there(rows)
        weight, momentum = np.random.default_rng(seed).standard_normal((2, len(rows), SPEC.dim)).astype(np.float32)
        last_step = np.array([self.rows[row].last_step for row in rows]) + ahead
        header = self.header(int(last_step.max(initial=0)))
        write = self.committer.submit(
            lambda batch: self.shard.write_state(batch, header, np.array(rows), weight, momentum, last_step)
        )
        if ahead < 0 or last_step.max() > HORIZON:  # older than what is stored, or beyond the schedule: refused whole
            with pytest.raises(StepError):
                write.result(60)
            return
        assert write.result(60) is True
        self.newest = header.sequence
        for row, *state in zip(rows, *np.stack([weight, momentum]).astype(np.float64), last_step.tolist(), strict=True):
            self.rows[row] = Row(*state)
        self.written |= set(rows)
        self.clock = max(self.clock, int(last_step.max()))

    @rule(rows=some_rows, beyond=st.integers(0, 3))
    def push_beyond_the_schedule(self, rows: list[int], beyond: int) -> None:
        rows = self.there(rows)
        with pytest.raises(StepError):
            self.push(self.header(HORIZON + beyond), rows, np.ones((len(rows), SPEC.dim), np.float32))

    @rule()
    def open_another_session(self) -> None:
        fenced = self.header(0)
        self.epoch += 1
        self.committer.submit(lambda batch: self.shard.open_session(batch, "run", self.epoch, WRITER)).result(60)
        with pytest.raises(FencedError):
            self.push(fenced, [0], np.ones((1, SPEC.dim), np.float32))
        self.sent = []

    @rule()
    def restart(self) -> None:
        before: tuple[npt.NDArray[Any], ...] = self.read(None)
        self.close()
        self.open()
        after: tuple[npt.NDArray[Any], ...] = self.read(None)
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))

    def change(self, method: str, name: str, step: int = 0) -> bool:
        header = self.header(step)
        change = getattr(self.shard, method)
        done: bool = self.committer.submit(lambda batch: change(batch, header, name)).result(60)
        assert self.committer.submit(lambda batch: change(batch, header, name)).result(60) is False, "done twice"
        self.newest = header.sequence
        return done

    @precondition(lambda self: len(self.checkpoints) < 4)
    @rule()
    def take_a_checkpoint(self) -> None:
        self.num_checkpoints = getattr(self, "num_checkpoints", 0) + 1
        name = f"checkpoint {self.num_checkpoints}"
        assert self.change("checkpoint", name, self.clock)
        self.checkpoints[name] = list(self.rows), set(self.written), self.clock, self.clock
        assert self.change("checkpoint", name, self.clock), "the same again is no error"
        with pytest.raises(InvalidRequestError, match="was taken at step"):
            self.change("checkpoint", name, (self.clock + 1) % (HORIZON + 1))

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 3))
    def roll_back(self, which: int) -> None:
        names = list(self.checkpoints)
        name = names[which % len(names)]
        assert self.change("rollback", name)
        rows, written, self.clock, _ = self.checkpoints[name]
        self.rows, self.written = list(rows), set(written)
        for later in names[names.index(name) + 1 :]:
            del self.checkpoints[later]

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        names = list(self.checkpoints)
        name = names[which % len(names)]
        assert self.change("release", name)
        del self.checkpoints[name]
        with pytest.raises(NoTableError, match=f"no checkpoint '{name}'"):
            self.change("rollback", name)

    @rule()
    def drop_and_create(self) -> None:
        self.committer.submit(self.shard.drop_table).result(60)
        self.epoch += 2  # dropping took one
        self.sent = []
        self.create()

    def read(
        self, step: int | None, checkpoint: str | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        (chunk,) = self.shard.fetch(
            np.arange(len(self.rows)), step=step, state=True, checkpoint=checkpoint, rates=naming(RATES)
        )
        assert chunk.momentum_buffer is not None
        assert chunk.last_step is not None
        return chunk.weight.astype(np.float32), chunk.momentum_buffer.astype(np.float32), chunk.last_step

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "rows"):
            return
        self.compare(self.rows, None)
        for name, (rows, *_) in self.checkpoints.items():
            self.compare(rows, name)
        assert [(c.name, c.step) for c in self.shard.state.checkpoints] == [
            (name, step) for name, (*_, step) in self.checkpoints.items()
        ]
        self.no_version_is_kept_in_vain()
        newest = max(row.last_step for row in self.rows)
        if newest:
            with pytest.raises(StepError, match=f"has seen {newest} updates"):
                self.read(newest - 1)
        assert (self.shard.state.rows_stored, self.shard.state.clock) == (len(self.written), self.clock)
        assert self.shard.state.epoch == self.epoch

    def compare(self, rows: list[Row], checkpoint: str | None) -> None:
        """Compares everything that can be read, now or at a checkpoint."""
        assert self.read(None, checkpoint)[2].tolist() == [row.last_step for row in rows]
        for step in {max(row.last_step for row in rows), HORIZON}:
            weight, momentum, _ = self.read(step, checkpoint)
            expected = [MODEL.at(row, step) for row in rows]
            scale = 1 + max(abs(value).max() for row in expected for value in (row.weight, row.momentum_buffer))
            np.testing.assert_allclose(weight, [row.weight for row in expected], atol=1e-5 * scale, rtol=0)
            np.testing.assert_allclose(momentum, [row.momentum_buffer for row in expected], atol=1e-5 * scale, rtol=0)

    def no_version_is_kept_in_vain(self) -> None:
        """After any write, a block has at most one version for each retained checkpoint, and the newest."""
        with self.storage.read() as txn:
            for block in range(-(-len(self.rows) // SPEC.rows_per_block)):
                generations = [version.generation for version in txn.versions(block) if version.block == block]
                assert all(generation <= self.shard.state.generation for generation in generations)
                assert len(generations) <= 5  # four checkpoints at the most, and now

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.close()
            shutil.rmtree(self.directory)


TestShardAgainstModel = ShardAgainstModel.TestCase
TestShardAgainstModel.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
