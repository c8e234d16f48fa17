"""What a row is and how it moves: specs, the correction, blocks, sharding, checkpoints, errors.

Import from it: all of its modules, from everywhere.
It may import: `common` only; no LMDB, no torch.
"""
