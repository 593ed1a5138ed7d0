"""Pictures that tests make for themselves."""

from __future__ import annotations

import numpy as np


def smooth_image(height: int, width: int, seed: int) -> np.ndarray:
    """A photograph-like uint8 H×W×3 array: low-frequency colour with a little noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [
        127.5 * (1 + np.sin(x * rng.uniform(0.01, 0.08) + y * rng.uniform(0.01, 0.08) + rng.uniform(0, 6)))
        for _ in range(3)
    ]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 3, (height, width, 3)), 0, 255).astype(np.uint8)
