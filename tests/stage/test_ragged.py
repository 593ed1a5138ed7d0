"""`RaggedImages` holds images of any sizes, from arrays and from tensors of any memory layout."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch
from helpers.matrix import matrix
from helpers.tensor_layouts import DENSE, LAYOUTS

from gpuload.stage import RaggedImages
from gpuload.transforms.program.windows import full_windows

IMAGE_SIZES = [(5, 7), (1, 9), (8, 1), (1, 1), (6, 6)]
DTYPES = ["uint8", "uint16", "float32"]


def test_from_arrays_stores_images_one_after_the_other():
    arrays = [np.full((2, 3, 3), 7, np.uint8), np.full((4, 1, 1), 9, np.uint8)[:, ::-1]]
    images = RaggedImages.from_arrays(arrays)
    assert len(images) == 2
    assert images.pixels.tolist() == [7] * 18 + [9] * 4
    assert images.offsets.tolist() == [0, 18]
    assert images.shapes.tolist() == [[2, 3, 3], [4, 1, 1]]
    assert images.sizes_hw.tolist() == [[2, 3], [4, 1]]
    assert images.regions_tlhw.tolist() == [[0, 0, 2, 3], [0, 0, 4, 1]]
    assert images.labels == ["image 0", "image 1"]


def test_from_arrays_of_no_images_is_empty():
    images = RaggedImages.from_arrays([])
    assert len(images) == 0
    assert images.shapes.shape == (0, 3)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((4, 6), np.float32), "float32 of shape (4, 6)"),
        (np.zeros((4, 6), np.uint8), "uint8 of shape (4, 6)"),
        (np.zeros((4, 6, 3)), "float64 of shape (4, 6, 3)"),
        ([[[1, 2, 3]]], "list"),
    ],
)
def test_from_arrays_of_another_dtype_or_shape_raises(array, got):
    with pytest.raises(TypeError, match=re.escape(f"image 1 must be an H×W×C array of uint8, got {got}")):
        RaggedImages.from_arrays([np.zeros((2, 2, 3), np.uint8), array])


def random_arrays(sizes: list[tuple[int, int]], channels: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(channels)
    return [rng.integers(0, 256, (*size, channels)).astype(dtype) for size in sizes]


def half_windows(sizes_hw: np.ndarray) -> np.ndarray:
    """Return a window within each image, with about half of the image's height and width."""
    return np.hstack([sizes_hw // 3, np.maximum(sizes_hw // 2, 1)])


def assert_interleaves(images: RaggedImages, expected: list[np.ndarray], windows_tlhw: np.ndarray) -> None:
    """Check that `interleave` returns these windows of the images, and copies only images that are not interleaved."""
    interleaved = images.interleave(windows_tlhw)
    assert interleaved.steps is None
    assert (interleaved is images) == (images.steps is None)
    regions = full_windows(images.sizes_hw) if images.steps is None else windows_tlhw
    assert interleaved.regions_tlhw.tolist() == regions.tolist()
    assert interleaved.sizes_hw.tolist() == [list(array.shape[:2]) for array in expected]
    assert (interleaved.labels, interleaved.dtype) == (images.labels, images.dtype)
    pixels = interleaved.pixels.numpy()
    for array, offset, shape, region in zip(expected, interleaved.offsets, interleaved.shapes, regions, strict=True):
        top, left, height, width = region
        region_pixels = array[top : top + height, left : left + width]
        assert tuple(shape) == region_pixels.shape
        np.testing.assert_array_equal(pixels[offset : offset + region_pixels.size].reshape(shape), region_pixels)


def values_by_address(images: RaggedImages, row: int) -> list[float]:
    """Return an image's values, H×W×C, read by address as a kernel reads them."""
    assert images.steps is not None
    pixels = images.pixels
    indices = images.offsets[row] + np.indices(images.shapes[row]).reshape(3, -1).T @ images.steps[row]
    dtype = np.dtype(images.dtype)
    types = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_float}
    return [
        types[dtype.itemsize].from_address(pixels.data_ptr() + int(index) * dtype.itemsize).value for index in indices
    ]


@matrix(layout=DENSE, dtype=DTYPES, channels=[1, 3, 5], size=[(5, 7), (1, 4), (6, 1), (1, 1)], count=[1, 3])
def test_from_planes_of_one_tensor_reads_its_memory_in_place(layout, dtype, channels, size, count):
    expected = random_arrays([size] * count, channels, dtype)
    tensor = DENSE[layout](expected)
    images = RaggedImages.from_planes(tensor, list("abc")[:count])
    assert images.pixels.data_ptr() == tensor.data_ptr()
    assert (images.labels, images.dtype) == (list("abc")[:count], dtype)
    assert images.shapes.tolist() == [[*size, channels]] * count
    assert images.regions_tlhw.tolist() == [[0, 0, *size]] * count
    is_gapless = layout == "channels last" or (layout == "contiguous" and (channels == 1 or size == (1, 1)))
    assert images.steps is None or not is_gapless
    assert_interleaves(images, expected, half_windows(images.sizes_hw))
    if images.steps is not None:
        assert [values_by_address(images, row) for row in range(count)] == [
            array.ravel().tolist() for array in expected
        ]


@matrix(layout=LAYOUTS, dtype=DTYPES, channels=[1, 3, 4], count=[1, 5])
def test_from_planes_of_several_sizes_reads_their_memory_in_place(layout, dtype, channels, count):
    expected = random_arrays(IMAGE_SIZES[:count], channels, dtype)
    planes = LAYOUTS[layout](expected)
    images = RaggedImages.from_planes(planes, list("abcde")[:count])
    assert images.pixels.data_ptr() == planes[0].data_ptr()
    assert images.shapes.tolist() == [[*size, channels] for size in IMAGE_SIZES[:count]]
    is_single_gapless = count == 1 and (
        layout in ("each channels last", "backwards") or (layout == "each" and channels == 1)
    )
    assert (images.steps is None) == (layout == "one after the other" or is_single_gapless)
    assert_interleaves(images, expected, half_windows(images.sizes_hw))
    if images.steps is not None:
        assert [values_by_address(images, row) for row in range(count)] == [
            array.ravel().tolist() for array in expected
        ]
        order = np.arange(count)[::-1]
        assert_interleaves(images.take(order), expected[::-1], half_windows(images.sizes_hw)[::-1])


@pytest.mark.parametrize("axes", [(4, -1, -1, -1), (4, 3, -1, -1), (4, 3, 6, -1), (4, 3, 6, 5)])
def test_from_planes_of_an_expanded_tensor_shares_its_memory(axes):
    tensor = torch.arange(210, dtype=torch.uint8).view(1, 3, 7, 10)
    tensor = tensor[:, *(slice(None if length == -1 else 1) for length in axes[1:])].expand(axes)
    images = RaggedImages.from_planes(tensor, list("abcd"))
    assert images.offsets.tolist() == [0] * 4
    assert_interleaves(images, [*tensor.permute(0, 2, 3, 1).numpy()], half_windows(images.sizes_hw))


def test_interleave_copies_into_the_memory_that_it_is_given():
    expected = random_arrays([(5, 7), (5, 7)], 3, "uint8")
    memory = torch.zeros(1000, dtype=torch.uint8)
    images = RaggedImages.from_planes(DENSE["contiguous"](expected), ["a", "b"])
    interleaved = images.interleave(full_windows(images.sizes_hw), lambda count: memory[:count])
    assert interleaved.pixels.data_ptr() == memory.data_ptr()
    assert interleaved.pixels.tolist() == np.stack(expected).ravel().tolist()


def test_from_planes_keeps_the_tensors_alive():
    expected = random_arrays(IMAGE_SIZES, 3, "float32")
    images = RaggedImages.from_planes(LAYOUTS["each"](expected), list("abcde"))
    _ = [torch.full((3, *size), 7.0) for size in IMAGE_SIZES]  # would overwrite the memory if it were free
    assert_interleaves(images, expected, full_windows(images.sizes_hw))
