"""From a program to the jobs of the fused kernels: plain numbers, no torch or Triton, so workers can make them."""
