"""What a head's state_dict contains: a checkpoint of the rows, and the recently visited ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from weightserver import Checkpoint, NoTableError, WeightClient
from weightserver.torch.recency import Visited
from weightserver.torch.windows import RangesOrder


@dataclass(frozen=True)
class SavedRows:
    """What identifies a checkpoint of the rows."""

    name: str
    checkpoint_id: str
    """Hexadecimal."""
    step: int
    """Number of finished updates."""
    table: str
    """Identity of the table, hexadecimal."""
    marks: Sequence[str]
    """Marks of the servers' states, see `WeightClient.marks`."""
    num_classes: Sequence[int]
    """Numbers of classes that were added one after another."""
    order_seed: int
    """Seed of the order of the rows, by which each class has its row."""

    @classmethod
    def of(cls, kept: Checkpoint, table: bytes, order: RangesOrder) -> SavedRows:
        identity = kept.checkpoint_id.hex(), kept.step, table.hex()
        return cls(kept.name, *identity, list(kept.marks), list(order.sizes), order.order_seed)

    @classmethod
    def from_state(cls, state: Tensor) -> SavedRows:
        """Reads a head's extra state. Raises ValueError for anything else."""
        return from_tensor(state)[0]

    @property
    def num_rows(self) -> int:
        return sum(self.num_classes)

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.name, self.step, bytes.fromhex(self.checkpoint_id), tuple(self.marks))

    def check_order(self, order: RangesOrder) -> None:
        """Raises ValueError unless each class has the same row in `order`, which may have more ranges of classes."""
        if self.order_seed != order.order_seed:
            raise ValueError(
                f"the state's rows have the order of order_seed={self.order_seed}, the head that of "
                f"{order.order_seed}: give it the same order_seed"
            )
        if list(order.sizes[: len(self.num_classes)]) != list(self.num_classes):
            had, has = (" + ".join(map(str, sizes)) for sizes in (self.num_classes, order.sizes))
            raise ValueError(
                f"the state's rows are those of {had} classes, the head has {has}, in another order: give it the same "
                f"num_classes, or num_classes=[{', '.join(map(str, self.num_classes))}, m] to add m"
            )

    def is_among(self, kept: Sequence[Checkpoint]) -> bool:
        """Whether these checkpoints include this one."""
        own = self.checkpoint
        return any((one.name, one.checkpoint_id) == (own.name, own.checkpoint_id) for one in kept)

    def check_held(self, client: WeightClient, *, may_be_released: bool = False) -> None:
        """Checks that the servers retain this checkpoint, or, if it may be released, that their data descends from it.

        Raises:
            ValueError: they do not, or hold another table.
            DataLossError: a server's data does not descend from the checkpoint: it is an older copy.
        """
        advice = "give the servers or the directory that it was saved with, or restore their backup"
        what = f"checkpoint {self.name!r} (step {self.step})"
        try:
            is_other = client.table_identity().hex() != self.table and "another table than"
        except NoTableError:
            is_other = "no table, not"
        if is_other:
            raise ValueError(f"the weight servers hold {is_other} that of {what}: {advice}")
        if self.is_among(kept := client.checkpoints()):
            return
        if len(self.marks) == len(client.marks()):  # after 'reshard' the checkpoint alone identifies the data
            client.expect(self.marks)
        if not may_be_released:
            names = [one.name for one in kept]
            found = "another of that name" if self.name in names else f"only {names}"
            raise ValueError(
                f"the weight servers do not hold {what} of this state, {found}: load another state, {advice}"
            )


def to_tensor(saved: SavedRows, recent: Visited) -> Tensor:
    """uint8 [n], for any file of tensors: a length, JSON, then recent rows and their last visits as int64."""
    text = json.dumps(asdict(saved)).encode()
    recent = recent.settled()
    arrays = np.stack([recent.rows, recent.last_visit]).astype("<i8").tobytes()
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + arrays), dtype=torch.uint8)


def from_tensor(state: Tensor) -> tuple[SavedRows, Visited]:
    """The inverse of `to_tensor`. Raises ValueError for anything else."""
    content = state.cpu().numpy().tobytes()
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        rows, last_visit = np.frombuffer(content[end:], "<i8").reshape(2, -1).astype(np.int64)
        return SavedRows(**json.loads(content[8:end])), Visited(rows, last_visit)
    except (ValueError, TypeError):
        raise ValueError("the head's state is damaged, of another version, or not one of a ClassifierHead") from None
