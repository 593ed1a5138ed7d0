"""Chains of torchvision and timm, written as chains of gpuload. Neither library is imported: their objects are known by
the names of their classes and modules, so gpuload needs none of the two. Imported by workers with the rest of
`gpuload.transforms`; no torch here."""

from gpuload.transforms.interop.from_timm import from_timm
from gpuload.transforms.interop.from_torchvision import from_torchvision

__all__ = ["from_timm", "from_torchvision"]
