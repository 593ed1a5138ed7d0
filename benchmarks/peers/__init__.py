"""The loaders that are measured: ``python -m benchmarks.peers.protocol NAME RECIPE``, each in its own process."""
