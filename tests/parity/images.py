"""Images for parity: real photographs, random images, and small images for interpreted kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

__all__ = ["DRAW_ROUNDS", "folder_of_photographs", "image_set", "photographs", "random_images", "small_images"]

SKIMAGE_PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png")  # photographs in the package of scikit-image
# For each set of images, the rounds of random draws that are made for it.
DRAW_ROUNDS = {"photographs": (0,), "random": (0, 1, 2, 3), "one": (9,), "small": (0,)}


def photographs(paths: Sequence[Path]) -> list[np.ndarray]:
    """Return three real photographs, uint8 H×W×3: scikit-image's, or photographs at `paths` if it is not installed."""
    paths = list(paths[:: max(1, len(paths) // 3)][:3])
    spec = importlib.util.find_spec("skimage")
    if spec is not None and spec.origin is not None:
        paths = [Path(spec.origin).parent / "data" / name for name in SKIMAGE_PHOTOS]
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]


def random_images() -> list[np.ndarray]:
    """Generate images of several kinds and sizes, uint8 H×W×3: noise, gray, one color, two levels, and a gradient."""
    rng = np.random.default_rng(12)
    return [
        rng.integers(0, 256, (97, 120, 3), np.uint8),
        rng.integers(100, 140, (64, 31, 3), np.uint8),
        np.minimum(rng.exponential(4, (50, 77, 3)), 255).astype(np.uint8),
        np.repeat(rng.integers(0, 256, (90, 60, 1), np.uint8), 3, axis=2),
        np.full((40, 40, 3), (255, 0, 77), np.uint8),
        rng.integers(0, 2, (33, 70, 3), np.uint8) * np.uint8(255),
        np.linspace(0, 255, 80 * 96 * 3).reshape(80, 96, 3).astype(np.uint8),
    ]


def small_images(pictures: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return a shrunk photograph, and noise. The interpreter takes up to 100 ms for an image of this size."""
    shrunk = [np.asarray(Image.fromarray(picture).resize((48, 40))) for picture in pictures[:1]]
    return [*shrunk, np.random.default_rng(13).integers(0, 256, (37, 41, 3), np.uint8)]


def folder_of_photographs() -> list[Path]:
    from conftest import SHARED

    return sorted((SHARED / "photos").glob("*.jpg"))


@cache
def image_set(name: str, channels: int) -> tuple[np.ndarray, ...]:
    """Return the images of a set in `SETS`, uint8 H×W×C; none if there are no photographs."""
    pictures = photographs(folder_of_photographs()) if name in ("photographs", "small") else []
    images = {
        "photographs": lambda: pictures,
        "random": random_images,
        "one": lambda: random_images()[:1],
        "small": lambda: small_images(pictures),
    }[name]()
    if channels == 1:
        images = [np.asarray(Image.fromarray(image).convert("L"))[:, :, None] for image in images]
    return tuple(images)
