"""One shard as a process: the gRPC service, admission of calls, metrics, start and stop.

Import from it: `serve`, by the command line.
It may import: `common`, `core`, `protocol`, `storage` and `shard`.
"""
