"""What augmenting a batch costs: gpuload's backends beside torchvision v2 and Kornia, on the CPU and on CUDA.

`cases` says what is measured, `photographs` on what, `contenders` by whom, `measuring` how, `kernel` what the fused
kernels alone take; `tables` makes the report of it, and `__main__` is the command. `own` is a command by itself.
"""
