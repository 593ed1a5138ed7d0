"""Weights in kernels: the bits of the reference for a resize, and those of a reflected image for a blur."""

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


def records_of(jobs: list[dict[int, int]]) -> np.ndarray:
    numbers = np.zeros((len(jobs), R.JOB), np.int64)
    for row, job in enumerate(jobs):
        for place, number in job.items():
            numbers[row, place] = number
    return numbers


def make_weights(jobs: list[dict[int, int]], sigmas: list[tuple[float, float]] | None = None):
    """Return the weights of each job's columns, (columns, width), and of its rows, (rows, height)."""
    ints = records_of(jobs)
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
    return [(columns_of(numbers, record), rows_of(numbers, record)) for record in ints]


def columns_of(numbers: np.ndarray, record: np.ndarray) -> np.ndarray:
    count, width, taps = record[R.OUT_WIDTH], record[R.WIDTH], record[R.TAPS]
    start = record[R.WEIGHTS_X]
    first = numbers[start : start + count]
    assert (first >= 0).all()
    assert (first + min(taps, width) <= width).all()
    weights = numbers[start + count : start + count * (1 + taps)].reshape(taps // 2, count, 2)
    dense = np.zeros((count, width + taps), np.int32)
    for tap in range(taps):
        dense[np.arange(count), first + tap] = weights[tap // 2, :, tap % 2]
    assert not dense[:, width:].any()  # pixels beyond the source have no weight
    return dense[:, :width]


def rows_of(numbers: np.ndarray, record: np.ndarray) -> np.ndarray:
    count, height, lines = record[R.OUT_HEIGHT], record[R.HEIGHT], record[R.LINES]
    dense = np.zeros((count, height + lines), np.int32)
    for tile in range(-(-count // ROWS)):
        at = record[R.WEIGHTS_Y] + tile * (1 + lines) * ROWS
        assert at % ROWS == 0
        top, tap_count = numbers[at : at + 2]
        assert 0 <= top < height
        assert tap_count % 4 == 0
        assert tap_count <= lines
        tile_rows = np.arange(tile * ROWS, min((tile + 1) * ROWS, count))
        weights = numbers[at + ROWS : at + ROWS * (1 + tap_count)].reshape(tap_count, ROWS)
        dense[tile_rows, top : top + tap_count] = weights[:, : len(tile_rows)].T
    assert not dense[:, height:].any()
    return dense[:, :height]


def resize_job(
    box_hw: tuple[int, int], size_hw: tuple[int, int], window_tlhw: tuple[int, int, int, int], name: str
) -> dict[int, int]:
    """Make a job whose source is the part of the box that the window needs."""
    codes = np.array([FILTERS.index(name)])
    top, left, height, width = source_windows(np.array([window_tlhw]), np.array([size_hw]), np.array([box_hw]), codes)[
        0
    ].tolist()
    job = {R.KIND: R.RESIZE, R.FILTER: FILTERS.index(name), R.STEP_Y: 1, R.STEP_X: 1}
    job |= {R.BOX_H: box_hw[0], R.BOX_W: box_hw[1], R.SIZE_H: size_hw[0], R.SIZE_W: size_hw[1]}
    job |= {R.CORNER_Y: top, R.CORNER_X: left, R.HEIGHT: height, R.WIDTH: width}
    return job | dict(zip((R.Y, R.X, R.OUT_HEIGHT, R.OUT_WIDTH), window_tlhw, strict=True))


AXES = (R.BOX_H, R.BOX_W), (R.SIZE_H, R.SIZE_W), (R.CORNER_Y, R.CORNER_X), (R.HEIGHT, R.WIDTH), (R.Y, R.X)


def reference_weights(job: dict[int, int], axis: int, name: str) -> np.ndarray:
    """Return the reference's weights, (positions, pixels of the source)."""
    box, size, corner, length, start = (int(job[fields[axis]]) for fields in AXES)
    count = job[(R.OUT_HEIGHT, R.OUT_WIDTH)[axis]]
    firsts, weights = filter_weights(np.array([box]), np.array([size]), np.array([start]), count, name)
    dense = np.zeros((count, box + weights.shape[2]), np.int32)
    for tap in range(weights.shape[2]):
        dense[np.arange(count), firsts[0] + tap] += weights[0, :, tap]
    inside = dense[:, corner : corner + length]
    assert inside.sum() == dense.sum()  # the source has all that the window needs
    return inside


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_resize_weights_have_the_bits_of_the_reference(name):
    rng = np.random.default_rng(7)
    jobs = []
    for number in range(20):
        low = 300 if number % 8 == 0 else 40  # some filters span many pixels
        box, size = (tuple(rng.integers(1, high, 2).tolist()) for high in (low, 40))
        if number % 5 == 0:
            size = box[0] % 40 + 1, size[1]
        if number % 7 == 0:
            box = size[0], box[1]  # one axis is copied
        start = [int(rng.integers(0, length)) for length in size]
        count = [int(rng.integers(1, length - first + 1)) for length, first in zip(size, start, strict=True)]
        jobs.append(resize_job(box, size, (*start, *count), name))
    for job, (columns, rows) in zip(jobs, make_weights(jobs), strict=True):
        np.testing.assert_array_equal(rows, reference_weights(job, 0, name))
        np.testing.assert_array_equal(columns, reference_weights(job, 1, name))


def test_resize_weights_of_a_mirrored_result_are_reversed():
    job = resize_job((50, 31), (23, 29), (2, 3, 19, 21), "bilinear")
    mirrored = {**job, R.Y: 20, R.STEP_Y: -1, R.X: 23, R.STEP_X: -1}
    [(columns, rows), (columns_mirrored, rows_mirrored)] = make_weights([job, mirrored])
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
def test_blur_weights_equal_those_of_a_reflected_image(shape, kernel, sigma):
    job = {R.KIND: R.BLUR, R.HEIGHT: shape[0], R.WIDTH: shape[1], R.KERNEL_H: kernel[0], R.KERNEL_W: kernel[1]}
    job |= {R.OUT_HEIGHT: shape[0], R.OUT_WIDTH: shape[1], R.STEP_Y: 1, R.STEP_X: 1}
    [(columns, rows)] = make_weights([job], [sigma])
    for weights, length, size, width in (
        (rows, shape[0], kernel[0], sigma[0]),
        (columns, shape[1], kernel[1], sigma[1]),
    ):
        offsets = np.arange(-(size // 2), size // 2 + 1)
        bell = np.exp(-0.5 * (offsets / width) ** 2)
        bell /= bell.sum()
        expected = np.zeros((length, length))
        for place in range(length):
            for offset, weight in zip(offsets, bell, strict=True):
                reflected = (place + offset) % max(2 * (length - 1), 1)
                expected[place, min(reflected, 2 * (length - 1) - reflected)] += weight
        np.testing.assert_allclose(weights.view(np.float32), expected, atol=2e-6)


def test_place_tables_of_a_warp_needs_no_table():
    assert place_tables(records_of([{R.KIND: R.WARP}]), R.WARP, ROWS) == (0, 0)
