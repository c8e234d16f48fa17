"""A run's directory and life: its files, checkpoints, resuming, records and end.

`claim` and `resume` decide whether a run may use a directory; `directory` reads its files, also after the run has ended;
`recorder` writes its records.
"""
