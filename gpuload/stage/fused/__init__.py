"""Fused Triton kernels: `kernel` has the kernel, `gpuload.transforms.program.fusing` how a program becomes its jobs."""

from gpuload.stage.fused.backend import FusedBackend

__all__ = ["FusedBackend"]
