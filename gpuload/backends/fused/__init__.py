"""Fused Triton kernels; see `gpuload.backends.fused.kernel` for the kernel, `passes` for what is brought to it."""

from gpuload.backends.fused.backend import FusedBackend

__all__ = ["FusedBackend"]
