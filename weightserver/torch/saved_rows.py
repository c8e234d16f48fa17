"""What a head's state_dict contains: a checkpoint of the rows, and the recently visited ones."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from weightserver import Checkpoint, NoTableError, WeightClient
from weightserver.core.arrays import Int64Array


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

    @classmethod
    def of(cls, kept: Checkpoint, table: bytes, order_seed: int) -> SavedRows:
        return cls(kept.name, kept.checkpoint_id.hex(), kept.step, table.hex(), order_seed)

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
