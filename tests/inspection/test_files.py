"""What is known of a file, and of its pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes, smooth_image
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


def encoded(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, form, **options)
    return file.getvalue()


def looked_at(sample: Any, *, pixels: bool = False) -> tuple[dict[str, Any], str, str]:
    """The numbers by name, the class, and why the image is damaged."""
    row = np.zeros(1, ROW)
    number, record, label, cause = InspectedImages([[sample]], row, np.array([0]), pixels=pixels)[0]
    assert number == 0
    (record,) = record.view(PIXELS if pixels else ROW)
    found = {name: record[name].tolist() for name in record.dtype.names or ()}
    if not pixels:
        found["format"], found["mode"] = FORMATS[found["format"]], MODES[found["mode"]]
        found["kinds"] = [kind for kind in KINDS if found[kind]]
    return found, label, cause


@pytest.mark.parametrize(
    ("form", "image", "mode", "kinds"),
    [
        ("PNG", Image.fromarray(PICTURE), "RGB", []),
        ("PNG", Image.fromarray(PICTURE).convert("RGBA"), "RGBA", ["alpha"]),
        ("PNG", Image.fromarray(PICTURE).convert("P"), "P", []),
        ("PNG", Image.fromarray(np.arange(24 * 32, dtype=np.uint16).reshape(24, 32) * 80), "I;16", ["deep"]),
        ("BMP", Image.fromarray(PICTURE), "RGB", []),
        ("TIFF", Image.fromarray(PICTURE).convert("CMYK"), "CMYK", []),
        ("WEBP", Image.fromarray(PICTURE), "RGB", []),
        ("JPEG", Image.fromarray(PICTURE).convert("L"), "L", []),
        ("JPEG", Image.fromarray(PICTURE).convert("CMYK"), "CMYK", []),
    ],
)
def test_format_mode_and_size_are_those_of_the_content(
    form: str, image: Image.Image, mode: str, kinds: list[str]
) -> None:
    data = encoded(image, form)
    found, _, cause = looked_at(gl.Encoded(data))
    assert not cause
    assert (found["state"], found["format"], found["mode"], found["kinds"]) == (GOOD, form, mode, kinds)
    assert (found["height"], found["width"], found["nbytes"]) == (24, 32, len(data))


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_what_a_jpeg_says_of_itself(sampling: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = jpeg_bytes(
        PICTURE,
        subsampling=sampling,
        progressive=True,
        exif=exif.tobytes(),
        icc_profile=b"x" * 40,
        restart_marker_rows=1,
    )
    found, _, _ = looked_at(gl.Encoded(data, source="a.png"))
    assert SAMPLINGS[found["sampling"]] == sampling
    assert found["orientation"] == 6
    assert found["kinds"] == ["progressive", "restart_markers", "profile", "misnamed"]
    plain, _, _ = looked_at(gl.Encoded(jpeg_bytes(PICTURE), source="a.JPG"))
    assert (plain["orientation"], plain["kinds"]) == (1, [])


def test_a_png_that_lies_on_its_side_is_seen() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    assert looked_at(gl.Encoded(encoded(PICTURE, "PNG", exif=exif)))[0]["orientation"] == 8


def test_damage_has_a_cause_and_a_limit_is_no_damage() -> None:
    whole = jpeg_bytes(smooth_image(160, 160, 0))
    for data, cause in (
        (whole[: len(whole) // 2], "truncated"),
        (b"", "the file is empty"),
        (b"nothing", "not an image"),
    ):
        found, label, why = looked_at((gl.Encoded(data), 3))
        assert found["state"] == files.DAMAGED
        assert why.startswith("DecodeError: ")
        assert cause in why
        assert label == "3"
    bomb = bytearray(encoded(PICTURE, "BMP"))
    bomb[18:26] = np.array([100_000, 100_000], "<i4").tobytes()
    found, _, why = looked_at(gl.Encoded(bytes(bomb)))
    assert (found["state"], found["width"]) == (files.REFUSED, 100_000)
    assert "more than max_pixels=" in why


def test_arrays_are_images_too() -> None:
    found, _, _ = looked_at(gl.Image(np.zeros((5, 7, 13), np.uint16), layout="HWC"))
    assert (found["format"], found["mode"], found["height"], found["width"]) == ("array", "other", 5, 7)
    assert found["kinds"] == ["deep"]
    other, _, _ = looked_at(gl.Image(np.zeros((7, 5, 13), np.uint16), layout="HWC"))
    assert found["digest"] != other["digest"]


def test_equal_bytes_have_equal_digests() -> None:
    one, two, three = (looked_at(gl.Encoded(jpeg_bytes(smooth_image(8, 8, seed))))[0] for seed in (0, 0, 1))
    assert one["digest"] == two["digest"]
    assert one["digest"] != three["digest"]


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
def test_labels_are_numbers_or_words(sample: Any, label: Any) -> None:
    image, found = find_image(sample)
    assert isinstance(image, gl.Encoded)
    assert found == label


def test_a_class_has_the_name_that_the_data_set_gives_it() -> None:
    class Named(list[int]):
        classes = ("cat", "dog")
        labels = np.array([1, 0])

    assert [class_name_of(Named(), 0, label) for label in (0, "cat", 7, None)] == ["cat", "cat", "7", "dog"]
    assert [class_name_of([], 0, label) for label in (0, "cat", None)] == ["0", "cat", ""]


def test_a_sample_without_an_image_is_told() -> None:
    with pytest.raises(TypeError, match="the sample has no image, only int, str"):
        find_image((1, "x"))


# -- pixels ------------------------------------------------------------------------------------------------------------


def measured(sample: Any) -> dict[str, Any]:
    found, _, cause = looked_at(sample, pixels=True)
    assert not cause
    return found


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_sums_are_exact(dtype: Any, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "STRIP_PIXELS", 100)  # several strips, the last one smaller
    array = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (23, 17, channels), dtype, endpoint=True)
    found = measured(gl.Image(array, layout="HWC"))
    assert (found["channels"], found["bits"], found["count"]) == (channels, 8 * array.itemsize, 23 * 17)
    exact = array.astype(object)
    assert found["sums"][:channels] == exact.sum(axis=(0, 1)).tolist()
    assert found["squares"][:channels] == (exact**2).sum(axis=(0, 1)).tolist()
    assert not any(found["sums"][channels:])
    for channel in range(min(channels, 4)):
        upper = array[..., channel] >> (8 * array.itemsize - 8)
        assert found["levels"][channel] == np.bincount(upper.ravel(), minlength=256).tolist()


def test_files_are_counted_as_they_are_decoded() -> None:
    data = jpeg_bytes(smooth_image(40, 30, 0))
    array = Decoder(Decode()).decode(gl.Encoded(data), Decoder(Decode()).header(gl.Encoded(data)))
    assert measured(gl.Encoded(data)) == measured(gl.Image(array))


def test_what_has_no_levels_is_left_out() -> None:
    for array in (np.zeros((4, 4, 3), np.float32), np.zeros((40, 40, 17), np.uint8)):
        assert measured(gl.Image(array, layout="HWC"))["bits"] == 0


def test_damage_is_told() -> None:
    found, _, why = looked_at(gl.Encoded(b"nothing"), pixels=True)
    assert why.startswith("DecodeError: not an image")
    assert not np.array(found["levels"]).any()
    assert found["bits"] == 0


def test_an_image_of_one_colour_is_flat() -> None:
    array = np.full((20, 20, 3), 200, np.uint8)
    assert measured(gl.Image(array))["flat"]
    array[:, ::2] += 3  # deviates by 1.5 levels
    assert measured(gl.Image(array))["flat"]
    assert measured(gl.Image(array.astype(np.uint16) * 257))["flat"]
    array[:, ::2] += 3
    assert not measured(gl.Image(array))["flat"]
    assert not measured(gl.Image(array.astype(np.uint16) * 257))["flat"]
