"""Geometry of uint16, float32 and many channels equals torch, NumPy and Pillow on both runners."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpuload import transforms as T
from gpuload.transforms.program.ops import Box, Erase, Flip, Warp, filter_codes
from gpuload.transforms.program.windows import FILTERS, filter_weights

RUNNERS = ("single", "batched")
MAX_LEVELS = {"uint8": 255, "uint16": 65535}
PILLOW_FILTERS = {
    name: getattr(Image.Resampling, name.upper()) for name in ("nearest", "bilinear", "bicubic", "lanczos")
}

GEOMETRY_CHAINS = {
    "Resize": [T.Resize((33, 44))],
    "Resize, bicubic": [T.Resize((70, 21), interpolation="bicubic")],
    "Resize, nearest": [T.Resize((33, 70), interpolation="nearest")],
    "Resize, lanczos": [T.Resize((70, 21), interpolation="lanczos"), T.CenterCrop(20)],
    "Resize, plain bilinear": [T.Resize((70, 21), antialias=False)],
    "Resize, plain bicubic": [T.Resize((70, 21), interpolation="bicubic", antialias=False)],
    "Resize of one axis": [T.CenterCrop(40), T.Resize((40, 21))],
    "Resize, CenterCrop": [T.Resize(50, interpolation="bicubic"), T.CenterCrop((30, 20))],
    "RandomResizedCrop": [T.RandomResizedCrop((32, 28))],
    "RandomCrop": [T.RandomCrop(60, padding=7, pad_if_needed=True, fill=9)],
    "flips": [T.CenterCrop(30), T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
    "Pad": [T.CenterCrop(30), T.Pad((3, 4, 5, 6), fill=200)],
    "Pad, edge": [T.CenterCrop(30), T.Pad(7, padding_mode="edge")],
    "Pad, reflect": [T.CenterCrop(30), T.Pad(7, padding_mode="reflect")],
    "Pad, symmetric": [T.CenterCrop(30), T.Pad(40, padding_mode="symmetric")],
    "RandomZoomOut": [T.CenterCrop(30), T.RandomZoomOut(p=1), T.CenterCrop(40)],
    "RandomRotation": [T.CenterCrop(40), T.RandomRotation(30, fill=7)],
    "RandomRotation, bilinear": [T.CenterCrop(40), T.RandomRotation(30, interpolation="bilinear", fill=7)],
    "RandomAffine": [T.CenterCrop(40), T.RandomAffine(20, (0.1, 0.1), (0.5, 1.5), 10, interpolation="bilinear")],
    "RandomPerspective": [T.CenterCrop(40), T.RandomPerspective(p=1, interpolation="bicubic")],
    "RandomApply": [T.CenterCrop(40), T.RandomApply([T.RandomRotation(30)]), T.RandomChoice([T.Resize((9, 9))])],
    "RandomErasing": [T.CenterCrop(40), T.RandomErasing(1, value=77)],
}


def deep_images(dtype: str, channels: int, count: int = 6) -> list[np.ndarray]:
    """Generate noise over gradients, of many sizes; floats are negative and positive."""
    rng = np.random.default_rng(channels)
    images = []
    for _ in range(count):
        height, width = rng.integers(41, 90, 2)
        image = rng.random((height, width, channels)) * np.linspace(0.2, 1, width)[:, None]
        images.append(
            (image * 3 - 1).astype(np.float32) if dtype == "float32" else (image * MAX_LEVELS[dtype]).astype(dtype)
        )
    return images


@pytest.fixture
def run_both(run_stage):
    def run(transforms: list[Any], images: list[np.ndarray], **options) -> torch.Tensor:
        """Return the result, and check that both runners give the same bits."""
        single, batched = (run_stage(transforms, images, runner=runner, **options) for runner in RUNNERS)
        assert single.dtype == batched.dtype
        torch.testing.assert_close(single, batched, rtol=0, atol=0, equal_nan=True)
        return single

    return run


def expected_by_libraries(image: np.ndarray, program: T.Program, row: int, dtype: str) -> np.ndarray:
    """Apply the records to an image by torch, NumPy and Pillow, in float64; H×W×C."""
    levels = image.astype(np.float64)
    for record in program.records:
        index = row if record.rows is None else int(np.searchsorted(record.rows, row))
        if record.rows is not None and row not in record.rows:
            continue
        match record:
            case Flip():
                levels = np.flip(levels, record.axis) if record.flipped[index] else levels
            case Box(padding_mode=str()):
                top, left, height, width = record.box_tlhw[index].tolist()
                axes = zip((top, left), (height, width), levels.shape[:2], strict=True)
                padding = [(max(-start, 0), max(start + length - size, 0)) for start, length, size in axes]
                mode, options = record.padding_mode, {}
                if mode == "constant":
                    options = {"constant_values": record.fill[0]}
                levels = np.pad(levels, [*padding, (0, 0)], mode=mode, **options)  # pyright: ignore
                top, left = max(top, 0), max(left, 0)
                levels = levels[top : top + height, left : left + width]
            case Box():
                top, left, height, width = record.box_tlhw[index].tolist()
                levels = levels[top : top + height, left : left + width]
                name = FILTERS[filter_codes(record.filters, len(record.box_tlhw))[index]]
                levels = resize_by_libraries(levels, record.size_hw[index].tolist(), name)
            case Warp() if record.warped[index]:
                name = FILTERS[filter_codes(record.filters, len(record.warped))[index]]
                levels = warp_by_pillow(
                    levels, record.coefficients[index], record.size_hw[index].tolist(), name, record.fill[0]
                )
            case Erase():
                levels = levels.copy()
                for top, left, height, width in record.boxes_tlhw[index].tolist():
                    levels[top : top + height, left : left + width] = record.numbers[0]
        if dtype != "float32":
            levels = np.rint(levels).clip(0, MAX_LEVELS[dtype])
    return levels


def resize_by_libraries(levels: np.ndarray, size_hw: list[int], name: str) -> np.ndarray:
    if list(levels.shape[:2]) == size_hw:
        return levels
    planes = torch.from_numpy(np.ascontiguousarray(levels.transpose(2, 0, 1)))[None]
    if name in PILLOW_FILTERS and name not in ("bilinear", "bicubic"):  # torch chooses another nearest pixel in a tie
        planes_resized = [
            Image.fromarray(np.float32(plane)).resize(size_hw[::-1], PILLOW_FILTERS[name])
            for plane in planes[0].numpy()
        ]
        return np.stack(planes_resized, 2).astype(np.float64)
    mode = name.removeprefix("plain ")
    planes_resized = torch.nn.functional.interpolate(planes, size_hw, mode=mode, antialias=mode == name)
    return planes_resized[0].numpy().transpose(1, 2, 0)


def warp_by_pillow(
    levels: np.ndarray, coefficients: np.ndarray, size_hw: list[int], name: str, fill: float
) -> np.ndarray:
    is_affine = not coefficients[6:].any()
    planes = [
        Image.fromarray(plane.astype(np.float32)).transform(
            (size_hw[1], size_hw[0]),
            Image.Transform.AFFINE if is_affine else Image.Transform.PERSPECTIVE,
            coefficients[:6].tolist() if is_affine else coefficients.tolist(),
            PILLOW_FILTERS[name],
            fillcolor=fill,
        )
        for plane in levels.transpose(2, 0, 1)
    ]
    return np.stack([np.asarray(plane, np.float64) for plane in planes], 2)


@pytest.mark.parametrize("channels", [1, 6, 13])
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("name", GEOMETRY_CHAINS)
def test_geometry_equals_torch_numpy_and_pillow(name, dtype, channels, make_batch, run_both):
    images = deep_images(dtype, channels)
    result = run_both(GEOMETRY_CHAINS[name], images)
    assert result.dtype == getattr(torch, dtype)
    _, draws = make_batch(T.Chain(GEOMETRY_CHAINS[name]), images)
    for row, image in enumerate(images):
        expected = expected_by_libraries(image, draws, row, dtype).transpose(2, 0, 1)
        difference = abs(result[row].numpy().astype(np.float64) - expected)
        # A level of uint16 that is close to a half may be rounded in the other direction by float32.
        assert difference.max() <= (1 if dtype == "uint16" else 2e-6)
        if dtype == "uint16":
            assert (difference > 0).mean() < 0.02


@pytest.mark.parametrize("channels", [6, 13])
@pytest.mark.parametrize("name", GEOMETRY_CHAINS)
def test_uint8_of_many_channels_equals_each_channel_alone(name, channels, run_stage):
    images = deep_images("uint8", channels)
    for runner in RUNNERS:
        result = run_stage(GEOMETRY_CHAINS[name], images, runner=runner)
        for channel in range(channels):
            alone = run_stage(GEOMETRY_CHAINS[name], [image[:, :, [channel]] for image in images], runner=runner)
            # torch's CPU kernels for up to four channels differ by a level.
            assert abs(result[:, channel].int() - alone[:, 0].int()).max() <= (runner == "single")


@pytest.mark.parametrize("interpolation", ["bicubic", "lanczos"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_resize_of_a_batch_copies_axes_that_have_the_new_length_already(dtype, interpolation, run_stage):
    """The window has no margin along such an axis, and the filter's taps outside the window have no weight."""
    transforms = [T.Resize((70, 60), interpolation=interpolation), T.CenterCrop(20)]
    images = [image[:41, :41] for image in deep_images(dtype, 3)[:2]]
    images += [np.resize(images[0], (70, 41, 3)), np.resize(images[0], (41, 60, 3)), np.resize(images[0], (70, 60, 3))]
    single, batched = (run_stage(transforms, images, runner=runner) for runner in RUNNERS)
    assert torch.equal(single[-1], batched[-1])
    assert torch.equal(single[-1], torch.from_numpy(images[-1][25:45, 20:40].transpose(2, 0, 1).copy()))
    assert abs(single.double() - batched.double()).max() <= (dtype == "uint8")


@pytest.mark.parametrize("backend", ["torch", "auto", "kornia"])
@pytest.mark.parametrize(("dtype", "unit"), [("uint8", 255), ("uint16", 65535), ("float32", 1)])
def test_normalize_scales_integers_to_1_and_leaves_floats_unscaled(dtype, unit, backend, run_stage, run_both):
    mean, std = np.linspace(-1, 1, 13), np.linspace(0.5, 2, 13)
    images = deep_images(dtype, 13)
    levels = run_stage([T.CenterCrop(40)], images).double()
    expected = (levels / unit - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    for conversion in ([], [T.ToDtype("float32", scale=True)]):
        transforms = [T.CenterCrop(40), *conversion, T.Normalize(mean.tolist(), std.tolist())]
        for result in (run_stage(transforms, images, backend=backend), run_both(transforms, images)):
            torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "scale", "factor"),
    [("uint16", True, 1 / 65535), ("uint16", False, 1), ("float32", True, 1), ("float32", False, 1)],
)
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("result_dtype", ["float32", "float16", "bfloat16"])
def test_to_dtype_scales_integers_only_if_requested(dtype, scale, factor, memory_format, result_dtype, run_both):
    images = [image // 2 if dtype == "uint16" else image for image in deep_images(dtype, 6)]  # float16 ends at 65504
    transforms = [T.CenterCrop(40), T.ToDtype(result_dtype, scale=scale)]
    result = run_both(transforms, images, memory_format=memory_format)
    assert result.is_contiguous(memory_format=getattr(torch, memory_format))
    assert result.dtype == getattr(torch, result_dtype)
    expected = (run_both(transforms[:1], images).float() * factor).to(result.dtype)
    torch.testing.assert_close(result, expected, rtol=1e-6 if result_dtype == "float32" else 1e-2, atol=1e-7)


@pytest.mark.parametrize("ragged", ["list", "pad"])
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_flip_of_images_of_several_sizes_keeps_their_values(dtype, ragged, run_stage):
    images = deep_images(dtype, 6)
    for runner in RUNNERS:
        results = run_stage([T.RandomHorizontalFlip(1)], images, runner=runner, ragged=ragged)
        if ragged == "pad":
            results, sizes = results
            assert sizes.tolist() == [list(image.shape[:2]) for image in images]
        for image, result in zip(images, results, strict=True):
            height, width = image.shape[:2]
            assert result.dtype == getattr(torch, dtype)
            assert np.array_equal(result[:, :height, :width].numpy(), image[:, ::-1].transpose(2, 0, 1))
            assert not result[:, height:].float().any()


@pytest.mark.parametrize(("dtype", "expected"), [("uint16", 32768 / 65535), ("float32", 0.5)])
def test_erasing_value_after_to_dtype_is_on_the_scale_of_to_dtype(dtype, expected, run_both):
    """Before a transform of levels, the value 0.5 is converted to a level for uint16, but not for floats."""
    transforms = [T.ToDtype("float32", scale=True), T.RandomErasing(1, (0.9, 0.9), (1, 1), 0.5), T.CenterCrop(8)]
    assert run_both(transforms, [np.zeros((60, 60, 6), dtype)]).mean() == pytest.approx(expected, abs=1e-6)


def test_resize_of_floats_neither_rounds_nor_clamps(run_both):
    """Bicubic overshoots floats, whereas levels are clamped to 0 … 65535."""
    stripes = np.where(np.arange(64)[:, None, None] % 16 < 8, 0, 1) * np.ones((64, 64, 2))
    transforms = [T.Resize((150, 150), interpolation="bicubic")]
    floats = run_both(transforms, [stripes.astype(np.float32)])
    assert floats.min() < -0.05
    assert floats.max() > 1.05
    levels = run_both(transforms, [(stripes * 65535).astype(np.uint16)])
    torch.testing.assert_close(levels.float(), (floats * 65535).round().clamp(0, 65535), rtol=0, atol=1)


@pytest.mark.parametrize(("size", "reach"), [(20, 2), (80, 3)])
def test_nan_spreads_as_far_as_the_resize_filter_reaches(size, reach, run_both):
    image = np.zeros((40, 40, 1), np.float32)
    image[20, 20] = np.nan
    # The second image needs a longer filter, which must not spread the NaN further.
    results = run_both([T.Resize((size, size))], [image, np.zeros((57, 43, 1), np.float32)])
    assert 1 <= int(results[0].isnan().sum()) <= (2 * reach) ** 2
    assert not results[1].isnan().any()


@pytest.mark.parametrize("interpolation", ["bilinear", "lanczos"])
def test_nan_does_not_spread_through_a_tap_without_weight(interpolation, run_both):
    side, size = 41, 13
    first_pixels, weights = filter_weights(np.array([side]), np.array([size]), np.array([0]), size, interpolation)
    reached = np.zeros((side + weights.shape[2], size), np.bool_)
    for tap in range(weights.shape[2]):
        reached[first_pixels[0] + tap, np.arange(size)] = weights[0, :, tap] != 0
    images = [np.zeros((side, side, 1), np.float32) for _ in range(side)]
    for position, image in enumerate(images):
        image[position, position] = np.nan
    is_nan = run_both([T.Resize((size, size), interpolation)], images).isnan()[:, 0].numpy()
    assert np.array_equal(is_nan, reached[:side, :, None] & reached[:side, None])


@pytest.mark.parametrize(("fill", "dtype"), [(-9999, "float32"), (0.25, "float32"), (40_000, "uint16")])
def test_fill_is_on_the_scale_of_the_images(fill, dtype, run_both):
    for transform in (T.Pad(3, fill=fill), T.RandomRotation((45, 45), expand=False, fill=fill)):
        result = run_both([T.CenterCrop(30), transform], deep_images(dtype, 6))
        assert result[:, :, 0, 0].float().eq(fill).all()


@pytest.mark.parametrize(
    ("transform", "dtype", "text"),
    [
        (T.Pad(3, fill=-1), "uint8", "Pad(fill=-1): all values must be integers in 0 … 255 for uint8 images, such as"),
        (T.Pad(3, fill=(1, 2, 0.5)), "uint8", "Pad(fill=(1, 2, 0.5)): all values must be integers"),
        (T.RandomApply([T.RandomRotation(3, fill=256)]), "uint8", "RandomRotation(fill=256): all values must be"),
        (T.Pad(3, fill=65536), "uint16", "integers in 0 … 65535 for uint16 images, such as image 0"),
        (T.RandomApply([T.ColorJitter(0.4)], 0.01), "float32", "ColorJitter takes uint8 images, but image 0 is float"),
        (T.GaussianBlur(3), "uint16", "but image 0 is uint16; put T.ToDtype('uint8', scale=True) first"),
        (T.RandAugment(), "float32", "RandAugment takes uint8 images, but image 0 is float32"),
        (T.AugMix(), "float32", "AugMix takes uint8 images, but image 0 is float32"),
        (T.ToDtype("uint8"), "float32", "ToDtype('uint8') accepts only uint8 images, but these images are float32"),
    ],
)
def test_transform_that_does_not_accept_the_dtype_raises_with_its_name(transform, dtype, text, run_stage):
    with pytest.raises(ValueError, match=re.escape(text)):
        run_stage([T.CenterCrop(30), transform], deep_images(dtype, 3))
