from __future__ import annotations

import numpy as np
import pytest

import gpuload as gl


def test_read_gives_the_bytes_and_remembers_the_path(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"bytes of a file")
    encoded = gl.read(path)
    assert (encoded.data, encoded.mode, encoded.source) == (b"bytes of a file", "RGB", str(path))


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)])
def test_any_bytes_like_object_becomes_bytes(data):
    assert gl.Encoded(data).data == b"abc"


def test_a_path_is_not_the_bytes_of_a_file():
    with pytest.raises(
        TypeError, match=r"takes the bytes of an image file, got str; to read a file write gpuload.read"
    ):
        gl.Encoded("cat.jpg")


def test_an_unknown_mode_names_those_that_there_are():
    with pytest.raises(ValueError, match="must be one of 'RGB', 'L', 'RGBA', 'unchanged', got 'BGR'"):
        gl.Encoded(b"", mode="BGR")


def test_an_image_is_kept_as_height_width_channels():
    assert gl.Image(np.zeros((3, 4, 5), np.uint8), layout="CHW").hwc.shape == (4, 5, 3)
    assert gl.Image(np.zeros((4, 5), np.uint8)).hwc.shape == (4, 5, 1)


@pytest.mark.parametrize(
    ("array", "layout", "error", "text"),
    [
        (np.zeros((2, 2, 3), np.float32), "HWC", TypeError, r"must be uint8, got float32 of shape \(2, 2, 3\)"),
        (np.zeros(5, np.uint8), "HWC", ValueError, r"must have 2 or 3 axes, got shape \(5,\)"),
        (np.zeros((0, 4, 3), np.uint8), "HWC", ValueError, "must have pixels and 1 to 4 channels"),
        (np.zeros((3, 20, 30), np.uint8), "HWC", ValueError, r"got H×W×C = \(3, 20, 30\) with layout='HWC'"),
        (np.zeros((3, 20, 30), np.uint8), "NCHW", ValueError, "layout=…. must be 'HWC' or 'CHW', got 'NCHW'"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(array, layout, error, text):
    with pytest.raises(error, match=text):
        gl.Image(array, layout=layout)
