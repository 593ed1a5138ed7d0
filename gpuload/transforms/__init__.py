"""The transforms: torchvision's names, arguments, defaults and meaning, every draw made for each sample.

This package only declares and draws; `gpuload.backends` applies. It is imported by workers and imports no torch.
"""

from gpuload.transforms.augmix import AugMix
from gpuload.transforms.auto import AutoAugment, RandAugment, TrivialAugmentWide
from gpuload.transforms.chain import Chain, Draws
from gpuload.transforms.color import ColorJitter
from gpuload.transforms.composite import Compose, Identity, RandomApply, RandomChoice, RandomOrder
from gpuload.transforms.convert import Normalize, ToDtype
from gpuload.transforms.erasing import RandomErasing
from gpuload.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, Resize
from gpuload.transforms.interop import from_timm, from_torchvision
from gpuload.transforms.keep_ratio import CenterCropOrPad, RandomCropOrPad, ResizeKeepRatio, TrimBorder
from gpuload.transforms.mixing import CutMix, MixUp
from gpuload.transforms.multiview import MultiView
from gpuload.transforms.random_resized_crop import RandomResizedCrop

__all__ = [
    "AugMix",
    "AutoAugment",
    "CenterCrop",
    "CenterCropOrPad",
    "Chain",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Draws",
    "Identity",
    "MixUp",
    "MultiView",
    "Normalize",
    "RandAugment",
    "RandomApply",
    "RandomChoice",
    "RandomCrop",
    "RandomCropOrPad",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomOrder",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ResizeKeepRatio",
    "ToDtype",
    "TrimBorder",
    "TrivialAugmentWide",
    "from_timm",
    "from_torchvision",
]
