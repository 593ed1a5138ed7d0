"""`Normalize` for levels (0 … 255) and for floats (0 … 1), `ToDtype("uint8")` for floats and uint16, `Window`, and
`CenterCropOrPad` of lines of text."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.peers import torchvision
from PIL import Image as PILImage
from transforms.drawing import TO_FLOAT

import gpuload as gl
from gpuload import transforms as T

NORMALIZE_LEVELS = T.Normalize((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
NORMALIZE_FLOATS = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("before", [[], [TO_FLOAT], [T.CenterCrop(8)]])
def test_chain_refuses_a_mean_of_levels_if_images_are_scaled(before):
    text = (
        r"is for images in 0 … 255, but uint8 images are scaled to 0 … 1 before it; divide mean and std by 255, or "
        r"put ToDtype\('float32'\), which does not scale, right before it"
    )
    for normalize in (NORMALIZE_LEVELS, T.Normalize((0.0,) * 3, (255.0,) * 3)):
        with pytest.raises(ValueError, match=text):
            T.Chain([*before, normalize])


def test_chain_refuses_a_mean_of_0_to_1_after_to_dtype_without_scale():
    text = r"is for images in 0 … 1, but a ToDtype without scale=True leaves 0 … 255; set scale=True, or"
    with pytest.raises(ValueError, match=text):
        T.Chain([T.ToDtype("float32"), T.RandomHorizontalFlip(), NORMALIZE_FLOATS])


def test_normalize_of_levels_and_of_floats_give_equal_results():
    image = np.random.default_rng(3).integers(0, 256, (8, 8, 3), np.uint8)
    results = []
    for chain in ([T.ToDtype("float32"), NORMALIZE_LEVELS], [NORMALIZE_FLOATS], [TO_FLOAT, NORMALIZE_FLOATS]):
        with gl.Loader([image], transforms=chain, num_workers=0, device="cpu") as loader:
            results += loader
    for result in results[1:]:
        np.testing.assert_allclose(results[0].numpy(), result.numpy(), atol=2e-6)


@pytest.mark.parametrize(
    "normalize", [T.Normalize((0.0,) * 3, (1.0,) * 3), T.Normalize((0.0,) * 3, (2.0,) * 3), T.Normalize((1.0,), (1.0,))]
)
@pytest.mark.parametrize("before", [[], [T.ToDtype("float32")], [TO_FLOAT]])
def test_chain_accepts_an_ambiguous_mean_and_std(before, normalize):
    T.Chain([*before, normalize])


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("kornia", marks=lacking.needs("kornia")),
        pytest.param("dali", marks=lacking.needs("nvidia.dali")),
    ],
)
def test_normalize_with_one_mean_and_std_applies_to_any_number_of_channels(backend):
    for channels in (1, 3):
        levels = torch.randint(0, 256, (2, channels, 8, 9), dtype=torch.uint8)
        result = gl.Augment([T.CenterCrop(6), T.Normalize([0.5], [0.25])], backend=backend)(levels)
        expected = gl.Augment([T.CenterCrop(6), T.Normalize([0.5] * channels, [0.25] * channels)], backend=backend)(
            levels
        )
        assert torch.equal(result, expected)


def test_normalize_with_one_mean_and_std_applies_after_a_custom_transform():
    floats = torch.rand(2, 3, 8, 9)
    chain = [T.Lambda(lambda images: images * 2, per="image"), T.Normalize([0.5], [0.25])]
    torch.testing.assert_close(gl.Augment(chain)(floats), (floats * 2 - 0.5) / 0.25)


def test_arguments_as_tensors_and_arrays_equal_plain_numbers():
    mean = [0.5, 0.25, 0.75]
    assert T.Normalize(torch.tensor(mean), torch.tensor(mean)) == T.Normalize(np.array(mean), mean)
    assert T.RandomHorizontalFlip(torch.tensor(0.25)) == T.RandomHorizontalFlip(0.25)
    assert T.RandomHorizontalFlip(np.array(0.25)) == T.RandomHorizontalFlip(0.25)
    assert T.ColorJitter(torch.tensor(0.25)) == T.ColorJitter(0.25)
    assert T.RandomRotation(torch.tensor(10)) == T.RandomRotation(10)


TO_UINT8 = T.ToDtype("uint8", scale=True)


def load_images(dataset, transforms, **options):
    with gl.Loader(dataset, 32, transforms=transforms, device="cpu", **{"num_workers": 0, **options}) as loader:
        return torch.cat(list(loader))


def make_unit_floats():
    """Generate float32 images, 20×24×25×3, in 0 … 1, which include the bounds of each level."""
    floats = np.random.default_rng(0).random((20, 24, 25, 3), np.float32)
    bounds = (np.arange(257) / 255.999).astype(np.float32)  # torchvision's level is ⌊255.999 x⌋
    floats[0].flat[: 3 * 257] = np.clip(
        np.concatenate([bounds, np.nextafter(bounds, np.float32(0)), np.nextafter(bounds, np.float32(1))]), 0, 1
    )
    return floats


def to_nchw(images):
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def test_to_uint8_in_first_place_converts_floats_and_uint16_like_torchvision(tmp_path):
    floats = make_unit_floats()
    uint16_images = np.random.default_rng(1).integers(0, 65536, (20, 24, 25, 3)).astype(np.uint16)
    torchvision_to_dtype = torchvision().transforms.v2.ToDtype(torch.uint8, scale=True)
    for images in (floats, uint16_images):
        expected = torchvision_to_dtype(to_nchw(images))
        assert torch.equal(load_images(list(map(gl.Image, images)), [TO_UINT8]), expected)
        assert torch.equal(gl.Augment([TO_UINT8])(to_nchw(images)), expected)
        np.save(tmp_path / "images.npy", images)  # more than SEARCHED_SAMPLES rows; later rows are copied unchecked
        assert torch.equal(load_images(gl.ArrayFile(tmp_path / "images.npy"), [TO_UINT8], num_workers=1), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_to_uint8_converts_float64_float16_and_bfloat16_like_float32(dtype):
    images = to_nchw(make_unit_floats()).to(dtype)
    assert torch.equal(gl.Augment([TO_UINT8])(images), gl.Augment([TO_UINT8])(images.float()))


def test_to_uint8_in_first_place_converts_image_files_of_16_bits():
    uint16_image = np.random.default_rng(1).integers(0, 65536, (24, 25)).astype(np.uint16)
    file = io.BytesIO()
    PILImage.fromarray(uint16_image).save(file, "PNG")
    files = [gl.Encoded(file.getvalue(), "unchanged")]
    levels = torch.from_numpy((uint16_image >> 8).astype(np.uint8))
    assert torch.equal(load_images(files, [TO_UINT8, T.CenterCrop(20)])[0, 0], levels[2:22, 2:22])


@pytest.mark.parametrize(
    "transforms",
    [
        [TO_UINT8, T.RandomResizedCrop(16), T.ColorJitter(0.3, 0.3)],
        [T.ClampBoundingBoxes(), TO_UINT8, T.RandomHorizontalFlip(), T.RandAugment()],
        [T.MultiView([[TO_UINT8, T.ColorJitter(0.3)], [TO_UINT8, T.RandomGrayscale(0.5)]])],
    ],
)
def test_images_converted_in_first_place_give_the_results_of_uint8_images(transforms):
    floats = make_unit_floats()
    levels = np.ascontiguousarray(gl.Augment([TO_UINT8])(to_nchw(floats)).permute(0, 2, 3, 1).numpy())
    options = {"batch_size": 20, "device": "cpu", "num_workers": 0, "transforms": transforms}
    converted, expected = (next(iter(gl.Loader(list(map(gl.Image, images)), **options))) for images in (floats, levels))
    augmented, augmented_levels = (gl.Augment(transforms)(to_nchw(images)) for images in (floats, levels))
    for results, expected_results in ((converted, expected), (augmented, augmented_levels)):
        views, expected_views = ([x] if isinstance(x, torch.Tensor) else x for x in (results, expected_results))
        assert {view.dtype for view in views} == {torch.uint8}
        torch.testing.assert_close(list(views), list(expected_views), rtol=0, atol=0)


@pytest.mark.parametrize(("value", "content"), [(1.5, "floats from 0.5 to 1.5"), (np.nan, "NaN")])
def test_to_uint8_in_first_place_refuses_floats_outside_0_to_1(value, content):
    image = np.full((8, 9, 3), 0.5, np.float32)
    image[2, 3] = value
    message = f"contains {content}, but float images must be in 0 … 1"
    with pytest.raises(gl.SampleError, match=f"^sample 0,.* ValueError: the image {re.escape(message)}"):
        load_images([gl.Image(image)], [TO_UINT8, T.ColorJitter(0.3)])
    with pytest.raises(ValueError, match=f"^batch {re.escape(message)}"):
        gl.Augment([TO_UINT8, T.ColorJitter(0.3)])(to_nchw(image[None]))


@pytest.mark.parametrize(
    "transforms",
    [
        [T.RandomHorizontalFlip(), TO_UINT8],
        [T.ToDtype("uint8")],
        [T.MultiView([[TO_UINT8], [T.RandomHorizontalFlip(), TO_UINT8]])],
    ],
)
def test_loader_refuses_floats_if_to_uint8_is_not_in_first_place(transforms):
    text = "accepts only uint8 images, but these images are float32; put ToDtype('uint8', scale=True) first"
    with pytest.raises(ValueError, match=re.escape(text)):
        load_images(list(map(gl.Image, make_unit_floats())), transforms)
    levels = (make_unit_floats() * 255).astype(np.uint8)
    load_images([gl.Image(image) for image in levels[:1]], [T.RandomHorizontalFlip(), TO_UINT8, T.ColorJitter(0.3)])


def test_color_jitter_refuses_floats_with_to_uint8_as_the_remedy():
    text = "ColorJitter takes uint8 images, but sample 0 is float32; put T.ToDtype('uint8', scale=True) first"
    with pytest.raises(ValueError, match=re.escape(text)):
        load_images(list(map(gl.Image, make_unit_floats())), [T.ColorJitter(0.3)])


# -- Window ------------------------------------------------------------------------------------------------------------


def dicom_window(values, center, width):
    """Return the pseudocode of DICOM PS3.3, C.11.2.1.2.1, for outputs from 0 to 255, in float64."""
    x = np.asarray(values, np.float64)
    inside = ((x - (center - 0.5)) / (width - 1) + 0.5) * 255
    return np.where(x <= center - 0.5 - (width - 1) / 2, 0, np.where(x > center - 0.5 + (width - 1) / 2, 255, inside))


HOUNSFIELD = np.arange(-1024, 3072, dtype=np.float32).reshape(64, 64)


@pytest.mark.parametrize(("center", "width"), [(40, 400), (-600, 1500), (300, 2.0), (2048, 4096)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_window_has_the_levels_of_dicoms_linear_function(center, width, dtype):
    values = HOUNSFIELD if dtype == np.float32 else (HOUNSFIELD + 1024).astype(np.uint16)
    levels = T.Window(center, width).levels(values)
    assert levels.dtype == np.uint8
    assert np.abs(levels - dicom_window(values, center, width)).max() <= 0.501  # the levels are rounded
    assert torch.equal(T.Window(center, width).levels(torch.from_numpy(values)), torch.from_numpy(levels))


def load_batch(sample, chain):
    [batch] = gl.Loader([sample], 1, transforms=chain, num_workers=0, device="cpu")
    return batch


def test_window_is_applied_before_the_crop_and_colours_of_a_loader_and_an_augment():
    chain = [T.Window(40, 400), T.RandomCrop(32), T.RandomInvert(p=1), T.RandomHorizontalFlip()]
    levels = T.Window(40, 400).levels(HOUNSFIELD)
    expected = load_batch(gl.Image(levels), chain[1:])
    assert torch.equal(load_batch(gl.Image(HOUNSFIELD), chain), expected)
    augmented = gl.Augment(chain)(torch.from_numpy(HOUNSFIELD)[None, None])
    assert torch.equal(augmented, expected)


def test_window_converts_image_files_of_16_bits():
    file = io.BytesIO()
    values = (HOUNSFIELD + 1024).astype(np.uint16)
    PILImage.fromarray(values).save(file, "PNG")
    image = load_batch(gl.Encoded(file.getvalue(), mode="unchanged"), [T.Window(1064, 400)])
    assert torch.equal(image[0, 0], torch.from_numpy(T.Window(1064, 400).levels(values)))


@pytest.mark.parametrize(
    "chain",
    [
        [T.RandomCrop(8), T.Window(40, 400)],
        [T.Window(40, 400), T.Window(40, 400)],
        [T.MultiView([[T.Window(40, 400)], [T.Window(300, 2000)]])],
        [T.MultiView([[T.Window(40, 400)], [T.RandomCrop(8)]])],
        [T.RandomApply([T.Window(40, 400)])],
    ],
    ids=["after a crop", "twice", "views", "one view", "nested"],
)
def test_chain_refuses_a_window_that_is_not_its_first_transform(chain):
    with pytest.raises(ValueError, match="a chain can have only one, at its beginning; put Window first"):
        T.Chain(chain)


def test_window_refuses_images_of_8_bits_and_nan():
    levels = np.zeros((8, 8), np.uint8)
    with pytest.raises(gl.SampleError, match="Window takes intensities of 16 bits or floats, but this"):
        load_batch(gl.Image(levels), [T.Window(40, 400)])
    file = io.BytesIO()
    PILImage.fromarray(levels).save(file, "JPEG")
    for mode in ("L", "unchanged"):
        with pytest.raises(gl.SampleError, match="Window takes intensities of 16 bits or floats, but this"):
            load_batch(gl.Encoded(file.getvalue(), mode=mode), [T.Window(40, 400)])
    with pytest.raises(TypeError, match=r"batch has 8 bits, but Window takes intensities: uint16, or floats"):
        gl.Augment([T.Window(40, 400)])(torch.from_numpy(levels)[None, None])
    nan = np.full((8, 8), np.nan, np.float32)
    with pytest.raises(gl.SampleError, match="contains NaN"):
        load_batch(gl.Image(nan), [T.Window(40, 400)])
    with pytest.raises(ValueError, match="contains NaN"):
        gl.Augment([T.Window(40, 400)])(torch.from_numpy(nan)[None, None])


def test_window_refuses_an_array_file_of_8_bits(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((20, 8, 8, 1), np.uint8))
    images = gl.ArrayFile(tmp_path / "a.npy")
    with pytest.raises(gl.SampleError, match="this image has 8 bits"):
        list(gl.Loader(images, 20, transforms=[T.Window(40, 400)], num_workers=0, device="cpu"))


# -- padding on the right ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 64, 90])
def test_crop_or_pad_at_the_left_repeats_the_last_column_on_the_right(width):
    line = np.random.default_rng(0).integers(0, 256, (10, width, 3), np.uint8)
    [padded] = load_batch(gl.Image(line), [T.CenterCropOrPad((16, 64), padding_mode="edge", position="left")])
    rows = np.clip(np.arange(16) - 3, 0, 9)  # three rows of padding above and below the ten
    columns = np.minimum(np.arange(64), width - 1)
    assert np.array_equal(padded.permute(1, 2, 0).numpy(), line[rows][:, columns])
