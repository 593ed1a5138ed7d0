"""The loaders to measure, each in its own process: ``python -m benchmarks.peers.protocol NAME RECIPE``."""
