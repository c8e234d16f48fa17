"""The learning rates that a request to a shard names, without a client."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightserver.shard.rates import GivenRates
from weightserver.shard.shard import Shard


def naming(learning_rates: npt.ArrayLike) -> GivenRates:
    """All of them, as a client names them that knows nothing of the shard."""
    return GivenRates(learning_rates=np.asarray(learning_rates, np.float32))


def used_by(shard: Shard, further: npt.ArrayLike = ()) -> GivenRates:
    """Those of the steps below the shard's clock, and these."""
    used = shard.used_rates
    return GivenRates(len(used), used.digest(len(used)), np.asarray(further, np.float32))
