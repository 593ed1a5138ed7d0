"""Arrays that tensors cannot hold: the error names the sample, the dtype and the remedy."""

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


def collate_error(samples, batch_size=2, **options) -> str:
    loader = gl.Loader(samples, batch_size, num_workers=0, device="cpu", **options)
    with loader, pytest.raises(CollateError) as caught:
        next(iter(loader))
    return str(caught.value).partition("\n")[0]


@pytest.mark.parametrize("kind", ARRAYS)
def test_collating_unsupported_arrays_names_sample_dtype_and_remedy(kind):
    array, dtype, remedy = ARRAYS[kind]
    error = collate_error([{"x": array, "y": 1}] * 2)
    assert error.startswith("field 'x' of the samples cannot be collated into a batch: sample 0 has a ndarray of ")
    assert f" of {dtype} (" in error
    assert error.endswith(f"; {remedy}")


@pytest.mark.parametrize("kind", ["another byte order", "dates"])
def test_converting_an_unsupported_array_without_batches_names_its_remedy(kind):
    """As with `default_convert`, texts and objects stay as they are."""
    array, dtype, remedy = ARRAYS[kind]
    error = collate_error([{"x": array}], batch_size=None)
    assert error.startswith(f"sample 0 cannot be converted to tensors: it has a ndarray of {dtype} (")
    assert error.endswith(f"; {remedy}")


def test_converting_an_unsupported_array_among_targets_names_its_remedy():
    array, _, remedy = ARRAYS["another byte order"]
    image, targets = gl.Image(np.zeros((4, 4, 3), np.uint8)), {"boxes": gl.Boxes([[0, 0, 2, 2]]), "area": np.ones(1)}
    error = collate_error([(image, targets), (image, {**targets, "area": array})], transforms=[T.CenterCrop(2)])
    assert error.startswith("sample 1 cannot be converted to tensors: it has a ndarray of >f4 (")
    assert error.endswith(f"; {remedy}")


@pytest.mark.parametrize("kind", ["another byte order", "long doubles", "dates", "fields"])
def test_remedies_in_collate_errors_work(kind):
    x, _, remedy = ARRAYS[kind]
    fixed = eval(remedy.removeprefix("write ").removeprefix("return a dict of its fields: "), {"x": x})
    with gl.Loader([{"x": fixed}] * 2, 2, num_workers=0, device="cpu") as loader:
        [batch] = loader
    assert "x" in batch


def test_collating_arrays_of_different_shapes_recommends_padding():
    error = collate_error([np.ones((2, 3)), np.ones((1, 3))])
    assert error.endswith("collate_fn=gpuload.pad_collate pads them")
