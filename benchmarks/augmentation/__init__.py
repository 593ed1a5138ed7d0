"""The cost of augmenting a batch: gpuload's backends, torchvision v2, Kornia and DALI, on the CPU and on CUDA.

`cases` defines the transforms and recipes to measure, `photographs` the input, `contenders` the implementations, `dali`
those in DALI's dynamic mode, `measuring` the clocks and rounds, and `kernel` the fused kernels alone. `tables` formats
the report, and `__main__` is the command. `own` and `boxes` are separate commands.
"""
