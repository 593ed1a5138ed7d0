"""What is known of an image by its pixels."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from pictures import jpeg_bytes, smooth_image
from PIL import Image

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.inspection import pixels
from gpuload.inspection.duplicates import APART, BITS
from gpuload.inspection.pixels import PIXELS, measure


def measured(sample: Any) -> np.void:
    numbers, told = measure(sample, Decoder(Decode()))
    assert not told
    return numbers.view(PIXELS)[0]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_sums_are_exact(dtype: Any, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "STRIP", 100)  # several strips, the last one smaller
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


def test_looks_stay_where_a_picture_is_made_smaller_and_compressed() -> None:
    pictures = [Image.fromarray(smooth_image(300, 400, seed)) for seed in range(6)]
    looks = [measured(gl.Image(np.asarray(picture)))["looks"] for picture in pictures]
    small = [measured(gl.Encoded(jpeg_bytes(np.asarray(p.resize((200, 150))), quality=60)))["looks"] for p in pictures]
    apart = [[int(BITS[(one ^ other).view(np.uint8)].sum()) for other in small] for one in looks]
    assert max(apart[at][at] for at in range(6)) <= APART
    assert min(apart[i][j] for i in range(6) for j in range(6) if i != j) > 2 * APART
