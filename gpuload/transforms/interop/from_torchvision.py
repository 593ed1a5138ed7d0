"""A chain of torchvision becomes one of gpuload: each transform becomes the one of the same name, argument by argument.

torchvision's objects are recognised by the names of their classes and modules and read by their attributes; neither
torchvision nor torch is imported. What gpuload does not support is an error that names the transform and where it is,
never a chain that means something else.

The tables are for both `torchvision.transforms` and `torchvision.transforms.v2`, whose classes have the same names and,
where both exist, the same attributes. Tests compare them with torchvision's signatures: an argument in no table would
be lost silently.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuload.transforms.arguments import is_sequence
from gpuload.transforms.base import Transform
from gpuload.transforms.composite import Compose, Identity, RandomApply, RandomChoice, RandomOrder
from gpuload.transforms.convert import Normalize, ToDtype
from gpuload.transforms.geometry import CenterCrop, Resize
from gpuload.transforms.names import MODULE, NOTHING_TO_DO, REFUSED, TO_DTYPE

__all__ = ["ARGUMENTS", "PRESETS", "from_torchvision"]

# Ours has the same name and arguments; theirs keeps each argument in an attribute of that name.
ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "AugMix": ("severity", "mixture_width", "chain_depth", "alpha", "all_ops", "interpolation", "fill"),
    "AutoAugment": ("policy", "interpolation", "fill"),
    "CenterCrop": ("size",),
    "ClampBoundingBoxes": ("clamping_mode",),
    "ClampKeyPoints": (),
    "ColorJitter": ("brightness", "contrast", "saturation", "hue"),
    "ConvertBoundingBoxFormat": ("format",),
    "CutMix": ("alpha", "num_classes", "labels_getter"),
    "ElasticTransform": ("alpha", "sigma", "interpolation", "fill"),
    "GaussianBlur": ("kernel_size", "sigma"),
    "GaussianNoise": ("mean", "sigma", "clip"),
    "Grayscale": ("num_output_channels",),
    "JPEG": ("quality",),
    "MixUp": ("alpha", "num_classes", "labels_getter"),
    "Normalize": ("mean", "std", "inplace"),
    "Pad": ("padding", "fill", "padding_mode"),
    "RandAugment": ("num_ops", "magnitude", "num_magnitude_bins", "interpolation", "fill"),
    "RandomAdjustSharpness": ("sharpness_factor", "p"),
    "RandomAffine": ("degrees", "translate", "scale", "shear", "interpolation", "fill", "center"),
    "RandomAutocontrast": ("p",),
    "RandomChannelPermutation": (),
    "RandomCrop": ("size", "padding", "pad_if_needed", "fill", "padding_mode"),
    "RandomEqualize": ("p",),
    "RandomErasing": ("p", "scale", "ratio", "value", "inplace"),
    "RandomGrayscale": ("p",),
    "RandomHorizontalFlip": ("p",),
    "RandomInvert": ("p",),
    "RandomIoUCrop": ("min_scale", "max_scale", "min_aspect_ratio", "max_aspect_ratio", "sampler_options", "trials"),
    "RandomPerspective": ("distortion_scale", "p", "interpolation", "fill"),
    "RandomPhotometricDistort": ("brightness", "contrast", "saturation", "hue", "p"),
    "RandomPosterize": ("bits", "p"),
    "RandomResize": ("min_size", "max_size", "interpolation", "antialias"),
    "RandomResizedCrop": ("size", "scale", "ratio", "interpolation", "antialias"),
    "RandomRotation": ("degrees", "interpolation", "expand", "center", "fill"),
    "RandomShortestSize": ("min_size", "max_size", "interpolation", "antialias"),
    "RandomSolarize": ("threshold", "p"),
    "RandomVerticalFlip": ("p",),
    "RandomZoomOut": ("fill", "side_range", "p"),
    "Resize": ("size", "interpolation", "max_size", "antialias"),
    "SanitizeBoundingBoxes": ("min_size", "min_area", "labels_getter"),
    "SanitizeKeyPoints": ("labels_getter",),
    "ScaleJitter": ("target_size", "scale_range", "interpolation", "antialias"),
    "UniformTemporalSubsample": ("num_samples",),
    "TrivialAugmentWide": ("num_magnitude_bins", "interpolation", "fill"),
}

# Arguments that they keep in an attribute of another name.
RENAMED: Final[dict[tuple[str, str], str]] = {
    ("CutMix", "labels_getter"): "_labels_getter",
    ("MixUp", "labels_getter"): "_labels_getter",
    ("RandomIoUCrop", "sampler_options"): "options",
}

# The presets of models' weights, in `torchvision.transforms._presets`, and what to write instead; but
# ImageClassification becomes four transforms. Names in braces are attributes of the preset.
PRESET_RESIZE: Final = "T.Resize({resize_size[0]}, {interpolation!r}), "  # left out where resize_size is None
PRESETS: Final[dict[str, str]] = {
    "ObjectDetection": "write transforms=[T.ToDtype('float32', scale=True)]",
    "OpticalFlow": (
        "return both images in a sample, and write transforms=[T.ToDtype('float32', scale=True), "
        "T.Normalize([0.5] * 3, [0.5] * 3)]"
    ),
    "SemanticSegmentation": (
        f"write transforms=[{PRESET_RESIZE}T.ToDtype('float32', scale=True), "
        "T.Normalize({mean}, {std})]; masks beside the image move with it"
    ),
    "VideoClassification": "it takes the frames of a video; do it in the dataset's __getitem__",
}


def from_torchvision(transforms: Any) -> list[Transform]:
    """Write torchvision's transforms as gpuload's.

    Every argument is carried over; draws are made for each sample. ``ToImage``, ``PILToTensor``, ``ToPureTensor`` and
    ``ToPILImage`` are left out, since batches are tensors. ``ToTensor`` and ``ConvertImageDtype``
    become `ToDtype`. ``ImageClassification``, the preset that ``weights.transforms()`` gives, becomes `Resize`,
    `CenterCrop`, `ToDtype` and `Normalize`.

    Args:
        transforms: a ``Compose``, one transform, a list of them, an ``nn.Sequential`` of them, or a preset, of
            `torchvision.transforms.v2` or `torchvision.transforms`.

    Returns:
        A list for ``Loader(transforms=…)``; more may be added to it.

    Raises:
        TypeError: an entry is not a transform of torchvision, or is a ``Lambda``.
        ValueError: gpuload does not have a transform, or does not take one of its arguments.

    Example, with torchvision's `v2`::

        from_torchvision(v2.Compose([v2.ToImage(), v2.RandomCrop(32, padding=4)]))
        # [RandomCrop(size=(32, 32), padding=(4, 4, 4, 4))]
    """
    return _Reader().chain(transforms)


class _Reader:
    """Reads a chain from front to back, and remembers the `ToDtype` that converted the images to floats."""

    def __init__(self) -> None:
        self._floats: ToDtype | None = None

    def chain(self, transforms: Any) -> list[Transform]:
        found: list[Transform] = []
        for entry, path in _flat(transforms, "transforms"):
            for transform in self._read(entry, path):
                if not isinstance(transform, ToDtype) or not transform.makes:
                    found.append(transform)
                elif self._floats is None:
                    self._floats = transform
                    found.append(transform)
                else:
                    # Floats to floats: only the width changes, which the first ToDtype can set.
                    number = found.index(self._floats)
                    masks = transform.mask_dtype or self._floats.mask_dtype
                    self._floats = dataclasses.replace(self._floats, dtype=transform.dtype, mask_dtype=masks)
                    found[number] = self._floats
        return found

    def _read(self, entry: Any, path: str) -> Iterator[Transform]:
        name = type(entry).__name__
        if isinstance(entry, Transform):
            yield entry
        elif not _is_theirs(entry):
            raise TypeError(_foreign(entry, path))
        elif name in REFUSED:
            error = TypeError if name == "Lambda" else ValueError
            raise error(f"from_torchvision: {path} is {name}, which gpuload does not have: {REFUSED[name]}")
        elif name in PRESETS:
            raise ValueError(f"from_torchvision: {path} is the preset {name}, which is not read: {_preset(entry)}")
        elif name == "ImageClassification":
            yield from _classification(entry, path)
        elif name in ("RandomApply", "RandomChoice", "RandomOrder"):
            yield from self._container(name, entry, path)
        elif name in NOTHING_TO_DO:
            if name == "Identity":
                yield Identity()
            elif name == "ToPILImage":
                self._check_to_pil(entry, path)
        elif name in TO_DTYPE:
            yield from self._to_dtype(name, entry, path)
        elif name in ARGUMENTS:
            yield _made(_ours(name), self._arguments(name, entry), path)
        else:
            raise ValueError(
                f"from_torchvision: {path} is {name}, which gpuload does not have; do it in the dataset's "
                f"__getitem__, or make an nn.Module of it that takes a batch, and {MODULE}"
            )

    def _container(self, name: str, entry: Any, path: str) -> Iterator[Transform]:
        if name == "RandomApply":
            inside = [
                transform
                for inner, at in _flat(list(entry.transforms), f"{path}.transforms")
                for transform in self._read(inner, at)
            ]
            if inside:
                yield _made(RandomApply, {"transforms": inside, "p": entry.p}, path)
            return
        units = [self._unit(inner, f"{path}.transforms[{number}]") for number, inner in enumerate(entry.transforms)]
        if name == "RandomOrder":
            units = [unit for unit in units if not isinstance(unit, Identity)]
            if units:
                yield _made(RandomOrder, {"transforms": units}, path)
            return
        shares = None if entry.p is None or len(set(entry.p)) == 1 else list(entry.p)
        yield _made(RandomChoice, {"transforms": units, "p": shares}, path)

    def _unit(self, entry: Any, path: str) -> Transform:
        """One entry of a choice or an order; several transforms become a `Compose`."""
        found = [transform for inner, at in _flat(entry, path) for transform in self._read(inner, at)]
        return found[0] if len(found) == 1 else Compose(found) if found else Identity()

    def _to_dtype(self, name: str, entry: Any, path: str) -> Iterator[Transform]:
        dtype = "float32" if name == "ToTensor" else entry.dtype
        transform = _made(ToDtype, {"dtype": dtype, "scale": entry.scale if name == "ToDtype" else True}, path)
        if transform.dtype == "uint8":
            self._check_no_floats(name, path)
        if transform.makes or transform.mask_dtype:  # uint8 to uint8 changes nothing
            yield transform

    def _check_to_pil(self, entry: Any, path: str) -> None:
        if entry.mode is not None:
            raise ValueError(
                f"from_torchvision: {path}, ToPILImage(mode={entry.mode!r}), changes the mode of images; have them "
                "decoded to it, by gpuload.Encoded(…, mode=…), and leave it out"
            )
        self._check_no_floats("ToPILImage", path)

    def _check_no_floats(self, name: str, path: str) -> None:
        if self._floats is not None:
            raise ValueError(
                f"from_torchvision: {path}, {name}, converts floats back to levels; leave it out, and the conversion "
                "to floats before it: gpuload always computes as on uint8 images until Normalize"
            )

    def _arguments(self, name: str, entry: Any) -> dict[str, Any]:
        arguments = {
            argument: _plain(getattr(entry, RENAMED.get((name, argument), argument))) for argument in ARGUMENTS[name]
        }
        if name == "RandomErasing":
            arguments["value"] = _erasing_value(arguments["value"])
        if name == "RandomCrop" and type(entry).__module__.startswith("torchvision.transforms.v2"):
            arguments["padding"] = _crop_padding(arguments["padding"])
        if "fill" in arguments and self._floats is None:
            arguments["fill"] = _whole_levels(arguments["fill"])
        return arguments


def _flat(entry: Any, path: str) -> Iterator[tuple[Any, str]]:
    """The entries of a chain, each with its path, such as "transforms[2]"; Composes and lists are unpacked."""
    name = type(entry).__name__
    if _is_theirs(entry) and name in ("Sequential", "ModuleList"):
        entry = list(entry)
    elif _is_theirs(entry) and name == "Compose":
        entry = list(entry.transforms)
        path = path if path == "transforms" else f"{path}.transforms"
    if not isinstance(entry, list | tuple):
        yield entry, path
        return
    for number, inner in enumerate(entry):
        yield from _flat(inner, f"{path}[{number}]")


def _is_theirs(entry: Any) -> bool:
    module = type(entry).__module__
    if module.startswith("torch.nn.modules."):
        return type(entry).__name__ in ("Identity", "ModuleList", "Sequential")
    return module == "torchvision.transforms" or module.startswith("torchvision.transforms.")


def _ours(name: str) -> type[Transform]:
    return getattr(importlib.import_module("gpuload.transforms"), name)


def _made(kind: Any, arguments: dict[str, Any], path: str) -> Any:
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"from_torchvision: {path}: {error}") from None


def _classification(preset: Any, path: str) -> Iterator[Transform]:
    """The preset of torchvision's classifiers; it holds functions, not transforms."""
    given = {"size": _plain(preset.resize_size), "interpolation": _plain(preset.interpolation)}
    yield _made(Resize, {**given, "antialias": getattr(preset, "antialias", True)}, path)
    yield _made(CenterCrop, {"size": _plain(preset.crop_size)}, path)
    yield ToDtype("float32", scale=True)
    yield _made(Normalize, {"mean": _plain(preset.mean), "std": _plain(preset.std)}, path)


def _preset(preset: Any) -> str:
    """What to write instead of another preset, with its numbers."""
    text = PRESETS[type(preset).__name__]
    if getattr(preset, "resize_size", ()) is None:
        text = text.replace(PRESET_RESIZE, "")
    return text.format(**{name: _plain(value) for name, value in vars(preset).items()})


def _plain(value: Any) -> Any:
    """An argument as ours take it: enumerations and label getters by their names, tensors as numbers."""
    if isinstance(value, enum.Enum) and isinstance(value.value, str):
        return value.value
    if not isinstance(value, enum.Enum) and callable(getattr(value, "tolist", None)):
        return value.tolist()
    if callable(value) and getattr(value, "__module__", "").startswith("torchvision.transforms."):
        # labels_getter: for "default" and None MixUp and CutMix keep a function of torchvision's.
        return "default" if value.__name__ == "_find_labels_default_heuristic" else None
    if isinstance(value, list | tuple):
        return tuple(_plain(entry) for entry in value)
    return value


def _erasing_value(value: Any) -> Any:
    """v2 keeps "random" as None, and a number as a list with it."""
    if value is None:
        return "random"
    return value[0] if is_sequence(value) and len(value) == 1 else value


def _whole_levels(fill: Any) -> Any:
    """A colour such as (123.675, 116.28, 103.53), cut to levels as torchvision does for uint8 images."""
    if isinstance(fill, float):
        return int(fill) if math.isfinite(fill) else fill
    if isinstance(fill, tuple):
        return tuple(map(_whole_levels, fill))
    if isinstance(fill, defaultdict) and fill.default_factory is not None:
        missing = _whole_levels(_plain(fill.default_factory()))
        return defaultdict(lambda: missing, {kind: _whole_levels(_plain(level)) for kind, level in fill.items()})
    if isinstance(fill, Mapping):
        return {kind: _whole_levels(_plain(level)) for kind, level in fill.items()}
    return fill


def _crop_padding(value: Any) -> Any:
    """v2's RandomCrop keeps left, right, top, bottom, where its argument is left, top, right, bottom."""
    if value is None or not is_sequence(value) or len(value) != 4:
        return value
    left, right, top, bottom = value
    return left, top, right, bottom


def _foreign(entry: Any, path: str) -> str:
    kind = type(entry)
    text = f"from_torchvision: {path} is no transform of torchvision: got {entry!r} ({kind.__module__}.{kind.__name__})"
    if isinstance(entry, type):
        return f"from_torchvision: {path} is the class {entry.__name__}; write {entry.__name__}(…)"
    if kind.__module__.split(".")[0] == "timm":
        return f"{text}; write from_timm(data_config, …) for timm's chains"
    if any(base.__module__ == "torch.nn.modules.module" for base in kind.__mro__):
        return (
            f"{text}; take it out; if it takes a batch, {MODULE}; if it takes one image, call it in the dataset's "
            "__getitem__"
        )
    return f"{text}; call it in the dataset's __getitem__, or make an nn.Module of it that takes a batch, and {MODULE}"
