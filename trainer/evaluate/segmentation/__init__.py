"""Semantic segmentation: Cityscapes, the network and its training."""
