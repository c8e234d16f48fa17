"""What a head's state_dict contains: a checkpoint of the rows, and the recently visited ones."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from weightserver import Checkpoint, NoTableError, WeightClient
from weightserver.core.arrays import Int64Array
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
    order_seed: int
    """Seed of the order of the rows, by which each class has its row."""
    num_classes: int = 0
    """Number of classes, of which the order is a function too; 0 in states of older versions."""

    @classmethod
    def of(cls, kept: Checkpoint, table: bytes, order: RangesOrder) -> SavedRows:
        return cls(kept.name, kept.checkpoint_id.hex(), kept.step, table.hex(), order.order_seed, order.num_rows)

    def check_order(self, order: RangesOrder) -> None:
        """Raises ValueError unless each class has the same row in `order`."""
        if self.order_seed != order.order_seed:
            raise ValueError(
                f"the state's rows have the order of order_seed={self.order_seed}, the head that of "
                f"{order.order_seed}: give it the same order_seed"
            )
        if self.num_classes not in (0, order.num_rows):
            raise ValueError(
                f"the state's rows are those of {self.num_classes} classes, the head has {order.num_rows}, in another "
                "order: give it the same num_classes"
            )

    def check_held(self, client: WeightClient) -> None:
        """Raises ValueError unless the servers retain this checkpoint."""
        try:
            found = {kept.name: kept.checkpoint_id.hex() for kept in client.checkpoints()}
            same_table = client.table_identity().hex() == self.table
        except NoTableError:
            found, same_table = {}, False
        if not same_table or found.get(self.name) != self.checkpoint_id:
            instead = "another of that name" if self.name in found else f"only {sorted(found)}"
            raise ValueError(
                f"the weight servers do not hold checkpoint {self.name!r} (step {self.step}) of this state, {instead}: "
                "give the servers or the directory that it was saved with, or restore their backup"
            )


def to_tensor(saved: SavedRows, recent: tuple[Int64Array, Int64Array]) -> Tensor:
    """uint8 [n], for any file of tensors: a length, JSON, then recent rows and their last visits as int64."""
    text = json.dumps(asdict(saved)).encode()
    arrays = np.stack(recent).astype("<i8").tobytes()
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + arrays), dtype=torch.uint8)


def from_tensor(state: Tensor) -> tuple[SavedRows, tuple[Int64Array, Int64Array]]:
    """The inverse of `to_tensor`. Raises ValueError for anything else."""
    content = state.cpu().numpy().tobytes()
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        rows, last_visit = np.frombuffer(content[end:], "<i8").reshape(2, -1).astype(np.int64)
        return SavedRows(**json.loads(content[8:end])), (rows, last_visit)
    except (ValueError, TypeError):
        raise ValueError("the head's state is damaged, or not one of a ClassifierHead") from None
