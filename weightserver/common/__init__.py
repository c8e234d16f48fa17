"""What every process needs and no row knows of: files, logs, addresses, TLS, timing.

Import from it: all of its modules, from everywhere, the trainer included.
It may import: no other folder.
"""
