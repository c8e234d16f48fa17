"""Experiments on what is learnt: the paper's tables, and what else learns from the same images for comparison."""
