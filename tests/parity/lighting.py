"""Motion blur, exposure, light and shadow, compared with Albumentations' functions, and what `from_albumentations`
makes of Albumentations' transforms, compared with these.

Albumentations is in the tests' environment only for integrations, so it is imported when an oracle runs, and the cases
are skipped without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from parity.case import Case, Tolerance

from gpuload import transforms as T
from gpuload.transforms.program.ops import NOTHING, OPS

__all__ = [
    "BELL",
    "CONVERTED",
    "FUSED_POWER",
    "GAMMA",
    "LAB",
    "MEAN_ON_A_LINE",
    "NAME",
    "SHADOW",
    "library",
    "lighting",
]

NAME = "Albumentations"  # what these cases are compared with begins with it


@cache
def library() -> Any:
    """Return the package; it must not ask the network for its newest version."""
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    import albumentations

    return albumentations


class Shifts:
    """Stands in for the generator of Albumentations' motion kernel, which draws two shifts in -1 … 1."""

    def __init__(self, *shifts: float) -> None:
        self._shifts = list(shifts)

    def uniform(self, low: float, high: float) -> float:
        return self._shifts.pop(0)


def gamma(image: np.ndarray, values: list[float]) -> np.ndarray:
    from albumentations.augmentations.pixel.functional import gamma_transform

    return gamma_transform(image, values[0])


def white_balance(image: np.ndarray, values: list[float]) -> np.ndarray:
    """Multiply red and blue by the function that Albumentations' `planckian_jitter` calls."""
    from albucore import multiply_by_constant

    if image.shape[2] == 1:
        return image
    red, green, blue = np.split(image, 3, axis=2)
    factors = values[:2]
    red, blue = (
        multiply_by_constant(np.ascontiguousarray(channel), factor, inplace=False).reshape(green.shape)
        for channel, factor in zip((red, blue), factors, strict=True)
    )
    return np.concatenate([red, green, blue], axis=2)


def illumination(image: np.ndarray, values: list[float]) -> np.ndarray:
    from albumentations.augmentations.pixel.functional import apply_gaussian_illumination

    height, width = image.shape[:2]
    intensity, y, x, sigma = values[:4]
    image = image[:, :, 0] if image.shape[2] == 1 else image
    return apply_gaussian_illumination(image, intensity, (x / width, y / height), sigma / max(height, width))


def shadow(image: np.ndarray, values: list[float]) -> np.ndarray:
    from albumentations.augmentations.pixel.functional import add_shadow

    from gpuload.stage.reference.color import shadow_vertices

    return add_shadow(image, [shadow_vertices(values).astype(np.int32)], np.array([1 - values[0]]))


def motion_blur(image: np.ndarray, values: list[float]) -> np.ndarray:
    from albumentations.augmentations.blur.functional import create_motion_kernel
    from albumentations.augmentations.pixel.functional import convolve

    size, _, angle, direction, *shifts = values[:6]
    shifts = Shifts(*(shift / (int(size) // 2) * 2 for shift in shifts))
    kernel = create_motion_kernel(int(size), angle, direction, True, shifts)  # pyright: ignore[reportArgumentType]
    return convolve(image, kernel / kernel.sum())


def clahe(image: np.ndarray, values: list[float]) -> np.ndarray:
    from albumentations.augmentations.pixel.functional import clahe

    columns, rows, limit = values[:3]
    return clahe(image, limit, (int(columns), int(rows)))


FUNCTIONS: dict[str, Callable[[np.ndarray, list[float]], np.ndarray]] = {
    "gamma": gamma,
    "white_balance": white_balance,
    "illumination": illumination,
    "shadow": shadow,
    "motion_blur": motion_blur,
    "clahe": clahe,
}


def operations(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """Apply all operations by Albumentations' functions, in order."""
    library()
    result = image
    for _, params in steps:
        for code, values in zip(params.codes[row].tolist(), params.values[row].tolist(), strict=True):
            if code != NOTHING:
                result = FUNCTIONS[OPS[code]](result, values).reshape(image.shape)
    return result


GAMMA = (
    "gpuload adds 0.001 before it truncates a power, so that a gamma of 100 changes nothing; Albumentations darkens "
    "the levels whose product is just below an integer"
)
BELL = "gpuload's bell is the product of a number per row and one per column, which are rounded to float32"
SHADOW = "OpenCV draws sides in fixed point, so the pixels on a side may differ"
MEAN_ON_A_LINE = "OpenCV adds up products in float32, so values near a half may round the other way"
LAB = "OpenCV converts CIELAB back to RGB in fixed point"
PRODUCT = "the result is a single float32 product, truncated as in Albumentations"
FUSED_POWER = Tolerance(0.05, 1, 1, "powers and exponentials are computed in float32 before results are truncated")


def lighting(
    name: str,
    transform: Any,
    function: str,
    mean: float = 0,
    most: float = 0,
    reason: str = PRODUCT,
    fused: Tolerance | None = None,
) -> Case:
    backends = {} if fused is None else {"fused": fused}
    against = f"{NAME} {function}"
    return Case("albumentations", name, [transform], operations, mean, most, against, reason, backends=backends)


BORDER = "OpenCV blends the border of the image with the fill, and gpuload, like Pillow, does not"
TIES = "a point halfway between two pixels may show the other one"
RESIZED = "gpuload's weights are rounded to multiples of 2**-22, OpenCV's to 2**-11; OpenCV rounds once"
EQUAL = "levels are identical"
HUE = "gpuload's hue has 255 steps, as in Pillow, OpenCV's has 180"
CONTRAST = "the grey levels that OpenCV computes in fixed point may round to other levels"
SWAPPED = "Albumentations compresses red as blue, so the oracle gets, and returns, images with these exchanged"
PADDED = "the same pixels, copied"


Converted = tuple[Callable[[Any], Any], Case]


def converted(
    name: str, make: Callable[[Any], Any], transforms: list[Any], mean: float = 0, most: float = 0, reason: str = EQUAL
) -> Converted:
    def oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
        order = -1 if reason == SWAPPED else 1
        swapped = np.ascontiguousarray(image[:, :, ::order])
        return make(library())(image=swapped)["image"][:, :, ::order].astype(np.float64)

    kinds = ", ".join(type(transform).__name__ for transform in transforms)
    is_scaled = isinstance(transforms[0], T.ToDtype)
    case = Case(
        "with albumentations",
        f"A.{name} as {kinds}",
        transforms,
        oracle,
        mean,
        most,
        f"{NAME}' {name}",
        reason,
        between=1.0 if isinstance(transforms[0], T.GaussianBlur | T.RandomGamma) else 0.0,  # on fused
        to_levels=(lambda numbers: numbers * 255) if is_scaled else None,
    )
    return make, case


def jitter(name: str, factor: float, mean: float = 0, most: float = 0, reason: str = EQUAL) -> Converted:
    ranges = {"brightness": (1, 1), "contrast": (1, 1), "saturation": (1, 1), "hue": (0, 0), name: (factor, factor)}
    transform = T.ColorJitter(**{name: (factor, factor)})
    return converted(f"ColorJitter({name})", lambda A: A.ColorJitter(**ranges, p=1), [transform], mean, most, reason)


FILL: Any = {"Image": (0,), "Mask": 0}
# Albumentations' transforms with parameters that are not random, and what `from_albumentations` makes of them.
CONVERTED: list[Converted] = [
    converted("HorizontalFlip", lambda A: A.HorizontalFlip(p=1), [T.RandomHorizontalFlip(1)]),
    converted("VerticalFlip", lambda A: A.VerticalFlip(p=1), [T.RandomVerticalFlip(1)]),
    converted("Transpose", lambda A: A.Transpose(p=1), [T.RandomTranspose(1)]),
    converted("InvertImg", lambda A: A.InvertImg(p=1), [T.RandomInvert(1)]),
    converted(
        "Pad", lambda A: A.Pad((3, 7, 9, 5), border_mode=4), [T.Pad((3, 7, 9, 5), FILL, "reflect")], reason=PADDED
    ),
    converted("Posterize", lambda A: A.Posterize(3, p=1), [T.RandomPosterize(3, 1)]),
    converted("Solarize", lambda A: A.Solarize((0.4, 0.4), p=1), [T.RandomSolarize(102.0, 1)]),
    converted("ToGray", lambda A: A.ToGray(p=1), [T.RandomGrayscale(1)], 0.01, 1, CONTRAST),
    converted("Resize", lambda A: A.Resize(70, 50), [T.Resize((70, 50), antialias=False)], 0.5, 1, RESIZED),
    converted(
        "RandomResizedCrop",
        lambda A: A.RandomResizedCrop((40, 40), (1, 1), (1, 1), interpolation=2),
        [T.RandomResizedCrop((40, 40), (1, 1), (1, 1), "bicubic", antialias=False)],
        0.5,
        3,
        RESIZED,
    ),
    converted(
        "Rotate",
        lambda A: A.Rotate((30, 30), p=1),
        [T.RandomRotation((30, 30), "bilinear", fill=FILL)],
        5,
        255,
        BORDER,
    ),
    converted(
        "Affine",
        lambda A: A.Affine(scale=(0.8, 0.8), rotate=(-20, -20), interpolation=0, p=1),
        [T.RandomAffine((20, 20), scale=(0.8, 0.8), fill=FILL)],
        2,
        255,
        TIES,
    ),
    jitter("brightness", 1.2),
    jitter("contrast", 1.3, 0.7, 1, CONTRAST),
    jitter("saturation", 0.6, 0.7, 1, CONTRAST),
    jitter("hue", 0.1, 5, 20, HUE),
    converted(
        "GaussianBlur",
        lambda A: A.GaussianBlur(0, (1.5, 1.5), p=1),
        [T.GaussianBlur(11, (1.5, 1.5))],
        0.02,
        1,
        MEAN_ON_A_LINE,
    ),
    converted("RandomGamma", lambda A: A.RandomGamma((150, 150), p=1), [T.RandomGamma((150, 150), 1)], 0.1, 1, GAMMA),
    converted("CLAHE", lambda A: A.CLAHE((2, 2), p=1), [T.CLAHE((2, 2), (8, 8), 1)], 0.5, 4, LAB),
    converted("ImageCompression", lambda A: A.ImageCompression("jpeg", (60, 60), p=1), [T.JPEG(60)], 0, 0, SWAPPED),
    converted(
        "Normalize",
        lambda A: A.Normalize(),
        [T.ToDtype("float32", scale=True), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))],
        1e-3,
        1e-3,
        "one multiplication and one addition in float32",
    ),
    converted("ToFloat", lambda A: A.ToFloat(255), [T.ToDtype("float32", scale=True)], 1e-4, 1e-4, "a float32 product"),
]
