"""The operator's commands on shards and their directories; one module per command.

Import from it: each module, by the command line; `arguments` and `export`, by the trainer.
It may import: `common`, `core`, `protocol`, `client` and `storage`.
"""
