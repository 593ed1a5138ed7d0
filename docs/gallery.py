"""The gallery: a picture of each transform's effect on a photograph, with the code that made it.

`pages` calls this module at each build of the site. Each picture shows the photograph and the results of the transform
for the seeds 0, 1, 2, …, or a single result if the transform draws nothing.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from transforms.specs import SPECS

import gpuload as gl
from gpuload import transforms as T
from gpuload.cli.pictures import photographs

__all__ = ["CODE", "page", "picture", "results", "write"]

# The call that each picture shows. Transforms that combine samples, or move boxes, are handled in `results`.
CODE = {name: spec.code for name, spec in SPECS.items() if spec.code}

HEIGHT_PX, GAP_PX, WIDTH_PX = 160, 6, 1200
DRAWN = 4  # results of each transform that draws
CUP = (68, 4, 178, 100)  # left, top, right, bottom, in the coffee at a height of 160 pixels
EYES = ((74, 50, 114, 88), (154, 52, 186, 86))  # in the cat


@functools.cache
def photograph(name: str) -> Image.Image:
    """Load a photograph at a height of 160 pixels."""
    image = Image.open(photographs()[name]).convert("RGB")
    return image.resize((round(image.width * HEIGHT_PX / image.height), HEIGHT_PX), Image.Resampling.LANCZOS)


def results(name: str) -> tuple[list[Image.Image], list[Image.Image]]:
    """Return the photographs, and the results of the transform."""
    transform = eval(CODE[name], {"T": T})
    cat, coffee = (photograph(each).crop((0, 0, 220, HEIGHT_PX)) for each in ("cat", "coffee"))
    if name in ("MixUp", "CutMix"):
        samples = [(gl.Image(np.asarray(image)), label) for label, image in enumerate((cat, coffee))]
        return [cat, coffee], _batch(samples, [T.ToDtype("float32", scale=True), transform])
    if name == "CopyPaste":
        return [cat, coffee], _batch([_with_masks(cat, EYES), _with_masks(coffee, (CUP,))], [transform])
    if name == "Mosaic":
        names = ("cat", "coffee", "astronaut", "motorcycle")
        samples = [(gl.Image(np.asarray(photograph(each))), gl.Boxes([CUP])) for each in names]
        return [photograph(each) for each in names], _batch(samples, [transform])
    cat = photograph("cat")
    if name == "RandomIoUCrop":
        boxes = {"boxes": gl.Boxes(list(EYES)), "labels": np.arange(2)}
        transformed = [T.apply([transform], (cat, boxes), seed=seed) for seed in range(DRAWN)]
        return [_boxed(cat, EYES)], [_boxed(_image(image), target["boxes"].tolist()) for image, target in transformed]
    if name == "MultiView":
        return [cat], [*map(_image, T.apply([transform], cat, seed=0))]
    transformed = [_image(T.apply([transform], cat, seed=seed)) for seed in range(DRAWN)]
    same = all(
        image.size == transformed[0].size and image.tobytes() == transformed[0].tobytes() for image in transformed
    )
    return [cat], transformed[: 1 if same else DRAWN]


def _with_masks(image: Image.Image, boxes: tuple[tuple[int, int, int, int], ...]) -> Any:
    """Return a sample with the image, and the ellipse in each box as an instance."""
    masks = []
    for box in boxes:
        mask = Image.new("L", image.size)
        ImageDraw.Draw(mask).ellipse(box, fill=1)
        masks.append(np.asarray(mask))
    target = {"boxes": gl.Boxes(list(boxes)), "masks": gl.Mask(np.stack(masks)), "labels": np.zeros(len(boxes), int)}
    return gl.Image(np.asarray(image)), target


def _batch(samples: list[Any], chain: list[Any]) -> list[Image.Image]:
    """Put all samples into one batch, and return its images as pictures."""
    with gl.Loader(samples, len(samples), transforms=chain, num_workers=0, device="cpu", seed=3) as loader:
        images = next(iter(loader))[0]
    return [_image(image) for image in images]


def _image(image: torch.Tensor) -> Image.Image:
    """Convert a tensor C×H×W, uint8 or float32 in 0 … 1, to a picture."""
    levels = image if image.dtype == torch.uint8 else (image * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def _boxed(image: Image.Image, boxes: Any) -> Image.Image:
    image = image.copy()
    for left, top, right, bottom in boxes:
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), outline=(255, 205, 40), width=3)
    return image


def picture(photographs: list[Image.Image], transformed: list[Image.Image]) -> Image.Image:
    """Put photographs and results on white, side by side, or in two rows if there are more than two photographs."""
    rows = [photographs + transformed] if len(photographs) <= 2 else [photographs, transformed]
    heights = [max(image.height for image in row) for row in rows]
    widths = [sum(image.width + GAP_PX for image in row) - GAP_PX for row in rows]
    sheet = Image.new("RGB", (max(widths), sum(heights) + GAP_PX * (len(rows) - 1)), "white")
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for image in row:
            sheet.paste(image, (left, top))
            left += image.width + GAP_PX
        top += height + GAP_PX
    sheet.thumbnail((WIDTH_PX, sheet.height), Image.Resampling.LANCZOS)
    return sheet


def page(families: dict[str, list[str]]) -> Iterator[str]:
    """Yield the paragraphs of the page, in Markdown."""
    yield "# Gallery"
    yield (
        "Each picture shows the effect of a transform: the photograph first, then results of several draws. "
        "`from gpuload import transforms as T`; `T.apply([transform], image, seed=n)` does the same to your own "
        "image. Transforms that combine samples need a `Loader`, and `RandomIoUCrop` needs boxes. "
        "[Transforms](../transforms.md) has all arguments in one table."
    )
    for title, names in families.items():
        pictured = [name for name in names if name in CODE]
        if pictured:
            yield f"## {title}"
        for name in pictured:
            yield f"### {name}"
            yield f"```python\n{CODE[name]}\n```"
            yield f"```{{image}} gallery/{name}.jpg\n:alt: A photograph, and results of {name}\n```"
            yield f"Reference: {{py:obj}}`gpuload.transforms.{name}`"


def write(folder: Path) -> None:
    """Write the pictures into ``folder/gallery``, which contains nothing else. This takes about a second."""
    shutil.rmtree(folder / "gallery", ignore_errors=True)
    (folder / "gallery").mkdir(parents=True)
    for name in CODE:
        picture(*results(name)).save(folder / "gallery" / f"{name}.jpg", quality=82, optimize=True)
