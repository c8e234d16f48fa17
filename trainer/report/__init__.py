"""The HTML report of a run: its curves, results and settings, nearest neighbours and saliency.

Import from it: `__main__`, by the command `python -m trainer report`.
It may import: `data`, `evaluate` and `run`.
"""
