"""The HTML report of a run: its curves, results and settings, and nearest neighbours.

Import from it: `__main__`, by the command `pic report`.
It may import: `data`, `evaluate` and `run`.
"""
