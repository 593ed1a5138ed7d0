"""Kernels sample the same pixels as the reference, for tiles that are cut, mirrored, or larger than an image."""

# Outside kernels, calls of a kernel's function raise, so type checkers report them.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.generated_images import smooth_image

from gpuload.stage.fused.geometry import sample_pixels, sample_row_by_row
from gpuload.stage.fused.separable import make_weight_tables
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.blur import blur, sharpness
from gpuload.stage.reference.gather import PixelSource, crop
from gpuload.stage.reference.gather import resize as resize_reference
from gpuload.stage.reference.warp import warp_batch
from gpuload.transforms.program.fusing import jobs
from gpuload.transforms.program.fusing.jobs import place_tables
from gpuload.transforms.program.ops import FILTERS
from gpuload.transforms.program.windows import nearest_indices, nearest_methods, padded_indices, source_windows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARGIN = 40  # random bytes before and after an image
NO_TABLE = np.zeros(1, np.int32)


@triton.jit(
    do_not_specialize=["height", "width", "y", "x", "step_y", "step_x"]
)  # so that cases share a compiled kernel
def sample_tiles(
    source_ptr,
    table_ptr,
    weights_ptr,
    ints_ptr,
    floats_ptr,
    result_ptr,
    height,
    width,
    y,
    x,
    step_y,
    step_x,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GEOMETRY: tl.constexpr,
    FILTERS: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source_columns = tl.minimum(columns, width - 1)
    ys = y + step_y * tl.minimum(rows, height - 1)
    xs = x + step_x * source_columns
    if BY_ROWS:
        source_ptr += tl.load(ints_ptr + 1)  # jobs.BASE; the 1 in the next line is the channel step
        red, green, blue = sample_row_by_row(source_ptr, ints_ptr, floats_ptr, 1, ys, xs, CHANNELS, GEOMETRY, FILTERS)
    else:
        red, green, blue = sample_pixels(
            source_ptr,
            table_ptr,
            weights_ptr,
            ints_ptr,
            floats_ptr,
            tl.program_id(0),
            source_columns,
            ys,
            xs,
            CHANNELS,
            GEOMETRY,
            FILTERS,
        )
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    pointers = result_ptr + rows[:, None] * width + columns[None, :]
    tl.store(pointers, red, inside)
    if CHANNELS == 3:
        tl.store(pointers + height * width, green, inside)
        tl.store(pointers + 2 * height * width, blue, inside)


def run_job(
    image: np.ndarray,
    kind: int,
    window_tlhw: tuple[int, int, int, int],
    ints: dict[int, int] | None = None,
    floats: dict[int, float] | None = None,
    *,
    table: np.ndarray = NO_TABLE,
    mirrored: tuple[bool, bool] = (False, False),
    upside_down: bool = False,
    channels: int | None = None,
    tile: tuple[int, int] = (32, 32),
    by_rows: bool = False,
) -> np.ndarray:
    """Run a job on an H×W×C image, and return a window of its result as a float32 array C×H'×W'.

    Args:
        image, kind, ints, floats, table: the job.
        window_tlhw: the window of the result.
        mirrored: whether the kernel writes rows, and columns, in reverse order.
        upside_down: whether the image's last row comes first in memory.
        channels: the number of channels of the result, by default as many as the image has.
        tile: the rows and columns of a program.
        by_rows: whether to sample row by row, as on a GPU; the interpreter otherwise samples all rows at once.
    """
    height, width, image_channels = image.shape
    channels = channels or image_channels
    stored_pixels = np.ascontiguousarray(image[::-1] if upside_down else image).ravel()

    margins = np.random.default_rng(0).integers(0, 256, (2, MARGIN), np.uint8)
    memory = np.concatenate([margins[0], stored_pixels, margins[1]])
    row_step = width * image_channels
    job_ints = np.zeros(jobs.JOB, np.int64)
    top, left, rows, columns = window_tlhw
    layout_ints = {
        jobs.KIND: kind,
        jobs.BASE: MARGIN + (height - 1) * row_step * upside_down,
        jobs.ROW_STEP: -row_step if upside_down else row_step,
        jobs.COLUMN_STEP: image_channels,
        jobs.CHANNEL_STEP: 1 if image_channels == channels else 0,
        jobs.HEIGHT: height,
        jobs.WIDTH: width,
        jobs.OUT_HEIGHT: rows,
        jobs.OUT_WIDTH: columns,
        jobs.Y: top + (rows - 1) * mirrored[0],
        jobs.X: left + (columns - 1) * mirrored[1],
        jobs.STEP_Y: -1 if mirrored[0] else 1,
        jobs.STEP_X: -1 if mirrored[1] else 1,
    }
    for field, number in [*layout_ints.items(), *(ints or {}).items()]:
        job_ints[field] = number
    job_floats = np.zeros(jobs.FLOATS)
    for field, number in (floats or {}).items():
        job_floats[field] = number
    size, programs = place_tables(job_ints[None], kind, tile[0])
    device_ints, device_floats = torch.from_numpy(job_ints).to(DEVICE), torch.from_numpy(job_floats).to(DEVICE)
    weights, filters = device_ints, 0  # weights are read only if the job has tables of weights
    if kind in (jobs.RESIZE, jobs.WARP):
        # The job's filters as bits: fixed point counts as nearest, and filters beyond bicubic count as bicubic.
        code = int(job_ints[jobs.FILTER])
        filters = 1 << (jobs.NEAREST if code == jobs.FIXED_POINT else min(code, jobs.BICUBIC))
    if size:
        weights = make_weight_tables(device_ints, device_floats, 1, size, programs, kind, filters, tile[0])
    result = torch.full((channels, rows, columns), np.nan, device=DEVICE)
    sample_tiles[(triton.cdiv(rows, tile[0]), triton.cdiv(columns, tile[1]))](
        torch.from_numpy(memory).to(DEVICE),
        torch.from_numpy(table).to(DEVICE),
        weights,
        device_ints,
        device_floats,
        result,
        rows,
        columns,
        *(job_ints[field].item() for field in (jobs.Y, jobs.X, jobs.STEP_Y, jobs.STEP_X)),
        CHANNELS=channels,
        ROWS=tile[0],
        COLUMNS=tile[1],
        GEOMETRY=jobs.COPY if kind == jobs.TABLE else kind,  # one kernel for both
        FILTERS=filters,
        BY_ROWS=by_rows,
        enable_fp_fusion=False,
    )
    levels = result.cpu().numpy()
    axes = [axis + 1 for axis in (0, 1) if mirrored[axis]]
    return np.flip(levels, axes)


def fill_floats(levels: tuple[int, ...]) -> dict[int, float]:
    return {jobs.FILL + channel: level for channel, level in enumerate(levels)}


def source_of(image: np.ndarray) -> PixelSource:
    height, width = image.shape[:2]
    return PixelSource.from_ragged(RaggedImages.from_arrays([image]), np.arange(1), np.array([[0, 0, height, width]]))


def to_nchw(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]


def random_above_smooth(seed: int, height: int, width: int, channels: int) -> np.ndarray:
    """Generate random levels, where errors are largest, above a photograph-like lower half."""
    image = random_image(seed, height, width, channels)
    image[height // 2 :] = smooth_image(height, width, seed)[height // 2 :, :, :channels]
    return image


def random_image(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mirrored", [(False, False), (True, False), (False, True)])
def test_copy_job_copies_the_window(channels, mirrored):
    image = random_image(1, 23, 37, channels)
    result = run_job(image, jobs.COPY, (2, 3, 20, 33), mirrored=mirrored, upside_down=mirrored[1])
    np.testing.assert_array_equal(result, image[2:22, 3:36].transpose(2, 0, 1))


@pytest.mark.parametrize("kind", [jobs.COPY, jobs.RESIZE, jobs.SHARPNESS])
def test_image_of_one_channel_gives_three_equal_channels(kind):
    image = random_image(2, 20, 21, 1)
    resize_ints = {jobs.FILTER: jobs.BILINEAR, jobs.BOX_H: 20, jobs.BOX_W: 21, jobs.SIZE_H: 13, jobs.SIZE_W: 17}
    ints = resize_ints if kind is jobs.RESIZE else {}
    floats = {jobs.FACTOR: 1.7}
    result = run_job(image, kind, (0, 0, 13, 17), ints, floats, channels=3)
    single = run_job(image, kind, (0, 0, 13, 17), ints, floats)
    np.testing.assert_array_equal(result, np.broadcast_to(single, result.shape))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_table_job_pads_like_the_reference(mode):
    image, fill = random_image(3, 11, 14), (7, 130, 255)
    corner, size = (-9, -5), (30, 27)
    positions = [corner[axis] + np.arange(size[axis]) for axis in (0, 1)]
    table = []
    for axis, axis_positions in enumerate(positions):
        length = image.shape[axis]
        inside = (axis_positions >= 0) & (axis_positions < length) if mode == "constant" else True
        table.append(np.where(inside, padded_indices(axis_positions, length, mode), -1))
    expected = crop(source_of(image), np.array([[*corner, 0, 0]]), size, np.array([image.shape[:2]]), mode, fill)
    # The table begins at index 3, after three entries that must not be read.
    table = np.concatenate([[-5, -5, -5], *table]).astype(np.int32)
    ints = {jobs.TABLE_AT: 3, jobs.TABLE_ROWS: size[0]}
    result = run_job(image, jobs.TABLE, (0, 0, *size), ints, fill_floats(fill), table=table, mirrored=(True, True))
    np.testing.assert_array_equal(result, expected[0].numpy())


def test_table_job_resizes_to_the_nearest_pixel():
    image, size = random_image(4, 19, 33, 1), (40, 20)
    table = [nearest_indices(image.shape[axis], size[axis], 0, size[axis]) for axis in (0, 1)]
    ints = {jobs.TABLE_AT: 0, jobs.TABLE_ROWS: size[0]}
    result = run_job(image, jobs.TABLE, (0, 0, *size), ints, table=np.concatenate(table).astype(np.int32))
    np.testing.assert_array_equal(result, image[table[0]][:, table[1]].transpose(2, 0, 1))


def resize_by_both(image, box_tlhw, size_hw, window_tlhw, interpolation, options) -> tuple[np.ndarray, np.ndarray]:
    """Resize a box of an image, cut to what the window needs, by the kernel and by the reference."""
    code = FILTERS.index(interpolation)
    window, size, box = (np.array([lengths]) for lengths in (window_tlhw, size_hw, box_tlhw[2:]))
    top, left, height, width = source_windows(window, size, box, np.array([code]))[0].tolist()
    source = np.ascontiguousarray(image[box_tlhw[0] + top :, box_tlhw[1] + left :][:height, :width])
    fields = (jobs.FILTER, jobs.BOX_H, jobs.BOX_W, jobs.SIZE_H, jobs.SIZE_W, jobs.CORNER_Y, jobs.CORNER_X)
    ints = dict(zip(fields, (code, *box_tlhw[2:], *size_hw, top, left), strict=True))
    expected = resize_reference(source_of(source), np.array([[top, left]]), box, size, window, interpolation)
    return run_job(source, jobs.RESIZE, window_tlhw, ints, **options), expected[0].numpy()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("shape", "box", "size", "window", "options"),
    [
        ((60, 64, 3), (0, 0, 60, 64), (32, 32), (0, 0, 32, 32), {"tile": (8, 32)}),
        ((64, 64, 3), (5, 9, 51, 38), (33, 29), (4, 6, 20, 20), {"mirrored": (False, True)}),
        ((13, 20, 3), (2, 3, 9, 16), (40, 36), (7, 1, 30, 32), {"mirrored": (True, False), "upside_down": True}),
        ((30, 64, 1), (0, 0, 30, 64), (30, 7), (0, 0, 30, 7), {"mirrored": (True, True)}),
        ((64, 30, 3), (1, 0, 62, 30), (7, 30), (0, 0, 7, 30), {"tile": (2, 16)}),
        ((12, 12, 3), (4, 4, 5, 5), (5, 5), (0, 0, 5, 5), {}),
        ((1, 1, 3), (0, 0, 1, 1), (9, 4), (0, 0, 9, 4), {}),
        ((2, 64, 3), (0, 0, 2, 64), (11, 1), (0, 0, 11, 1), {}),
    ],
)
def test_resize_job_gives_the_levels_of_the_reference(shape, box, size, window, options, interpolation):
    result, expected = resize_by_both(random_above_smooth(5, *shape), box, size, window, interpolation, options)
    np.testing.assert_array_equal(result, expected)


def test_resize_job_to_half_the_size_rounds_halves_like_the_reference():
    result, expected = resize_by_both(random_image(7, 64, 32), (0, 0, 64, 32), (32, 16), (0, 0, 32, 16), "bilinear", {})
    np.testing.assert_array_equal(result, expected)


class Map(NamedTuple):
    coefficients: list[float]
    channels: int = 3
    is_mirrored: bool = False
    is_fixed_point: bool = False  # whether its nearest pixels are found in fixed point


AFFINE = [0.8, -0.5, 9.3, 0.45, 0.9, -6.2]
MAPS = {
    "affine": Map([*AFFINE, 0, 0], is_fixed_point=True),
    "affine, one channel": Map([2.3, 0.4, -20, -0.6, 1.9, 11, 0, 0], channels=1, is_fixed_point=True),
    "shear, mirrored": Map([1, 1, 0, 0, 1, 0, 0, 0], is_mirrored=True, is_fixed_point=True),
    "scaling": Map([0.3, 0, 7, 0, 0.2, 3, 0, 0]),
    "projective": Map([*AFFINE, 0.004, -0.003]),
    "the horizon crosses the result": Map([1.1, 0.2, -3, 0.1, 0.7, 4, -0.05, 0.02], channels=1),
    "the horizon goes through centers of pixels": Map([1, 0, 0, 0, 1, 0, -2 / 31, 0], is_mirrored=True),
}
WARP_CASES = [(name, interpolation) for name in MAPS for interpolation in FILTERS]
WARP_CASES.remove(("scaling", "nearest"))  # its pixels come from a table (jobs.TABLE), so there is no warp job


@pytest.mark.parametrize(("name", "interpolation"), WARP_CASES)
def test_warp_job_gives_the_levels_of_the_reference(name, interpolation):
    coefficients, channels, is_mirrored, is_fixed_point = MAPS[name]
    image, maps, fill = random_image(8, 26, 31, channels), np.array([coefficients]), (12, 200, 77)[:channels]
    expected = warp_batch(to_nchw(image), maps, (24, 32), interpolation, fill)[0, :, 3:, 2:].numpy()
    _, fixed = nearest_methods(maps, np.array([[24, 32]]))
    assert fixed.item() == is_fixed_point
    code = jobs.FIXED_POINT if is_fixed_point and interpolation == "nearest" else FILTERS.index(interpolation)
    arguments = {jobs.FILTER: code}, fill_floats(fill) | dict(enumerate(coefficients))
    result = run_job(image, jobs.WARP, (3, 2, 21, 30), *arguments, mirrored=(False, is_mirrored))
    np.testing.assert_array_equal(result, expected)
    if name in ("affine", "projective"):
        options = {"mirrored": (True, True), "tile": (8, 32), "by_rows": True}
        result = run_job(image, jobs.WARP, (3, 2, 7, 30), *arguments, **options)
        np.testing.assert_array_equal(result, expected[:, :7])


def test_warp_job_with_infinite_coordinates_gives_the_fill():
    image, coefficients = random_image(9, 8, 8), [1, 0, 1e300, 0, 1, 0, -2, 0]
    floats = fill_floats((1, 2, 3)) | dict(enumerate(coefficients))
    for code in (jobs.NEAREST, jobs.BILINEAR, jobs.BICUBIC):
        result = run_job(image, jobs.WARP, (0, 0, 4, 4), {jobs.FILTER: code}, floats)
        np.testing.assert_array_equal(result, np.broadcast_to(np.array([[[1]], [[2]], [[3]]]), (3, 4, 4)))


@pytest.mark.parametrize(
    ("shape", "kernel", "sigma", "options"),
    [
        ((40, 33, 3), (5, 9), (1.1, 2.4), {}),
        ((33, 20, 1), (23, 23), (0.1, 2.0), {"mirrored": (True, True)}),
        ((17, 20, 3), (3, 1), (9.0, 1.0), {"mirrored": (False, True), "upside_down": True, "tile": (4, 16)}),
        ((6, 5, 3), (31, 23), (7.0, 6.0), {}),  # mirrored more than once
        ((5, 5, 3), (9, 9), (2.0, 2.0), {}),  # mirrored as far as the opposite border
        ((1, 1, 3), (5, 5), (1.0, 1.0), {}),
    ],
)
def test_blur_job_is_within_a_level_of_the_reference(shape, kernel, sigma, options):
    image = random_above_smooth(10, *shape)
    expected = blur(to_nchw(image).float(), np.array([[*kernel, *sigma, 0, 0, 0, 0]]))[0].numpy()
    ints = {jobs.KERNEL_W: kernel[0], jobs.KERNEL_H: kernel[1]}
    floats = {jobs.SIGMA_X: sigma[0], jobs.SIGMA_Y: sigma[1]}
    error = np.abs(run_job(image, jobs.BLUR, (0, 0, *shape[:2]), ints, floats, **options) - expected)
    assert error.max() <= 1
    assert error.mean() <= 0.02


@pytest.mark.parametrize(
    ("shape", "factor"),
    [((21, 30, 3), 1.9), ((21, 30, 3), 0.0), ((9, 3, 1), 0.35), ((5, 6, 3), 1.0), ((2, 9, 3), 1.9), ((1, 1, 3), 1.9)],
)
def test_sharpness_job_gives_the_levels_of_the_reference(shape, factor):
    image = random_image(12, *shape)
    expected = sharpness(to_nchw(image).float(), np.array([[factor]]))[0].numpy()
    result = run_job(image, jobs.SHARPNESS, (0, 0, *shape[:2]), None, {jobs.FACTOR: factor})
    np.testing.assert_array_equal(result, expected)
    window, mirrored = (0, 0, min(shape[0], 7), shape[1]), (True, True)
    result = run_job(
        image, jobs.SHARPNESS, window, None, {jobs.FACTOR: factor}, mirrored=mirrored, tile=(8, 32), by_rows=True
    )
    np.testing.assert_array_equal(result, expected[:, :7])
