"""Converts a program to the jobs of the fused kernels. This needs neither torch nor Triton, so workers can do it."""
