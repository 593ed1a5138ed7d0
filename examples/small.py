"""Code shared by the examples: their options, small generated datasets, and a small network to replace with yours.

The generated pictures show circles, crosses, squares and triangles on grey clouds, in folders like those of ImageNet,
COCO and Pascal VOC. They are in a temporary folder, which is removed at the end.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import nn

SIDE = 96  # side of a picture, in pixels
COLOURS = {"red": (214, 48, 49), "green": (30, 160, 80), "blue": (52, 101, 220), "yellow": (240, 200, 40)}
ROUND = np.linspace(0, 2 * np.pi, 24, endpoint=False)
ARMS = [(-1, -3), (1, -3), (1, -1), (3, -1), (3, 1), (1, 1), (1, 3), (-1, 3), (-1, 1), (-3, 1), (-3, -1), (-1, -1)]
OUTLINES = {
    "circle": np.stack([np.cos(ROUND), np.sin(ROUND)], 1),
    "cross": np.array(ARMS) / 3,
    "square": np.array([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]),
    "triangle": np.array([(0, -1), (1, 0.8), (-1, 0.8)]),
}
CLASSES = list(OUTLINES)


class Shape(NamedTuple):
    kind: int  # index in CLASSES
    colour: str
    outline: np.ndarray  # (n, 2), x and y in pixels


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", nargs="?", type=Path, metavar="PATH", help="your images; default: small generated pictures"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch and process (%(default)s)")
    parser.add_argument("--size", type=int, help="size of the images in a batch; default: 224, or 64 without PATH")
    parser.add_argument(
        "--workers", type=int, help="processes that read and decode; default: depends on the number of CPUs"
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu, …; default: the current GPU, or the CPU without one")
    return parser


def arguments(parser: argparse.ArgumentParser, make: Callable[[Path], None]) -> argparse.Namespace:
    """Parse the options. Without PATH, let `make` write a small dataset, and use its path."""
    args = parser.parse_args()
    args.size = args.size or (224 if args.data else 64)
    if args.data is None:
        args.data = Path(tempfile.mkdtemp(prefix="gpuload-example-"))
        atexit.register(shutil.rmtree, args.data, ignore_errors=True)
        make(args.data)
    return args


def network(classes: int) -> nn.Module:
    """Return a network of three convolutions, which two CPU cores train in seconds."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.GroupNorm(8, outputs), nn.ReLU()]

    body = [*block(3, 16), *block(16, 32), *block(32, 64)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def scene(number: int, shapes: int = 1, *, any_colour: bool = False) -> tuple[Image.Image, list[Shape]]:
    """Draw a picture, and return it with its shapes. The class of the first shape is `number` modulo 4."""
    rng = np.random.default_rng(number)
    clouds = Image.fromarray(rng.integers(90, 190, (5, 5), np.uint8))
    picture = clouds.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB")
    cells_per_side, drawn = (1 if shapes == 1 else 2), []
    for cell in rng.permutation(cells_per_side**2)[:shapes]:
        kind = int(rng.integers(4)) if drawn else number % 4
        colour = list(COLOURS)[rng.integers(4) if any_colour else kind]
        middle = (
            (np.array([cell % cells_per_side, cell // cells_per_side]) + rng.uniform(0.45, 0.55, 2))
            * SIDE
            / cells_per_side
        )
        outline = OUTLINES[CLASSES[kind]] * rng.uniform(0.25, 0.4) * SIDE / cells_per_side + middle
        ImageDraw.Draw(picture).polygon(outline.ravel().tolist(), fill=COLOURS[colour])
        drawn.append(Shape(kind, colour, outline))
    return picture, drawn


def folder(root: Path, training: int = 128, validation: int = 32) -> None:
    """Write a dataset in ImageNet's layout: train/CLASS/….jpg and val/CLASS/….jpg."""
    for number in range(training + validation):
        picture, [shape] = scene(number)
        path = root / ("train" if number < training else "val") / CLASSES[shape.kind] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)


def coco(root: Path, training: int = 128, validation: int = 32) -> None:
    """Write a dataset in COCO's layout: train2017/….jpg, annotations/instances_train2017.json, and likewise val."""
    categories = [{"id": 10 * kind + 1, "name": name} for kind, name in enumerate(CLASSES)]  # ids with gaps, as in COCO
    (root / "annotations").mkdir()
    for part, numbers in {"train": range(training), "val": range(training, training + validation)}.items():
        (root / f"{part}2017").mkdir()
        images, annotations = [], []
        for number in numbers:
            picture, shapes = scene(number, number % 3 + 1)
            picture.save(root / f"{part}2017" / f"{number}.jpg")
            images.append({"id": number, "file_name": f"{number}.jpg", "width": SIDE, "height": SIDE})
            for shape in shapes:
                low, high = shape.outline.min(0), shape.outline.max(0) + 1
                annotation = {"id": len(annotations), "image_id": number, "category_id": 10 * shape.kind + 1}
                annotation |= {"bbox": [*low, *(high - low)], "area": float(np.prod(high - low)), "iscrowd": 0}
                annotations.append(annotation | {"segmentation": [shape.outline.ravel().tolist()]})
        description = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(description))


def voc(root: Path, training: int = 128, validation: int = 32) -> None:
    """Write a dataset in VOC's layout: JPEGImages/….jpg, SegmentationClass/….png, ImageSets/Segmentation/….txt."""
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / name).mkdir(parents=True)
    for part, numbers in {"train": range(training), "val": range(training, training + validation)}.items():
        for number in numbers:
            picture, shapes = scene(number, number % 3 + 1)
            mask = Image.new("P", picture.size)
            mask.putpalette([0, 0, 0, *np.ravel(list(COLOURS.values())).tolist()])
            for shape in shapes:
                ImageDraw.Draw(mask).polygon(shape.outline.ravel().tolist(), fill=1 + shape.kind)
            picture.save(root / "JPEGImages" / f"{number}.jpg")
            mask.save(root / "SegmentationClass" / f"{number}.png")
        (root / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(map(str, numbers)))


def captions(root: Path, count: int = 192) -> None:
    """Write captions.csv, with the columns file and caption, and the image files."""
    with open(root / "captions.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "caption"])
        for number in range(count):
            picture, [shape] = scene(number, any_colour=True)
            picture.save(root / f"{number}.jpg")
            rows.writerow([f"{number}.jpg", f"a {shape.colour} {CLASSES[shape.kind]} on grey clouds"])
