"""Exports for other programs: an encoder for other libraries, and rows with their images.

Import from it: nothing; `python -m trainer.export` runs it.
It may import: `data` and `run`.
"""
