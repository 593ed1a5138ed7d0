"""The draws of transforms (`…_columns`), and simulations that must have the same distribution (`simulate_…`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from distributions import published
from distributions.published import Generator, repeated

from gpuload import transforms as T
from gpuload.transforms.program.ops import NOTHING, OPS

SAMPLES = 20_000
SIZE_HW = (61, 83)
BOX = ("top", "left", "height", "width")


class Definition(NamedTuple):
    """A transform or a chain, a function that returns its draws as named columns, and a simulation of them."""

    transform: Any
    columns_of: Callable[[T.Program], dict[str, np.ndarray]]
    simulate: Callable[[Generator], dict[str, np.ndarray]]


def columns(names: tuple[str, ...], numbers: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(names, np.asarray(numbers, np.float64).reshape(SAMPLES, -1).T, strict=True))


def box_columns(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX, draws.records[0].box_tlhw)


def corner_columns(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX[:2], draws.records[0].box_tlhw[:, :2])


def size_columns(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX[2:], draws.results_hw)


def flip_column(draws: T.Program) -> dict[str, np.ndarray]:
    return {"done": draws.records[0].flipped.astype(float)}


def quarter_turn_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return where the first row and the first column of an image are moved: 0 to 3 are down, up, right, left."""
    [record] = draws.records
    down, right = record.flipped.T.astype(float)
    return {"row": np.where(record.transposed, 2 + right, down), "column": np.where(record.transposed, down, 2 + right)}


def simulate_quarter_turns(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate turns with numpy's `rot90`."""
    corner_labels = np.array([[0, 1], [2, 3]])
    turns = np.where(rng.uniform(size=SAMPLES) < 0.7, rng.integers(0, 4, SAMPLES), 0)
    rotated = [np.rot90(corner_labels, turn) for turn in range(4)]
    label_positions = np.array([[np.argwhere(direction == number)[0] for number in range(4)] for direction in rotated])
    down, right = label_positions[:, 2] - label_positions[:, 0], label_positions[:, 1] - label_positions[:, 0]

    def direction(step: np.ndarray) -> np.ndarray:
        return np.where(step[:, 0] != 0, step[:, 0] < 0, 2 + (step[:, 1] < 0)).astype(float)

    return {"row": direction(down)[turns], "column": direction(right)[turns]}


def zoom_out_columns(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX, np.hstack([-draws.records[0].box_tlhw[:, :2], draws.results_hw]))


def affine_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the source of the corners of a result. In contrast to coefficients, these numbers have one scale."""
    a, b, c, d, e, f = draws.records[0].coefficients[:, :6].T
    return map_columns(a, b, c, d, e, f)


def map_columns(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> dict[str, np.ndarray]:
    height, width = SIZE_HW
    return {
        "x of the first": np.asarray(c),
        "y of the first": np.asarray(f),
        "x across": a * width + c,
        "y across": d * width + f,
        "x down": b * height + c,
        "y down": e * height + f,
    }


def simulate_affine(rng: Generator, *arguments: Any) -> dict[str, np.ndarray]:
    maps = np.array([published.affine(rng, SIZE_HW, *arguments) for _ in range(SAMPLES)])
    return map_columns(*maps.T)


CORNERS = tuple(f"{axis}{number}" for number in range(4) for axis in "xy")


def perspective_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return where a perspective moves the corners of the image, from the coefficients of the inverse map."""
    height, width = SIZE_HW
    maps = np.concatenate([draws.records[0].coefficients, np.ones((SAMPLES, 1))], axis=1).reshape(SAMPLES, 3, 3)
    starts = np.array([[0, 0, 1], [width - 1, 0, 1], [width - 1, height - 1, 1], [0, height - 1, 1.0]])
    ends = np.einsum("nij,kj->nki", np.linalg.inv(maps), starts)
    ends = np.where(draws.records[0].warped[:, None, None], ends[:, :, :2] / ends[:, :, 2:], starts[:, :2])
    return columns(CORNERS, np.rint(ends))


ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")
JITTER_RANGES = [(0.6, 1.4), (0.2, 0.9), (0.0, 3.0), (-0.1, 0.1)]


def jitter_columns(draws: T.Program) -> dict[str, np.ndarray]:
    order = np.argsort(draws.records[0].codes, axis=1)  # the order of OPS
    factors = np.take_along_axis(draws.records[0].values[:, :, 0], order, axis=1)
    return columns((*ADJUSTMENTS, *(f"place of {name}" for name in ADJUSTMENTS)), np.hstack([factors, order]))


def distortion_columns(draws: T.Program) -> dict[str, np.ndarray]:
    codes, values = draws.records[0].codes, draws.records[0].values
    # Four factors (-9 if not applied), the place of contrast (0 if not applied), and the first channel (-1: in order).
    numbers = np.tile([-9.0, -9.0, -9.0, -9.0, 0.0, -1.0], (SAMPLES, 1))
    for number in range(codes.shape[1]):
        for code in set(codes[:, number].tolist()) - {NOTHING}:
            rows, name = np.flatnonzero(codes[:, number] == code), OPS[code]
            if name == "permute":
                numbers[rows, 5] = values[rows, number, 0]
                continue
            numbers[rows, ADJUSTMENTS.index(name)] = values[rows, number, 0]
            if name == "contrast":
                numbers[rows, 4] = 1 if number < 2 else 2  # before saturation, or after hue
    return columns((*ADJUSTMENTS, "place of contrast", "first channel"), numbers)


def erasing_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the number of boxes, and the first box that has an area."""
    boxes = draws.records[0].boxes_tlhw
    has_area = boxes[:, :, 2] > 0
    first_box = np.where(has_area.any(axis=1)[:, None], boxes[np.arange(SAMPLES), has_area.argmax(axis=1)], -1)
    return columns(("count", *BOX), np.column_stack([has_area.sum(axis=1), first_box]))


def mix_columns(draws: T.Program) -> dict[str, np.ndarray]:
    return columns((*BOX, "share"), np.column_stack([draws.records[1].box_tlhw, draws.records[1].share]))


def applied_jitter_column(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the factors, which are 0 if the jitter is not applied."""
    factors = np.zeros(SAMPLES)
    for record in draws.records:
        factors[record.rows] = record.values[:, 0, 0]
    return {"factor": factors}


def branch_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the branch, and the number that its transform drew."""
    branch, number = np.full(SAMPLES, 2.0), np.zeros(SAMPLES)  # Identity
    for record in draws.records:
        kind = ["ColorJitter", "GaussianBlur"].index(record.name)
        branch[record.rows] = kind
        number[record.rows] = record.values[:, 0, 2 * kind]
    return {"way": branch, "number": number}


def simulate_choice(rng: Generator) -> dict[str, np.ndarray]:
    branch = rng.choice(3, SAMPLES, p=[0.5, 0.3, 0.2])
    numbers = np.where(branch == 0, rng.uniform(0.6, 1.4, SAMPLES), rng.uniform(0.5, 3, SAMPLES))
    return {"way": branch.astype(float), "number": np.where(branch == 2, 0, numbers)}


def order_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the position of each flip, and whether it is applied."""
    numbers = np.zeros((SAMPLES, 4))
    for number, record in enumerate(draws.records):  # two per branch
        numbers[record.rows, record.axis] = number % 2
        numbers[record.rows, 2 + record.axis] = record.flipped
    return columns(("place 0", "place 1", "flip 0", "flip 1"), numbers)


def simulate_order(rng: Generator) -> dict[str, np.ndarray]:
    first = rng.integers(2, size=SAMPLES)
    flips = rng.uniform(size=(SAMPLES, 2)) < [0.3, 0.7]
    return columns(("place 0", "place 1", "flip 0", "flip 1"), np.column_stack([first, 1 - first, flips]))


def simulation(
    names: tuple[str, ...], once: Callable[..., Any], *arguments: Any
) -> Callable[[Any], dict[str, np.ndarray]]:
    return lambda rng: repeated(SAMPLES, names, partial(once, rng, *arguments))


def simulate_resize_range(rng: Generator) -> dict[str, np.ndarray]:
    short = rng.integers(20, 45, SAMPLES)
    return columns(BOX[2:], np.column_stack([short, short * SIZE_HW[1] // SIZE_HW[0]]))


def simulate_shortest_size(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate Detectron's ResizeShortestEdge, as in torchvision."""
    factor = np.minimum(rng.choice([20, 31, 40, 55], SAMPLES) / min(SIZE_HW), 70 / max(SIZE_HW))
    return columns(BOX[2:], (np.array(SIZE_HW) * factor[:, None]).astype(int))


def simulate_scale_jitter(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate Ghiasi et al. 2021, as in torchvision, which compares the target's width with the image's height."""
    factor = rng.uniform(0.2, 1.5, SAMPLES) * min(50 / SIZE_HW[0], 90 / SIZE_HW[1])
    return columns(BOX[2:], (np.array(SIZE_HW) * factor[:, None]).astype(int))


AFFINE_ARGUMENTS: Any = ((-30.0, 50.0), (0.1, 0.3), (0.5, 1.5), (-20.0, 5.0, -10.0, 15.0))
DISTORTION_RANGES = [(0.875, 1.125), (0.5, 1.5), (0.5, 1.5), (-0.05, 0.05)]


def operation_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return whether an operation is applied, its code, and its first number."""
    [record] = draws.records
    [codes] = record.codes.T
    applied = codes != NOTHING
    return {"done": applied.astype(float), "code": codes.astype(float), "number": record.values[:, 0, 0] * applied}


def operation_definition(transform: Any, p: float, name: str, number: float = 0) -> Definition:
    """Define an operation with a fixed number that is applied with a probability."""

    def simulate_operation(rng: Generator) -> dict[str, np.ndarray]:
        applied = rng.uniform(size=SAMPLES) < p
        code = np.where(applied, OPS.index(name), NOTHING).astype(float)
        return {"done": applied.astype(float), "code": code, "number": np.where(applied, number, 0.0)}

    return Definition(transform, operation_columns, simulate_operation)


def coin_simulation(name: str, p: float) -> Callable[[Generator], dict[str, np.ndarray]]:
    """Return a simulation of a transform that is applied with probability `p`."""
    return lambda rng: {name: (rng.uniform(size=SAMPLES) < p).astype(float)}


CHANNEL_COLUMNS = ("first", "second", "third")


def permutation_columns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return where each channel comes from."""
    return columns(CHANNEL_COLUMNS, draws.records[0].values[:, 0, :3])


def resized_crop_definition(scale: tuple[float, float], ratio: tuple[float, float]) -> Definition:
    return Definition(
        T.RandomResizedCrop(32, scale, ratio),
        box_columns,
        simulation(BOX, published.resized_crop, SIZE_HW, scale, ratio),
    )


def erasing_definition(
    p: float, scale: tuple[float, float], ratio: tuple[float, float], counts: tuple[int, int]
) -> Definition:
    transform = T.RandomErasing(p, scale, ratio, 1, min_count=counts[0], max_count=counts[1])
    return Definition(
        transform, erasing_columns, simulation(("count", *BOX), published.erasing, SIZE_HW, p, scale, ratio, counts)
    )


jitter_definition = Definition(
    T.ColorJitter(*JITTER_RANGES),
    jitter_columns,
    simulation((*ADJUSTMENTS, *(f"place of {name}" for name in ADJUSTMENTS)), published.color_jitter, JITTER_RANGES),
)
distortion_definition = Definition(
    T.RandomPhotometricDistort(p=0.4),
    distortion_columns,
    simulation((*ADJUSTMENTS, "place of contrast", "first channel"), published.photometric, DISTORTION_RANGES, 0.4),
)
