"""What only reproduces the paper: detection, segmentation, and classes divided by clustering."""
