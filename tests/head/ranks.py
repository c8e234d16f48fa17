"""Two ranks, which torchrun starts once for all tests of heads: python -m tests.head.ranks DIRECTORY SERVER...

They do the part of each module, and write into the directory what its tests compare.
"""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.head import test_failures, test_looking, test_ranks, test_scaling


def main() -> None:
    directory, servers = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    for module in (test_ranks, test_looking, test_scaling, test_failures):
        module.as_rank(directory, servers)
    gc.collect()  # a head in a traceback keeps the process group, which then ends the process if it is collected later
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
