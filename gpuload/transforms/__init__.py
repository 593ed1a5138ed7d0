"""Transforms with torchvision's names, arguments, defaults and semantics, but with random parameters per sample.

This package declares transforms and draws their random parameters; `gpuload.stage` applies them. Workers import it, so
it does not import torch. Each transform is imported on first use, since a worker needs only the transforms of its
chain, and importing all transforms would take longer than all of a worker's other imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.transforms.base import Uniforms, by_epoch
    from gpuload.transforms.blur_noise import JPEG, ElasticTransform, GaussianBlur, GaussianNoise
    from gpuload.transforms.chain import Chain
    from gpuload.transforms.colour import (
        ColorJitter,
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
    from gpuload.transforms.composite import Compose, Identity, MultiView, RandomApply, RandomChoice, RandomOrder
    from gpuload.transforms.convert import Normalize, ToDtype, UniformTemporalSubsample
    from gpuload.transforms.custom import Custom, Lambda
    from gpuload.transforms.erasing import RandomErasing
    from gpuload.transforms.gathering import CopyPaste, Mosaic
    from gpuload.transforms.geometry import (
        CenterCrop,
        Pad,
        RandomCrop,
        RandomHorizontalFlip,
        RandomResizedCrop,
        RandomRotate90,
        RandomTranspose,
        RandomVerticalFlip,
        RandomZoomOut,
        Resize,
    )
    from gpuload.transforms.interop import from_timm, from_torchvision
    from gpuload.transforms.mixing import CutMix, MixUp
    from gpuload.transforms.policies import AugMix, AutoAugment, RandAugment, TrivialAugmentWide
    from gpuload.transforms.program.draws import Program
    from gpuload.transforms.resizing import (
        CenterCropOrPad,
        RandomCropOrPad,
        RandomResize,
        RandomShortestSize,
        ResizeKeepRatio,
        ScaleJitter,
        TrimBorder,
    )
    from gpuload.transforms.targets import (
        ClampBoundingBoxes,
        ClampKeyPoints,
        ConvertBoundingBoxFormat,
        RandomIoUCrop,
        SanitizeBoundingBoxes,
        SanitizeKeyPoints,
    )
    from gpuload.transforms.timm_policies import TimmAugMix, TimmAutoAugment, TimmRandAugment
    from gpuload.transforms.warps import RandomAffine, RandomPerspective, RandomRotation

    # Defined in a higher layer; this package only re-exports it.
    def apply(transforms: Any, sample: Any, *, seed: int = 0, device: Any = "cpu") -> Any: ...


# The public names of each module.
_MODULES = {
    "base": "Uniforms by_epoch",
    "blur_noise": "ElasticTransform GaussianBlur GaussianNoise JPEG",
    "chain": "Chain",
    "colour": "ColorJitter Grayscale RandomAdjustSharpness RandomAutocontrast RandomChannelPermutation RandomEqualize "
    "RandomGrayscale RandomInvert RandomPhotometricDistort RandomPosterize RandomSolarize",
    "composite": "Compose Identity MultiView RandomApply RandomChoice RandomOrder",
    "convert": "Normalize ToDtype UniformTemporalSubsample",
    "custom": "Custom Lambda",
    "erasing": "RandomErasing",
    "gathering": "CopyPaste Mosaic",
    "geometry": "CenterCrop Pad RandomCrop RandomHorizontalFlip RandomResizedCrop RandomRotate90 RandomTranspose "
    "RandomVerticalFlip RandomZoomOut Resize",
    "interop": "from_timm from_torchvision",
    "mixing": "CutMix MixUp",
    "policies": "AugMix AutoAugment RandAugment TrivialAugmentWide",
    "program.draws": "Program",
    "resizing": "CenterCropOrPad RandomCropOrPad RandomResize RandomShortestSize ResizeKeepRatio ScaleJitter "
    "TrimBorder",
    "targets": "ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat RandomIoUCrop SanitizeBoundingBoxes "
    "SanitizeKeyPoints",
    "timm_policies": "TimmAugMix TimmAutoAugment TimmRandAugment",
    "warps": "RandomAffine RandomPerspective RandomRotation",
}
_MODULE_OF_NAME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "JPEG", "AugMix", "AutoAugment", "CenterCrop", "CenterCropOrPad", "Chain", "ClampBoundingBoxes", "ClampKeyPoints",
    "ColorJitter", "Compose", "ConvertBoundingBoxFormat", "CopyPaste", "Custom", "CutMix", "ElasticTransform",
    "GaussianBlur", "GaussianNoise", "Grayscale", "Identity", "Lambda", "MixUp", "Mosaic", "MultiView", "Normalize",
    "Pad", "Program", "RandAugment", "RandomAdjustSharpness", "RandomAffine", "RandomApply", "RandomAutocontrast",
    "RandomChannelPermutation", "RandomChoice", "RandomCrop", "RandomCropOrPad", "RandomEqualize", "RandomErasing",
    "RandomGrayscale", "RandomHorizontalFlip", "RandomInvert", "RandomIoUCrop", "RandomOrder", "RandomPerspective",
    "RandomPhotometricDistort", "RandomPosterize", "RandomResize", "RandomResizedCrop", "RandomRotate90",
    "RandomRotation", "RandomShortestSize", "RandomSolarize", "RandomTranspose", "RandomVerticalFlip", "RandomZoomOut",
    "Resize", "ResizeKeepRatio", "SanitizeBoundingBoxes", "SanitizeKeyPoints", "ScaleJitter", "TimmAugMix",
    "TimmAutoAugment", "TimmRandAugment", "ToDtype", "TrimBorder", "TrivialAugmentWide", "UniformTemporalSubsample",
    "Uniforms", "apply", "by_epoch", "from_timm", "from_torchvision",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = (
        "gpuload.loader.loader"
        if name == "apply"
        else f"{__name__}.{_MODULE_OF_NAME[name]}"
        if name in _MODULE_OF_NAME
        else None
    )
    if module is None:
        from gpuload.transforms.names import missing_name_error

        raise missing_name_error(__name__, name)
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
