"""Trains an encoder by instance classification; `python -m trainer --help`."""

import os

# OpenMP threads that spin while they wait take the cores from the shards, the data loading and each other; it is read
# once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
