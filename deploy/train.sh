#!/bin/sh
# Trains into $OUTPUT, or resumes the run in it: train.sh PRESET --OPTIONS. torchrun reads its settings from its own
# environment (PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...).
set -eu
exec torchrun -m trainer "$@" --output "$OUTPUT" --resume auto
