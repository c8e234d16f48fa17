"""Imports of the fork server: all that a rank needs, and before torch the simulated GPU's shim if there is one."""

from tests.helpers import pretended_gpu

if pretended_gpu.unavailable() is None:
    pretended_gpu.load()

import torch._inductor  # noqa: F401  (the optimizer imports it at its first step, for 2 s)

import benchmarks.gpu.plain  # noqa: F401
import tests.helpers.small_run  # noqa: F401
import trainer.loop  # noqa: F401
