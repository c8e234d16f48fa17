"""The classifier head as a library for PyTorch; needs the extra `torch`.

Import from it: all of its modules.
It may import: `common` and `core`.
"""
