"""Generated images of many sizes, and batches of images that are cut, as by workers, to the regions a chain needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuload import transforms as T
from gpuload.rng.philox import Key, epoch_key
from gpuload.stage import RaggedImages

KEY = epoch_key(5, 0)


def smooth_images(seed: int, count: int, channels: int = 3, low: int = 30, high: int = 120) -> list[np.ndarray]:
    """Generate photograph-like uint8 H×W×C arrays of many sizes: waves of color, edges, and a little noise."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        height, width = rng.integers(low, high, 2)
        y, x = np.mgrid[0:height, 0:width]
        planes = []
        for _ in range(channels):
            wave = 127 * (1 + np.sin(x * rng.uniform(-0.1, 0.1) + y * rng.uniform(-0.1, 0.1) + rng.uniform(0, 6)))
            planes.append(np.where((x // 9 + y // 7) % 5 == 0, 255 - wave, wave))
        noisy = np.stack(planes, -1) + rng.normal(0, 2, (height, width, channels))
        images.append(np.clip(noisy, 0, 255).astype(np.uint8))
    return images


def cut_batch(
    chain: T.Chain, images: Sequence[np.ndarray], *, uncut: bool = False, key: Key = KEY, first: int = 0
) -> tuple[RaggedImages, T.Program]:
    """Return the images as workers would deliver them, or entire if `uncut`, and the draws for them."""
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    positions = np.arange(first, first + len(images))
    regions = chain.regions(key, positions, sizes)
    if uncut:
        regions = np.hstack([np.zeros_like(sizes), sizes])
    crops = [
        image[top : top + height, left : left + width]
        for image, (top, left, height, width) in zip(images, regions.tolist(), strict=True)
    ]
    ragged = RaggedImages.from_arrays(crops)
    ragged.table["size_hw"], ragged.table["region_tlhw"] = sizes, regions
    return ragged, chain.draw(key, positions, sizes)
