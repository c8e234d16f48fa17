"""Our shard beside what else could hold a classifier's rows: `python -m benchmarks.peers`."""
