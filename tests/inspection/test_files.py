"""What is known of a file, and of its pixels."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from pictures import jpeg_bytes, smooth_image
from PIL import Image

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.inspection import files
from gpuload.inspection.files import FORMATS, GOOD, MODES, PIXELS, SAMPLINGS, find_image, look_at, measure

PICTURE = smooth_image(24, 32, 0)


def encoded(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, form, **options)
    return file.getvalue()


def looked_at(sample: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers by name, and what was told."""
    numbers, told = look_at(sample, Decoder(Decode()))
    names = (
        "state",
        "format",
        "mode",
        "sampling",
        "orientation",
        "flags",
        "height",
        "width",
        "nbytes",
        "first",
        "second",
    )
    found: dict[str, Any] = dict(zip(names, numbers.tolist(), strict=True))
    found["format"], found["mode"] = FORMATS[found["format"]], MODES[found["mode"]]
    return found, json.loads(told or "{}")


@pytest.mark.parametrize(
    ("form", "image", "mode", "flags"),
    [
        ("PNG", Image.fromarray(PICTURE), "RGB", 0),
        ("PNG", Image.fromarray(PICTURE).convert("RGBA"), "RGBA", files.ALPHA),
        ("PNG", Image.fromarray(PICTURE).convert("P"), "P", 0),
        ("PNG", Image.fromarray(np.arange(24 * 32, dtype=np.uint16).reshape(24, 32) * 80), "I;16", files.DEEP),
        ("BMP", Image.fromarray(PICTURE), "RGB", 0),
        ("TIFF", Image.fromarray(PICTURE).convert("CMYK"), "CMYK", 0),
        ("WEBP", Image.fromarray(PICTURE), "RGB", 0),
        ("JPEG", Image.fromarray(PICTURE).convert("L"), "L", 0),
        ("JPEG", Image.fromarray(PICTURE).convert("CMYK"), "CMYK", 0),
    ],
)
def test_format_mode_and_size_are_those_of_the_content(form: str, image: Image.Image, mode: str, flags: int) -> None:
    data = encoded(image, form)
    found, told = looked_at(gl.Encoded(data))
    assert told == {}
    assert (found["state"], found["format"], found["mode"], found["flags"]) == (GOOD, form, mode, flags)
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
    found, _ = looked_at(gl.Encoded(data, source="a.png"))
    assert SAMPLINGS[found["sampling"]] == sampling
    assert found["orientation"] == 6
    assert found["flags"] == files.PROGRESSIVE_JPEG | files.RESTARTS | files.PROFILE | files.MISNAMED
    plain, _ = looked_at(gl.Encoded(jpeg_bytes(PICTURE), source="a.JPG"))
    assert (plain["orientation"], plain["flags"]) == (1, 0)


def test_a_png_that_lies_on_its_side_is_seen() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    assert looked_at(gl.Encoded(encoded(PICTURE, "PNG", exif=exif)))[0]["orientation"] == 8


def test_damage_has_a_cause_and_a_limit_is_no_damage() -> None:
    whole = jpeg_bytes(smooth_image(160, 160, 0))
    for data, cause in (
        (whole[: len(whole) // 2], "cut off"),
        (b"", "the file is empty"),
        (b"nothing", "not an image"),
    ):
        found, told = looked_at((gl.Encoded(data), 3))
        assert found["state"] == files.DAMAGED
        assert told["cause"].startswith("DecodeError: ")
        assert cause in told["cause"]
        assert told["label"] == 3
    bomb = bytearray(encoded(PICTURE, "BMP"))
    bomb[18:26] = np.array([100_000, 100_000], "<i4").tobytes()
    found, told = looked_at(gl.Encoded(bytes(bomb)))
    assert (found["state"], found["width"]) == (files.REFUSED, 100_000)
    assert "more than max_pixels=" in told["cause"]


def test_arrays_are_images_too() -> None:
    found, _ = looked_at(gl.Image(np.zeros((5, 7, 13), np.uint16), layout="HWC"))
    assert (found["format"], found["mode"], found["height"], found["width"]) == ("array", "other", 5, 7)
    assert found["flags"] == files.DEEP
    other, _ = looked_at(gl.Image(np.zeros((7, 5, 13), np.uint16), layout="HWC"))
    assert (found["first"], found["second"]) != (other["first"], other["second"])


def test_equal_bytes_have_equal_digests() -> None:
    one, two, three = (looked_at(gl.Encoded(jpeg_bytes(smooth_image(8, 8, seed))))[0] for seed in (0, 0, 1))
    assert (one["first"], one["second"]) == (two["first"], two["second"])
    assert (one["first"], one["second"]) != (three["first"], three["second"])


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
    found = find_image(sample)
    assert isinstance(found.image, gl.Encoded)
    assert found.label == label


def test_a_sample_without_an_image_is_told() -> None:
    with pytest.raises(TypeError, match="the sample holds no image: int, str"):
        find_image((1, "x"))


# -- pixels ------------------------------------------------------------------------------------------------------------


def measured(sample: Any) -> np.void:
    numbers, told = measure(sample, Decoder(Decode()))
    assert not told
    return numbers.view(PIXELS)[0]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_sums_are_exact(dtype: Any, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "STRIP", 100)  # several strips, the last one smaller
    array = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (23, 17, channels), dtype, endpoint=True)
    found = measured(gl.Image(array, layout="HWC"))
    assert (found["channels"], found["bits"], found["count"]) == (channels, 8 * array.itemsize, 23 * 17)
    exact = array.astype(object)
    assert found["sums"][:channels].tolist() == exact.sum(axis=(0, 1)).tolist()
    assert found["squares"][:channels].tolist() == (exact**2).sum(axis=(0, 1)).tolist()
    assert not found["sums"][channels:].any()
    for channel in range(min(channels, 4)):
        upper = array[..., channel] >> (8 * array.itemsize - 8)
        assert found["levels"][channel].tolist() == np.bincount(upper.ravel(), minlength=256).tolist()


def test_files_are_counted_as_they_are_decoded() -> None:
    data = jpeg_bytes(smooth_image(40, 30, 0))
    array = Decoder(Decode()).decode(gl.Encoded(data), Decoder(Decode()).header(gl.Encoded(data)))
    assert measured(gl.Encoded(data)).tobytes() == measured(gl.Image(array)).tobytes()


def test_what_has_no_levels_is_left_out() -> None:
    for array in (np.zeros((4, 4, 3), np.float32), np.zeros((40, 40, 17), np.uint8)):
        assert measured(gl.Image(array, layout="HWC"))["bits"] == 0


def test_damage_is_told() -> None:
    numbers, told = measure(gl.Encoded(b"nothing"), Decoder(Decode()))
    assert json.loads(told)["cause"].startswith("DecodeError: not an image")
    assert not numbers.any()


def test_an_image_of_one_colour_is_flat() -> None:
    array = np.full((20, 20, 3), 200, np.uint8)
    assert measured(gl.Image(array))["flat"]
    array[:, ::2] += 3  # deviates by 1.5 levels
    assert measured(gl.Image(array))["flat"]
    array[:, ::2] += 3
    assert not measured(gl.Image(array))["flat"]
