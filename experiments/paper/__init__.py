"""Reproduces the paper's further results: object detection on Pascal VOC and semantic segmentation on Cityscapes."""
