"""Fused Triton kernels. `kernel` contains the kernel; `gpuload.transforms.program.fusing` turns a program into
the kernel's jobs."""

from gpuload.stage.fused.backend import FusedBackend

__all__ = ["FusedBackend"]
