"""The picture of README.md: photographs and augmented versions of them.

``python -m benchmarks.plot_augmented`` writes docs/pictures/augmented.jpg. The photographs are the public-domain
photographs in scikit-image's wheel; each row begins with an unaugmented centre crop. The same seed gives the same
picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

import gpuload as gl
from gpuload import transforms as T
from gpuload.cli.pictures import photographs

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "augmented.jpg"
PHOTOGRAPHS = ("astronaut", "cat", "coffee")
SIZE_PX, GAP_PX, COLUMNS, SEED = 160, 6, 8, 4


def load_rows(seed: int = SEED) -> np.ndarray:
    """Return uint8 photographs × columns × height × width × 3: a centre crop, then augmented versions."""
    files = [photographs()[name] for name in PHOTOGRAPHS]
    recipe = [
        T.RandomResizedCrop(SIZE_PX, scale=(0.2, 1.0)),
        T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        T.RandomApply([T.RandomRotation(20, interpolation="bilinear")], p=0.3),
        T.RandomGrayscale(0.15),
        T.RandomErasing(p=0.25, value=127),
    ]

    def images(per_file: int, transforms: list) -> np.ndarray:
        samples = [gl.read(path) for path in files for _ in range(per_file)]
        with gl.Loader(samples, len(samples), transforms=transforms, num_workers=0, device="cpu", seed=seed) as loader:
            (batch,) = loader
        return batch.permute(0, 2, 3, 1).numpy().reshape(len(files), per_file, SIZE_PX, SIZE_PX, 3)

    plain = images(1, [T.Resize(SIZE_PX), T.CenterCrop(SIZE_PX)])
    return np.concatenate([plain, images(COLUMNS - 1, recipe)], axis=1)


def draw_sheet() -> Image.Image:
    """Draw all images in rows, with a wider gap after the unaugmented images."""
    step = SIZE_PX + GAP_PX
    picture = Image.new("RGB", (COLUMNS * step + GAP_PX, len(PHOTOGRAPHS) * step - GAP_PX), "white")
    for row, images in enumerate(load_rows()):
        for column, image in enumerate(images):
            left = column * step + (2 * GAP_PX if column else 0)
            picture.paste(Image.fromarray(image), (left, row * step))
    return picture


def main() -> None:
    draw_sheet().save(PICTURE, quality=85, optimize=True)


if __name__ == "__main__":
    main()
