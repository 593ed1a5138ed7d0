"""Level tables of contrast, equalize and autocontrast in kernels equal the reference's for each level."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage.fused import statistics
from gpuload.stage.reference.color import equalize_table, stretch_table
from gpuload.stage.reference.operations import OPERATIONS
from gpuload.transforms.program.fusing.passes import STATISTICS
from gpuload.transforms.program.ops import VALUES, code

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def varied_images(channels: int) -> list[np.ndarray]:
    """Generate H×W×C images: random, of one color, nearly black, bright, of two levels, and of one or few pixels."""
    rng = np.random.default_rng(channels)
    return [
        rng.integers(0, 256, (61, 47, channels), np.uint8),
        np.broadcast_to(rng.integers(0, 256, channels, np.uint8), (33, 7, channels)).copy(),
        rng.integers(0, 3, (17, 64, channels), np.uint8),
        np.zeros((5, 5, channels), np.uint8),
        rng.integers(250, 256, (64, 63, channels), np.uint8),
        rng.choice(np.array([10, 200], np.uint8), (3, 3, channels)),
        rng.integers(0, 256, (1, 1, channels), np.uint8),
        np.clip(rng.normal(90, 20, (47, 53, channels)), 0, 255).astype(np.uint8),
        rng.integers(0, 200, (19, 21, channels), np.uint8),  # so few pixels that equalize's step is 1
    ]


def make_tables(images: list[np.ndarray], names: list[str], factors: list[float], gap: int = 0) -> np.ndarray:
    """Make the tables of images stored one after another, with `gap` unused bytes before each image."""
    jobs, parts, offset = [], [], 0
    for image, name in zip(images, names, strict=True):
        parts += [np.full(gap, 77, np.uint8), image.ravel()]
        height, width, channels = image.shape
        jobs.append((offset + gap, height, width, code(name), width * channels, channels, 1, 0))  # fields of COUNTED
        offset += gap + image.size
    pixels = torch.from_numpy(np.concatenate(parts)).to(DEVICE)
    jobs_on_device, factors_on_device = (torch.from_numpy(np.array(numbers)).to(DEVICE) for numbers in (jobs, factors))
    max_pixels = max(image.shape[0] * image.shape[1] for image in images)
    tables = statistics.make_level_tables(
        pixels, jobs_on_device.flatten(), factors_on_device, max_pixels, images[0].shape[2]
    )
    assert tables.shape == (len(images), 3, 256)
    assert tables.dtype == torch.uint8
    return tables.cpu().numpy()


def apply_table(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Look the image's levels up in its table, C×H×W."""
    return np.stack([row[plane] for row, plane in zip(table, image.transpose(2, 0, 1), strict=False)])


def reference_levels(image: np.ndarray, name: str, factor: float) -> np.ndarray:
    levels = torch.from_numpy(image.transpose(2, 0, 1).astype(np.float32))[None]
    return OPERATIONS[name](levels, np.array([[factor] + [0.0] * (VALUES - 1)]))[0].numpy()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", STATISTICS)
def test_level_tables_give_the_levels_of_the_reference(name, channels):
    factors = (0.0, 0.1, 0.7, 1.0, 1.3, 1.6, 1.9, 4.0) if name == "contrast" else (0.0,)
    images = varied_images(channels)
    for factor in factors:
        tables = make_tables(images, [name] * len(images), [factor] * len(images))
        for image, table in zip(images, tables, strict=True):
            np.testing.assert_array_equal(apply_table(image, table), reference_levels(image, name, factor))


@pytest.mark.parametrize("channels", [1, 3])
def test_equalize_and_autocontrast_tables_equal_the_references_at_all_256_levels(channels):
    for image in varied_images(channels):
        planes = torch.from_numpy(image.reshape(-1, channels).T.copy())
        counts = torch.stack([torch.bincount(plane.long(), minlength=256) for plane in planes])
        expected_tables = equalize_table(counts).numpy(), stretch_table(*planes.double().aminmax(dim=1)).numpy()
        for table, rows in zip(
            make_tables([image] * 2, ["equalize", "autocontrast"], [0, 0]), expected_tables, strict=True
        ):
            np.testing.assert_array_equal(table, np.broadcast_to(rows, (3, 256)))


def test_autocontrast_tables_equal_the_references_for_many_ranges():
    """Each channel of an image of two pixels has one range."""
    lowest_and_highest = np.array(
        [(lowest, highest) for lowest in range(0, 256, 7) for highest in range(lowest, 256, 5)]
    )
    lowest_and_highest = lowest_and_highest[: len(lowest_and_highest) // 3 * 3].reshape(-1, 3, 2)
    images = list(lowest_and_highest.transpose(0, 2, 1)[:, None].astype(np.uint8))  # 1 × 2 × 3
    tables = make_tables(images, ["autocontrast"] * len(images), [0.0] * len(images))
    bounds = torch.from_numpy(lowest_and_highest.astype(np.float64))
    np.testing.assert_array_equal(tables, stretch_table(bounds[..., 0], bounds[..., 1]).numpy())


def test_level_tables_of_several_operations_and_sizes_equal_the_references():
    """Images that need several programs and rounds are stored between small images, with gaps."""
    rng = np.random.default_rng(0)
    sizes = [(64, 64), (9, 1), (181, 193), (150, 90), (2, 31)]
    names = ["equalize", "contrast", "contrast", "autocontrast", "equalize"]
    images = [np.clip(rng.normal(90, 30, (*size, 3)), 20, 230).astype(np.uint8) for size in sizes]
    factors = [0.0, 0.5, 1.45, 0.0, 0.0]
    for image, name, factor, table in zip(
        images, names, factors, make_tables(images, names, factors, gap=5), strict=True
    ):
        np.testing.assert_array_equal(apply_table(image, table), reference_levels(image, name, factor))


def test_images_are_counted_in_several_launches_if_one_has_too_many_programs(monkeypatch):
    """All images of a launch have as many pieces as the largest image."""
    images = [*varied_images(3), np.random.default_rng(0).integers(0, 256, (150, 160, 3), np.uint8)]
    names, factors = ["equalize"] * len(images), [0.0] * len(images)
    expected_tables, grids = make_tables(images, names, factors), []

    class RecordedKernel:
        def __getitem__(self, grid: tuple[int, int]):
            grids.append(grid)
            return count[grid]

    count = statistics._count
    monkeypatch.setattr(statistics, "_count", RecordedKernel())
    monkeypatch.setattr("gpuload.transforms.program.fusing.plan.MOST_PROGRAMS", 12)  # 4 images of 3 pieces
    np.testing.assert_array_equal(make_tables(images, names, factors), expected_tables)
    assert grids == [(4, 3), (4, 3), (2, 3)]  # (images, pieces)


@pytest.mark.parametrize("channels", [1, 3])
def test_level_tables_of_mirrored_and_transposed_planes_equal_the_tables_of_interleaved_images(channels):
    images, name = varied_images(channels), "equalize"
    expected_tables = make_tables(images, [name] * len(images), [0.0] * len(images))
    batch = torch.full((3, 100, 4 * len(images), 90), 77, dtype=torch.uint8)  # C × H × N × W
    jobs, row_step, column_step = [], batch.stride(1), batch.stride(3)
    for number, image in enumerate(images):
        height, width = image.shape[:2]
        batch[:channels, :height, number, :width] = torch.from_numpy(image.transpose(2, 0, 1).copy())
        offset, (h, w), steps = number * batch.stride(2), (height, width), (row_step, column_step)
        if number % 3 == 1:  # mirrored along both axes
            offset, steps = offset + (height - 1) * row_step + (width - 1) * column_step, (-row_step, -column_step)
        elif number % 3 == 2:  # transposed
            (h, w), steps = (width, height), (column_step, row_step)
        jobs.append((offset, h, w, code(name), *steps, batch.stride(0), 0))
    jobs_on_device, factors = torch.from_numpy(np.array(jobs)).to(DEVICE), torch.zeros(len(jobs), dtype=torch.float64)
    max_pixels = max(image.shape[0] * image.shape[1] for image in images)
    tables = statistics.make_level_tables(
        batch.to(DEVICE).flatten(), jobs_on_device.flatten(), factors.to(DEVICE), max_pixels, channels
    )
    np.testing.assert_array_equal(tables.cpu().numpy(), expected_tables)
