"""The draws of transforms as columns of numbers, and simulations of them that must have the same distribution."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from distributions import published
from distributions.published import Generator, repeated

from gpuload import transforms as T
from gpuload.transforms.program.ops import NOTHING, OPS

N = 20_000
SIZE = (61, 83)
BOX = ("top", "left", "height", "width")


class Definition(NamedTuple):
    """A transform or a chain, a function that returns its draws as named columns, and a simulation of them."""

    transform: Any
    drawn: Callable[[T.Program], dict[str, np.ndarray]]
    simulated: Callable[[Generator], dict[str, np.ndarray]]


def columns(names: tuple[str, ...], numbers: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(names, np.asarray(numbers, np.float64).reshape(N, -1).T, strict=True))


def box(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX, draws.records[0].box_tlhw)


def corner(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX[:2], draws.records[0].box_tlhw[:, :2])


def size(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX[2:], draws.results_hw)


def flipped(draws: T.Program) -> dict[str, np.ndarray]:
    return {"done": draws.records[0].flipped.astype(float)}


def quarter_turns(draws: T.Program) -> dict[str, np.ndarray]:
    """Return where the first row and the first column of an image are moved: 0 to 3 are down, up, right, left."""
    [record] = draws.records
    down, right = record.flipped.T.astype(float)
    return {"row": np.where(record.transposed, 2 + right, down), "column": np.where(record.transposed, down, 2 + right)}


def rot90(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate turns with numpy's `rot90`."""
    mark = np.array([[0, 1], [2, 3]])
    turns = np.where(rng.uniform(size=N) < 0.7, rng.integers(0, 4, N), 0)
    ways = [np.rot90(mark, turn) for turn in range(4)]
    places = np.array([[np.argwhere(way == number)[0] for number in range(4)] for way in ways])
    down, right = places[:, 2] - places[:, 0], places[:, 1] - places[:, 0]

    def way(step: np.ndarray) -> np.ndarray:
        return np.where(step[:, 0] != 0, step[:, 0] < 0, 2 + (step[:, 1] < 0)).astype(float)

    return {"row": way(down)[turns], "column": way(right)[turns]}


def zoomed_out(draws: T.Program) -> dict[str, np.ndarray]:
    return columns(BOX, np.hstack([-draws.records[0].box_tlhw[:, :2], draws.results_hw]))


def mapped_corners(draws: T.Program) -> dict[str, np.ndarray]:
    """Return where the corners of a result come from; in contrast to coefficients, these numbers have one scale."""
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


def simulated_affine(rng: Generator, *arguments: Any) -> dict[str, np.ndarray]:
    maps = np.array([published.affine(rng, SIZE, *arguments) for _ in range(N)])
    return places(*maps.T)


CORNERS = tuple(f"{axis}{number}" for number in range(4) for axis in "xy")


def moved_corners(draws: T.Program) -> dict[str, np.ndarray]:
    """Return where a perspective moves the corners of the image, from the coefficients of the inverse map."""
    height, width = SIZE
    maps = np.concatenate([draws.records[0].coefficients, np.ones((N, 1))], axis=1).reshape(N, 3, 3)
    starts = np.array([[0, 0, 1], [width - 1, 0, 1], [width - 1, height - 1, 1], [0, height - 1, 1.0]])
    ends = np.einsum("nij,kj->nki", np.linalg.inv(maps), starts)
    ends = np.where(draws.records[0].warped[:, None, None], ends[:, :, :2] / ends[:, :, 2:], starts[:, :2])
    return columns(CORNERS, np.rint(ends))


ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")
RANGES = [(0.6, 1.4), (0.2, 0.9), (0.0, 3.0), (-0.1, 0.1)]


def jittered(draws: T.Program) -> dict[str, np.ndarray]:
    order = np.argsort(draws.records[0].codes, axis=1)  # the order of OPS
    factors = np.take_along_axis(draws.records[0].values[:, :, 0], order, axis=1)
    return columns((*ADJUSTMENTS, *(f"place of {name}" for name in ADJUSTMENTS)), np.hstack([factors, order]))


def distorted(draws: T.Program) -> dict[str, np.ndarray]:
    codes, values = draws.records[0].codes, draws.records[0].values
    numbers = np.full((N, 6), -9.0)
    numbers[:, 4], numbers[:, 5] = 0, -1
    for number in range(codes.shape[1]):
        for code in set(codes[:, number].tolist()) - {NOTHING}:
            rows, name = np.flatnonzero(codes[:, number] == code), OPS[code]
            if name == "permute":
                numbers[rows, 5] = values[rows, number, 0]
                continue
            numbers[rows, ADJUSTMENTS.index(name)] = values[rows, number, 0]
            if name == "contrast":  # comes before saturation, or after hue
                numbers[rows, 4] = 1 if number < 2 else 2
    return columns((*ADJUSTMENTS, "place of contrast", "first channel"), numbers)


def erased_boxes(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the number of boxes, and the first box that has an area."""
    boxes = draws.records[0].boxes_tlhw
    there = boxes[:, :, 2] > 0
    first = np.where(there.any(axis=1)[:, None], boxes[np.arange(N), there.argmax(axis=1)], -1)
    return columns(("count", *BOX), np.column_stack([there.sum(axis=1), first]))


def mix_columns(draws: T.Program) -> dict[str, np.ndarray]:
    return columns((*BOX, "share"), np.column_stack([draws.records[1].box_tlhw, draws.records[1].share]))


def jittered_sometimes(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the factor, 0 if the jitter is not applied."""
    factors = np.zeros(N)
    for record in draws.records:
        factors[record.rows] = record.values[:, 0, 0]
    return {"factor": factors}


def branches(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the branch, and the number that its transform drew."""
    branch, number = np.full(N, 2.0), np.zeros(N)  # Identity
    for record in draws.records:
        kind = ["ColorJitter", "GaussianBlur"].index(record.name)
        branch[record.rows] = kind
        number[record.rows] = record.values[:, 0, 2 * kind]
    return {"way": branch, "number": number}


def simulated_choice(rng: Generator) -> dict[str, np.ndarray]:
    branch = rng.choice(3, N, p=[0.5, 0.3, 0.2])
    numbers = np.where(branch == 0, rng.uniform(0.6, 1.4, N), rng.uniform(0.5, 3, N))
    return {"way": branch.astype(float), "number": np.where(branch == 2, 0, numbers)}


def ordered(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the position of each flip, and whether it is applied."""
    numbers = np.zeros((N, 4))
    for number, record in enumerate(draws.records):  # two per branch
        numbers[record.rows, record.axis] = number % 2
        numbers[record.rows, 2 + record.axis] = record.flipped
    return columns(("place 0", "place 1", "flip 0", "flip 1"), numbers)


def simulated_order(rng: Generator) -> dict[str, np.ndarray]:
    first = rng.integers(2, size=N)
    flips = rng.uniform(size=(N, 2)) < [0.3, 0.7]
    return columns(("place 0", "place 1", "flip 0", "flip 1"), np.column_stack([first, 1 - first, flips]))


def simulation(
    names: tuple[str, ...], once: Callable[..., Any], *arguments: Any
) -> Callable[[Any], dict[str, np.ndarray]]:
    return lambda rng: repeated(N, names, partial(once, rng, *arguments))


def resize_range(rng: Generator) -> dict[str, np.ndarray]:
    short = rng.integers(20, 45, N)
    return columns(BOX[2:], np.column_stack([short, short * SIZE[1] // SIZE[0]]))


def shortest(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate Detectron's ResizeShortestEdge, as in torchvision."""
    factor = np.minimum(rng.choice([20, 31, 40, 55], N) / min(SIZE), 70 / max(SIZE))
    return columns(BOX[2:], (np.array(SIZE) * factor[:, None]).astype(int))


def jitter_scale(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate Ghiasi et al. 2021, as in torchvision, which compares the target's width with the image's height."""
    factor = rng.uniform(0.2, 1.5, N) * min(50 / SIZE[0], 90 / SIZE[1])
    return columns(BOX[2:], (np.array(SIZE) * factor[:, None]).astype(int))


AFFINE: Any = ((-30.0, 50.0), (0.1, 0.3), (0.5, 1.5), (-20.0, 5.0, -10.0, 15.0))
DISTORTED = [(0.875, 1.125), (0.5, 1.5), (0.5, 1.5), (-0.05, 0.05)]


def operation(draws: T.Program) -> dict[str, np.ndarray]:
    """Return whether an operation is applied, its code, and its first number."""
    [record] = draws.records
    [codes] = record.codes.T
    done = codes != NOTHING
    return {"done": done.astype(float), "code": codes.astype(float), "number": record.values[:, 0, 0] * done}


def operation_with(transform: Any, p: float, name: str, number: float = 0) -> Definition:
    """Define an operation with a fixed number that is applied with a probability."""

    def simulated(rng: Generator) -> dict[str, np.ndarray]:
        done = rng.uniform(size=N) < p
        code = np.where(done, OPS.index(name), NOTHING).astype(float)
        return {"done": done.astype(float), "code": code, "number": np.where(done, number, 0.0)}

    return Definition(transform, operation, simulated)


def uniform_operation(transform: Any, p: float, name: str, low: float, high: float, column: int = 0) -> Definition:
    """Define an operation with a uniform number that is applied with a probability."""

    def drawn(draws: T.Program) -> dict[str, np.ndarray]:
        [record] = draws.records
        done = (record.codes[:, 0] == OPS.index(name)).astype(float)
        return {"done": done, "number": record.values[:, 0, column] * done}

    def simulated(rng: Generator) -> dict[str, np.ndarray]:
        done = (rng.uniform(size=N) < p).astype(float)
        return {"done": done, "number": rng.uniform(low, high, N) * done}

    return Definition(transform, drawn, simulated)


BLUR = ("size", "angle", "direction", "shift x", "shift y")
LAMP = ("intensity", "y", "x", "sigma")


def motion_blurs(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate Albumentations' MotionBlur: even limits are raised to the next odd size."""
    sizes = rng.choice([5, 7, 9], N)
    shifts = rng.uniform(-1, 1, (2, N)) * (sizes // 2) / 2
    return columns(BLUR, np.stack([sizes, rng.uniform(10, 80, N), rng.uniform(-0.5, 1, N), *shifts], axis=1))


def red_factors(mode: str, limits: tuple[int, int], method: str, rng: Generator) -> dict[str, np.ndarray]:
    """Simulate the factor of red of Albumentations' PlanckianJitter, with Kornia's table of illuminants. The factor of
    blue is a function of that of red (test_lighting.py)."""
    from kornia.augmentation._2d.intensity.planckian_jitter import get_planckian_coeffs

    is_warm, (low, high), white = rng.uniform(size=N) < 0.4, limits, 6000
    temperatures = np.where(is_warm, rng.uniform(low, white, N), rng.uniform(white, high, N))
    if method == "gaussian":
        shifts = abs(rng.normal(size=N)) / 3
        temperatures = np.clip(white + np.where(is_warm, low - white, high - white) * shifts, low, high)
    table = get_planckian_coeffs(mode).double().numpy()
    steps = 15_000 - 500 * np.arange(len(table))[::-1]
    return {"red": np.interp(temperatures // 1, steps, table[:, 0])}


def lamps(rng: Generator) -> dict[str, np.ndarray]:
    """Simulate Albumentations' Illumination(mode="gaussian"), in pixels."""
    height, width = SIZE
    intensity = rng.uniform(0.2, 0.7, N) * rng.choice([-1, 1], N)
    y, x, sigma = rng.uniform(0.1, 0.8, N) * height, rng.uniform(0.1, 0.8, N) * width, rng.uniform(0.3, 0.9, N) * width
    return columns(LAMP, np.stack([intensity, y, x, sigma], axis=1))


SHADOWS = ("count", "share", "x", "y")


def shadows(draws: T.Program) -> dict[str, np.ndarray]:
    """Return the number of shadows, and the share of light and the second vertex of the first shadow."""
    from gpuload.stage.reference.color import shadow_vertices

    [record] = draws.records
    counts = (record.codes != NOTHING).sum(axis=1)
    firsts = np.array([[row[0], *shadow_vertices(row)[1]] for row in record.values[:, 0].tolist()])
    return columns(SHADOWS, np.column_stack([counts, firsts * (counts > 0)[:, None]]))


def simulated_shadows(rng: Generator) -> dict[str, np.ndarray]:
    height, width = SIZE
    counts = np.where(rng.uniform(size=N) < 0.6, rng.integers(1, 4, N), 0)
    x = rng.integers(int(0.1 * width), int(0.7 * width), N)
    y = rng.integers(int(0.2 * height), height, N)
    firsts = np.column_stack([1 - rng.uniform(0.2, 0.7, N), x, y])
    return columns(SHADOWS, np.column_stack([counts, firsts * (counts > 0)[:, None]]))


def simulated_coin(name: str, p: float) -> Callable[[Generator], dict[str, np.ndarray]]:
    """Return a simulation of a simulated_coin."""
    return lambda rng: {name: (rng.uniform(size=N) < p).astype(float)}


ORDER = ("first", "second", "third")


def permuted(draws: T.Program) -> dict[str, np.ndarray]:
    """Return where each channel comes from."""
    return columns(ORDER, draws.records[0].values[:, 0, :3])


def resized_crops(scale: tuple[float, float], ratio: tuple[float, float]) -> Definition:
    return Definition(
        T.RandomResizedCrop(32, scale, ratio), box, simulation(BOX, published.resized_crop, SIZE, scale, ratio)
    )


def erasures(p: float, scale: tuple[float, float], ratio: tuple[float, float], counts: tuple[int, int]) -> Definition:
    transform = T.RandomErasing(p, scale, ratio, 1, min_count=counts[0], max_count=counts[1])
    return Definition(
        transform, erased_boxes, simulation(("count", *BOX), published.erasing, SIZE, p, scale, ratio, counts)
    )


jitters = Definition(
    T.ColorJitter(*RANGES),
    jittered,
    simulation((*ADJUSTMENTS, *(f"place of {name}" for name in ADJUSTMENTS)), published.color_jitter, RANGES),
)
distortions = Definition(
    T.RandomPhotometricDistort(p=0.4),
    distorted,
    simulation((*ADJUSTMENTS, "place of contrast", "first channel"), published.photometric, DISTORTED, 0.4),
)
