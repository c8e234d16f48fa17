"""What a machine with GPUs does: `python -m benchmarks.gpu`, or `make bench-gpu`."""
