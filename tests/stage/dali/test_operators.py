"""DALI gives each kind of record the bits of DALI's functions, called image by image with the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.programs import run_python

from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.dali.engine import DaliEngine, ndd, types
from gpuload.transforms.program.ops import NOTHING, OPS, Box, Erase, Flip, Ops, Turn, Warp
from gpuload.transforms.program.windows import FILTERS

CPU = torch.device("cpu")
INTERPOLATIONS = {
    "nearest": types.INTERP_NN,
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
    "lanczos": types.INTERP_LANCZOS3,
    "plain bilinear": types.INTERP_LINEAR,
}


def resize(batch: Any, record: Box, index: int) -> Any:
    """Crop to the box, then resize, in two calls."""
    (top, left, height, width), size = record.box_tlhw[index].tolist(), record.size_hw[index].tolist()
    name = record.filters if isinstance(record.filters, str) else FILTERS[record.filters[index]]
    cropped = ndd.slice(batch, start=[top, left], shape=[height, width], axis_names="HW")
    interp_type, antialias = INTERPOLATIONS[name], "plain" not in name
    return ndd.resize(cropped, size=[float(length) for length in size], interp_type=interp_type, antialias=antialias)


def pad(batch: Any, record: Box, index: int) -> Any:
    (top, left, height, width), fill = record.box_tlhw[index].tolist(), list(record.fill)
    return ndd.slice(
        batch, start=[top, left], shape=[height, width], axis_names="HW", out_of_bounds_policy="pad", fill_values=fill
    )


def flip(batch: Any, record: Flip, index: int) -> Any:
    if not record.flipped[index]:
        return batch
    return ndd.flip(batch, horizontal=record.axis, vertical=1 - record.axis)


def turn_quarters(batch: Any, record: Turn, index: int) -> Any:
    if record.transposed[index]:
        batch = ndd.transpose(batch, perm=[1, 0, 2], transpose_layout=False)
    vertical, horizontal = record.flipped[index].tolist()
    return ndd.flip(batch, horizontal=int(horizontal), vertical=int(vertical))


def warp(batch: Any, record: Warp, index: int) -> Any:
    if not record.warped[index]:
        return batch
    matrix = np.float32([*record.coefficients[index], 1]).reshape(1, 3, 3)
    name = record.filters if isinstance(record.filters, str) else FILTERS[record.filters[index]]
    size, interp_type = ndd.as_batch(record.size_hw[index : index + 1].astype(np.float32)), INTERPOLATIONS[name]
    return ndd.experimental.warp_perspective(
        batch, matrix=ndd.as_batch(matrix), size=size, interp_type=interp_type, fill_value=list(record.fill)
    )


def erase(batch: Any, record: Erase, index: int) -> Any:
    for top, left, height, width in record.boxes_tlhw[index].tolist():
        if height:
            anchor, shape = [float(top), float(left)], [float(height), float(width)]
            batch = ndd.erase(batch, anchor=anchor, shape=shape, axis_names="HW", fill_value=list(record.numbers))
    return batch


def auto_contrast(batch: Any) -> Any:
    """As in `nvidia.dali.auto_aug.augmentations.auto_contrast`."""
    lowest = ndd.reductions.min(batch, axis_names="HW", keep_dims=True)
    highest = ndd.reductions.max(batch, axis_names="HW", keep_dims=True)
    difference = highest - lowest
    is_scaled = difference > 0
    white = ndd.as_batch(np.full((1, 1, 1, 1), 255, np.uint8))
    scale = 255 / (difference * is_scaled + white * (is_scaled ^ True))
    return ndd.cast_like((batch - lowest * is_scaled) * scale, batch)


def solarize(batch: Any, threshold: float) -> Any:
    """As in `nvidia.dali.auto_aug.augmentations.solarize`."""
    is_unchanged = batch < ndd.as_batch(np.full((1, 1, 1, 1), threshold, np.float32))
    inverted = ndd.as_batch(np.full((1, 1, 1, 1), 255, np.uint8)) - batch
    return is_unchanged * batch + (is_unchanged ^ True) * inverted


def sharpness(batch: Any, factor: float) -> Any:
    """As in `nvidia.dali.auto_aug.augmentations.sharpness`."""
    blur = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float64) / 13
    kernel = (1 - factor) * blur + factor * np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]])
    return ndd.filter(batch, ndd.as_batch(kernel[None].astype(np.float32)))


def posterize(batch: Any, bits: int) -> Any:
    """As in `nvidia.dali.auto_aug.augmentations.posterize`."""
    return batch & ndd.as_batch(np.full((1, 1, 1, 1), 255 ^ (2 ** (8 - bits) - 1), np.uint8))


def solarize_add(batch: Any, threshold: float, amount: int) -> Any:
    """As in `nvidia.dali.auto_aug.augmentations.solarize_add`, without overflow."""
    is_shifted = batch < ndd.as_batch(np.full((1, 1, 1, 1), threshold, np.float32))
    shift = ndd.as_batch(np.full((1, 1, 1, 1), amount, np.uint8))
    return is_shifted * (batch + shift) + (is_shifted ^ True) * batch


def blur(batch: Any, width: int, height: int, sigma_x: float, sigma_y: float) -> Any:
    window, sigma = np.int32([[height, width]]), np.float32([[sigma_y, sigma_x]])
    return ndd.gaussian_blur(batch, window_size=ndd.as_batch(window), sigma=ndd.as_batch(sigma))


def noise(batch: Any, mean: float, sigma: float, key0: float, key1: float, *_: float) -> Any:
    generator = ndd.random.RNG(seed=(int(key0) << 32) + int(key1))
    return ndd.noise.gaussian(batch, mean=float(mean), stddev=float(sigma), rng=generator)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "solarize": lambda batch, threshold, *_: solarize(batch, threshold),
    "solarize_add": lambda batch, threshold, amount, *_: solarize_add(batch, threshold, int(amount)),
    "posterize": lambda batch, bits, *_: posterize(batch, int(bits)),
    "invert": lambda batch, *_: ndd.as_batch(np.full((1, 1, 1, 1), 255, np.uint8)) - batch,
    "equalize": lambda batch, *_: ndd.equalize(batch),
    "autocontrast": lambda batch, *_: auto_contrast(batch),
    "sharpness": lambda batch, factor, *_: sharpness(batch, factor),
    "blur": lambda batch, width, height, sigma_x, sigma_y, *_: blur(batch, int(width), int(height), sigma_x, sigma_y),
    "pillow_blur": lambda batch, radius, *_: ndd.gaussian_blur(batch, sigma=float(radius)),
    "noise": noise,
    "jpeg": lambda batch, quality, *_: ndd.jpeg_compression_distortion(batch, quality=int(quality)),
    "identity": lambda batch, *_: batch,
}


def apply_colors(batch: Any, arguments: dict[str, float]) -> Any:
    if set(arguments) <= {"brightness", "contrast"}:
        return ndd.brightness_contrast(batch, **arguments)
    return ndd.color_twist(batch, **arguments)


def apply_ops(batch: Any, record: Ops, index: int) -> Any:
    """Apply an image's operations. Consecutive brightness, contrast, saturation and hue are applied by one call."""
    arguments: dict[str, float] = {}
    for column, number in enumerate(record.codes[index].tolist()):
        name = OPS[number] if number != NOTHING else "identity"
        values = record.values[index, column].tolist()
        is_color = name in ("brightness", "contrast", "saturation", "hue")
        if arguments and name not in ("grayscale", "identity") and (not is_color or name in arguments):
            batch, arguments = apply_colors(batch, arguments), {}
        if is_color:
            arguments[name] = values[0] * 360 if name == "hue" else values[0]
        elif name == "grayscale":
            arguments["saturation"] = 0.0
        elif name == "warp":
            filters = record.filters if isinstance(record.filters, str) else record.filters[:, column]
            size_hw = record.sizes_hw
            coefficients, is_warped = record.values[:, column], np.ones(len(size_hw), np.bool_)
            batch = warp(batch, Warp(coefficients, size_hw, is_warped, filters, record.fill), index)
        else:
            batch = OPERATIONS[name](batch, *values)
    return apply_colors(batch, arguments) if arguments else batch


FUNCTIONS: dict[type, Callable[..., Any]] = {Flip: flip, Turn: turn_quarters, Warp: warp, Erase: erase, Ops: apply_ops}

CHAINS: dict[str, list[Any]] = {
    "resize": [T.Resize((50, 61))],
    "resize bicubic": [T.Resize((50, 61), "bicubic")],
    "resize nearest": [T.Resize((50, 61), "nearest")],
    "resize lanczos": [T.Resize((50, 61), "lanczos")],
    "resize without antialiasing": [T.Resize((50, 61), antialias=False)],
    "enlarge": [T.Resize((211, 190), "bicubic")],
    "resized crop": [T.RandomResizedCrop(48, interpolation="random")],
    "crop with padding": [T.RandomCrop(80, padding=6, pad_if_needed=True, fill=(1, 2, 3))],
    "horizontal flip": [T.RandomHorizontalFlip()],
    "vertical flip": [T.RandomVerticalFlip()],
    "flip before colors": [T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomEqualize()],
    "flip before blur": [T.RandomHorizontalFlip(), T.GaussianBlur(5)],
    "two flips": [T.RandomHorizontalFlip(), T.RandomHorizontalFlip()],
    "quarter turns": [T.RandomRotate90()],
    "transposition": [T.RandomTranspose()],
    "rotation": [T.RandomRotation(30, "bilinear", fill=7)],
    "affine map": [T.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 5, "bicubic", fill=(9, 8, 7))],
    "perspective": [T.RandomPerspective(p=0.7, interpolation="bilinear")],
    "brightness": [T.ColorJitter(0.4)],
    "brightness and contrast": [T.ColorJitter(0.4, 0.4)],
    "all colors": [T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "grayscale": [T.RandomGrayscale(0.5)],
    "invert": [T.RandomInvert()],
    "posterize": [T.RandomPosterize(3)],
    "solarize": [T.RandomSolarize(100.5)],
    "equalize": [T.RandomEqualize()],
    "autocontrast": [T.RandomAutocontrast()],
    "sharpness": [T.RandomAdjustSharpness(1.7)],
    "blur": [T.GaussianBlur((5, 9), (0.1, 2.0))],
    "noise": [T.GaussianNoise(0.1, 0.2)],
    "jpeg": [T.JPEG((20, 90))],
    "erase": [T.RandomErasing(0.8, value=(3, 4, 5), max_count=3)],
    "RandAugment": [T.RandAugment(3, interpolation="bilinear", fill=3)],
    "TrivialAugmentWide": [T.TrivialAugmentWide()],
    "AutoAugment": [T.AutoAugment()],
    "timm": [T.TimmRandAugment("rand-m9-n3-mstd0.5-inc1")],
    "branches": [T.RandomApply([T.ColorJitter(0.4)]), T.RandomGrayscale(), T.RandomApply([T.GaussianBlur(5)])],
}


@pytest.fixture(scope="module")
def pictures(make_images) -> list[np.ndarray]:
    """Pictures and noise, with odd sizes, sizes of one pixel, and channels with a single level."""
    rng = np.random.default_rng(0)
    sizes = ((61, 83), (97, 64), (1, 1), (1, 40), (33, 1), (64, 64))
    flat = np.full((40, 50, 3), (7, 0, 255), np.uint8)
    half_flat = rng.integers(0, 256, (45, 50, 3), np.uint8)
    half_flat[..., 1] = 9
    return [*make_images(3, 8), *(rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes), flat, half_flat]


def dali_stage(chain: T.Chain) -> Any:
    return compile_stage(chain, device="cpu", backend="dali", ragged="list")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_results_are_bit_equal_to_dalis_functions(name, pictures, make_batch):
    chain = T.Chain(CHAINS[name])
    images, program = make_batch(chain, pictures, uncut=True)
    results = dali_stage(chain)(images, program)
    engine, is_changed = DaliEngine(CPU), False
    for row, (picture, result) in enumerate(zip(pictures, results, strict=True)):
        with engine.activate():
            batch = ndd.as_batch([torch.from_numpy(picture)], layout="HWC")
            for record in program.records:
                rows = np.arange(len(pictures)) if record.rows is None else record.rows
                function = FUNCTIONS.get(type(record))
                if isinstance(record, Box):
                    function = pad if record.padding_mode else resize
                if function is not None and row in rows:
                    batch = function(batch, record, int(np.flatnonzero(rows == row)[0]))
            [expected] = [sample.torch().clone() for sample in batch.evaluate()]
        assert torch.equal(result, expected.permute(2, 0, 1)), row
        is_changed |= expected.shape != picture.shape or not np.array_equal(expected, picture)
    assert is_changed, "no picture was changed by the chain"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_image_has_the_same_bits_alone_and_in_any_batch(name, pictures, make_batch):
    erasing = T.RandomErasing(0.5, value=0.5)
    chain = T.Chain([*CHAINS[name], T.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), erasing])
    repeated_pictures = pictures * 6  # more than a piece
    stage = dali_stage(chain)
    expected = stage(*make_batch(chain, repeated_pictures))
    for position in [*range(len(pictures)), len(repeated_pictures) - 1]:
        alone = stage(*make_batch(chain, repeated_pictures[position : position + 1], first=position))
        assert torch.equal(alone[0], expected[position]), position
    part = stage(*make_batch(chain, repeated_pictures[5:12], first=5))
    for position, image in enumerate(part, 5):
        assert torch.equal(image, expected[position]), position


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_images_without_an_operation_keep_their_bits(p, pictures, make_batch):
    colors, smooth = T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.GaussianBlur(5)
    chain = T.Chain([T.RandomChoice([colors, smooth, T.RandomRotation(30, "bilinear"), T.Identity()], p=[p, p, p, 1])])
    images, program = make_batch(chain, pictures * 2)
    results = dali_stage(chain)(images, program)
    changed_rows = [
        set(range(len(pictures) * 2) if record.rows is None else record.rows.tolist()) for record in program.records
    ]
    unchanged_rows = set(range(len(pictures) * 2)) - set().union(*changed_rows)
    assert len(unchanged_rows) > 3
    for row in unchanged_rows:
        assert np.array_equal(results[row].permute(1, 2, 0).numpy(), (pictures * 2)[row])


@pytest.mark.parametrize(
    "transforms",
    [
        [T.RandomResizedCrop(48), T.RandomHorizontalFlip(), T.RandomCrop(30)],
        [T.Resize(60), T.CenterCrop((50, 20)), T.RandomVerticalFlip()],
        [T.RandomCrop(24, pad_if_needed=True), T.ColorJitter(0.4)],
        [T.RandomRotation(20, "bilinear"), T.CenterCrop(24)],
        [T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomHorizontalFlip(), T.CenterCrop(24)],
        [T.GaussianBlur(5), T.RandomCrop(24, pad_if_needed=True)],
    ],
    ids=str,
)
def test_decoded_window_gives_bit_equal_results_to_the_entire_image(transforms, make_images, make_batch):
    chain = T.Chain([*transforms, T.Normalize((0.5,), (0.5,))])
    stage = dali_stage(chain)
    window, entire = (stage(*make_batch(chain, make_images(4, 9), uncut=uncut)) for uncut in (False, True))
    torch.testing.assert_close(list(window), list(entire), rtol=0, atol=0)


def test_window_inside_a_resized_image_is_within_a_level_of_the_reference(compare, make_images):
    """Only borders differ: DALI repeats the last pixel, and Pillow cuts the filter off."""
    compared = compare([T.Resize(72), T.CenterCrop(40), T.RandomHorizontalFlip()], make_images(3, 9, low=90, high=140))
    assert compared.backends == ["dali"]
    assert compared.mean < 0.25
    assert compared.max <= 1


def test_warp_is_within_a_level_of_the_reference_in_the_mean(compare, make_images):
    """A difference of half a pixel in the origin of coordinates would change many levels."""
    for transform in (T.RandomAffine(20, (0.1, 0.1), (1.2, 1.5), 5, "bilinear"), T.RandomPerspective(1.0, 0.3)):
        compared = compare([transform, T.CenterCrop(24)], make_images(3, 6))
        assert compared.backends == ["dali"]
        assert compared.mean < 1


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_gray_images_get_the_brightness_and_contrast_of_color_images(factor, make_images, make_batch):
    gray = make_images(5, 6, channels=1)
    colored = [array.repeat(3, axis=2) for array in gray]
    chain = T.Chain([T.ColorJitter((factor, factor), (0.7, 0.7)), T.RandomPosterize(5), T.JPEG(60)])
    results, color_results = (dali_stage(chain)(*make_batch(chain, arrays)) for arrays in (gray, colored))
    for image, color_image in zip(results, color_results, strict=True):
        assert torch.equal(image[0], color_image[0])


def test_hue_saturation_and_grayscale_leave_gray_images_unchanged(make_images, make_batch):
    gray = make_images(5, 6, channels=1)
    chain = T.Chain([T.ColorJitter(saturation=0.9, hue=0.5), T.RandomGrayscale(1.0)])
    results = dali_stage(chain)(*make_batch(chain, gray))
    for result, image in zip(results, gray, strict=True):
        np.testing.assert_array_equal(result[0], image[..., 0])


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_grayscale_returns_the_requested_channels(before, after, compare, make_images):
    """DALI's channels can differ by a level, since it rounds each of them."""
    compared = compare([T.Grayscale(after)], make_images(5, 6, channels=before))
    assert compared.backends == ["dali"]
    assert compared.ours[0].shape[0] == after
    assert compared.max <= 1


# This runs in a separate process, because DALI's color operators write beyond their memory on one channel. Each
# transform is printed before it runs, to show which transform crashed. The runner is called without a stage, because a
# stage refuses color transforms on two or four channels.
CHANNELS_PROGRAM = """
import sys
import numpy as np, torch
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages
from gpuload.stage.dali import DaliBackend
from gpuload.stage.finish import UNCHANGED
from gpuload.stage.plan import plan_steps

channels = int(sys.argv[1])
rng = np.random.default_rng(0)
arrays = [rng.integers(0, 256, (*size, channels), np.uint8) for size in ((31, 40), (1, 1), (50, 7), (64, 64))] * 4
transforms = [
    T.Resize(20), T.Resize(20, "bicubic"), T.RandomCrop(9, padding=9), T.RandomHorizontalFlip(), T.RandomVerticalFlip(),
    T.RandomRotate90(), T.RandomRotation(20, "bilinear"), T.RandomPerspective(1.0), T.ColorJitter(0.4),
    T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.ColorJitter(hue=0.5), T.ColorJitter(saturation=0.9), T.RandomGrayscale(1.0),
    T.RandomInvert(1.0), T.RandomPosterize(3, 1.0), T.RandomSolarize(99, 1.0), T.RandomEqualize(1.0),
    T.RandomAutocontrast(1.0), T.RandomAdjustSharpness(2, 1.0), T.GaussianBlur(5), T.GaussianNoise(), T.RandomErasing(1.0),
    T.RandAugment(2), T.TrivialAugmentWide(), T.AutoAugment(),
    *([T.JPEG(50)] if channels in (1, 3) else []),
    *([T.TimmRandAugment("rand-m9-n3")] if channels == 3 else []),
]
backend = DaliBackend(torch.device("cpu"))
run = backend.level_runner(UNCHANGED)
for transform in transforms:
    print(transform, flush=True)
    assert plan_steps([transform], backend)[0].backend == "dali"
    for turn in range(3):
        images = RaggedImages.from_arrays(arrays)
        program = T.Chain([transform]).draw(epoch_key(0, turn), np.arange(len(arrays)), images.sizes_hw)
        outputs = [torch.empty(channels, *size, dtype=torch.uint8) for size in program.results_hw.tolist()]
        run(images, program, program.windows_tlhw, outputs, None)
print("done")
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_operators_do_not_crash_on_any_number_of_channels(channels):
    output, _ = run_python(CHANNELS_PROGRAM, channels, timeout=120)
    assert output.splitlines()[-1] == "done"
