"""Converts Albumentations' transforms to gpuload's, without importing Albumentations.

Transforms are recognised by the names of their classes and modules, and read by their attributes, which are those of
Albumentations 2.0.8. Only what is equal, within what docs/parity.md states, is converted; anything else raises an error
with its name, its position in the chain, and the remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

from gpuload.transforms import blur_noise, colour, composite, convert, geometry, lighting, resizing, targets, warps
from gpuload.transforms.base import Transform
from gpuload.transforms.names import albumentations_remedy

__all__ = ["from_albumentations"]

# OpenCV's numbers of filters and borders.
RESIZE_FILTERS: Final = {1: "bilinear", 2: "bicubic", 5: "bilinear", 6: "nearest"}
WARP_FILTERS: Final = {0: "nearest", 1: "bilinear"}
BORDERS: Final = {0: "constant", 1: "edge", 2: "symmetric", 4: "reflect"}
TINY: Final = 1e-6  # Albumentations' least size of a box


def from_albumentations(transforms: object) -> list[Transform]:
    """Convert Albumentations' transforms to gpuload transforms.

    Random parameters have the same distributions, and are drawn per sample. ``ToTensorV2`` is dropped, since batches
    are tensors. Resizing is not antialiased, as in Albumentations. ``bbox_params`` become `ClampBoundingBoxes` and
    `SanitizeBoundingBoxes` at the end of the chain, ``keypoint_params`` become `SanitizeKeyPoints`; formats and labels
    are those of the sample's `gpuload.Boxes`.

    Args:
        transforms: a ``Compose``, a single transform, or a list of transforms, of Albumentations 2.

    Returns:
        A list of transforms for ``Loader(transforms=…)``; you can add more transforms to it.

    Raises:
        TypeError: an entry is not a transform of Albumentations.
        ValueError: gpuload has no equal of a transform, or of one of its arguments.

    Example, with Albumentations as ``A``::

        from_albumentations(A.Compose([A.HorizontalFlip(p=0.5), A.RandomGamma((50, 150), p=1)]))
        # [RandomHorizontalFlip(), RandomGamma(gamma_limit=(50.0, 150.0), p=1.0)]
    """
    return list(_convert_all(transforms, "transforms"))


def _convert_all(entry: Any, path: str) -> Iterator[Transform]:
    if isinstance(entry, list | tuple):
        for index, inner in enumerate(entry):
            yield from _convert_all(inner, f"{path}[{index}]")
    elif isinstance(entry, Transform):
        yield entry
    else:
        chain = _convert(entry, path)
        p = 1.0 if type(entry).__name__ == "OneOrOther" else entry.p  # of OneOrOther, p is that of the first choice
        if p < 1 and len(chain) == 1 and getattr(chain[0], "p", None) == 1.0:
            yield dataclasses.replace(chain[0], p=p)  # pyright: ignore[reportCallIssue]
        elif p < 1 and chain:
            yield composite.RandomApply(chain, p)
        else:
            yield from chain


def _convert(entry: Any, path: str) -> list[Transform]:
    """Convert one transform as if its `p` were 1."""
    name, location = type(entry).__name__, f"from_albumentations: {path}"
    if isinstance(entry, type) or type(entry).__module__.partition(".")[0] != "albumentations":
        value = f"the class {entry.__name__}; write {entry.__name__}(…)" if isinstance(entry, type) else repr(entry)
        raise TypeError(f"{location} is not a transform of albumentations: got {value}")
    children_path = path if path == "transforms" else f"{path}.transforms"
    try:
        if name in ("Compose", "Sequential"):
            return [*_convert_all(list(entry.transforms), children_path), *_target_transforms(entry)]
        if name in ("OneOf", "OneOrOther"):
            chains = [_convert(child, f"{path}.transforms[{index}]") for index, child in enumerate(entry.transforms)]
            choices = list(map(composite.as_one, chains))
            return [composite.RandomChoice(choices, p=list(getattr(entry, "transforms_ps", (entry.p, 1 - entry.p))))]
        if name not in RULES:
            raise _NoEqual
        for key, value in REQUIRED.items():
            owner, _, argument = key.rpartition(".")
            if owner in ("", name) and (actual := getattr(entry, argument, value)) != value:
                raise _NoEqual(f"({argument}={actual!r}), unlike {name}({argument}={value!r}),")
        chain = RULES[name](entry)
        return chain if isinstance(chain, list) else [chain]
    except _NoEqual as error:
        raise ValueError(
            f"{location} is {name}, and {name}{error} has no equal in gpuload; {albumentations_remedy(name)}"
        ) from None
    except (TypeError, ValueError) as error:
        text = str(error)
        raise type(error)(text if text.startswith("from_albumentations") else f"{location}, {name}: {text}") from None


class _NoEqual(Exception):
    """Raised for an argument that gpuload's transform does not have; the message begins with the argument."""


def _target_transforms(compose: Any) -> Iterator[Transform]:
    """Yield the transforms that drop boxes and keypoints as a ``Compose`` does."""
    params = {name: processor.params for name, processor in getattr(compose, "processors", {}).items()}
    if boxes := params.get("bboxes"):
        for argument, value in (("min_visibility", 0), ("max_accept_ratio", None), ("min_width", boxes.min_height)):
            if getattr(boxes, argument) != value:
                raise _NoEqual(f"(bbox_params=BboxParams({argument}={getattr(boxes, argument)}))")
        yield targets.ClampBoundingBoxes()
        yield targets.SanitizeBoundingBoxes(max(boxes.min_width, TINY), max(boxes.min_area, TINY))
    if (points := params.get("keypoints")) and points.remove_invisible:
        yield targets.SanitizeKeyPoints()


def _look_up(entry: Any, argument: str, names: dict[Any, Any]) -> Any:
    if (number := getattr(entry, argument)) not in names:
        raise _NoEqual(f"({argument}={number})")
    return names[number]


def _single(entry: Any, argument: str) -> Any:
    """Return the number of an argument that is a range of one number."""
    low, high = getattr(entry, argument)
    if low != high:
        raise _NoEqual(f"({argument}={(low, high)}), where the number is drawn,")
    return low


def _same(cls: Any) -> Callable[[Any], Transform]:
    """Return a function that creates a transform whose arguments have the names of Albumentations."""
    names = [field.name for field in dataclasses.fields(cls) if field.name != "p"]
    return lambda entry: cls(**{name: getattr(entry, name) for name in names}, p=1.0)


def _resampling(entry: Any) -> dict[str, Any]:
    return {"interpolation": _look_up(entry, "interpolation", RESIZE_FILTERS), "antialias": False}


def _warping(entry: Any) -> dict[str, Any]:
    return {"interpolation": _look_up(entry, "interpolation", WARP_FILTERS), "fill": _fill(entry)}


def _fill(entry: Any) -> dict[str, Any]:
    return {"Image": entry.fill, "Mask": entry.fill_mask or 0}


def _shortest_side(entry: Any) -> Transform:
    cls: Any = geometry.Resize if isinstance(entry.max_size, int) else resizing.RandomShortestSize
    return cls(entry.max_size, **_resampling(entry))


def _affine(entry: Any) -> Transform:
    low, high = entry.scale["x"]
    if entry.scale["y"] != (low, high) or not (entry.keep_ratio or low == high):
        raise _NoEqual(f"(scale={entry.scale}, keep_ratio={entry.keep_ratio})")
    degrees = -entry.rotate[1], -entry.rotate[0]  # torchvision's are clockwise
    return warps.RandomAffine(degrees, scale=(low, high), **_warping(entry))


def _gaussian_blur(entry: Any) -> Transform:
    size = _single(entry, "blur_limit") or int(entry.sigma_limit[1] * 3.5) * 2  # 0: the kernel ends at 3.5 sigma
    return blur_noise.GaussianBlur(size | 1, entry.sigma_limit)


# The arguments that must have these values, in all transforms that have them or in the named one.
REQUIRED: Final[dict[str, Any]] = {
    "Affine.border_mode": 0, "Illumination.mode": "gaussian", "Rotate.border_mode": 0,
    "area_for_downscale": None, "balanced_scale": False, "compression_type": "jpeg", "crop_border": False,
    "fit_output": False, "mask_interpolation": 0, "max_pixel_value": 255.0, "max_size_hw": None,
    "method": "weighted_average", "noise_scale_factor": 1, "normalization": "standard", "pad_if_needed": False,
    "per_channel": True, "rotate_method": "largest_box", "shear": dict.fromkeys("xy", (0.0, 0.0)),
    "translate_percent": None, "translate_px": dict.fromkeys("xy", (0, 0)), "transpose_mask": False,
}  # fmt: skip
# Functions that convert a transform as if its `p` were 1.
RULES: Final[dict[str, Callable[[Any], Transform | list[Transform]]]] = {
    "Affine": _affine,
    "CenterCrop": lambda entry: geometry.CenterCrop((entry.height, entry.width)),
    "ChannelShuffle": lambda entry: colour.RandomChannelPermutation(),
    "CLAHE": _same(lighting.CLAHE),
    "ColorJitter": lambda entry: colour.ColorJitter(entry.brightness, entry.contrast, entry.saturation, entry.hue),
    **dict.fromkeys(
        ("D4", "SquareSymmetry"), lambda entry: [geometry.RandomRotate90(1.0), geometry.RandomTranspose(0.5)]
    ),
    "GaussianBlur": _gaussian_blur,
    "GaussNoise": lambda entry: blur_noise.GaussianNoise(_single(entry, "mean_range"), _single(entry, "std_range")),
    "HorizontalFlip": _same(geometry.RandomHorizontalFlip),
    "Illumination": _same(lighting.GaussianIllumination),
    "ImageCompression": lambda entry: blur_noise.JPEG(entry.quality_range),
    "InvertImg": _same(colour.RandomInvert),
    "LongestMaxSize": lambda entry: geometry.Resize(None, max_size=entry.max_size, **_resampling(entry)),
    "MotionBlur": _same(blur_noise.MotionBlur),
    **dict.fromkeys(("NoOp", "ToTensorV2"), lambda entry: []),
    "Normalize": lambda entry: [convert.ToDtype("float32", scale=True), convert.Normalize(entry.mean, entry.std)],
    "Pad": lambda entry: geometry.Pad(entry.padding, _fill(entry), _look_up(entry, "border_mode", BORDERS)),
    "PlanckianJitter": _same(lighting.PlanckianJitter),
    "Posterize": lambda entry: colour.RandomPosterize(_single(entry, "num_bits"), 1.0),
    "RandomCrop": lambda entry: geometry.RandomCrop((entry.height, entry.width)),
    "RandomGamma": _same(lighting.RandomGamma),
    "RandomResizedCrop": lambda entry: geometry.RandomResizedCrop(
        entry.size, entry.scale, entry.ratio, **_resampling(entry)
    ),
    "RandomRotate90": _same(geometry.RandomRotate90),
    "RandomShadow": _same(lighting.RandomShadow),
    "Resize": lambda entry: geometry.Resize((entry.height, entry.width), **_resampling(entry)),
    "Rotate": lambda entry: warps.RandomRotation(entry.limit, **_warping(entry)),
    "SmallestMaxSize": _shortest_side,
    "Solarize": lambda entry: colour.RandomSolarize(255 * _single(entry, "threshold_range"), 1.0),
    "ToFloat": lambda entry: _look_up(
        entry, "max_value", dict.fromkeys((None, 255), convert.ToDtype("float32", scale=True))
    ),
    "ToGray": lambda entry: colour.Grayscale() if entry.num_output_channels == 1 else colour.RandomGrayscale(1.0),
    "Transpose": _same(geometry.RandomTranspose),
    "VerticalFlip": _same(geometry.RandomVerticalFlip),
}
