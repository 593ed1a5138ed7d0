"""Chains of torchvision and timm, written as chains of gpuload. Neither library is imported: their objects are
recognised by the names of their classes and modules."""

from gpuload.transforms.interop.from_timm import from_timm
from gpuload.transforms.interop.from_torchvision import from_torchvision

__all__ = ["from_timm", "from_torchvision"]
