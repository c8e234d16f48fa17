#!/bin/sh
# Trains into $OUTPUT, or resumes the run in it: train.sh PRESET --OPTIONS. torchrun reads its settings from its own
# environment (PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...). Ends with the status of the rank that
# ended first, where torchrun always has 1: schedulers tell 143, after SIGTERM and a checkpoint, from a failure.
set -eu
export PET_SHUTDOWN_TIMEOUT="${PET_SHUTDOWN_TIMEOUT:-110}" # for a checkpoint; torchrun kills its ranks after 30 s by default
exec python3 -c '
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

try:
    main()
except ChildFailedError as failed:
    status = failed.get_first_failure()[1].exitcode
    if status < 0:  # killed: it could not say why itself
        print(failed, file=sys.stderr)
    sys.exit(status if status > 0 else 128 - status)
except SignalException as stopped:
    sys.exit(128 + stopped.sigval)
' -m trainer "$@" --output "$OUTPUT" --resume auto
