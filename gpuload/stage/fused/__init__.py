"""Fused Triton kernels. `kernel` has the kernel; `gpuload.transforms.program.fusing` turns a program into its jobs."""

from gpuload.stage.fused.backend import FusedBackend

__all__ = ["FusedBackend"]
