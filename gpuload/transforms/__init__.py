"""The transforms: torchvision's names, arguments, defaults and meaning, every draw made for each sample.

This package only declares and draws; `gpuload.backends` applies. It is imported by workers and imports no torch.
"""

from gpuload.transforms.chain import Chain, Draws
from gpuload.transforms.color import ColorJitter
from gpuload.transforms.composite import Compose, Identity, RandomApply, RandomChoice, RandomOrder
from gpuload.transforms.convert import Normalize, ToDtype
from gpuload.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, Resize
from gpuload.transforms.multiview import MultiView
from gpuload.transforms.random_resized_crop import RandomResizedCrop

__all__ = [
    "CenterCrop",
    "Chain",
    "ColorJitter",
    "Compose",
    "Draws",
    "Identity",
    "MultiView",
    "Normalize",
    "RandomApply",
    "RandomChoice",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomOrder",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToDtype",
]
