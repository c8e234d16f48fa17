"""What only reproduces the paper: detection and segmentation."""
