"""One shard as a state machine: reads, writes, checkpoints, rollbacks, in groups that commit together.

Import from it: all of its modules, by `server`.
It may import: `common`, `core`, `protocol` and `storage`.
"""
