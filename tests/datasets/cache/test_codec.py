"""Samples as bytes and back; what is refused, and that no bytes do harm."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpuload as gl
from gpuload.datasets.cache.codec import pack, unpack
from gpuload.datasets.sample import as_meta

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(gl.Encoded, st.binary(), st.sampled_from(["RGB", "L", "unchanged"]), st.none() | st.text())
)
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


def again(sample: Any) -> Any:
    return unpack(memoryview(pack(sample)))


@pytest.mark.slow
@settings(max_examples=40)
@given(SAMPLES)
def test_a_sample_comes_back_as_it_was(sample: Any) -> None:
    found = again(sample)
    assert found == sample
    assert repr(found) == repr(sample)  # types and the order of keys too


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(["cat", "dog"]),
        np.array([True, False]),
        np.array(3.5),
        np.float16(1.5),
        np.int64(-3),
        np.arange(12).reshape(3, 4).T,
    ],
)
def test_arrays_keep_type_and_shape_and_may_be_written_to(array: Any) -> None:
    found = again({"a": array})["a"]
    assert type(found) is type(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)
    assert not isinstance(found, np.ndarray) or found.flags.writeable


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_decoded_images_come_back(channels: int) -> None:
    image = gl.Image(np.arange(6 * channels, dtype=np.uint16).reshape(channels, 2, 3), layout="CHW")
    found = again({"image": image})["image"]
    assert type(found) is gl.Image
    assert found.hwc.dtype == np.uint16
    assert np.array_equal(found.hwc, image.hwc)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int16).reshape(2, 3),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.arange(12).reshape(3, 4).T,
        torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ],
)
def test_tensors_come_back_and_may_be_written_to(tensor: torch.Tensor) -> None:
    found = again({"a": [tensor]})["a"][0]
    assert (type(found), found.dtype, found.shape) == (torch.Tensor, tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    found[...] = 0  # no warning that its memory is read-only


def test_targets_come_back() -> None:
    mask, boxes, points = gl.Mask(gl.Encoded(b"png")), gl.Boxes([[1, 2, 3, 4]], "xywh"), gl.Keypoints([[1.5, 2.0]])
    found = again((mask, boxes, points, gl.Mask(np.eye(3, dtype=np.uint8))))
    assert [type(part) for part in found] == [gl.Mask, gl.Boxes, gl.Keypoints, gl.Mask]
    assert found[0].array == mask.array
    assert found[1].format == "xywh"
    assert np.array_equal(found[1].array, boxes.array)
    assert np.array_equal(found[2].array, points.array)
    assert np.array_equal(found[3].array, np.eye(3))


class Own:
    pass


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (
            (1, {"x": Own()}),
            f"[1]['x'] of the sample is a {__name__}.Own, which gpuload.Cached does not keep; expected",
        ),
        ([np.array([None])], "[0] of the sample is a numpy.ndarray, which gpuload.Cached does not keep; expected"),
        (
            (torch.ones(2, requires_grad=True),),
            "[0] of the sample is a torch.Tensor, which gpuload.Cached does not keep",
        ),
        (
            (torch.eye(2).to_sparse(),),
            "[0] of the sample is a torch.Tensor, which gpuload.Cached does not keep; expected",
        ),
        ((nn.Parameter(torch.ones(2)),), "[0] of the sample is a torch.nn.parameter.Parameter, which gpuload.Cached"),
        ({(1, 2): 3}, "the sample has the key (1, 2), a tuple; expected tuples, lists and dicts of gpuload.Encoded"),
    ],
)
def test_what_is_not_kept_is_named(sample: Any, error: str) -> None:
    with pytest.raises(TypeError, match=re.escape(error)):
        pack(sample)


@pytest.mark.parametrize("value", [{"a": [None]}, [1], "x", 3, 0.5, None])
def test_metadata_stay_metadata(value: Any) -> None:
    found = unpack(memoryview(pack((1, as_meta(value)))))[1]
    assert found == value
    assert type(found) is type(as_meta(value))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.binary(max_size=60), SAMPLES)
def test_bytes_that_are_no_sample_raise_a_value_error(junk: bytes, sample: Any) -> None:
    packed = pack(sample)
    for data in (junk, packed[:-1], packed + b"x", packed[: len(packed) // 2] + junk):
        try:
            unpack(memoryview(data))
        except ValueError:
            continue


@pytest.mark.parametrize(
    "described",
    [
        ["tensor", "float32", [3]],
        ["tensor", "save", [8]],
        ["tensor", "float32", [-1, -1]],
        ["tensor", "no", [8]],
        ["array", "O", [1]],
        ["array", "V8", [1]],
        ["exec", "1"],
        ["mask", 3],
        ["array", "<f8", [1 << 40]],
        [],
        ["tuple"],
    ],
)
def test_a_description_that_was_made_up_is_refused(described: Any) -> None:
    head = json.dumps([described, [8]]).encode()
    with pytest.raises(ValueError, match="not a packed sample"):
        unpack(memoryview(len(head).to_bytes(4, "little") + head + bytes(8)))
