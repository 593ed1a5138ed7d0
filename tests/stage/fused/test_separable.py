"""Weights in kernels are bit-identical to the reference for a resize, and close to a reflected image for a blur."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage.fused.separable import make_weight_tables
from gpuload.transforms.program.fusing import jobs
from gpuload.transforms.program.fusing.jobs import place_tables
from gpuload.transforms.program.ops import FILTERS
from gpuload.transforms.program.windows import filter_weights, source_windows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 8  # of a tile


def pack_jobs(job_list: list[dict[int, int]]) -> np.ndarray:
    numbers = np.zeros((len(job_list), jobs.JOB), np.int64)
    for row, job in enumerate(job_list):
        for field, number in job.items():
            numbers[row, field] = number
    return numbers


def make_weights(job_list: list[dict[int, int]], sigmas: list[tuple[float, float]] | None = None):
    """Make the weights of each job's columns, (columns, width), and rows, (rows, height)."""
    ints = pack_jobs(job_list)
    kind = int(ints[0, jobs.KIND])
    floats = np.zeros((len(job_list), jobs.FLOATS))
    if sigmas:
        floats[:, [jobs.SIGMA_Y, jobs.SIGMA_X]] = sigmas
    size, programs = place_tables(ints, kind, ROWS)
    filters = 0 if kind == jobs.BLUR else 1 << jobs.BILINEAR | 1 << jobs.BICUBIC
    jobs_on_device = torch.from_numpy(ints).to(DEVICE), torch.from_numpy(floats).to(DEVICE)
    tables = make_weight_tables(*jobs_on_device, len(job_list), size, programs, kind, filters, ROWS)
    tables = tables.cpu().numpy()
    assert len(tables) == size > 0
    return [(dense_columns(tables, job_ints), dense_rows(tables, job_ints)) for job_ints in ints]


def dense_columns(tables: np.ndarray, job_ints: np.ndarray) -> np.ndarray:
    count, width, taps = job_ints[jobs.OUT_WIDTH], job_ints[jobs.WIDTH], job_ints[jobs.TAPS]
    start = job_ints[jobs.WEIGHTS_X]
    first_pixels = tables[start : start + count]
    assert (first_pixels >= 0).all()
    assert (first_pixels + min(taps, width) <= width).all()
    weights = tables[start + count : start + count * (1 + taps)].reshape(taps // 2, count, 2)  # pairs, see place_tables
    dense = np.zeros((count, width + taps), np.int32)
    for tap in range(taps):
        dense[np.arange(count), first_pixels + tap] = weights[tap // 2, :, tap % 2]
    assert not dense[:, width:].any()  # pixels beyond the source have no weight
    return dense[:, :width]


def dense_rows(tables: np.ndarray, job_ints: np.ndarray) -> np.ndarray:
    count, height, lines = job_ints[jobs.OUT_HEIGHT], job_ints[jobs.HEIGHT], job_ints[jobs.LINES]
    dense = np.zeros((count, height + lines), np.int32)
    for tile in range(-(-count // ROWS)):
        start = job_ints[jobs.WEIGHTS_Y] + tile * (1 + lines) * ROWS
        assert start % ROWS == 0
        top, tap_count = tables[start : start + 2]
        assert 0 <= top < height
        assert tap_count % jobs.LINES_AT_ONCE == 0
        assert tap_count <= lines
        tile_rows = np.arange(tile * ROWS, min((tile + 1) * ROWS, count))
        weights = tables[start + ROWS : start + ROWS * (1 + tap_count)].reshape(tap_count, ROWS)
        dense[tile_rows, top : top + tap_count] = weights[:, : len(tile_rows)].T
    assert not dense[:, height:].any()
    return dense[:, :height]


def resize_job(
    box_hw: tuple[int, int], size_hw: tuple[int, int], window_tlhw: tuple[int, int, int, int], interpolation: str
) -> dict[int, int]:
    """Make a job whose source is the part of the box that the window needs."""
    code = FILTERS.index(interpolation)
    arrays = (np.array([value]) for value in (window_tlhw, size_hw, box_hw, code))
    [[top, left, height, width]] = source_windows(*arrays).tolist()
    job = {jobs.KIND: jobs.RESIZE, jobs.FILTER: code, jobs.STEP_Y: 1, jobs.STEP_X: 1}
    job |= {jobs.BOX_H: box_hw[0], jobs.BOX_W: box_hw[1], jobs.SIZE_H: size_hw[0], jobs.SIZE_W: size_hw[1]}
    job |= {jobs.CORNER_Y: top, jobs.CORNER_X: left, jobs.HEIGHT: height, jobs.WIDTH: width}
    return job | dict(zip((jobs.Y, jobs.X, jobs.OUT_HEIGHT, jobs.OUT_WIDTH), window_tlhw, strict=True))


# The fields of a job along each axis: box, size, corner, length of the source, start and length of the result.
VERTICAL = (jobs.BOX_H, jobs.SIZE_H, jobs.CORNER_Y, jobs.HEIGHT, jobs.Y, jobs.OUT_HEIGHT)
HORIZONTAL = (jobs.BOX_W, jobs.SIZE_W, jobs.CORNER_X, jobs.WIDTH, jobs.X, jobs.OUT_WIDTH)


def reference_weights(job: dict[int, int], fields: tuple[int, ...], interpolation: str) -> np.ndarray:
    """Return the reference's weights along an axis, (positions, pixels of the source)."""
    box, size, corner, length, start, count = (int(job[field]) for field in fields)
    first_pixels, weights = filter_weights(np.array([box]), np.array([size]), np.array([start]), count, interpolation)
    dense = np.zeros((count, box + weights.shape[2]), np.int32)
    for tap in range(weights.shape[2]):
        dense[np.arange(count), first_pixels[0] + tap] += weights[0, :, tap]
    inside = dense[:, corner : corner + length]
    assert inside.sum() == dense.sum(), "the source lacks pixels that the window needs"
    return inside


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_weights_are_bit_identical_to_the_reference(interpolation):
    rng = np.random.default_rng(7)
    job_list = []
    for number in range(20):
        max_box = 300 if number % 8 == 0 else 40  # some filters span many pixels
        box, size = (tuple(rng.integers(1, high, 2).tolist()) for high in (max_box, 40))
        if number % 5 == 0:
            size = box[0] % 40 + 1, size[1]  # a pixel more than the box, unless the box is large
        if number % 7 == 0:
            box = size[0], box[1]  # one axis is copied
        start = [int(rng.integers(0, length)) for length in size]
        count = [int(rng.integers(1, length - first + 1)) for length, first in zip(size, start, strict=True)]
        job_list.append(resize_job(box, size, (*start, *count), interpolation))
    for job, (columns, rows) in zip(job_list, make_weights(job_list), strict=True):
        np.testing.assert_array_equal(rows, reference_weights(job, VERTICAL, interpolation))
        np.testing.assert_array_equal(columns, reference_weights(job, HORIZONTAL, interpolation))


def test_resize_weights_of_a_mirrored_result_are_reversed():
    job = resize_job((50, 31), (23, 29), (2, 3, 19, 21), "bilinear")
    mirrored = {**job, jobs.Y: 20, jobs.STEP_Y: -1, jobs.X: 23, jobs.STEP_X: -1}
    [(columns, rows), (columns_mirrored, rows_mirrored)] = make_weights([job, mirrored])
    np.testing.assert_array_equal(columns_mirrored, columns[::-1])
    np.testing.assert_array_equal(rows_mirrored, rows[::-1])


@pytest.mark.parametrize(
    ("shape", "kernel", "sigma"),
    [
        ((40, 33), (9, 5), (2.4, 1.1)),
        ((20, 21), (23, 23), (2.0, 7.0)),
        ((6, 5), (23, 31), (6.0, 7.0)),  # mirrored more than once
        ((5, 9), (9, 17), (2.0, 3.0)),  # mirrored as far as the opposite border
        ((1, 2), (5, 5), (1.0, 3.0)),
        ((17, 1), (1, 7), (1.0, 0.5)),
    ],
)
def test_blur_weights_equal_the_weights_of_a_reflected_image(shape, kernel, sigma):
    (height, width), (kernel_height, kernel_width) = shape, kernel
    job = {jobs.KIND: jobs.BLUR, jobs.KERNEL_H: kernel_height, jobs.KERNEL_W: kernel_width, jobs.HEIGHT: height}
    job |= {jobs.WIDTH: width, jobs.OUT_HEIGHT: height, jobs.OUT_WIDTH: width, jobs.STEP_Y: 1, jobs.STEP_X: 1}
    [(columns, rows)] = make_weights([job], [sigma])
    for weights, length, size, sigma_of_axis in zip((rows, columns), shape, kernel, sigma, strict=True):
        offsets = np.arange(-(size // 2), size // 2 + 1)
        gaussian = np.exp(-0.5 * (offsets / sigma_of_axis) ** 2)
        gaussian /= gaussian.sum()
        expected = np.zeros((length, length))
        for position in range(length):
            for offset, weight in zip(offsets, gaussian, strict=True):
                reflected = (position + offset) % max(2 * (length - 1), 1)
                expected[position, min(reflected, 2 * (length - 1) - reflected)] += weight
        np.testing.assert_allclose(weights.view(np.float32), expected, atol=2e-6)


def test_place_tables_of_a_warp_needs_no_table():
    assert place_tables(pack_jobs([{jobs.KIND: jobs.WARP}]), jobs.WARP, ROWS) == (0, 0)
