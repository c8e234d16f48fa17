"""What only reproduces the paper: detection, segmentation, saliency maps, and classes divided by clustering."""
