"""A shard's directory: LMDB, and the records kept in it. Nothing else imports lmdb.

Import from it: all of its modules, by `shard`, `server` and `operations`.
It may import: `common` and `core`.
"""
