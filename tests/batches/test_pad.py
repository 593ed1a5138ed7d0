"""`pad_collate`, `pad` and `keep`: batches of arrays of different sizes in any nesting, and their errors."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike, gpuload_batches, torch_batches
from helpers.map_datasets import MapDataset
from helpers.patterns import exactly
from helpers.programs import run_python
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from torch.utils.data import DataLoader, default_collate

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.pad import Padded, pad_collate
from gpuload.errors import CollateError


class Point(NamedTuple):
    track: Any
    name: Any


@dataclass
class Scene:
    points: Any
    label: int


def ragged_array(index: int) -> tuple[np.ndarray, int]:
    return np.full((index + 1, 2), index, np.float32), index


RAGGED = MapDataset(ragged_array, 6)


@pytest.mark.slow
@given(st.data())
def test_pad_collate_places_each_array_at_the_start_of_its_row(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 4))
    dtype = data.draw(st.sampled_from([np.uint8, np.int64, np.float32, np.float64, np.bool_, np.int16]))
    shapes = st.tuples(*[st.integers(0, 4)] * rank)
    arrays = data.draw(st.lists(shapes.flatmap(lambda shape: st_numpy.arrays(dtype, shape)), min_size=1, max_size=5))
    padded, sizes, padding = pad_collate(arrays, value=1)
    largest = tuple(max(array.shape[axis] for array in arrays) for axis in range(rank))
    assert padded.shape == (len(arrays), *largest)
    assert padded.dtype == torch.from_numpy(np.zeros(1, dtype)).dtype
    assert sizes.dtype == torch.int64
    assert sizes.tolist() == [list(array.shape) for array in arrays]
    is_padding = np.ones(padded.shape, bool)
    for row, array in enumerate(arrays):
        region = (row, *map(slice, array.shape))
        np.testing.assert_array_equal(padded[region].numpy(), array)
        is_padding[region] = False
    assert (padded.numpy()[is_padding] == 1).all()
    assert padding == (is_padding.mean() if is_padding.size else 0)


def test_pad_collate_keeps_the_dtype_of_tensors() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.uint16, torch.complex64, torch.bool):
        batch = pad_collate([torch.ones(1, dtype=dtype), torch.ones(3, dtype=dtype)])
        assert batch.data.dtype == dtype
        assert batch.data.to(torch.complex64).real.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_pad_collate_combines_arrays_and_tensors() -> None:
    batch = pad_collate([np.ones(1, np.int32), torch.ones(2, dtype=torch.int32)])
    assert batch.data.tolist() == [[1, 0], [1, 1]]


def test_pad_collate_accepts_views_and_read_only_arrays() -> None:
    """Warnings are errors here, and torch warns about arrays that cannot be written to."""
    fixed = np.arange(3)
    fixed.flags.writeable = False
    batch = pad_collate([fixed, np.arange(5)[::-1], np.arange(8)[::2]])
    assert batch.data.tolist() == [[0, 1, 2, 0, 0], [4, 3, 2, 1, 0], [0, 2, 4, 6, 0]]


def test_pad_collate_copies_arrays() -> None:
    array = np.zeros(2)
    batch = pad_collate([array])
    array[:] = 1
    assert batch.data.tolist() == [[0, 0]]


def test_pad_collate_pads_to_fixed_sizes() -> None:
    arrays = [np.ones((1, 2)), np.ones((2, 1))]
    assert pad_collate(arrays, to=(3, 4)).data.shape == (2, 3, 4)
    assert pad_collate(arrays, to=(None, 4)).data.shape == (2, 2, 4)
    assert pad_collate(arrays, to=(3, 4)).padding == pytest.approx(1 - (1 * 2 + 2 * 1) / (2 * 3 * 4))
    assert pad_collate([np.ones((0, 4))], to=(5, None)).padding == 1
    assert pad_collate([np.ones((0, 4))]).padding == 0


def test_pad_collate_takes_sizes_and_values_per_field() -> None:
    samples = [{"tokens": np.arange(n), "target": {"boxes": np.zeros((n, 4), np.float32)}} for n in (1, 2)]
    batch = pad_collate(samples, to={"target.boxes": (3, None)}, value={"tokens": -100})
    assert batch["tokens"].data.tolist() == [[0, -100], [0, 1]]
    assert batch["target"]["boxes"].data.shape == (2, 3, 4)
    assert not batch["target"]["boxes"].data.any()


def test_pad_collate_pads_with_nan_and_infinity() -> None:
    batch = pad_collate([np.zeros(1), np.zeros(2)], value=float("nan"))
    assert batch.data.isnan().tolist() == [[False, True], [False, False]]
    assert pad_collate([np.zeros(1), np.zeros(2)], value=float("-inf")).data[0, 1] == float("-inf")


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2],
        [1.5, 2.5],
        ["a", "b"],
        [b"a", b"b"],
        [np.float32(1), np.float32(2)],
        [np.array(1), np.array(2)],
        [torch.tensor(1), torch.tensor(2)],
        [("a", 1, True), ("b", 2, False)],
        [["a", 1], ["b", 2]],
        [{"z": 1, "a": ("x", 2)}, {"a": ("y", 3), "z": 2}],
        [OrderedDict(b="x", a=2), OrderedDict(b="y", a=3)],
        [Point(1, "x"), Point(2, "y")],
        [((), 1), ((), 2)],
        [([{"a": 1.5}], [2]), ([{"a": 2.5}], [3])],
    ],
)
def test_pad_collate_without_arrays_equals_default_collate(samples: list[Any]) -> None:
    batch, expected = pad_collate(samples), default_collate(samples)
    assert repr(batch) == repr(expected)
    assert type(batch) is type(expected)


def test_pad_collate_pads_arrays_in_all_containers() -> None:
    def sample(n: int) -> dict[str, Any]:
        array = np.ones(n)
        return {"t": (array, "x"), "l": [array], "p": Point(array, "x"), "s": Scene(array, n), "d": {"e": array}}

    batch = pad_collate([sample(1), sample(3)])
    assert list(batch) == ["t", "l", "p", "s", "d"]
    for padded in (batch["t"][0], batch["l"][0], batch["p"].track, batch["s"].points, batch["d"]["e"]):
        assert padded.data.tolist() == [[1, 0, 0], [1, 1, 1]]
        assert padded.sizes.tolist() == [[1], [3]]
        assert padded.padding == pytest.approx(1 / 3)
    assert type(batch["t"]) is list
    assert type(batch["p"]) is Point
    assert type(batch["s"]) is Scene
    assert batch["s"].label.tolist() == [1, 3]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_pad_collate_works_in_torchs_dataloader(workers: int) -> None:
    collate = partial(gl.pad_collate, to=(8, None), value=-1)
    loader = DataLoader(
        RAGGED, 4, collate_fn=collate, num_workers=workers, multiprocessing_context="spawn" if workers else None
    )
    batches = list(loader)
    assert [tuple(padded.data.shape) for padded, _ in batches] == [(4, 8, 2), (2, 8, 2)]
    assert [padded.sizes.tolist() for padded, _ in batches] == [[[1, 2], [2, 2], [3, 2], [4, 2]], [[5, 2], [6, 2]]]
    assert {type(padded) for padded, _ in batches} == {Padded}
    first_padded, _ = batches[0]
    assert first_padded.padding == pytest.approx(1 - 2 * (1 + 2 + 3 + 4) / (4 * 8 * 2))
    assert torch.cat([labels for _, labels in batches]).tolist() == list(range(6))


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_pad_collate_in_a_loader_equals_dataloader(workers: int) -> None:
    collate = partial(gl.pad_collate, to=(8, None), value=-1)
    batches = gpuload_batches(RAGGED, 4, collate_fn=collate, num_workers=workers)
    assert alike(batches, torch_batches(RAGGED, 4, collate_fn=collate))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_pad_collate_in_a_loader_pads_images_and_arrays(workers: int) -> None:
    samples = [(gl.Image(np.full((20 + n, 30, 3), n, np.uint8)), {"boxes": np.ones((n, 4))}) for n in range(4)]
    with gl.Loader(samples, 4, collate_fn=gl.pad_collate, num_workers=workers, device="cpu") as loader:
        ((images, target),) = loader
    assert images.data.shape == (4, 3, 23, 30)
    assert images.sizes.tolist() == [[3, 20 + n, 30] for n in range(4)]
    assert images.padding == pytest.approx((3 + 2 + 1 + 0) / (4 * 23))  # rows of pixels
    assert target["boxes"].data.shape == (4, 3, 4)
    assert target["boxes"].sizes[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.cuda
def test_pad_collate_keeps_tensors_on_cuda() -> None:
    batch = pad_collate([torch.ones(1, device="cuda"), torch.ones(3, device="cuda")])
    assert batch.data.device.type == batch.sizes.device.type == "cuda"
    assert batch.data.tolist() == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.processes
def test_importing_pad_collate_does_not_import_torch() -> None:
    code = "import sys, gpuload; gpuload.pad_collate; gpuload.Padded; print('torch' in sys.modules)"
    assert run_python(code) == ("False\n", "")


@pytest.mark.parametrize(("samples", "message"), [
    ([{"boxes": np.ones((3, 4))}, {"boxes": np.ones(4)}],
     "field 'boxes' is of shape (3, 4) in sample 0 of the batch, but of shape (4,) in sample 1; padding does "
     "not change the number of dimensions, so return arrays with the same number of dimensions "
     "(for an empty array, use an axis of size 0)"),
    ([(1, np.ones(3)), (1, None)],
     "field '1' is of shape (3,) in sample 0 of the batch, but of type NoneType in sample 1; padding does "
     "not change the number of dimensions, so return arrays with the same number of dimensions "
     "(for an empty array, use an axis of size 0)"),
    ([np.array(1), np.ones(3)],
     "the sample is of shape (3,) in sample 1 of the batch, but of shape () in sample 0; padding does "
     "not change the number of dimensions, so return arrays with the same number of dimensions "
     "(for an empty array, use an axis of size 0)"),
    ([Point(np.ones(1), 1), Point(np.ones(1, np.float32), 1)],
     "field 'track' is float64 in sample 0 of the batch, but float32 in sample 1; return arrays with the same "
     "dtype"),
    ([(1, {"a": 2}), (1, {"b": 2})],
     "sample 0 of the batch is (·, {'a': ·}), but sample 1 is (·, {'b': ·}) (the keys of '1' differ: 'a' in the "
     "first only, 'b' in the second only; collate_fn=gpuload.keep('1') keeps dicts with any keys, in a list): "
     "all samples of a batch must have the same structure; make the dataset return every "
     "sample with the same structure"),
    ([[1, 2], [1]],
     "sample 0 of the batch is [·, ·], but sample 1 is [·] (the sample has length 2 in the first, 1 in the "
     "second): all samples of a batch must have the same structure; make the dataset return every "
     "sample with the same structure"),
])  # fmt: skip
def test_pad_collate_of_samples_with_different_structure_raises(samples: list[Any], message: str) -> None:
    with pytest.raises(CollateError, match=exactly(message)):
        pad_collate(samples)


def test_pad_collate_of_an_array_larger_than_the_fixed_size_raises() -> None:
    samples = [{"target": [np.ones((2, 4))]}, {"target": [np.ones((6, 4))]}, {"target": [np.ones((7, 4))]}]
    message = (
        "field 'target.0' of sample 1 of the batch has shape (6, 4), which exceeds to=(5, None) on axis 0; "
        "increase to=, or truncate arrays in the dataset"
    )
    with pytest.raises(CollateError, match=exactly(message)):
        pad_collate(samples, to=(5, None))


@pytest.mark.parametrize(("samples", "message"), [
    ([{"a": np.array(["x"])}], r"field 'a' of sample 0 of the batch is an array of <U1, which torch does not support"),
    ([{"a": np.array([1], ">i2")}],
     r"field 'a' of sample 0 .* an array of >i2, which torch.*; write x.astype\(x.dtype.newbyteorder\(\"=\"\)\)$"),
    ([{"a": gl.Encoded(b"x")}], r"field 'a' \(Encoded\) cannot be collated into a batch: "),
    ([(1,), (None,)], r"field '0' \(NoneType, int\) cannot be collated into a batch: "),
])  # fmt: skip
def test_pad_collate_of_unsupported_values_raises(samples: list[Any], message: str) -> None:
    with pytest.raises(CollateError, match=f"^{message}"):
        pad_collate(samples)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"to": (5,)}, ValueError,
     "to=(5,) must have one size for each dimension of field 'boxes', whose shape is (1, 4); give each field "
     "its own sizes: to={name: sizes}"),
    ({"to": {"box": (5, 4)}}, ValueError, "to= names the field 'box', which is not padded; padded fields are 'boxes'"),
    ({"value": {"label": 1}}, ValueError,
     "value= names the field 'label', which is not padded; padded fields are 'boxes'"),
    ({"value": -1}, ValueError, "value=-1 cannot be stored in field 'boxes', which is uint8"),
    ({"value": 256}, ValueError, "value=256 cannot be stored in field 'boxes', which is uint8"),
    ({"value": 0.5}, ValueError, "value=0.5 cannot be stored in field 'boxes', which is uint8"),
    ({"value": float("nan")}, ValueError, "value=nan cannot be stored in field 'boxes', which is uint8"),
    ({"value": "0"}, TypeError, "value must be a number, got '0' (str)"),
    ({"value": {"boxes": None}}, TypeError, "value['boxes'] must be a number, got None (NoneType)"),
    ({"to": 5}, TypeError, "to must be a tuple with one size (or None) per axis, got 5"),
    ({"to": (5, -4)}, ValueError, "to must be at least 0, got -4"),
    ({"to": {"boxes": (5, 4.0)}}, TypeError, "to['boxes'] must be an integer, got 4.0 (float)"),
])  # fmt: skip
def test_pad_collate_with_wrong_options_raises(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=exactly(message)):
        pad_collate([{"boxes": np.ones((1, 4), np.uint8), "label": 3}], **options)


def test_pad_collate_with_a_value_beyond_the_dtype_raises() -> None:
    with pytest.raises(ValueError, match=exactly("value=1000000.0 cannot be stored in the sample, which is float16")):
        pad_collate([np.ones(1, np.float16)], value=1e6)
    with pytest.raises(ValueError, match=exactly("value=2 cannot be stored in the sample, which is bool")):
        pad_collate([np.ones(1, bool)], value=2)


def test_pad_pads_only_the_named_fields() -> None:
    def sample(i: int) -> dict[str, Any]:
        return {"image": np.full((2, 3), i), "caption": np.arange(i + 1), "deep": {"tokens": [7] * i}}

    samples = [sample(i) for i in range(3)]
    batch = gl.pad("caption", "deep.tokens", value={"caption": -1})(samples)
    assert batch["image"].shape == (3, 2, 3)
    assert batch["caption"].data.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert batch["deep"]["tokens"].data.tolist() == [[0, 0], [7, 0], [7, 7]]
    assert batch["deep"]["tokens"].sizes.tolist() == [[0], [1], [2]]
    assert batch["deep"]["tokens"].data.dtype == torch.int64
    nested = gl.pad(1, to=(4, 2))([(1, [[1.5, 2]] * n) for n in (1, 3)])
    assert nested[0].tolist() == [1, 1]
    assert nested[1].data.shape == (2, 4, 2)
    assert nested[1].data.dtype == torch.float32
    assert nested[1].sizes.tolist() == [[1, 2], [3, 2]]


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transforms", [[], [T.CenterCrop(8)]])
def test_pad_in_a_loader_pads_captions(workers: int, transforms: list[Any]) -> None:
    def sample(index: int) -> dict[str, Any]:
        picture = np.full((8, 8, 3), index, np.uint8) if transforms else index
        return {"image": picture, "caption": [5] * (index + 1), "label": index}

    options: dict[str, Any] = {"transforms": transforms, "num_workers": workers, "device": "cpu"}
    with gl.Loader(MapDataset(sample, 4), 4, collate_fn=gl.pad("caption"), **options) as loader:
        (batch,) = loader
    assert batch["image"].shape == ((4, 3, 8, 8) if transforms else (4,))
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["caption"].sizes.tolist() == [[1], [2], [3], [4]]
    assert batch["caption"].data.sum(dim=1).tolist() == [5, 10, 15, 20]


def test_pad_with_wrong_arguments_raises() -> None:
    for names in ((), (b"x",), (True,)):
        message = f"pad() needs the names of the leaves that it pads, as in pad('caption') or pad(1), got {names}"
        with pytest.raises(TypeError, match=exactly(message)):
            gl.pad(*names)
    with pytest.raises(TypeError, match="to must be a tuple with one size"):
        gl.pad("x", to=5)
    samples = [{"a": np.ones(n), "b": np.ones(n), "c": "x", "d": [n]} for n in (1, 2)]
    message = (
        "pad() names the field 'c', but the samples have no array of that name; their fields are 'a', 'b', 'c', 'd.0'"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        gl.pad("c")(samples)
    message = "field 'b' (ndarray) cannot be collated into a batch: "
    with pytest.raises(gl.CollateError, match=re.escape(message)) as caught:
        gl.pad("a")(samples)
    assert str(caught.value).endswith("; to pad it too, name it: gpuload.pad('a', 'b')")
    message = "field 'd' of sample 1 of the batch is a list that is not an array of numbers"
    with pytest.raises(gl.CollateError, match=re.escape(message)):
        gl.pad("d")([{"d": [1]}, {"d": ["x"]}])


def test_pad_collate_without_samples_raises() -> None:
    with pytest.raises(ValueError, match=exactly("pad_collate() got no samples; a batch must have at least one")):
        pad_collate([])


ANNOTATIONS = [{"who": "Ann", "tags": ["a", "b"]}, None, {"who": None}, [1, [2]]]


def annotated_image(index: int) -> dict[str, Any]:
    return {
        "image": gl.Image(np.full((8, 8, 3), index, np.uint8)),
        "meta": ANNOTATIONS[index],
        "tokens": list(range(index + 1)),
        "inner": {"id": index, "meta": [index] * index},
    }


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_keep_in_a_loader_returns_lists_of_objects(workers: int) -> None:
    collate = gl.keep("meta", "inner.meta", collate_fn=gl.pad("tokens"))
    with gl.Loader(MapDataset(annotated_image, 4), 4, num_workers=workers, device="cpu", collate_fn=collate) as loader:
        (batch,) = loader
    assert batch["image"].shape == (4, 3, 8, 8)
    assert batch["meta"] == ANNOTATIONS
    assert [type(value) for value in batch["meta"]] == [dict, type(None), dict, list]
    assert batch["inner"]["meta"] == [[n] * n for n in range(4)]
    assert batch["inner"]["id"].tolist() == [0, 1, 2, 3]
    assert batch["tokens"].sizes.tolist() == [[1], [2], [3], [4]]


def test_keep_accepts_indices_of_a_tuple() -> None:
    numbers, objects = gl.keep(1)([(3, {"a": 1}), (4, (5,))])
    assert numbers.tolist() == [3, 4]
    assert objects == [{"a": 1}, (5,)]
    assert pickle.loads(pickle.dumps(gl.keep("a")))([{"a": None}]) == {"a": [None]}


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: gl.keep(), TypeError, "keep() needs the names of the fields that it keeps, as in keep('meta') or"),
    (lambda: gl.keep("meta")([{"meta": 1}, {"mete": 1, "x": {"y": 2}}]), ValueError,
     "keep() names the field 'meta', which sample 1 of the batch lacks; its fields are 'mete', 'x.y'"),
])  # fmt: skip
def test_keep_with_wrong_arguments_raises(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
