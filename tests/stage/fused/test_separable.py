"""Tables of weights: the reference's for resizing, to the last bit; of a blur, those of a padded image, summed up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage.fused.separable import make_weight_tables
from gpuload.transforms.program.fusing import jobs as R
from gpuload.transforms.program.fusing.jobs import place_tables
from gpuload.transforms.program.ops import FILTERS
from gpuload.transforms.program.windows import filter_weights, source_windows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 8


def records(jobs: list[dict[int, int]]) -> np.ndarray:
    numbers = np.zeros((len(jobs), R.JOB), np.int64)
    for row, job in enumerate(jobs):
        for place, number in job.items():
            numbers[row, place] = number
    return numbers


def made(jobs: list[dict[int, int]], sigmas: list[tuple[float, float]] | None = None):
    """Of each job what all pixels of the source weigh in its columns, (columns, width), and rows, (rows, height)."""
    ints = records(jobs)
    kind = int(ints[0, R.KIND])
    floats = np.zeros((len(jobs), R.FLOATS))
    if sigmas:
        floats[:, [R.SIGMA_Y, R.SIGMA_X]] = sigmas
    size, programs = place_tables(ints, kind, ROWS)
    filters = 0 if kind == R.BLUR else 1 << R.BILINEAR | 1 << R.BICUBIC
    records_on_device = torch.from_numpy(ints).to(DEVICE), torch.from_numpy(floats).to(DEVICE)
    numbers = make_weight_tables(*records_on_device, len(jobs), size, programs, kind, filters, ROWS)
    numbers = numbers.cpu().numpy()
    assert len(numbers) == size > 0
    return [(columns_of(numbers, own), rows_of(numbers, own)) for own in ints]


def columns_of(numbers: np.ndarray, own: np.ndarray) -> np.ndarray:
    count, width, taps = own[R.OUT_WIDTH], own[R.WIDTH], own[R.TAPS]
    at = own[R.WEIGHTS_X]
    first = numbers[at : at + count]
    assert (first >= 0).all()
    assert (first + min(taps, width) <= width).all()
    weights = numbers[at + count : at + count * (1 + taps)].reshape(taps // 2, count, 2)
    found = np.zeros((count, width + taps), np.int32)
    for tap in range(taps):
        found[np.arange(count), first + tap] = weights[tap // 2, :, tap % 2]
    assert not found[:, width:].any()  # what lies behind the source has no weight
    return found[:, :width]


def rows_of(numbers: np.ndarray, own: np.ndarray) -> np.ndarray:
    count, height, lines = own[R.OUT_HEIGHT], own[R.HEIGHT], own[R.LINES]
    found = np.zeros((count, height + lines), np.int32)
    for tile in range(-(-count // ROWS)):
        at = own[R.WEIGHTS_Y] + tile * (1 + lines) * ROWS
        assert at % ROWS == 0
        top, there = numbers[at : at + 2]
        assert 0 <= top < height
        assert there % 4 == 0
        assert there <= lines
        own_rows = np.arange(tile * ROWS, min((tile + 1) * ROWS, count))
        weights = numbers[at + ROWS : at + ROWS * (1 + there)].reshape(there, ROWS)
        found[own_rows, top : top + there] = weights[:, : len(own_rows)].T
    assert not found[:, height:].any()
    return found[:, :height]


def resizing(
    box_hw: tuple[int, int], size_hw: tuple[int, int], window_tlhw: tuple[int, int, int, int], name: str
) -> dict[int, int]:
    """A job whose source is what the window needs of the box."""
    codes = np.array([FILTERS.index(name)])
    source = source_windows(np.array([window_tlhw]), np.array([size_hw]), np.array([box_hw]), codes)[0].tolist()
    return {
        R.KIND: R.RESIZE,
        R.FILTER: FILTERS.index(name),
        R.HEIGHT: source[2],
        R.WIDTH: source[3],
        R.BOX_H: box_hw[0],
        R.BOX_W: box_hw[1],
        R.SIZE_H: size_hw[0],
        R.SIZE_W: size_hw[1],
        R.CORNER_Y: source[0],
        R.CORNER_X: source[1],
        R.OUT_HEIGHT: window_tlhw[2],
        R.OUT_WIDTH: window_tlhw[3],
        R.Y: window_tlhw[0],
        R.X: window_tlhw[1],
        R.STEP_Y: 1,
        R.STEP_X: 1,
    }


def expected(job: dict[int, int], axis: int, name: str) -> np.ndarray:
    """By the reference: (places, pixels of the source)."""
    box, size, corner, length, start, count = (
        int(job[keys[axis]])
        for keys in (
            (R.BOX_H, R.BOX_W),
            (R.SIZE_H, R.SIZE_W),
            (R.CORNER_Y, R.CORNER_X),
            (R.HEIGHT, R.WIDTH),
            (R.Y, R.X),
            (R.OUT_HEIGHT, R.OUT_WIDTH),
        )
    )
    firsts, weights = filter_weights(np.array([box]), np.array([size]), np.array([start]), count, name)
    found = np.zeros((count, box + weights.shape[2]), np.int32)
    for tap in range(weights.shape[2]):
        found[np.arange(count), firsts[0] + tap] += weights[0, :, tap]
    inside = found[:, corner : corner + length]
    assert inside.sum() == found.sum()  # what the window needs is there
    return inside


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_weights_of_resizing_are_the_references_to_the_last_bit(name):
    rng = np.random.default_rng(7)
    jobs = []
    for number in range(20):
        low = 300 if number % 8 == 0 else 40  # some reach over many pixels
        box, size = (tuple(rng.integers(1, high, 2).tolist()) for high in (low, 40))
        if number % 5 == 0:
            size = box[0] % 40 + 1, size[1]
        if number % 7 == 0:
            box = size[0], box[1]  # one axis is copied
        start = [int(rng.integers(0, length)) for length in size]
        count = [int(rng.integers(1, length - first + 1)) for length, first in zip(size, start, strict=True)]
        jobs.append(resizing(box, size, (*start, *count), name))
    for job, (columns, rows) in zip(jobs, made(jobs), strict=True):
        np.testing.assert_array_equal(rows, expected(job, 0, name))
        np.testing.assert_array_equal(columns, expected(job, 1, name))


def test_rows_and_columns_of_a_mirrored_result_are_those_of_the_other_one():
    job = resizing((50, 31), (23, 29), (2, 3, 19, 21), "bilinear")
    mirrored = {**job, R.Y: 20, R.STEP_Y: -1, R.X: 23, R.STEP_X: -1}
    [(columns, rows), (columns_mirrored, rows_mirrored)] = made([job, mirrored])
    np.testing.assert_array_equal(columns_mirrored, columns[::-1])
    np.testing.assert_array_equal(rows_mirrored, rows[::-1])


@pytest.mark.parametrize(
    ("shape", "kernel", "sigma"),
    [
        ((40, 33), (9, 5), (2.4, 1.1)),
        ((20, 21), (23, 23), (2.0, 7.0)),
        ((6, 5), (23, 31), (6.0, 7.0)),  # mirrored more than once
        ((5, 9), (9, 17), (2.0, 3.0)),  # as far as the last pixel
        ((1, 2), (5, 5), (1.0, 3.0)),
        ((17, 1), (1, 7), (1.0, 0.5)),
    ],
)
def test_weights_of_a_blur_are_those_of_a_mirrored_image(shape, kernel, sigma):
    job = {R.KIND: R.BLUR, R.HEIGHT: shape[0], R.WIDTH: shape[1], R.KERNEL_H: kernel[0], R.KERNEL_W: kernel[1]}
    job |= {R.OUT_HEIGHT: shape[0], R.OUT_WIDTH: shape[1], R.STEP_Y: 1, R.STEP_X: 1}
    [(columns, rows)] = made([job], [sigma])
    for found, length, size, width in ((rows, shape[0], kernel[0], sigma[0]), (columns, shape[1], kernel[1], sigma[1])):
        away = np.arange(-(size // 2), size // 2 + 1)
        bell = np.exp(-0.5 * (away / width) ** 2)
        bell /= bell.sum()
        wanted = np.zeros((length, length))
        for place in range(length):
            for step, weight in zip(away, bell, strict=True):
                mirrored = (place + step) % max(2 * (length - 1), 1)
                wanted[place, min(mirrored, 2 * (length - 1) - mirrored)] += weight
        np.testing.assert_allclose(found.view(np.float32), wanted, atol=2e-6)


def test_a_kind_that_is_no_filter_has_no_tables():
    assert place_tables(records([{R.KIND: R.WARP}]), R.WARP, ROWS) == (0, 0)
