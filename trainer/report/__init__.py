"""The HTML report of a run: its curves, results and settings, nearest neighbours, confusion and near-duplicates.

Import from it: `__main__` and `duplicates`, by the commands `pic report` and `duplicates`.
It may import: `data`, `evaluate` and `run`.
"""
