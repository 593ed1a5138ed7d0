"""Published definitions of the draws of transforms, simulated with numpy's generator, without code of gpuload."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]
Generator = np.random.Generator


def repeated(count: int, names: tuple[str, ...], once: Callable[[], Any]) -> Columns:
    """Repeat a definition for one image, and return the numbers as columns."""
    rows = np.array([once() for _ in range(count)], np.float64).reshape(count, len(names))
    return dict(zip(names, rows.T, strict=True))


def resized_crop(
    rng: Generator, size_hw: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Szegedy et al. 2015, as in torchvision: the first of ten boxes that fits, or a central box."""
    height, width = size_hw
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def crop(
    rng: Generator, size_hw: tuple[int, int], crop_hw: tuple[int, int], padding: tuple[int, int, int, int]
) -> tuple[int, int]:
    """torchvision's RandomCrop with pad_if_needed: the corner, relative to the image. The image is padded by `padding`
    (left, top, right, bottom), then on both sides by the length that is missing."""
    corner = []
    for length, crop_length, (before, after) in zip(
        size_hw, crop_hw, ((padding[1], padding[3]), (padding[0], padding[2])), strict=True
    ):
        padded = length + before + after
        if padded < crop_length:
            before += crop_length - padded
            padded += 2 * (crop_length - padded)
        corner.append(int(rng.integers(padded - crop_length + 1)) - before)
    return corner[0], corner[1]


def zoom_out(rng: Generator, size_hw: tuple[int, int], sides: tuple[float, float], p: float) -> tuple[int, ...]:
    """Liu et al. 2016 (SSD), as in torchvision: top and left of the image on its canvas, and the size of the canvas."""
    height, width = size_hw
    if rng.uniform() >= p:
        return 0, 0, height, width
    factor = rng.uniform(*sides)
    tall, wide = int(height * factor), int(width * factor)
    return int((tall - height) * rng.uniform()), int((wide - width) * rng.uniform()), tall, wide


def keep_ratio(
    rng: Generator,
    size_hw: tuple[int, int],
    target_hw: tuple[int, int],
    longest: float,
    scaled: tuple[float, float, float],
    stretched: tuple[float, float, float],
) -> tuple[int, int]:
    """timm's ResizeKeepRatio, with `random_scale_area`: the new size; the last two are probability, low, high."""
    ratios = size_hw[0] / target_hw[0], size_hw[1] / target_hw[1]
    ratio = max(ratios) * longest + min(ratios) * (1 - longest)
    factors = [1.0, 1.0]
    if rng.uniform() < scaled[0]:
        factor = 1 / math.sqrt(rng.uniform(*scaled[1:]))
        factors = [factor, factor]
    if rng.uniform() < stretched[0]:
        aspect = math.sqrt(math.exp(rng.uniform(math.log(stretched[1]), math.log(stretched[2]))))
        factors = [factors[0] / aspect, factors[1] * aspect]
    height, width = (round(side * factor / ratio) for side, factor in zip(size_hw, factors, strict=True))
    return height, width


def affine(
    rng: Generator,
    size_hw: tuple[int, int],
    degrees: tuple[float, float],
    translate: tuple[float, float],
    scale: tuple[float, float],
    shear: tuple[float, float, float, float],
) -> list[float]:
    """torchvision's RandomAffine: the map from a result to its input, in Pillow's order a, b, c, d, e, f.

    Its documented forward map is shift · center · (scale · rotation · shear) · center⁻¹.
    """
    height, width = size_hw
    angle = math.radians(rng.uniform(*degrees))
    reach_x, reach_y = translate[0] * width, translate[1] * height
    shift_xy = round(rng.uniform(-reach_x, reach_x)), round(rng.uniform(-reach_y, reach_y))
    factor = rng.uniform(*scale)
    sx, sy = math.radians(rng.uniform(*shear[:2])), math.radians(rng.uniform(*shear[2:]))
    rotation = angle - sy
    linear = np.array(
        [
            [math.cos(rotation) / math.cos(sy), -math.cos(rotation) * math.tan(sx) / math.cos(sy) - math.sin(angle)],
            [math.sin(rotation) / math.cos(sy), -math.sin(rotation) * math.tan(sx) / math.cos(sy) + math.cos(angle)],
        ]
    )
    forward = np.eye(3)
    forward[:2, :2] = factor * linear
    to_center, from_center, shift = np.eye(3), np.eye(3), np.eye(3)
    from_center[:2, 2] = width / 2, height / 2
    to_center[:2, 2] = -width / 2, -height / 2
    shift[:2, 2] = shift_xy
    return np.linalg.inv(shift @ from_center @ forward @ to_center)[:2].ravel().tolist()


def perspective(rng: Generator, size_hw: tuple[int, int], distortion: float, p: float) -> list[int]:
    """torchvision's RandomPerspective: the new x and y of the corners, clockwise from the top left."""
    height, width = size_hw
    if rng.uniform() >= p:
        distortion = 0
    max_shift_x, max_shift_y = int(distortion * (width // 2)), int(distortion * (height // 2))
    left, right = (0, max_shift_x + 1), (width - max_shift_x - 1, width)
    top, bottom = (0, max_shift_y + 1), (height - max_shift_y - 1, height)
    return [int(rng.integers(*bounds)) for bounds in (left, top, right, top, right, bottom, left, bottom)]


def color_jitter(rng: Generator, ranges: list[tuple[float, float]]) -> list[float]:
    """torchvision's ColorJitter: a factor for each adjustment, and its position in the order."""
    factors = [rng.uniform(*span) for span in ranges]
    order = rng.permutation(len(ranges))
    return [*factors, *np.argsort(order).tolist()]


def photometric(rng: Generator, ranges: list[tuple[float, float]], p: float) -> list[float]:
    """Howard 2013, as in torchvision: a factor for each adjustment, -9 if it is not applied; the place of contrast, 1
    before saturation and hue, 2 after them, 0 if it is not applied; the first channel, -1 if they are not permuted."""
    brightness, contrast, saturation, hue = (rng.uniform(*span) if rng.uniform() < p else math.nan for span in ranges)
    contrast_is_early = rng.uniform() < 0.5
    first_channel = int(rng.permutation(3)[0]) if rng.uniform() < p else -1
    place_of_contrast = 0 if math.isnan(contrast) else 1 if contrast_is_early else 2
    factors = (brightness, contrast, saturation, hue)
    return [*(-9.0 if math.isnan(factor) else factor for factor in factors), place_of_contrast, first_channel]


def erasing(
    rng: Generator,
    size_hw: tuple[int, int],
    p: float,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    counts: tuple[int, int],
) -> tuple[int, ...]:
    """Zhong et al. 2017, as in torchvision for one box, and as in timm for several: their number, and the first box."""
    height, width = size_hw
    boxes, count = [], int(rng.integers(counts[0], counts[1] + 1)) if rng.uniform() < p else 0
    for _ in range(count):
        for _ in range(10):
            area = height * width * rng.uniform(*scale) / count
            aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h < height and w < width:
                if h and w:
                    boxes.append((int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w))
                break
    return (len(boxes), *(boxes[0] if boxes else (-1, -1, -1, -1)))


def cutmix(rng: Generator, size_hw: tuple[int, int], alpha: float) -> list[float]:
    """Yun et al. 2019, as in torchvision: the box, and the share of the image."""
    height, width = size_hw
    share = rng.beta(alpha, alpha)
    x, y = int(rng.integers(width)), int(rng.integers(height))
    r = 0.5 * math.sqrt(1 - share)
    half_w, half_h = int(r * width), int(r * height)
    top, left, bottom, right = max(y - half_h, 0), max(x - half_w, 0), min(y + half_h, height), min(x + half_w, width)
    return [top, left, bottom - top, right - left, 1 - (bottom - top) * (right - left) / (height * width)]
