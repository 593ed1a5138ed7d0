"""`Encoded`, `Image` and targets: their arguments, dtypes and errors, and samples without an image."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.both_loaders import gpuload_batches
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T

BFLOAT16 = torch.zeros(3, 4, 4, dtype=torch.bfloat16)
NORMALIZE = T.Normalize([0.5] * 3, [0.2] * 3)


def test_read_returns_the_bytes_and_the_path(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"bytes of a file")
    encoded = gl.read(path)
    assert (encoded.data, encoded.mode, encoded.source) == (b"bytes of a file", "RGB", str(path))
    assert repr(gl.Encoded(b"abc", exif=False)) == "Encoded(3 bytes, mode='RGB', source=None, exif=False)"


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)])
def test_encoded_converts_any_buffer_to_bytes(data):
    assert gl.Encoded(data).data == b"abc"


@pytest.mark.parametrize(
    ("array", "layout", "error", "text"),
    [
        (np.zeros((2, 2, 3)), "HWC", TypeError, r"uint8, uint16 or float32, got float64 of shape \(2, 2, 3\); convert"),
        (np.zeros((2, 2, 3), np.int16), "HWC", TypeError, r"int16 of shape .*; convert it, for example with array.ast"),
        (np.zeros(5, np.uint8), "HWC", ValueError, r"must have 2 or 3 axes, or 4 as a clip, got shape \(5,\)"),
        (np.zeros((0, 4, 3), np.uint8), "HWC", ValueError, "must have pixels and channels"),
        (np.zeros((3, 20, 30), np.uint8), "HWC", ValueError, r"got H×W×C = \(3, 20, 30\) with layout='HWC'"),
        (np.zeros((20, 30, 3), np.uint8), "CHW", ValueError, "an image of 20 channels; its shape suggests another"),
        (np.zeros((13, 20, 30), np.float32), None, ValueError, "pass layout='CHW' for a C×H×W array, layout='HWC' fo"),
        (np.zeros((6, 6, 6), np.float32), None, ValueError, r"got H×W×C = \(6, 6, 6\) with layout=None"),
    ],
)
def test_image_refuses_arrays_with_an_unsupported_dtype_or_ambiguous_shape(array, layout, error, text):
    with pytest.raises(error, match=text):
        gl.Image(array, layout=layout)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u2", "float32", ">f4"])
@pytest.mark.parametrize(
    ("shape", "layout", "hwc"),
    [
        ((13, 20, 30), "CHW", (20, 30, 13)),
        ((20, 30, 13), None, (20, 30, 13)),
        ((3, 3, 200), "HWC", (3, 3, 200)),
        ((6, 6, 6), "CHW", (6, 6, 6)),
        ((20, 30), None, (20, 30, 1)),
        ((3, 20, 30), "CHW", (20, 30, 3)),
    ],
)
def test_image_stores_any_layout_as_hwc_in_native_byte_order(shape, layout, hwc, dtype):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    image = gl.Image(array, layout=layout)
    assert image.hwc.shape == hwc
    assert image.hwc.dtype == np.dtype(dtype).newbyteorder("=")
    assert np.array_equal(image.hwc.squeeze(), array.transpose(1, 2, 0) if layout == "CHW" else array)


def test_targets_keep_dtypes_of_torch_and_widen_unsupported_dtypes():
    assert gl.Mask(np.zeros((4, 5), bool)).array.dtype == bool
    assert gl.Mask(np.zeros((2, 4, 5), np.uint16)).array.dtype == np.int32
    assert gl.Mask(np.zeros((4, 5), np.uint32)).array.dtype == np.int64
    assert gl.Mask(np.zeros((4, 5), ">i2")).array.dtype == np.dtype("=i2")
    assert gl.Boxes([[1, 2, 3, 4.5]]).array.dtype == np.float32
    assert gl.Boxes(np.ones((1, 4))).array.dtype == np.float64
    assert gl.Keypoints([[[1, 2]]]).array.shape == (1, 1, 2)
    assert (gl.Boxes([]).array.shape, gl.Keypoints([]).array.shape) == ((0, 4), (0, 2))
    assert gl.Boxes(np.zeros((0, 4), np.float32), "CXCYWH").format == "cxcywh"


def test_mask_of_a_palette_image_holds_the_stored_indices():
    palette = PILImage.fromarray(np.arange(20, dtype=np.uint8).reshape(4, 5)).convert("P")
    palette.putpalette([200, 0, 0] * 20)  # all of one colour, so that only the indices tell the pixels apart
    np.testing.assert_array_equal(gl.Mask(palette).array, np.asarray(palette))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: gl.Mask(np.zeros((4, 5), complex)), TypeError, "takes an array of numbers, got complex128"),
        (lambda: gl.Mask(np.zeros((0, 5))), ValueError, r"must have pixels, got shape \(0, 5\)"),
        (lambda: gl.Mask(np.zeros((1, 1, 2, 4, 5))), ValueError, "must be H×W, or N×H×W"),
        (lambda: gl.Boxes(np.ones((1, 4), bool)), TypeError, "takes an array of numbers, got bool"),
        (lambda: gl.Boxes([[1, 2, np.inf, 4]]), ValueError, "finite numbers, but box 0"),
        (lambda: gl.Boxes([[3, 2, 1, 4]]), ValueError, "box 0 ends before it begins"),
        (lambda: gl.Boxes([[1, 2, 3, 4]], "coco"), ValueError, "is 'coco', which is 'xywh' here"),
        (lambda: gl.Boxes([[1, 2, 3, 4]], "bbox"), ValueError, "COCO's bbox is 'xywh' here"),
        (lambda: gl.Boxes([[1, 2, 3, 4]], "Pascal_VOC"), ValueError, "is 'Pascal_VOC', which is 'xyxy' here"),
        (lambda: gl.Boxes([[1, 2, 3, 4]], "yolo"), ValueError, "multiply the array by .* and pass 'cxcywh'"),
        (lambda: gl.Boxes([[1, 2, 3, 4]], "albumentations"), ValueError, "multiply the array by .* and pass 'xyxy'"),
        (lambda: gl.Keypoints(np.ones(3)), ValueError, r"keypoints must be a \(…, 2\) array"),
    ],
)
def test_targets_refuse_arrays_with_a_wrong_dtype_shape_value_or_format(make, error, text):
    with pytest.raises(error, match=text):
        make()


IMAGE_REMEDY = "return gpuload.read(path), or gpuload.Encoded(bytes), without an Image around it"
MASK_REMEDY = "for a mask in a file, write Mask(gpuload.read(path)) or Mask(gpuload.Encoded(bytes))"


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: gl.Encoded("cat.jpg"), "got str; to read a file, call gpuload.read(path)"),
        (lambda: gl.Encoded(b"", mode="BGR"), "must be one of 'RGB', 'L', 'RGBA', 'unchanged', got 'BGR'"),
        (
            lambda: gl.Boxes([1, 2, 3, 4]),
            "boxes must be an (n, 4) array, with one row for each box, got shape (4,); write [box]",
        ),
        (lambda: gl.Boxes(np.ones((3, 6))), "write boxes[:, :4], and return the other columns as another field"),
        (lambda: gl.Boxes(np.ones((3, 2))), "got shape (3, 2)"),
        (
            lambda: gl.Keypoints(np.ones((17, 3))),
            "(17, 3); if the third number is a visibility, write points[..., :2], and return it as another field",
        ),
        (lambda: gl.Keypoints([1.0] * 51), "(51,); for a list of COCO, write numpy.reshape(points, (-1, 3))[:, :2]"),
        (lambda: gl.Keypoints(np.ones(4)), "got shape (4,)"),
        (lambda: gl.Boxes(None), "Boxes() takes an array, got None; for an image without any, write []"),
        (
            lambda: gl.Image(None),
            "Image() takes an array, got None; cv2.imread returns None for a file that it cannot read; check the path, "
            "or return gpuload.read(path)",
        ),
        (lambda: gl.Mask(None), "check the path, or return gpuload.Mask(gpuload.read(path))"),
        (lambda: gl.Image(BFLOAT16), "Image() got a bfloat16 tensor, which NumPy lacks; write tensor.float()"),
        (lambda: gl.Boxes(BFLOAT16[0]), "Boxes() got a bfloat16 tensor, which NumPy lacks; write tensor.float()"),
        (
            lambda: gl.read(None),
            "read() takes the path or URL of one image, got None (NoneType); call it for each path, and leave out "
            "samples without a file",
        ),
        (lambda: gl.read(["a"]), "got ['a'] (list); call it for each path, and leave out samples without a file"),
        (lambda: gl.Image("cat.jpg"), f"Image() takes an array of numbers, got the path 'cat.jpg'; {IMAGE_REMEDY}"),
        (
            lambda: gl.Image(Path("cat.jpg")),
            f"Image() takes an array of numbers, got the path 'cat.jpg'; {IMAGE_REMEDY}",
        ),
        (lambda: gl.Image(b"abc"), f"Image() takes an array of numbers, got bytes; {IMAGE_REMEDY}"),
        (
            lambda: gl.Image(gl.Encoded(b"abc")),
            f"Image() takes an array of numbers, got an Encoded(3 bytes, mode='RGB', source=None); {IMAGE_REMEDY}",
        ),
        (lambda: gl.Mask("cat.png"), f"Mask() takes an array of numbers, got the path 'cat.png'; {MASK_REMEDY}"),
        (lambda: gl.Mask(Path("cat.png")), f"Mask() takes an array of numbers, got the path 'cat.png'; {MASK_REMEDY}"),
        (lambda: gl.Mask(b"abc"), f"Mask() takes an array of numbers, got bytes; {MASK_REMEDY}"),
    ],
)
def test_sample_types_refuse_common_mistakes_with_a_remedy(make, remedy):
    with pytest.raises((TypeError, ValueError), match=f"{re.escape(remedy)}$"):
        make()


def load_cropped_batch(samples):
    """Load one batch of the samples with a center crop of 4×4."""
    [batch] = gpuload_batches(samples, len(samples), transforms=[T.CenterCrop(4)])
    return batch


def error_of(sample) -> str:
    with pytest.raises(gl.SampleError) as caught:
        load_cropped_batch([sample])
    return str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("uint16", "16 bits per pixel (Pillow mode 'I;16')"),
        (">u2", "16 bits per pixel (Pillow mode 'I;16B')"),
        ("int32", "32-bit integers (Pillow mode 'I')"),
        ("float32", "32-bit floats (Pillow mode 'F')"),
    ],
)
def test_loader_refuses_pillow_images_of_more_than_8_bits(dtype, text):
    image = PILImage.fromarray(np.full((8, 9), 30000, dtype))
    assert (
        f"DecodeError: the PIL image sample[0] holds {text}, which Pillow would clip to 8; to keep its values, "
        "yield gpuload.Image(array), of uint16 or float32, or scale them to 0 … 255; if they are classes or depths, "
        "yield a gpuload.Mask"
    ) in error_of((image, 0))


@pytest.mark.parametrize("mode", ["1", "P", "L", "LA", "RGB", "RGBA", "CMYK"])
def test_loader_takes_pillow_images_of_8_bits_in_every_mode(mode):
    image = PILImage.fromarray(np.full((8, 9, 3), 255, np.uint8)).convert(mode)
    assert (load_cropped_batch([(image, 0)])[0][:, :3] == 255).all()


def test_loader_refuses_a_16_bit_file_as_image_and_takes_it_as_mask(tmp_path):
    PILImage.fromarray(np.full((8, 9), 30000, np.uint16)).save(tmp_path / "deep.png")
    encoded = gl.read(tmp_path / "deep.png")
    assert "deep.png" in error_of((encoded, 0))
    assert "this PNG holds 16 bits per pixel" in error_of((encoded, 0))
    _, masks = load_cropped_batch([(gl.Image(np.zeros((8, 9, 3), np.uint8)), gl.Mask(encoded))])
    assert (masks == 30000).all()


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (
            (np.zeros((48, 64), np.uint8), 7),
            "the sample, (uint8 array 48×64, int), has no image for the transforms: sample[0], uint8 "
            "array 48×64, counts as an image only as gpuload.Image(array); return gpuload.Encoded(bytes),",
        ),
        (
            {"x": torch.zeros(3, 40, 50), "y": 7, "z": [None, "a"]},
            "the sample, {'x': float32 tensor 3×40×50, 'y': int, 'z': [None, str]}, has no image for the transforms: "
            "sample[\"x\"], float32 tensor 3×40×50, counts as an image only as gpuload.Image(tensor, layout='CHW'); "
            "to return uint8 instead, remove ToTensor or other scaling from the dataset; return",
        ),
        (
            (np.float32(1), np.zeros((), np.int64), np.zeros((3, 4), np.uint16)),
            "the sample, (float32, 0-d int64 array, uint16 array 3×4), has no image for the transforms; return",
        ),
        (list(range(1000)), "int, int…, has no image for the transforms; return gpuload.Encoded(bytes)"),
        ((BFLOAT16, 7), "counts as an image only as gpuload.Image(tensor.float(), layout='CHW'); to return uint8"),
        ((np.zeros((9, 9, 3), np.float16), 7), "counts as an image only as gpuload.Image(array.astype('float32')); "),
        (
            {"image": None, "y": 7},
            'for the transforms: sample["image"] is None, which cv2.imread returns for a file that it cannot read; if '
            "it should be the image, check the path, or use gpuload.read(path), whose errors name the file; return",
        ),
        ({"caption": None, "path": "a.jpg"}, "is the path 'a.jpg'; return gpuload.read(path) instead"),
    ],
    ids=["grey", "floats", "no_image_shape", "long", "bfloat16", "float16", "none", "none_and_path"],
)
def test_loader_describes_a_sample_without_an_image_with_a_remedy(sample, text):
    assert text in error_of(sample)


def test_loader_takes_a_float_array_as_image_only_if_declared():
    nan_pixels = np.full((8, 9, 3), np.nan, np.float32)
    text = "sample[0], float32 array 8×9×3, counts as an image only as gpuload.Image(array)"
    assert text in error_of((nan_pixels, 0))
    images, _ = load_cropped_batch([(gl.Image(nan_pixels), 0)])
    assert images.shape == (1, 3, 4, 4)
    assert images.isnan().all(), "NaN values must pass through unchanged"


@pytest.mark.parametrize("value", [255, -0.5])
def test_normalize_with_a_mean_in_0_to_1_refuses_float_images_outside_0_to_1(value):
    text = (
        f"ValueError: the image contains floats from {value} to {value}, but float images must be in 0 … 1; pass pixel"
    )
    images = [gl.Image(np.full((8, 9, 3), level, np.float32)) for level in (0, 1, value)]
    for transforms in ([NORMALIZE], [T.MultiView([[NORMALIZE]] * 2)]):
        with pytest.raises(gl.SampleError, match=f"^sample 2,.*{re.escape(text)}"):
            gpuload_batches(images, 3, transforms=transforms)


def test_normalize_with_a_mean_in_0_to_1_does_not_check_float_masks():
    sample = gl.Image(np.zeros((8, 9, 3), np.float32)), gl.Mask(np.full((1, 8, 9), 91, np.float32))
    [(_, mask)] = gpuload_batches([sample], transforms=[NORMALIZE])
    assert (mask == 91).all()


@pytest.mark.parametrize(
    ("transforms", "channels"),
    [
        ([T.CenterCrop(4)], 3),
        ([T.ToDtype("float32"), T.Normalize([120.0] * 3, [50.0] * 3)], 3),
        ([T.Normalize([0.5] * 4, [0.2] * 4)], 4),  # for example three reflectances and a vegetation index
        ([T.Lambda(lambda images: images / 255, per="image"), NORMALIZE], 3),
    ],
    ids=["no Normalize", "Normalize in 0 … 255", "four channels", "Lambda before Normalize"],
)
def test_loader_accepts_any_floats_if_normalize_does_not_expect_rgb_in_0_to_1(transforms, channels):
    image = gl.Image(np.full((8, 9, channels), 255, np.float32))
    assert len(gpuload_batches([image], transforms=transforms)) == 1
