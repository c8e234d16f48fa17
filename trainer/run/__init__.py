"""A run's directory and life: its files, checkpoints, resuming, records and end.

`claim` and `resume` decide whether a run may use a directory; `directory` reads its files, during a run and after it;
`recorder` writes its records.
"""
