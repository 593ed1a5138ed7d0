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

# Arguments that must have these values, and a function of the transform and its position.
Rule = tuple[dict[str, Any], Callable[[Any, str], list[Transform]]]

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
    chain = list(_convert_all(transforms, "transforms"))
    return [transform for transform in chain if not isinstance(transform, composite.Identity)]


def _convert_all(entry: Any, path: str) -> Iterator[Transform]:
    if isinstance(entry, list | tuple):
        for index, inner in enumerate(entry):
            yield from _convert_all(inner, f"{path}[{index}]")
    elif isinstance(entry, Transform):
        yield entry
    else:
        is_choice = type(entry).__name__ == "OneOrOther"  # its p is the probability of the first transform
        yield from _convert(entry, path, 1.0 if is_choice else getattr(entry, "p", 1.0))


def _convert(entry: Any, path: str, p: float) -> Iterator[Transform]:
    """Convert one transform, which is applied with probability `p`."""
    name, location = type(entry).__name__, f"from_albumentations: {path}"
    if isinstance(entry, type) or type(entry).__module__.partition(".")[0] != "albumentations":
        value = f"the class {entry.__name__}; write {entry.__name__}(…)" if isinstance(entry, type) else repr(entry)
        raise TypeError(f"{location} is not a transform of albumentations: got {value}")
    try:
        if name not in RULES:
            raise _NoEqual("")
        required, rule = RULES[name]
        for argument, value in {**({} if hasattr(entry, "transforms") else ALWAYS_REQUIRED), **required}.items():
            if (actual := getattr(entry, argument, value)) != value:
                raise _NoEqual(f"({argument}={actual!r}), unlike {name}({argument}={value!r}),")
        chain = rule(entry, path)
        if p < 1 and len(chain) == 1 and getattr(chain[0], "p", None) == 1.0:
            yield dataclasses.replace(chain[0], p=p)  # pyright: ignore[reportCallIssue]
        elif p < 1 and chain:
            yield composite.RandomApply(chain, p)
        else:
            yield from chain
    except _NoEqual as error:
        raise ValueError(
            f"{location} is {name}, and {name}{error} has no equal in gpuload; {albumentations_remedy(name)}"
        ) from None
    except (TypeError, ValueError) as error:
        text = str(error)
        raise type(error)(text if text.startswith("from_albumentations") else f"{location}, {name}: {text}") from None


class _NoEqual(Exception):
    """Raised for an argument that gpuload's transform does not have; the message begins with the argument."""


def _look_up(entry: Any, argument: str, names: dict[int, Any]) -> Any:
    if (number := getattr(entry, argument)) not in names:
        raise _NoEqual(f"({argument}={number})")
    return names[number]


def _single(entry: Any, argument: str) -> Any:
    """Return the number of an argument that is a range of one number."""
    low, high = getattr(entry, argument)
    if low != high:
        raise _NoEqual(f"({argument}={(low, high)}), where the number is drawn,")
    return low


def _plain(cls: Any) -> Rule:
    return {}, lambda entry, path: [cls(1.0)]


def _same_arguments(cls: Any, **required: Any) -> Rule:
    names = [field.name for field in dataclasses.fields(cls) if field.name != "p"]
    return required, lambda entry, path: [cls(**{name: getattr(entry, name) for name in names}, p=1.0)]


def _fill(entry: Any) -> dict[str, Any]:
    return {"Image": entry.fill, "Mask": entry.fill_mask or 0}


def _resize(entry: Any, path: str) -> list[Transform]:
    options: dict[str, Any] = {"antialias": False, "interpolation": _look_up(entry, "interpolation", RESIZE_FILTERS)}
    if (size := getattr(entry, "max_size", None)) is None:  # geometry.Resize, or a side whose length is in max_size_hw
        return [geometry.Resize((entry.height, entry.width), **options)]
    if type(entry).__name__ == "SmallestMaxSize":
        cls: Any = geometry.Resize if isinstance(size, int) else resizing.RandomShortestSize
        return [cls(size, **options)]
    if not isinstance(size, int):
        raise _NoEqual(f"(max_size={size})")
    return [geometry.Resize(None, max_size=size, **options)]


def _affine(entry: Any, path: str) -> list[Transform]:
    low, high = entry.scale["x"]
    if entry.scale["y"] != (low, high) or not (entry.keep_ratio or low == high):
        raise _NoEqual(f"(scale={entry.scale}, keep_ratio={entry.keep_ratio})")
    interpolation = _look_up(entry, "interpolation", WARP_FILTERS)
    degrees = -entry.rotate[1], -entry.rotate[0]  # torchvision's are clockwise
    return [warps.RandomAffine(degrees, scale=(low, high), interpolation=interpolation, fill=_fill(entry))]


def _gaussian_blur(entry: Any, path: str) -> list[Transform]:
    size = _single(entry, "blur_limit") or int(entry.sigma_limit[1] * 3.5) * 2  # 0: the kernel ends at 3.5 sigma
    return [blur_noise.GaussianBlur(size | 1, entry.sigma_limit)]


def _square_symmetry(entry: Any, path: str) -> list[Transform]:
    return [geometry.RandomRotate90(1.0), geometry.RandomTranspose(0.5)]


def _one_of(entry: Any, path: str) -> list[Transform]:
    """Convert a choice, which always applies the chosen transform."""
    chains = [
        list(_convert(child, f"{path}.transforms[{index}]", 1.0)) or [composite.Identity()]
        for index, child in enumerate(entry.transforms)
    ]
    choices = [chain[0] if len(chain) == 1 else composite.Compose(chain) for chain in chains]
    return [composite.RandomChoice(choices, p=list(getattr(entry, "transforms_ps", (entry.p, 1 - entry.p))))]


def _compose(entry: Any, path: str) -> list[Transform]:
    chain = list(_convert_all(list(entry.transforms), path if path == "transforms" else f"{path}.transforms"))
    params = {name: processor.params for name, processor in getattr(entry, "processors", {}).items()}
    if boxes := params.get("bboxes"):
        for argument, value in (("min_visibility", 0), ("max_accept_ratio", None), ("min_width", boxes.min_height)):
            if getattr(boxes, argument) != value:
                raise _NoEqual(f"(bbox_params=BboxParams({argument}={getattr(boxes, argument)}))")
        sanitize = targets.SanitizeBoundingBoxes(max(boxes.min_width, TINY), max(boxes.min_area, TINY))
        chain += [targets.ClampBoundingBoxes(), sanitize]
    if (points := params.get("keypoints")) and points.remove_invisible:
        chain.append(targets.SanitizeKeyPoints())
    return chain


# The arguments that must have these values in all single transforms that have them.
ALWAYS_REQUIRED: Final = {
    "area_for_downscale": None, "crop_border": False, "fit_output": False, "mask_interpolation": 0,
    "pad_if_needed": False, "rotate_method": "largest_box",
}  # fmt: skip
CENTERED: Final = {
    "translate_percent": None, "translate_px": dict.fromkeys("xy", (0, 0)), "shear": dict.fromkeys("xy", (0.0, 0.0))
}  # fmt: skip
# For each transform, the arguments that must have these values, and a function that converts it as if p were 1.
RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("Compose", "Sequential"), ({}, _compose)),
    **dict.fromkeys(("OneOf", "OneOrOther"), ({}, _one_of)),
    **dict.fromkeys(("NoOp", "ToTensorV2"), ({"transpose_mask": False}, lambda entry, path: [])),
    **dict.fromkeys(("Resize", "SmallestMaxSize", "LongestMaxSize"), ({"max_size_hw": None}, _resize)),
    **dict.fromkeys(("D4", "SquareSymmetry"), ({}, _square_symmetry)),
    "Affine": ({**CENTERED, "border_mode": 0, "balanced_scale": False}, _affine),
    "CenterCrop": ({}, lambda entry, path: [geometry.CenterCrop((entry.height, entry.width))]),
    "ChannelShuffle": ({}, lambda entry, path: [colour.RandomChannelPermutation()]),
    "CLAHE": _same_arguments(lighting.CLAHE),
    "ColorJitter": (
        {}, lambda entry, path: [colour.ColorJitter(entry.brightness, entry.contrast, entry.saturation, entry.hue)]
    ),
    "GaussianBlur": ({}, _gaussian_blur),
    "GaussNoise": (
        {"per_channel": True, "noise_scale_factor": 1},
        lambda entry, path: [blur_noise.GaussianNoise(_single(entry, "mean_range"), _single(entry, "std_range"))],
    ),
    "HorizontalFlip": _plain(geometry.RandomHorizontalFlip),
    "Illumination": _same_arguments(lighting.GaussianIllumination, mode="gaussian"),
    "ImageCompression": ({"compression_type": "jpeg"}, lambda entry, path: [blur_noise.JPEG(entry.quality_range)]),
    "InvertImg": _plain(colour.RandomInvert),
    "MotionBlur": _same_arguments(blur_noise.MotionBlur),
    "Normalize": (
        {"max_pixel_value": 255.0, "normalization": "standard"},
        lambda entry, path: [convert.ToDtype("float32", scale=True), convert.Normalize(entry.mean, entry.std)],
    ),
    "Pad": (
        {}, lambda entry, path: [geometry.Pad(entry.padding, _fill(entry), _look_up(entry, "border_mode", BORDERS))]
    ),
    "PlanckianJitter": _same_arguments(lighting.PlanckianJitter),
    "Posterize": ({}, lambda entry, path: [colour.RandomPosterize(_single(entry, "num_bits"), 1.0)]),
    "RandomCrop": ({}, lambda entry, path: [geometry.RandomCrop((entry.height, entry.width))]),
    "RandomGamma": _same_arguments(lighting.RandomGamma),
    "RandomResizedCrop": (
        {}, lambda entry, path: [geometry.RandomResizedCrop(
            entry.size, entry.scale, entry.ratio, _look_up(entry, "interpolation", RESIZE_FILTERS), antialias=False
        )],
    ),
    "RandomRotate90": _plain(geometry.RandomRotate90),
    "RandomShadow": _same_arguments(lighting.RandomShadow),
    "Rotate": (
        {"border_mode": 0}, lambda entry, path: [
            warps.RandomRotation(entry.limit, _look_up(entry, "interpolation", WARP_FILTERS), fill=_fill(entry))
        ],
    ),
    "Solarize": ({}, lambda entry, path: [colour.RandomSolarize(255 * _single(entry, "threshold_range"), 1.0)]),
    "ToFloat": ({"max_value": 255}, lambda entry, path: [convert.ToDtype("float32", scale=True)]),
    "ToGray": (
        {"method": "weighted_average"},
        lambda entry, path: [colour.Grayscale(1) if entry.num_output_channels == 1 else colour.RandomGrayscale(1.0)],
    ),
    "Transpose": _plain(geometry.RandomTranspose),
    "VerticalFlip": _plain(geometry.RandomVerticalFlip),
}  # fmt: skip
