"""Helpers of every process that do not depend on rows: files, logs, addresses, TLS, timing.

Import from it: all of its modules, from everywhere, the trainer included.
It may import: no other folder.
"""
