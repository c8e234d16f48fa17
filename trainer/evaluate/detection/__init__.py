"""Object detection on Pascal VOC: its files, the network, its training and the average precision."""
