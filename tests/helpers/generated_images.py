"""Generated pictures for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def smooth_image(height: int, width: int, seed: int) -> np.ndarray:
    """Generate a photograph-like uint8 H×W×3 array: low-frequency colour with a little noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [
        127.5 * (1 + np.sin(x * rng.uniform(0.01, 0.08) + y * rng.uniform(0.01, 0.08) + rng.uniform(0, 6)))
        for _ in range(3)
    ]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 3, (height, width, 3)), 0, 255).astype(np.uint8)


def jpeg_bytes(image: np.ndarray, **options: Any) -> bytes:
    """Encode a uint8 H×W×3 array as a JPEG with Pillow's options; defaults are quality 90 and 4:2:0."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", **{"quality": 90, "subsampling": "4:2:0", **options})
    return file.getvalue()


def encode(array: np.ndarray, kind: str = "JPEG", mode: str | None = None, **options: Any) -> bytes:
    """Encode the array as a file of this kind with Pillow's options, after conversion to `mode`."""
    image, file = Image.fromarray(array), io.BytesIO()
    (image if mode is None else image.convert(mode)).save(file, kind, **options)
    return file.getvalue()
