"""One shard as a process: the gRPC service, admission, metrics, start and stop.

Import from it: `process`, by the command line.
It may import: `common`, `core`, `protocol`, `storage` and `shard`.
"""
