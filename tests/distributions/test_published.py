"""What a sample draws, all its numbers together, is distributed as published: against direct simulations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributions import published
from distributions.joint import alike
from distributions.published import repeated

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import NOTHING, OPS

N = 20_000
SIZE = (61, 83)
BOX = ("top", "left", "height", "width")


class Definition(NamedTuple):
    """A transform; the numbers that it drew, by name; and the same ones simulated."""

    transform: Any
    found: Callable[[T.Program], dict[str, np.ndarray]]
    simulated: Callable[[np.random.Generator], dict[str, np.ndarray]]


def columns(names: tuple[str, ...], numbers: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(names, np.asarray(numbers, np.float64).reshape(N, -1).T, strict=True))


def box(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX, draws.records[0].box_tlhw)


def corner(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX[:2], draws.records[0].box_tlhw[:, :2])


def size(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX[2:], draws.results_hw)


def coin(draws: T.Program) -> dict[str, np.ndarray]:
    return {"done": draws.records[0].flipped.astype(float)}


def turned(draws: T.Program) -> dict[str, np.ndarray]:
    """Where the first row and the first column of an image are turned to: down, up, right and left are 0 to 3."""
    [record] = draws.records
    down, right = record.flipped.T.astype(float)
    return {"row": np.where(record.transposed, 2 + right, down), "column": np.where(record.transposed, down, 2 + right)}


def quarters(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """numpy's `rot90`, of marked images."""
    mark = np.array([[0, 1], [2, 3]])
    turns = np.where(rng.uniform(size=N) < 0.7, rng.integers(0, 4, N), 0)
    ways = [np.rot90(mark, turn) for turn in range(4)]
    places = np.array([[np.argwhere(way == number)[0] for number in range(4)] for way in ways])
    down, right = places[:, 2] - places[:, 0], places[:, 1] - places[:, 0]

    def way(step: np.ndarray) -> np.ndarray:
        return np.where(step[:, 0] != 0, step[:, 0] < 0, 2 + (step[:, 1] < 0)).astype(float)

    return {"row": way(down)[turns], "column": way(right)[turns]}


def zoomed(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX, np.hstack([-draws.records[0].box_tlhw[:, :2], draws.results_hw]))


def coefficients(draws: T.Program) -> dict[str, np.ndarray]:
    """Where the corners of a result come from, which are of one size; coefficients are not."""
    a, b, c, d, e, f = draws.records[0].coefficients[:, :6].T
    return places(a, b, c, d, e, f)


def places(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> dict[str, np.ndarray]:
    height, width = SIZE
    return {
        "x of the first": np.asarray(c),
        "y of the first": np.asarray(f),
        "x across": a * width + c,
        "y across": d * width + f,
        "x down": b * height + c,
        "y down": e * height + f,
    }


def simulated_affine(rng: np.random.Generator, *arguments: Any) -> dict[str, np.ndarray]:
    found = np.array([published.affine(rng, SIZE, *arguments) for _ in range(N)])
    return places(*found.T)


CORNERS = tuple(f"{axis}{number}" for number in range(4) for axis in "xy")


def corners(draws: T.Program) -> dict[str, np.ndarray]:
    """Where a perspective map brings the corners, found from its coefficients, which lead back. Pillow's maps are of
    pixels' upper left corners there."""
    height, width = SIZE
    maps = np.concatenate([draws.records[0].coefficients, np.ones((N, 1))], axis=1).reshape(N, 3, 3)
    starts = np.array([[0, 0, 1], [width - 1, 0, 1], [width - 1, height - 1, 1], [0, height - 1, 1.0]])
    ends = np.einsum("nij,kj->nki", np.linalg.inv(maps), starts)
    return columns(CORNERS, np.rint(ends[:, :, :2] / ends[:, :, 2:]))


ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")
RANGES = [(0.6, 1.4), (0.2, 0.9), (0.0, 3.0), (-0.1, 0.1)]


def jittered(draws: T.Program) -> dict[str, np.ndarray]:
    order = np.argsort(draws.records[0].codes, axis=1)  # OPS has them in this order
    factors = np.take_along_axis(draws.records[0].values[:, :, 0], order, axis=1)
    return columns((*ADJUSTMENTS, *(f"place of {name}" for name in ADJUSTMENTS)), np.hstack([factors, order]))


def distorted(draws: T.Program) -> dict[str, np.ndarray]:
    codes, values = draws.records[0].codes, draws.records[0].values
    found = np.full((N, 6), -9.0)
    found[:, 4], found[:, 5] = 0, -1
    for number in range(codes.shape[1]):
        for code in set(codes[:, number].tolist()) - {NOTHING}:
            rows, name = np.flatnonzero(codes[:, number] == code), OPS[code]
            if name == "permute":
                found[rows, 5] = values[rows, number, 0]
                continue
            found[rows, ADJUSTMENTS.index(name)] = values[rows, number, 0]
            if name == "contrast":  # before saturation, where that is done at all, or behind the hue
                found[rows, 4] = 1 if number < 2 else 2
    return columns((*ADJUSTMENTS, "place of contrast", "first channel"), found)


def erased(draws: T.Program) -> dict[str, np.ndarray]:
    """How many boxes there are, and the first of them, wherever it stands."""
    boxes = draws.records[0].boxes_tlhw
    there = boxes[:, :, 2] > 0
    first = np.where(there.any(axis=1)[:, None], boxes[np.arange(N), there.argmax(axis=1)], -1)
    return columns(("count", *BOX), np.column_stack([there.sum(axis=1), first]))


def mixed(draws: T.Program) -> dict[str, np.ndarray]:
    return columns((*BOX, "share"), np.column_stack([draws.records[1].box_tlhw, draws.records[1].share]))


def jittered_sometimes(draws: T.Program) -> dict[str, np.ndarray]:
    """The factor, 0 where it is not done."""
    found = np.zeros(N)
    for record in draws.records:
        found[record.rows] = record.values[:, 0, 0]
    return {"factor": found}


def chosen(draws: T.Program) -> dict[str, np.ndarray]:
    """Which way, and the number that was drawn on it."""
    way, number = np.full(N, 2.0), np.zeros(N)  # Identity
    for record in draws.records:
        kind = ["ColorJitter", "GaussianBlur"].index(record.name)
        way[record.rows] = kind
        number[record.rows] = record.values[:, 0, 2 * kind]
    return {"way": way, "number": number}


def simulated_choice(rng: np.random.Generator) -> dict[str, np.ndarray]:
    way = rng.choice(3, N, p=[0.5, 0.3, 0.2])
    numbers = np.where(way == 0, rng.uniform(0.6, 1.4, N), rng.uniform(0.5, 3, N))
    return {"way": way.astype(float), "number": np.where(way == 2, 0, numbers)}


def ordered(draws: T.Program) -> dict[str, np.ndarray]:
    """At which place each flip is done, and whether it is."""
    found = np.zeros((N, 4))
    for number, record in enumerate(draws.records):  # two for each way
        found[record.rows, record.axis] = number % 2
        found[record.rows, 2 + record.axis] = record.flipped
    return columns(("place 0", "place 1", "flip 0", "flip 1"), found)


def simulated_order(rng: np.random.Generator) -> dict[str, np.ndarray]:
    first = rng.integers(2, size=N)
    flips = rng.uniform(size=(N, 2)) < [0.3, 0.7]
    return columns(("place 0", "place 1", "flip 0", "flip 1"), np.column_stack([first, 1 - first, flips]))


def loop(names: tuple[str, ...], once: Callable[..., Any], *arguments: Any) -> Callable[[Any], dict[str, np.ndarray]]:
    return lambda rng: repeated(N, names, partial(once, rng, *arguments))


def resize_range(rng: np.random.Generator) -> dict[str, np.ndarray]:
    short = rng.integers(20, 45, N)
    return columns(BOX[2:], np.column_stack([short, short * SIZE[1] // SIZE[0]]))


def shortest(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Detectron's ResizeShortestEdge as torchvision has it."""
    factor = np.minimum(rng.choice([20, 31, 40, 55], N) / min(SIZE), 70 / max(SIZE))
    return columns(BOX[2:], (np.array(SIZE) * factor[:, None]).astype(int))


def jitter_scale(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Ghiasi et al. 2021, as torchvision has it, which compares the target's width with the image's height."""
    factor = rng.uniform(0.2, 1.5, N) * min(50 / SIZE[0], 90 / SIZE[1])
    return columns(BOX[2:], (np.array(SIZE) * factor[:, None]).astype(int))


FLOAT = T.ToDtype("float32", scale=True)
AFFINE: Any = ((-30.0, 50.0), (0.1, 0.3), (0.5, 1.5), (-20.0, 5.0, -10.0, 15.0))
DISTORTED = [(0.875, 1.125), (0.5, 1.5), (0.5, 1.5), (-0.05, 0.05)]

DEFINITIONS: dict[str, Definition] = {
    "RandomResizedCrop": Definition(
        T.RandomResizedCrop(32), box, loop(BOX, published.resized_crop, SIZE, (0.08, 1.0), (3 / 4, 4 / 3))
    ),
    "RandomResizedCrop, seldom possible": Definition(
        T.RandomResizedCrop(32, (0.8, 1.0), (1.5, 4.0)),
        box,
        loop(BOX, published.resized_crop, SIZE, (0.8, 1.0), (1.5, 4.0)),
    ),
    "RandomCrop": Definition(
        T.RandomCrop((70, 30), padding=(1, 2, 3, 4), pad_if_needed=True),
        corner,
        loop(BOX[:2], published.crop, SIZE, (70, 30), (1, 2, 3, 4)),
    ),
    "RandomCropOrPad": Definition(
        T.RandomCropOrPad((70, 30)),
        corner,
        # timm's: what is smaller stands at any place of the crop, too.
        lambda rng: columns(BOX[:2], np.column_stack([-rng.integers(0, 10, N), rng.integers(0, 54, N)])),
    ),
    "RandomHorizontalFlip": Definition(
        T.RandomHorizontalFlip(0.3), coin, lambda rng: {"done": (rng.uniform(size=N) < 0.3).astype(float)}
    ),
    "RandomRotate90": Definition(T.RandomRotate90(0.7), turned, quarters),
    "RandomTranspose": Definition(
        T.RandomTranspose(0.3),
        lambda draws: {"done": draws.records[0].transposed.astype(float)},
        lambda rng: {"done": (rng.uniform(size=N) < 0.3).astype(float)},
    ),
    "RandomVerticalFlip": Definition(
        T.RandomVerticalFlip(0.8), coin, lambda rng: {"done": (rng.uniform(size=N) < 0.8).astype(float)}
    ),
    "RandomZoomOut": Definition(
        T.RandomZoomOut(0, (1.0, 3.0), 0.7), zoomed, loop(BOX, published.zoom_out, SIZE, (1.0, 3.0), 0.7)
    ),
    "RandomResize": Definition(T.RandomResize(20, 45), size, resize_range),
    "RandomShortestSize": Definition(T.RandomShortestSize([20, 31, 40, 55], 70), size, shortest),
    "ScaleJitter": Definition(T.ScaleJitter((90, 50), (0.2, 1.5)), size, jitter_scale),
    "ResizeKeepRatio": Definition(
        T.ResizeKeepRatio((90, 120), 0.3, "bilinear", 0.6, (0.5, 1.2), True, 0.7, (0.5, 1.5)),
        size,
        loop(BOX[2:], published.keep_ratio, SIZE, (90, 120), 0.3, (0.6, 0.5, 1.2), (0.7, 0.5, 1.5)),
    ),
    "RandomAffine": Definition(T.RandomAffine(*AFFINE), coefficients, lambda rng: simulated_affine(rng, *AFFINE)),
    "RandomRotation": Definition(
        # torchvision turns counterclockwise here, and clockwise in RandomAffine.
        T.RandomRotation((-20, 50)),
        coefficients,
        lambda rng: simulated_affine(rng, (-50, 20), (0, 0), (1, 1), (0, 0, 0, 0)),
    ),
    "RandomPerspective": Definition(
        T.RandomPerspective(0.6, 1.0), corners, loop(CORNERS, published.perspective, SIZE, 0.6)
    ),
    "ColorJitter": Definition(
        T.ColorJitter(*RANGES),
        jittered,
        loop((*ADJUSTMENTS, *(f"place of {name}" for name in ADJUSTMENTS)), published.color_jitter, RANGES),
    ),
    "RandomPhotometricDistort": Definition(
        T.RandomPhotometricDistort(p=0.4),
        distorted,
        loop((*ADJUSTMENTS, "place of contrast", "first channel"), published.photometric, DISTORTED, 0.4),
    ),
    "GaussianBlur": Definition(
        T.GaussianBlur(5, (0.3, 1.7)),
        lambda draws: columns(("x", "y"), draws.records[0].values[:, 0, 2:4]),
        lambda rng: columns(("x", "y"), np.repeat(rng.uniform(0.3, 1.7, (N, 1)), 2, axis=1)),
    ),
    "RandomErasing": Definition(
        T.RandomErasing(0.6, (0.02, 0.6), (0.3, 3.3), 1),
        erased,
        loop(("count", *BOX), published.erasing, SIZE, 0.6, (0.02, 0.6), (0.3, 3.3), (1, 1)),
    ),
    "RandomErasing, timm's": Definition(
        T.RandomErasing(0.8, (0.02, 1 / 3), (0.3, 1 / 0.3), 1, min_count=2, max_count=4),
        erased,
        loop(("count", *BOX), published.erasing, SIZE, 0.8, (0.02, 1 / 3), (0.3, 1 / 0.3), (2, 4)),
    ),
    "MixUp": Definition(
        [FLOAT, T.MixUp(alpha=0.3)],
        lambda draws: {"share": draws.records[1].share},
        lambda rng: {"share": rng.beta(0.3, 0.3, N)},
    ),
    "CutMix": Definition([FLOAT, T.CutMix(alpha=0.7)], mixed, loop((*BOX, "share"), published.cutmix, SIZE, 0.7)),
    "RandomApply": Definition(
        T.RandomApply([T.ColorJitter(0.4)], 0.3),
        jittered_sometimes,
        lambda rng: {"factor": np.where(rng.uniform(size=N) < 0.3, rng.uniform(0.6, 1.4, N), 0)},
    ),
    "RandomChoice": Definition(
        T.RandomChoice([T.ColorJitter(0.4), T.GaussianBlur(3, (0.5, 3)), T.Identity()], [5, 3, 2]),
        chosen,
        simulated_choice,
    ),
    "RandomOrder": Definition(
        T.RandomOrder([T.RandomVerticalFlip(0.3), T.RandomHorizontalFlip(0.7)]), ordered, simulated_order
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFINITIONS)
def test_draws_are_distributed_as_published(name):
    definition = DEFINITIONS[name]
    given = definition.transform if isinstance(definition.transform, list) else [definition.transform]
    draws = T.Chain(given).draw(epoch_key(8, 0), np.arange(N), np.tile([SIZE], (N, 1)))
    alike(definition.found(draws), definition.simulated(np.random.default_rng(1)))


# Where the draws of others are held against what is published, or against the original that is installed.
ELSEWHERE = {
    "transforms/test_policies.py": ("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"),
    "transforms/test_blur_noise.py": ("ElasticTransform", "JPEG"),
    "transforms/test_timm_policies.py": ("TimmAugMix", "TimmAutoAugment", "TimmRandAugment"),
    "transforms/test_colour.py": (
        *("RandomAdjustSharpness", "RandomAutocontrast", "RandomEqualize", "RandomGrayscale", "RandomInvert"),
        *("RandomChannelPermutation", "RandomPosterize", "RandomSolarize"),
    ),
    "stage/test_noise.py": ("GaussianNoise",),
    "transforms/test_gathering.py": ("CopyPaste", "Mosaic"),
    "targets/test_boxes.py": ("RandomIoUCrop",),
}
NOTHING_DRAWN = {
    *(
        "CenterCrop",
        "CenterCropOrPad",
        "ClampBoundingBoxes",
        "ClampKeyPoints",
        "Compose",
        "ConvertBoundingBoxFormat",
        "Custom",
        "Grayscale",
        "Lambda",
    ),
    *(
        "Identity",
        "MultiView",
        "Normalize",
        "Pad",
        "SanitizeBoundingBoxes",
        "SanitizeKeyPoints",
        "ToDtype",
        "TrimBorder",
        "UniformTemporalSubsample",
    ),
    "Resize",  # but for a random filter: transforms/test_resizing.py
}


def test_the_draws_of_every_transform_are_tested():
    kinds = {name: getattr(T, name) for name in T.__all__}
    names = {name for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, Transform)}
    here = {name.partition(",")[0] for name in DEFINITIONS}
    elsewhere = {name for found in ELSEWHERE.values() for name in found}
    assert names == here | elsewhere | NOTHING_DRAWN
    for path, found in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / path).read_text()
        assert all(name in text or name == "GaussianNoise" for name in found), path
