"""Flips, crops, pads and maps by Kornia are those of the reference, for any place and size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage.kornia.geometry import cropped, flipped, sampled, warped
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.gather import Source, crop
from gpuload.stage.reference.warp import warp_batch
from gpuload.transforms.program.ops import Box
from gpuload.transforms.program.windows import full_windows
from gpuload.transforms.warps import rotation_coefficients


def noise(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, shape, np.uint8))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("which", [[True] * 4, [False, True, False, True]])
def test_flips(axis, which):
    given = noise(np.random.default_rng(0), 4, 3, 5, 7)
    before = given.clone()
    found = flipped(given, np.array(which), axis)
    assert torch.equal(given, before)
    for row, mirrored in enumerate(which):
        assert torch.equal(found[row], given[row].flip(axis + 1) if mirrored else given[row])


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
@pytest.mark.parametrize("fill", [(9,), (1, 200, 30)])
@pytest.mark.parametrize("trial", range(12))
def test_crops_of_windows_of_any_size(mode, fill, trial):
    """Boxes that lie inside, reach beyond, or lie outside; of images of which a part is there."""
    rng = np.random.default_rng(trial)
    alike = trial % 2 == 0
    size = tuple(rng.integers(1, 30, 2).tolist())
    frames = np.tile(rng.integers(2, 40, 2), (5, 1)) if alike else rng.integers(2, 40, (5, 2))
    reach = 3 if trial % 3 else 40  # how far they go beyond
    low, high = np.minimum(-reach, frames - size), np.maximum(frames - size + reach, 0)
    starts = rng.integers(low, high + 1)
    boxes = np.concatenate([starts, np.tile(size, (5, 1))], axis=1)
    record = Box(boxes, boxes[:, 2:], padding_mode=mode, fill=fill, sizes_hw=frames)
    whole = mode != "constant" and trial % 4 == 0
    windows = full_windows(frames) if whole else record.input_windows(full_windows(record.size_hw))
    images = [rng.integers(0, 256, (*frame, 3), np.uint8) for frame in frames]
    cut = [
        image[top : top + height, left : left + width]
        for image, (top, left, height, width) in zip(images, windows.tolist(), strict=True)
    ]
    ragged = RaggedImages.from_arrays(cut)
    ragged.table["size_hw"], ragged.table["region_tlhw"] = frames, windows
    source = Source.of_ragged(ragged, np.arange(5), windows)
    corners = np.concatenate([starts, windows[:, :2]], axis=1)
    found = cropped(source, record, corners, size)
    assert found.is_contiguous()
    assert torch.equal(found, crop(source, corners, size, frames, mode, fill))


def maps(rng: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
    """Some that turn, some that only scale, some that tilt."""
    coefficients, _ = rotation_coefficients(
        rng.uniform(-90, 90, count), None, np.tile([height, width], (count, 1)), expand=False
    )
    coefficients[:, [0, 4]] *= rng.uniform(0.5, 2, (count, 1))
    coefficients[::3, 6:] = rng.normal(0, 0.01, (len(coefficients[::3]), 2))
    coefficients[1::3, [1, 3]] = 0
    return coefficients


@pytest.mark.parametrize(("interpolation", "per_million"), [("nearest", 0), ("bilinear", 1)])
def test_maps(interpolation, per_million):
    rng = np.random.default_rng(4)
    differing = total = 0
    for trial in range(20):
        height, width, out_height, out_width = rng.integers(1, 70, 4).tolist()
        channels = 3 if trial % 2 else 1
        given, coefficients = noise(rng, 6, channels, height, width), maps(rng, 6, height, width)
        fill, size = tuple(rng.integers(0, 256, channels).tolist()), (out_height, out_width)
        expected = warp_batch(given, coefficients, size, interpolation, fill)
        found = warped(given, coefficients, size, interpolation, fill)
        difference = (found.int() - expected.int()).abs()
        assert difference.max() <= 1
        differing, total = differing + int((difference > 0).sum()), total + difference.numel()
        corners = rng.integers(0, size, (6, 2))
        part = (out_height - int(corners[:, 0].max()), out_width - int(corners[:, 1].max()))
        parts = warped(given, coefficients, part, interpolation, fill, corners)
        for row, (top, left) in enumerate(corners.tolist()):
            assert torch.equal(parts[row], found[row, :, top : top + part[0], left : left + part[1]])
    assert differing * 1e6 <= per_million * total


def test_what_lies_infinitely_far_away_is_filled():
    given = torch.full((1, 3, 8, 8), 200, dtype=torch.uint8)
    horizon = np.array([[1.0, 0, 0, 0, 1, 0, -1 / 4.5, 0]])  # w is 0 in the middle of column 4
    for interpolation in ("nearest", "bilinear"):
        assert (warped(given, horizon, (8, 8), interpolation, (9,))[0, :, :, 4] == 9).all()


def test_gradients_flow_through_a_map():
    rng = np.random.default_rng(3)
    given = torch.from_numpy(rng.uniform(0, 255, (2, 1, 5, 6))).requires_grad_()
    y, x = (torch.from_numpy(rng.uniform(-1, 6, (2, 4, 3))) for _ in range(2))
    assert torch.autograd.gradcheck(lambda images: sampled(images, y, x, "bilinear"), given)
    sampled(given, y, x, "bilinear").sum().backward()
    torch.testing.assert_close(given.grad.sum(dim=(1, 2, 3)), torch.full((2,), 12.0, dtype=torch.float64))
