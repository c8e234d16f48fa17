#!/bin/sh
# Trains into $OUTPUT, or goes on with the run that is there: train.sh PRESET --OPTIONS. torchrun is told by its own
# environment (PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...).
set -eu
exec torchrun -m trainer "$@" --output "$OUTPUT" --resume auto
