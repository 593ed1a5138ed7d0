"""Fused Triton kernels; see `gpuload.stage.fused.kernel` for the kernel, `passes` for how a program becomes passes."""

from gpuload.stage.fused.backend import FusedBackend

__all__ = ["FusedBackend"]
