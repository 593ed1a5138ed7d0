"""What is known of a file without its pixels."""

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
from gpuload.inspection.files import FORMATS, GOOD, MODES, SAMPLINGS, look_at, take_apart

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
    found = dict(zip(names, numbers.tolist(), strict=True))
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
    taken = take_apart(sample)
    assert isinstance(taken.image, gl.Encoded)
    assert taken.label == label


def test_a_sample_without_an_image_is_told() -> None:
    with pytest.raises(TypeError, match="the sample holds no image: int, str"):
        take_apart((1, "x"))
