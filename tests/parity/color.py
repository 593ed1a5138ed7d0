"""Color transforms, compared with Pillow's enhancers and operations, and blur, compared with Kornia."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from parity.case import RUNS, Case, Oracle, Tolerance
from PIL import Image, ImageEnhance, ImageOps

from gpuload.stage.noise import normals
from gpuload.transforms.program.ops import NOTHING, OPS

__all__ = [
    "AFFINE", "BLUR", "CONTRAST", "FLOAT", "FUSED_BLUR", "GRAY", "HUE", "MEAN", "NOISE", "STD", "WRAPPING",
    "color_and_gray", "grayscale_oracle", "jpeg_oracle", "noise_oracle", "normalize_oracle", "operations_oracle",
    "recolored",
]  # fmt: skip

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def as_pillow(levels: np.ndarray) -> Image.Image:
    return Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels)


def as_levels(image: Image.Image) -> np.ndarray:
    levels = np.asarray(image)
    return levels[:, :, None] if levels.ndim == 2 else levels


def as_batch(image: Image.Image) -> torch.Tensor:
    """Return a Pillow image as Kornia expects it: levels, float64 1×C×H×W."""
    return torch.from_numpy(as_levels(image).astype(np.float64)).permute(2, 0, 1)[None]


def hue(image: Image.Image, turns: float) -> Image.Image:
    """Rotate the hue as torchvision does on Pillow images."""
    if image.mode == "L":
        return image
    hue_channel, saturation, value = image.convert("HSV").split()
    rotated = (np.asarray(hue_channel).astype(np.int32) + int(turns * 255)).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(rotated), saturation, value)).convert("RGB")


def blur(image: Image.Image, values: list[float]) -> Image.Image:
    """Blur by Kornia in float64, which expects the kernel's size and the sigmas in the order (y, x)."""
    from kornia.filters import gaussian_blur2d

    width, height, sigma_x, sigma_y = values[:4]
    blurred = gaussian_blur2d(as_batch(image), (int(height), int(width)), (sigma_y, sigma_x), "reflect")
    return as_pillow(blurred[0].permute(1, 2, 0).round().to(torch.uint8).numpy())


def permute(image: Image.Image, values: list[float]) -> Image.Image:
    bands = image.split()
    return image if len(bands) == 1 else Image.merge("RGB", [bands[int(value)] for value in values[:3]])


def grayscale(image: Image.Image, values: list[float]) -> Image.Image:
    gray = image.convert("L")
    return gray if image.mode == "L" else Image.merge("RGB", [gray] * 3)


def posterize(image: Image.Image, values: list[float]) -> Image.Image:
    bits = int(values[0])
    return ImageOps.posterize(image, bits) if bits else image.point(lambda level: 0)


PILLOW_OPERATIONS: dict[str, Any] = {
    "brightness": lambda image, values: ImageEnhance.Brightness(image).enhance(values[0]),
    "contrast": lambda image, values: ImageEnhance.Contrast(image).enhance(values[0]),
    "saturation": lambda image, values: ImageEnhance.Color(image).enhance(values[0]),
    "hue": lambda image, values: hue(image, values[0]),
    "sharpness": lambda image, values: ImageEnhance.Sharpness(image).enhance(values[0]),
    "solarize": lambda image, values: ImageOps.solarize(image, values[0]),
    "posterize": posterize,
    "equalize": lambda image, values: ImageOps.equalize(image),
    "autocontrast": lambda image, values: ImageOps.autocontrast(image),
    "invert": lambda image, values: ImageOps.invert(image),
    "grayscale": grayscale,
    "blur": blur,
    "permute": permute,
}


def operations_oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    result = as_pillow(image)
    for _, params in steps:
        for code, values in zip(params.codes[row].tolist(), params.values[row].tolist(), strict=True):
            if code != NOTHING:
                result = PILLOW_OPERATIONS[OPS[code]](result, values)
    return as_levels(result)


def grayscale_oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int, count: int) -> np.ndarray:
    """Convert to gray with `count` equal channels."""
    gray = as_pillow(image).convert("L")
    return as_levels(gray if count == 1 else Image.merge("RGB", [gray] * 3))


def jpeg_oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    [(_, params)], file = steps, io.BytesIO()
    as_pillow(image).save(file, "JPEG", quality=int(params.values[row, 0, 0]))
    return as_levels(Image.open(file))


def noise_oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """Add the same noise, channel by channel, clipped by Pillow or wrapped to 8 bits by NumPy."""
    [(_, params)] = steps
    mean, sigma, *key_words, wraps = params.values[row, 0, :5].tolist()
    numbers = normals((int(key_words[0]), int(key_words[1])), image.size) * np.float32(sigma) + np.float32(mean)
    bands = []
    for band, noise in zip(as_pillow(image).split(), numbers.reshape(image.shape[2], *image.shape[:2]), strict=True):
        total = np.asarray(band, np.int32) + np.trunc(noise).astype(np.int32)
        bands.append(total.astype(np.uint8) if wraps else np.asarray(Image.fromarray(total).convert("L")))
    return np.stack(bands, -1)


def normalize_oracle(mean: tuple[float, ...], std: tuple[float, ...]) -> Oracle:
    """Return an oracle that normalizes the image in 0 … 1 by Kornia."""

    def oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
        from kornia.enhance import normalize

        numbers = as_batch(as_pillow(image)) / 255
        result = normalize(numbers, torch.tensor(mean).to(numbers), torch.tensor(std).to(numbers))
        return result[0].permute(1, 2, 0).numpy()

    return oracle


# Tolerances of cases, in levels, with their reasons.
EXACT: dict[str, Any] = {"reason": "gpuload uses Pillow's arithmetic, so all levels are identical"}
FLOAT: dict[str, Any] = {"reason": "the result is a single float32 product, truncated as in Pillow"}
GRAY_REASON = (
    "gpuload's contrast uses the grey level of the mean colour, whereas Pillow uses the mean of the rounded grey "
    "levels; the two may round to different levels"
)
GRAY: dict[str, Any] = {"mean": 0.1, "max": 1, "reason": GRAY_REASON}
HUE_REASON = (
    "Pillow rounds hue and saturation to 8 bits between its float32 operations, and one step of hue may change a value "
    "by 6 levels"
)
HUE: dict[str, Any] = {"mean": 0.05, "max": 6, "reason": HUE_REASON}
CONTRAST_REASON = f"{GRAY_REASON}; the next operation may amplify this difference; {HUE_REASON}"
CONTRAST: dict[str, Any] = {"mean": 1, "max": 8, "reason": CONTRAST_REASON}
BLUR_REASON = (
    "weights are multiples of 2**-16, so sums are exact on every device, but values near a half may round the other way"
)
BLUR: dict[str, Any] = {"mean": 0.02, "max": 1, "reason": BLUR_REASON}
AFFINE: dict[str, Any] = {"mean": 1e-4, "max": 1e-4, "reason": "one multiplication and one addition in float32"}
NOISE_REASON = (
    "the oracle adds the same float32 noise; this case checks the addition and the clipping, and other tests check "
    "the distribution"
)
NOISE: dict[str, Any] = {"mean": 0.001, "max": 1, "reason": NOISE_REASON}
WRAPPING_REASON = "the oracle adds the same float32 noise and keeps the lowest eight bits of each integer sum"
WRAPPING: dict[str, Any] = {"reason": WRAPPING_REASON}

FUSED_BLUR = Tolerance(
    mean=0.001,
    max=1,
    apart=1,
    reason="weights and sums are float32, and weights are not rounded to multiples of 2**-16; values near a half may "
    "round the other way",
)


def recolored(name: str, transforms: Any, against: str, **options: Any) -> Case:
    """Return a case that is exact by default; an option named after a run is the run's tolerance."""
    transforms = transforms if isinstance(transforms, list) else [transforms]
    backends = {run: options.pop(run) for run in RUNS if run in options}
    options = {"oracle": operations_oracle, "mean": 0, "max": 0, **EXACT, **options}
    return Case("color", name, transforms, against=against, backends=backends, **options)


def color_and_gray(*cases: Case) -> list[Case]:
    """Return the cases, and each of them again for images of one channel."""
    return [*cases, *(replace(case, name=f"{case.name}, 1 channel", channels=1) for case in cases)]
