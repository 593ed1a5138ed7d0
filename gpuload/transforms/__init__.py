"""The transforms: torchvision's names, arguments, defaults and meaning, every draw made for each sample.

This package only declares and draws; `gpuload.backends` applies. It is imported by workers and imports no torch.
"""

from gpuload.transforms.augmix import AugMix
from gpuload.transforms.auto import AutoAugment, RandAugment, TrivialAugmentWide
from gpuload.transforms.blur_noise import GaussianBlur, GaussianNoise
from gpuload.transforms.boxes import (
    ClampBoundingBoxes,
    ConvertBoundingBoxFormat,
    RandomIoUCrop,
    SanitizeBoundingBoxes,
)
from gpuload.transforms.chain import Chain, Draws
from gpuload.transforms.color import ColorJitter
from gpuload.transforms.color_random import (
    Grayscale,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPhotometricDistort,
    RandomPosterize,
    RandomSolarize,
)
from gpuload.transforms.composite import Compose, Identity, RandomApply, RandomChoice, RandomOrder
from gpuload.transforms.convert import Normalize, ToDtype
from gpuload.transforms.erasing import RandomErasing
from gpuload.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, Resize
from gpuload.transforms.interop import from_timm, from_torchvision
from gpuload.transforms.keep_ratio import CenterCropOrPad, RandomCropOrPad, ResizeKeepRatio, TrimBorder
from gpuload.transforms.mixing import CutMix, MixUp
from gpuload.transforms.multiview import MultiView
from gpuload.transforms.padding import Pad, RandomZoomOut
from gpuload.transforms.random_resized_crop import RandomResizedCrop
from gpuload.transforms.resizing import RandomResize, RandomShortestSize, ScaleJitter
from gpuload.transforms.timm_randaugment import TimmRandAugment
from gpuload.transforms.warps import RandomAffine, RandomPerspective, RandomRotation

__all__ = [
    "AugMix",
    "AutoAugment",
    "CenterCrop",
    "CenterCropOrPad",
    "Chain",
    "ClampBoundingBoxes",
    "ColorJitter",
    "Compose",
    "ConvertBoundingBoxFormat",
    "CutMix",
    "Draws",
    "GaussianBlur",
    "GaussianNoise",
    "Grayscale",
    "Identity",
    "MixUp",
    "MultiView",
    "Normalize",
    "Pad",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomApply",
    "RandomAutocontrast",
    "RandomChoice",
    "RandomCrop",
    "RandomCropOrPad",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomIoUCrop",
    "RandomOrder",
    "RandomPerspective",
    "RandomPhotometricDistort",
    "RandomPosterize",
    "RandomResize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomShortestSize",
    "RandomSolarize",
    "RandomVerticalFlip",
    "RandomZoomOut",
    "Resize",
    "ResizeKeepRatio",
    "SanitizeBoundingBoxes",
    "ScaleJitter",
    "TimmRandAugment",
    "ToDtype",
    "TrimBorder",
    "TrivialAugmentWide",
    "from_timm",
    "from_torchvision",
]
