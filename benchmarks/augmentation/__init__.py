"""What augmenting a batch costs: gpuload's backends beside torchvision v2 and Kornia, on the CPU and on CUDA.

`cases` and `recipes` say what is measured, `photographs` on what, `contenders` by whom, `clocks` and `measuring`
how, `kernel` what the fused kernels alone take; `tables` makes the report of it, and `__main__` is the command.
"""
