"""Tables as most tests begin with them, and everything that a client sees of one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightserver import TableSpec, WeightClient

SLOW = np.full(100, 0.1, np.float32)


def begin(client: WeightClient, spec: TableSpec, rates: npt.ArrayLike = SLOW, *, session: str = "run") -> int:
    """Makes a table and opens a session of a client that knows these learning rates; returns its epoch."""
    client.create_table(spec)
    client.extend_schedule(0, rates)
    return client.open_session(session)


def everything(client: WeightClient) -> tuple[object, ...]:
    info = client.describe()
    rows = vars(client.fetch_state(np.arange(info.spec.num_rows)))
    told = (info.spec, info.epoch, info.run, info.clock, info.horizon, info.rows_stored, client.checkpoints())
    return *(array.tobytes() for array in rows.values()), *told
