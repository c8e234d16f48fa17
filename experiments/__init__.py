"""Reproduces the paper's tables at a scale that a CPU can train: cells, their runs, and the page about them.

A cell is one training run with its evaluations, for any number of seeds; a table is cells with the paper's numbers and
claims about them. `tables` holds these as data, `baselines` trains other methods, `runner` runs the cells, one process
each, `results` collects what they measured, and `page` writes docs/results.md and its appendix from it.
"""
