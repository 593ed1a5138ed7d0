"""Measurements of gpuload beside other loaders; not part of the installed package."""
