"""What names of torch and torchvision are in gpuload: for the error that a name is not here.

Imported when a name of `gpuload` or `gpuload.transforms` is not found. No torch.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["missing"]

# Names of torch and torchvision that a user may look for in `gpuload`.
HERE: Final = {
    "BoundingBoxes": "write gpuload.Boxes(array, format)",
    "CocoCaptions": "write gpuload.wrap(torchvision.datasets.CocoCaptions(…))",
    "CocoDetection": "write gpuload.wrap(torchvision.datasets.CocoDetection(…))",
    "DataLoader": "write gpuload.Loader, which takes its arguments",
    "DatasetFolder": "write gpuload.ImageFolder(root, extensions=…)",
    "DistributedSampler": "leave it out: gpuload.Loader divides samples among ranks by itself",
    "KeyPoints": "write gpuload.Keypoints(array)",
    "Video": "return a list of images",
    "WeightedRandomSampler": "write gpuload.Loader(weights=…)",
    "default_collate": "leave it out: gpuload.Loader does the same without a collate_fn",
    "read_image": "write gpuload.read(path), which leaves the decoding to gpuload.Loader",
}
# Of torch.utils.data, and of use beside a `Loader`.
AS_THEY_ARE: Final = (
    "BatchSampler", "ChainDataset", "ConcatDataset", "Dataset", "IterableDataset", "RandomSampler", "Sampler",
    "SequentialSampler", "StackDataset", "Subset", "SubsetRandomSampler", "TensorDataset", "random_split",
)  # fmt: skip
# Names of torchvision's that a user may look for in `gpuload.transforms`; more are in `interop.tables`.
TRANSFORMS: Final = {
    "AutoAugmentPolicy": "write AutoAugment(policy='imagenet'), 'cifar10' or 'svhn'",
    "InterpolationMode": "write its name, as in Resize(224, interpolation='bicubic')",
    "Transform": "a transform of your own is a subclass of Custom, or Lambda(function)",
}


def missing(module: str, name: str) -> AttributeError:
    """The error that a module of gpuload has no such name; it says what to write instead, if that is known."""
    text = f"module {module!r} has no attribute {name!r}"
    hint = None if name.startswith("_") else _in_transforms(name) if "." in module else _in_gpuload(name)
    return AttributeError(f"{text}; {hint}" if hint else text, name=name, obj=sys.modules[module])


def _in_gpuload(name: str) -> str | None:
    from gpuload import transforms

    if name in transforms.__all__:
        return f"write gpuload.transforms.{name}"
    if name in AS_THEY_ARE:
        return f"use torch.utils.data.{name}, which gpuload.Loader takes as it is"
    return HERE.get(name)


def _in_transforms(name: str) -> str | None:
    from gpuload.transforms.interop.tables import NOTHING_TO_DO, REFUSED, TO_DTYPE

    if name in TO_DTYPE:
        return "write ToDtype('float32', scale=True); Normalize scales by itself, and tensors are what a batch holds"
    if name in NOTHING_TO_DO:
        return "leave it out: batches hold tensors, whatever the dataset returns"
    if name in sys.modules["gpuload"].__all__ and name != "transforms":
        return f"write gpuload.{name}"
    return TRANSFORMS.get(name) or REFUSED.get(name)
