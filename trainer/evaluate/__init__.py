"""Evaluates encoders by the protocols that the field reports (paper, appendix, Experimental Settings).

Every protocol has a module with its settings and a function from an `Evaluation` to an `Outcome`; `command` runs them.
Those that only reproduce the paper's results are `experiments.paper`. Settings that are not given are chosen on images
held out from the training set, never on test images.

Import from it: single modules, by the loop, the demo, `report` and experiments.
It may import: `data` and `run`.
"""
