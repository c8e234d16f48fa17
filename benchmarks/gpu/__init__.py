"""Benchmarks of a machine with GPUs: `python -m benchmarks.gpu`, or `make bench-gpu`."""
