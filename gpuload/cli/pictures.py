"""A folder of JPEGs for demos and benchmarks, created from the photographs in scikit-image's wheel.

Each photograph is one class. Its images are random crops, resized to the size of a photo, flipped, and changed in
brightness, contrast and saturation. An image depends only on its number. Nothing is downloaded, and scikit-image is not
imported.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

__all__ = ["PhotographsMissing", "make_folder", "make_picture", "photographs"]

PHOTOGRAPHS = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "galaxies": "hubble_deep_field.jpg",
    "motorcycle": "motorcycle_left.png",
    "retina": "retina.jpg",
    "rocket": "rocket.jpg",
    "tissue": "ihc.png",
}
SIZES_WH = ((500, 375), (500, 333), (375, 500), (400, 400))
SCALE = (0.25, 1.0)  # range of the crop's area, relative to the largest crop with the same aspect ratio
ENHANCE = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


class PhotographsMissing(Exception):
    """The error if scikit-image is not installed, or lacks the photographs."""


def photographs() -> dict[str, Path]:
    """Return the files of the photographs in the installed scikit-image, keyed by class.

    Raises:
        PhotographsMissing: there are fewer than two photographs.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise PhotographsMissing(
            "the photographs come from scikit-image, which is not installed: pip install 'gpuload[demo]'"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    files = {name: folder / file for name, file in PHOTOGRAPHS.items() if (folder / file).exists()}
    if len(files) < 2:
        raise PhotographsMissing(f"expected scikit-image's photographs ({', '.join(PHOTOGRAPHS.values())}) in {folder}")
    return files


def make_picture(photograph: Image.Image, number: int) -> bytes:
    """Return a JPEG of a random part of the photograph, which depends only on the photograph and `number`."""
    rng = np.random.default_rng([0x6750, number])
    width, height = SIZES_WH[rng.integers(len(SIZES_WH))]
    max_zoom = min(photograph.width / width, photograph.height / height)
    zoom = max_zoom * np.sqrt(rng.uniform(*SCALE))
    left = rng.uniform(0, photograph.width - width * zoom)
    top = rng.uniform(0, photograph.height - height * zoom)
    box = (left, top, min(photograph.width, left + width * zoom), min(photograph.height, top + height * zoom))
    picture = photograph.resize((width, height), Image.Resampling.BICUBIC, box=box)
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for enhance in ENHANCE:
        picture = enhance(picture).enhance(rng.uniform(0.7, 1.3))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=int(rng.integers(88, 97)))
    return buffer.getvalue()


def make_folder(root: Path, *, count: int, progress: Callable[[int], None] = lambda count_so_far: None) -> Path:
    """Write `count` JPEGs to ``root/class/number.jpg``, and return `root`. A complete folder is reused unchanged.

    `progress` is called with the number of pictures written so far.

    Raises:
        PhotographsMissing: see `photographs`.
        FileExistsError: `root` exists and was not created by this function.
    """
    sources = photographs()
    marker = root.with_name(root.name + ".made")  # not inside the folder, which must contain only classes
    expected_marker = f"{count} pictures of {', '.join(sources)}; recipe 1\n"
    if marker.exists() and marker.read_text() == expected_marker and root.exists():
        progress(count)
        return root
    if root.exists():
        if not marker.exists():
            raise FileExistsError(f"{root} exists, and is not a demo folder: remove it, or choose another folder")
        shutil.rmtree(root)
    root.mkdir(parents=True)
    marker.write_text("unfinished\n")
    photographs_by_class = {name: Image.open(path).convert("RGB") for name, path in sources.items()}
    names = list(photographs_by_class)
    for name in names:
        (root / name).mkdir()
    for number in range(count):
        name = names[number % len(names)]
        (root / name / f"{number:04d}.jpg").write_bytes(make_picture(photographs_by_class[name], number))
        progress(number + 1)
    marker.write_text(expected_marker)
    return root
