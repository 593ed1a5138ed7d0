"""The loaders that are measured: one module each, ``python -m benchmarks.peers.NAME RECIPE``, in its own process."""
