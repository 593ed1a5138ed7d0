"""From a program to the jobs of the fused kernels: numbers only, without torch and Triton, as workers make them too."""
