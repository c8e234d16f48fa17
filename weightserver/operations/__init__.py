"""What operators do with shards and their directories; one module a command.

Import from it: each module, by the command line.
It may import: `common`, `core`, `protocol`, `client` and `storage`.
"""
