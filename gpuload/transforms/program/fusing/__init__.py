"""Conversion of a program to the jobs of the fused kernels. The jobs are plain numbers and need neither torch nor
Triton, so workers can make them."""
