"""Weights of filters, windows of sources and indices of padding equal Pillow's and NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from gpuload.transforms.program.windows import (
    FILTERS,
    clip_to_windows,
    filter_weights,
    nearest_indices,
    padded_indices,
    source_windows,
)

# Lengths of an axis before and after a resize.
LENGTHS = [(1, 1), (1, 9), (9, 1), (50, 77), (77, 50), (200, 7), (60, 90), (60, 60)]


@pytest.mark.parametrize(("length", "output"), LENGTHS)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_filter_weights_give_pillows_levels(length, output, interpolation):
    row = np.random.default_rng(length).integers(0, 256, length)
    first_pixels, weights = filter_weights(np.array([length]), np.array([output]), np.array([0]), output, interpolation)
    taps = np.minimum(first_pixels[0, :, None] + np.arange(weights.shape[2]), length - 1)
    levels = np.clip(((row[taps] * weights[0]).sum(1) + (1 << 21)) >> 22, 0, 255)  # weights have 22 bits
    expected = Image.fromarray(row.astype(np.uint8)[None]).resize((output, 1), getattr(Image, interpolation.upper()))
    np.testing.assert_array_equal(levels, np.asarray(expected)[0])


@pytest.mark.parametrize(("length", "output"), LENGTHS)
def test_nearest_indices_equal_pillows_indices(length, output):
    row = np.arange(length, dtype=np.uint8)[None]
    expected = np.asarray(Image.fromarray(row).resize((output, 1), Image.NEAREST))[0]
    np.testing.assert_array_equal(nearest_indices(length, output, 0, output), expected)
    assert nearest_indices(length, output, output // 2, 1).tolist() == [expected[output // 2]]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_source_windows_contain_every_pixel_with_a_weight(interpolation):
    rng = np.random.default_rng(0)
    for length, output in [*LENGTHS, *rng.integers(1, 300, (200, 2)).tolist()]:
        count = int(rng.integers(1, output + 1))
        start = int(rng.integers(0, output - count + 1))
        code = np.array([FILTERS.index(interpolation)])
        input_hw, output_hw = np.array([[length, length]]), np.array([[output, output]])
        top, _, height, _ = source_windows(np.array([[start, start, count, count]]), output_hw, input_hw, code)[0]
        first_pixels, weights = filter_weights(
            np.array([length]), np.array([output]), np.array([start]), count, interpolation
        )
        weighted_pixels = (first_pixels[0, :, None] + np.arange(weights.shape[2]))[weights[0] != 0]
        assert top <= weighted_pixels.min()
        assert weighted_pixels.max() < top + height <= length
        assert weighted_pixels.min() - top <= 3  # a window may begin with a few pixels without weight


@pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric"])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_padded_indices_equal_numpys_indices(mode, length):
    expected = np.pad(np.arange(length), 12, mode=mode)
    np.testing.assert_array_equal(padded_indices(np.arange(-12, length + 12), length, mode), expected)


def test_clip_to_windows_shifts_boxes_and_empties_boxes_outside():
    boxes = np.array([[[2, 3, 10, 10], [9, 1, 3, 2], [0, 0, 0, 0], [30, 2, 0, 5]]])
    clipped = clip_to_windows(boxes, np.array([[4, 5, 6, 20]]))
    assert clipped[0, 0].tolist() == [0, 0, 6, 8]
    # Boxes outside the window and empty boxes are empty.
    assert clipped[0, 1:, 2:].min(axis=1).tolist() == [0, 0, 0]
    assert (clipped[..., 2:] >= 0).all()
