"""A run's directory and life: its files, checkpoints, rows, resuming, records and end.

Import from it: all of its modules. `claim` and `resume` decide whether a run may use a directory, `opening` opens its
rows and `stored_rows` reads them after a run, `directory` reads its files during a run and after it, and `recorder`
writes its records.
It may import: `data`.
"""
