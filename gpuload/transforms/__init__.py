"""The transforms: torchvision's names, arguments, defaults and meaning, every draw made for each sample.

This package only declares and draws; `gpuload.stage` applies. It is imported by workers and imports no torch.

This module only re-exports, and imports what it names when it is first used: a worker needs but the transforms of its
chain, and all of them would take it longer than everything else that it imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.transforms.augmix import AugMix
    from gpuload.transforms.auto import AutoAugment, RandAugment, TrivialAugmentWide
    from gpuload.transforms.blur_noise import GaussianBlur, GaussianNoise
    from gpuload.transforms.boxes import (
        ClampBoundingBoxes,
        ConvertBoundingBoxFormat,
        RandomIoUCrop,
        SanitizeBoundingBoxes,
    )
    from gpuload.transforms.chain import Chain
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
    from gpuload.transforms.program.draws import Draws as Draws
    from gpuload.transforms.program.draws import Program
    from gpuload.transforms.random_resized_crop import RandomResizedCrop
    from gpuload.transforms.resizing import RandomResize, RandomShortestSize, ScaleJitter
    from gpuload.transforms.timm_randaugment import TimmRandAugment
    from gpuload.transforms.warps import RandomAffine, RandomPerspective, RandomRotation

# Where each name is at home, below this package.
_HOMES = {
    "AugMix": "augmix",
    "AutoAugment": "auto",
    "CenterCrop": "geometry",
    "CenterCropOrPad": "keep_ratio",
    "Chain": "chain",
    "ClampBoundingBoxes": "boxes",
    "ColorJitter": "color",
    "Compose": "composite",
    "ConvertBoundingBoxFormat": "boxes",
    "CutMix": "mixing",
    "Draws": "program.draws",  # what `Program` was called first
    "GaussianBlur": "blur_noise",
    "GaussianNoise": "blur_noise",
    "Grayscale": "color_random",
    "Identity": "composite",
    "MixUp": "mixing",
    "MultiView": "multiview",
    "Normalize": "convert",
    "Pad": "padding",
    "Program": "program.draws",
    "RandAugment": "auto",
    "RandomAdjustSharpness": "color_random",
    "RandomAffine": "warps",
    "RandomApply": "composite",
    "RandomAutocontrast": "color_random",
    "RandomChoice": "composite",
    "RandomCrop": "geometry",
    "RandomCropOrPad": "keep_ratio",
    "RandomEqualize": "color_random",
    "RandomErasing": "erasing",
    "RandomGrayscale": "color_random",
    "RandomHorizontalFlip": "geometry",
    "RandomInvert": "color_random",
    "RandomIoUCrop": "boxes",
    "RandomOrder": "composite",
    "RandomPerspective": "warps",
    "RandomPhotometricDistort": "color_random",
    "RandomPosterize": "color_random",
    "RandomResize": "resizing",
    "RandomResizedCrop": "random_resized_crop",
    "RandomRotation": "warps",
    "RandomShortestSize": "resizing",
    "RandomSolarize": "color_random",
    "RandomVerticalFlip": "geometry",
    "RandomZoomOut": "padding",
    "Resize": "geometry",
    "ResizeKeepRatio": "keep_ratio",
    "SanitizeBoundingBoxes": "boxes",
    "ScaleJitter": "resizing",
    "TimmRandAugment": "timm_randaugment",
    "ToDtype": "convert",
    "TrimBorder": "keep_ratio",
    "TrivialAugmentWide": "auto",
    "from_timm": "interop",
    "from_torchvision": "interop",
}

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
    "GaussianBlur",
    "GaussianNoise",
    "Grayscale",
    "Identity",
    "MixUp",
    "MultiView",
    "Normalize",
    "Pad",
    "Program",
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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
