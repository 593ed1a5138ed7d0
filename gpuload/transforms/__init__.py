"""The transforms: torchvision's names, arguments, defaults and meaning, but each sample has draws of its own.

This package declares and draws; `gpuload.stage` applies. Workers import it, so it imports no torch. A transform is
imported when it is first used: a worker needs only those of its chain, and all of them would take it longer than
everything else that it imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.transforms.augmix import AugMix
    from gpuload.transforms.auto import AutoAugment, RandAugment, TrivialAugmentWide
    from gpuload.transforms.base import Uniforms
    from gpuload.transforms.blur_noise import GaussianBlur, GaussianNoise
    from gpuload.transforms.boxes import (
        ClampBoundingBoxes,
        ConvertBoundingBoxFormat,
        RandomIoUCrop,
        SanitizeBoundingBoxes,
    )
    from gpuload.transforms.chain import Chain
    from gpuload.transforms.clips import UniformTemporalSubsample
    from gpuload.transforms.color import ColorJitter
    from gpuload.transforms.color_random import (
        Grayscale,
        RandomAdjustSharpness,
        RandomAutocontrast,
        RandomChannelPermutation,
        RandomEqualize,
        RandomGrayscale,
        RandomInvert,
        RandomPhotometricDistort,
        RandomPosterize,
        RandomSolarize,
    )
    from gpuload.transforms.composite import Compose, Identity, RandomApply, RandomChoice, RandomOrder
    from gpuload.transforms.convert import Normalize, ToDtype
    from gpuload.transforms.custom import Custom, Lambda
    from gpuload.transforms.elastic import ElasticTransform
    from gpuload.transforms.epochs import by_epoch
    from gpuload.transforms.erasing import RandomErasing
    from gpuload.transforms.gathering import CopyPaste, Mosaic
    from gpuload.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, Resize
    from gpuload.transforms.interop import from_timm, from_torchvision
    from gpuload.transforms.jpeg import JPEG
    from gpuload.transforms.keep_ratio import CenterCropOrPad, RandomCropOrPad, ResizeKeepRatio, TrimBorder
    from gpuload.transforms.keypoints import ClampKeyPoints, SanitizeKeyPoints
    from gpuload.transforms.mixing import CutMix, MixUp
    from gpuload.transforms.multiview import MultiView
    from gpuload.transforms.padding import Pad, RandomZoomOut
    from gpuload.transforms.program.draws import Draws as Draws
    from gpuload.transforms.program.draws import Program
    from gpuload.transforms.random_resized_crop import RandomResizedCrop
    from gpuload.transforms.resizing import RandomResize, RandomShortestSize, ScaleJitter
    from gpuload.transforms.timm_policies import TimmAugMix, TimmAutoAugment
    from gpuload.transforms.timm_randaugment import TimmRandAugment
    from gpuload.transforms.warps import RandomAffine, RandomPerspective, RandomRotation

    # Far above this room, which only names it for users.
    def apply(transforms: Any, sample: Any, *, seed: int = 0, device: Any = "cpu") -> Any: ...


# The public names of each module. `Draws` is the former name of `Program`.
_MODULES = {
    "augmix": "AugMix",
    "auto": "AutoAugment RandAugment TrivialAugmentWide",
    "base": "Uniforms",
    "blur_noise": "GaussianBlur GaussianNoise",
    "boxes": "ClampBoundingBoxes ConvertBoundingBoxFormat RandomIoUCrop SanitizeBoundingBoxes",
    "chain": "Chain",
    "clips": "UniformTemporalSubsample",
    "color": "ColorJitter",
    "color_random": "Grayscale RandomAdjustSharpness RandomAutocontrast RandomChannelPermutation "
    "RandomEqualize RandomGrayscale RandomInvert RandomPhotometricDistort RandomPosterize RandomSolarize",
    "composite": "Compose Identity RandomApply RandomChoice RandomOrder",
    "convert": "Normalize ToDtype",
    "custom": "Custom Lambda",
    "elastic": "ElasticTransform",
    "epochs": "by_epoch",
    "erasing": "RandomErasing",
    "gathering": "CopyPaste Mosaic",
    "geometry": "CenterCrop RandomCrop RandomHorizontalFlip RandomVerticalFlip Resize",
    "interop": "from_timm from_torchvision",
    "jpeg": "JPEG",
    "keep_ratio": "CenterCropOrPad RandomCropOrPad ResizeKeepRatio TrimBorder",
    "keypoints": "ClampKeyPoints SanitizeKeyPoints",
    "mixing": "CutMix MixUp",
    "multiview": "MultiView",
    "padding": "Pad RandomZoomOut",
    "program.draws": "Draws Program",
    "random_resized_crop": "RandomResizedCrop",
    "resizing": "RandomResize RandomShortestSize ScaleJitter",
    "timm_policies": "TimmAugMix TimmAutoAugment",
    "timm_randaugment": "TimmRandAugment",
    "warps": "RandomAffine RandomPerspective RandomRotation",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "JPEG", "AugMix", "AutoAugment", "CenterCrop", "CenterCropOrPad", "Chain", "ClampBoundingBoxes", "ClampKeyPoints",
    "ColorJitter", "Compose", "ConvertBoundingBoxFormat", "CopyPaste", "Custom", "CutMix", "ElasticTransform",
    "GaussianBlur", "GaussianNoise", "Grayscale", "Identity", "Lambda", "MixUp", "Mosaic", "MultiView", "Normalize",
    "Pad", "Program", "RandAugment", "RandomAdjustSharpness", "RandomAffine", "RandomApply", "RandomAutocontrast",
    "RandomChannelPermutation", "RandomChoice", "RandomCrop", "RandomCropOrPad", "RandomEqualize", "RandomErasing",
    "RandomGrayscale", "RandomHorizontalFlip", "RandomInvert", "RandomIoUCrop", "RandomOrder", "RandomPerspective",
    "RandomPhotometricDistort", "RandomPosterize", "RandomResize", "RandomResizedCrop", "RandomRotation",
    "RandomShortestSize", "RandomSolarize", "RandomVerticalFlip", "RandomZoomOut", "Resize", "ResizeKeepRatio",
    "SanitizeBoundingBoxes", "SanitizeKeyPoints", "ScaleJitter", "TimmAugMix", "TimmAutoAugment", "TimmRandAugment",
    "ToDtype", "TrimBorder", "TrivialAugmentWide", "UniformTemporalSubsample", "Uniforms", "apply", "by_epoch",
    "from_timm", "from_torchvision",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = "gpuload.loader.loader" if name == "apply" else f"{__name__}.{_HOMES[name]}" if name in _HOMES else None
    if home is None:
        from gpuload.transforms.names import missing

        raise missing(__name__, name)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
