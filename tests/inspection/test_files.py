"""`InspectedImages`: the properties of a file and of its pixels, and its label."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.generated_images import encode, jpeg_bytes, smooth_image
from PIL import Image

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.inspection import files
from gpuload.inspection.files import (
    FORMATS,
    GOOD,
    KINDS,
    MODES,
    PIXELS,
    ROW,
    SAMPLINGS,
    InspectedImages,
    class_name_of,
    find_image,
)

PICTURE = smooth_image(24, 32, 0)
LEVELS_16 = np.arange(24 * 32, dtype=np.uint16).reshape(24, 32) * 80


def inspect_sample(sample: Any, *, pixels: bool = False) -> tuple[dict[str, Any], str, str]:
    """Return the values by name, the class, and why the image is damaged."""
    row = np.zeros(1, ROW)
    number, record, label, cause = InspectedImages([[sample]], row, np.array([0]), pixels=pixels)[0]
    assert number == 0
    (record,) = record.view(PIXELS if pixels else ROW)
    values = {name: record[name].tolist() for name in record.dtype.names or ()}
    if not pixels:
        values["format"], values["mode"] = FORMATS[values["format"]], MODES[values["mode"]]
        values["kinds"] = [kind for kind in KINDS if values[kind]]
    return values, label, cause


@pytest.mark.parametrize(
    ("form", "mode", "kinds"),
    [
        ("PNG", "RGB", []),
        ("PNG", "RGBA", ["alpha"]),
        ("PNG", "P", []),
        ("PNG", "I;16", ["deep"]),
        ("BMP", "RGB", []),
        ("TIFF", "CMYK", []),
        ("WEBP", "RGB", []),
        ("JPEG", "L", []),
        ("JPEG", "CMYK", []),
    ],
)
def test_format_mode_and_size_come_from_the_content(form: str, mode: str, kinds: list[str]) -> None:
    data = encode(LEVELS_16 if mode == "I;16" else PICTURE, form, mode)
    values, _, cause = inspect_sample(gl.Encoded(data))
    assert not cause
    assert (values["state"], values["format"], values["mode"], values["kinds"]) == (GOOD, form, mode, kinds)
    assert (values["height"], values["width"], values["nbytes"]) == (24, 32, len(data))


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_jpeg_header_gives_sampling_orientation_and_kinds(sampling: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"progressive": True, "exif": exif.tobytes(), "icc_profile": b"x" * 40, "restart_marker_rows": 1}
    data = jpeg_bytes(PICTURE, subsampling=sampling, **options)
    values, _, _ = inspect_sample(gl.Encoded(data, source="a.png"))
    assert SAMPLINGS[values["sampling"]] == sampling
    assert values["orientation"] == 6
    assert values["kinds"] == ["progressive", "restart_markers", "profile", "misnamed"]
    values_of_baseline, _, _ = inspect_sample(gl.Encoded(jpeg_bytes(PICTURE), source="a.JPG"))
    assert (values_of_baseline["orientation"], values_of_baseline["kinds"]) == (1, [])


def test_png_orientation_comes_from_exif() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    assert inspect_sample(gl.Encoded(encode(PICTURE, "PNG", exif=exif)))[0]["orientation"] == 8


def test_damaged_files_have_a_cause_and_files_over_a_limit_are_refused() -> None:
    jpeg = jpeg_bytes(smooth_image(160, 160, 0))
    truncated = jpeg[: len(jpeg) // 2]
    for data, cause in ((truncated, "truncated"), (b"", "the file is empty"), (b"nothing", "not an image")):
        values, label, message = inspect_sample((gl.Encoded(data), 3))
        assert values["state"] == files.DAMAGED
        assert message.startswith("DecodeError: ")
        assert cause in message
        assert label == "3"
    large_bmp = bytearray(encode(PICTURE, "BMP"))
    large_bmp[18:26] = np.array([100_000, 100_000], "<i4").tobytes()
    values, _, message = inspect_sample(gl.Encoded(bytes(large_bmp)))
    assert (values["state"], values["width"]) == (files.REFUSED, 100_000)
    assert "more than max_pixels=" in message


def test_array_has_format_size_and_a_digest_that_depends_on_its_shape() -> None:
    values, _, _ = inspect_sample(gl.Image(np.zeros((5, 7, 13), np.uint16), layout="HWC"))
    assert (values["format"], values["mode"], values["height"], values["width"]) == ("array", "other", 5, 7)
    assert values["kinds"] == ["deep"]
    transposed, _, _ = inspect_sample(gl.Image(np.zeros((7, 5, 13), np.uint16), layout="HWC"))
    assert values["digest"] != transposed["digest"]


def test_equal_bytes_have_equal_digests() -> None:
    original, copy, other = (inspect_sample(gl.Encoded(jpeg_bytes(smooth_image(8, 8, seed))))[0] for seed in (0, 0, 1))
    assert original["digest"] == copy["digest"]
    assert original["digest"] != other["digest"]


@pytest.mark.parametrize(
    ("sample", "label"),
    [
        (gl.Encoded(b""), None),
        ((gl.Encoded(b""), np.int64(4)), 4),
        ((gl.Encoded(b""), "cat"), "cat"),
        ((gl.Encoded(b""), 0.5), None),
        ((gl.Encoded(b""), "a caption " * 20), None),
        ({"jpg": gl.Encoded(b""), "cls": 2}, 2),
        ({"image": gl.Encoded(b""), "label": "dog"}, "dog"),
        ({"image": gl.Encoded(b""), "caption": "dog"}, None),
    ],
)
def test_find_image_label_is_an_integer_or_a_short_text(sample: Any, label: Any) -> None:
    image, found_label = find_image(sample)
    assert isinstance(image, gl.Encoded)
    assert found_label == label


def test_class_name_comes_from_the_datasets_classes_and_labels() -> None:
    class Named(list[int]):
        classes = ("cat", "dog")
        labels = np.array([1, 0])

    assert [class_name_of(Named(), 0, label) for label in (0, "cat", 7, None)] == ["cat", "cat", "7", "dog"]
    assert [class_name_of([], 0, label) for label in (0, "cat", None)] == ["0", "cat", ""]


def test_find_image_without_an_image_raises_type_error() -> None:
    with pytest.raises(TypeError, match="the sample has no image, only int, str"):
        find_image((1, "x"))


# -- pixels ------------------------------------------------------------------------------------------------------------


def inspect_pixels(sample: Any) -> dict[str, Any]:
    values, _, cause = inspect_sample(sample, pixels=True)
    assert not cause
    return values


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_sums_squares_and_levels_are_exact(dtype: Any, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "STRIP_PIXELS", 100)  # several strips, the last one smaller
    array = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (23, 17, channels), dtype, endpoint=True)
    values = inspect_pixels(gl.Image(array, layout="HWC"))
    assert (values["channels"], values["bits"], values["count"]) == (channels, 8 * array.itemsize, 23 * 17)
    exact_levels = array.astype(object)
    assert values["sums"][:channels] == exact_levels.sum(axis=(0, 1)).tolist()
    assert values["squares"][:channels] == (exact_levels**2).sum(axis=(0, 1)).tolist()
    assert set(values["sums"][channels:]) <= {0}
    for channel in range(min(channels, 4)):
        upper = array[..., channel] >> (8 * array.itemsize - 8)
        assert values["levels"][channel] == np.bincount(upper.ravel(), minlength=256).tolist()


def test_pixels_of_a_file_equal_those_of_its_decoded_array() -> None:
    data = jpeg_bytes(smooth_image(40, 30, 0))
    array = Decoder(Decode()).decode(gl.Encoded(data), Decoder(Decode()).header(gl.Encoded(data)))
    assert inspect_pixels(gl.Encoded(data)) == inspect_pixels(gl.Image(array))


def test_images_of_floats_or_too_many_channels_have_no_levels() -> None:
    for array in (np.zeros((4, 4, 3), np.float32), np.zeros((40, 40, 17), np.uint8)):
        assert inspect_pixels(gl.Image(array, layout="HWC"))["bits"] == 0


def test_pixels_of_a_damaged_file_are_empty_with_a_cause() -> None:
    values, _, message = inspect_sample(gl.Encoded(b"nothing"), pixels=True)
    assert message.startswith("DecodeError: not an image")
    assert np.array(values["levels"]).sum() == 0
    assert values["bits"] == 0


def test_image_is_flat_up_to_a_deviation_of_1_5_levels() -> None:
    array = np.full((20, 20, 3), 200, np.uint8)
    assert inspect_pixels(gl.Image(array))["flat"]
    array[:, ::2] += 3  # deviates by 1.5 levels
    assert inspect_pixels(gl.Image(array))["flat"]
    assert inspect_pixels(gl.Image(array.astype(np.uint16) * 257))["flat"]
    array[:, ::2] += 3
    assert not inspect_pixels(gl.Image(array))["flat"]
    assert not inspect_pixels(gl.Image(array.astype(np.uint16) * 257))["flat"]
