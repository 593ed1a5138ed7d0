"""Arrays that no tensor holds: the error names the sample, the dtype, and what to write."""

from __future__ import annotations

import numpy as np
import pytest

import gpuload as gl
from gpuload import transforms as T
from gpuload.errors import CollateError

ARRAYS = {
    "another byte order": (np.ones((2, 3), ">f4"), ">f4", 'write x.astype(x.dtype.newbyteorder("="))'),
    "dates": (np.array(["2020-01-01"], "M8[D]"), "datetime64[D]", "write x.astype('int64')"),
    "long doubles": (np.ones(2, np.longdouble), str(np.dtype(np.longdouble)), "write x.astype('float64')"),
    "fields": (
        np.zeros(2, [("a", "f4")]),
        "[('a', '<f4')]",
        "return a dict of its fields: {name: x[name] for name in x.dtype.names}",
    ),
    "texts": (np.array(["a", "b"]), "<U1", "return x.tolist(), which keeps strings and objects in a list, or numbers"),
    "objects": (np.array([None]), "object", "return x.tolist(), which keeps strings and objects in a list, or numbers"),
}


def refusal(samples, batch_size=2, **options) -> str:
    with (
        gl.Loader(samples, batch_size, num_workers=0, device="cpu", **options) as loader,
        pytest.raises(CollateError) as caught,
    ):
        next(iter(loader))
    return str(caught.value).partition("\n")[0]


@pytest.mark.parametrize("kind", ARRAYS)
def test_in_a_batch(kind):
    array, dtype, remedy = ARRAYS[kind]
    said = refusal([{"x": array, "y": 1}] * 2)
    assert said.startswith("field 'x' of the samples cannot be collated into a batch: sample 0 has a ndarray of ")
    assert f" of {dtype} (" in said
    assert said.endswith(f"; {remedy}")


@pytest.mark.parametrize("kind", ["another byte order", "dates"])
def test_one_by_one(kind):
    """As `default_convert` has it, which leaves texts and objects as they are."""
    array, dtype, remedy = ARRAYS[kind]
    said = refusal([{"x": array}], batch_size=None)
    assert said.startswith(f"sample 0 cannot be converted to tensors: it has a ndarray of {dtype} (")
    assert said.endswith(f"; {remedy}")


def test_beside_boxes():
    array, _, remedy = ARRAYS["another byte order"]
    image, targets = gl.Image(np.zeros((4, 4, 3), np.uint8)), {"boxes": gl.Boxes([[0, 0, 2, 2]]), "area": np.ones(1)}
    said = refusal([(image, targets), (image, {**targets, "area": array})], transforms=[T.CenterCrop(2)])
    assert said.startswith("sample 1 cannot be converted to tensors: it has a ndarray of >f4 (")
    assert said.endswith(f"; {remedy}")


@pytest.mark.parametrize("kind", ["another byte order", "long doubles", "dates", "fields"])
def test_the_remedy_is_one(kind):
    x, _, remedy = ARRAYS[kind]
    mended = eval(remedy.removeprefix("write ").removeprefix("return a dict of its fields: "), {"x": x})
    with gl.Loader([{"x": mended}] * 2, 2, num_workers=0, device="cpu") as loader:
        [batch] = loader
    assert "x" in batch


def test_shapes_that_differ_are_still_told_of_padding():
    said = refusal([np.ones((2, 3)), np.ones((1, 3))])
    assert said.endswith("collate_fn=gpuload.pad_collate pads them")
