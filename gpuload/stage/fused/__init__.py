"""Fused Triton kernels; see `gpuload.stage.fused.kernel` for the kernel, `passes` for what is brought to it."""

from gpuload.stage.fused.backend import FusedBackend

__all__ = ["FusedBackend"]
