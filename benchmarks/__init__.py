"""Benchmarks of gpuload against other loaders; not part of the installed package."""
