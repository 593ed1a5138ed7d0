"""Folders of pictures for tests of `gpuload inspect`."""

from __future__ import annotations

from pathlib import Path

from helpers.generated_images import jpeg_bytes, smooth_image


def picture(seed: int, height: int = 40, width: int = 56) -> bytes:
    return jpeg_bytes(smooth_image(height, width, seed))


def folder(root: Path, counts: dict[str, int], *, first: int = 0) -> Path:
    """Write a folder with `counts` pictures per class, all different: their seeds count up from `first`."""
    for name, count in counts.items():
        for number in range(count):
            path = root / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(first, 40, 56 + 8 * (number % 2)))
            first += 1
    return root
