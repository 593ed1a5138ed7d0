"""Types of samples: each type that torch's DataLoader collates gives an equal batch of the same types."""

from __future__ import annotations

import random
import threading
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike, gpuload_batches, torch_batches
from helpers.map_datasets import BatchedMapDataset, MapDataset
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, random_split

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.tables import NUMBERS

pytestmark = pytest.mark.usefixtures("warm")

Pair = namedtuple("Pair", ["left", "right"])


class NamedDict(dict):
    """A subclass of dict, defined by a user."""


class NamedList(list):
    """A subclass of list, defined by a user."""


TWO_COMPLEX = torch.full((2,), 1 + 2j), torch.full((2,), 1 + 2j, dtype=torch.complex128)
KINDS = {
    "an integer": lambda i: i,
    "a bool": lambda i: i > 2,
    "a float": lambda i: i / 3,
    "a string": lambda i: f"n{i}",
    "bytes": lambda i: bytes([i]),
    "a numpy integer": lambda i: np.int16(i),
    "a numpy float": lambda i: np.float32(i),
    "a numpy bool": lambda i: np.bool_(i % 2),
    "an array": lambda i: np.full((2, 3), i, np.float32),
    "an array without axes": lambda i: np.array(i, np.int8),
    "a large array": lambda i: np.full((40, 50), i, np.float64),
    "an array of uint16": lambda i: np.full(3, i, np.uint16),
    "an array of complex numbers": lambda i: np.full(3, i * 1j, np.complex64),
    "arrays of two types": lambda i: np.full(3, i, (np.float32, np.float64)[i % 2]),
    "tensors of two types": lambda i: torch.full((3,), i, dtype=(torch.int16, torch.int64)[i % 2]),
    "an empty array": lambda i: np.empty((0, 4)),
    "a view with strides": lambda i: np.arange(12.0).reshape(3, 4)[:, ::-2] + i,
    "a tensor": lambda i: torch.full((2, 3), float(i)),
    "a scalar tensor": lambda i: torch.tensor(i),
    "a large tensor": lambda i: torch.full((40, 50), i, dtype=torch.int32),
    "a tensor of bfloat16": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
    "a tensor that is transposed": lambda i: (torch.arange(6.0).view(2, 3) + i).t(),
    "tensors with the negative bit": lambda i: TWO_COMPLEX[i % 2].mul(i).conj().imag,
    "a conjugate tensor": lambda i: torch.full((2,), 1 + 1j * i).conj(),
    "an empty tensor": lambda i: torch.empty(0, 2),
    "a tuple": lambda i: (i, float(i), f"n{i}"),
    "a tuple of one": lambda i: (i,),
    "an empty tuple": lambda i: (),
    "a list": lambda i: [i, [f"n{i}"]],
    "a named tuple": lambda i: Pair(i, [f"n{i}", i]),
    "named tuples within one": lambda i: Pair(Pair(i, f"n{i}"), (i, f"n{i}")),
    "a dict": lambda i: {"b": i, "a": f"n{i}"},
    "a dict of keys of any kind": lambda i: {"b": i, 1: i, (2, 3): i, None: i},
    "a dict within a tuple": lambda i: ({"x": {"y": [np.int64(i)]}}, i),
    "an empty dict": lambda i: {},
    "an OrderedDict": lambda i: OrderedDict(b=i, a=i),
    "a defaultdict": lambda i: defaultdict(list, b=i, a=f"n{i}"),
    "a UserDict": lambda i: UserDict(a=i),
    "a ChainMap": lambda i: ChainMap({"a": i}, {"b": i}),
    "a subclass of dict": lambda i: NamedDict(a=i, b=(i, i)),
    "a UserList": lambda i: UserList([i, f"n{i}"]),
    "a deque": lambda i: deque([i, i]),
    "a range": lambda i: range(3),
}


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_kind_of_sample_equal_dataloaders(kind, batch_size):
    dataset = MapDataset(KINDS[kind], 5)
    assert alike(gpuload_batches(dataset, batch_size), torch_batches(dataset, batch_size))


def all_kinds(index):
    return {kind: make(index) for kind, make in KINDS.items() if kind != "a subclass of dict"}


@pytest.mark.processes
@pytest.mark.parametrize("batch_size", [3, None])
def test_samples_of_all_kinds_from_workers_equal_dataloaders(batch_size):
    dataset = MapDataset(all_kinds, 6)
    batches = gpuload_batches(dataset, batch_size, num_workers=2, chunk_size=2)
    assert alike(batches, torch_batches(dataset, batch_size))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_list_subclass_keeps_its_type(workers):
    """The list is created from its elements; DataLoader fills a copy of the first sample's list."""
    dataset = MapDataset(lambda i: NamedList([i, f"n{i}"]), 8)
    batches = gpuload_batches(dataset, 4, num_workers=workers, chunk_size=1)
    assert {type(batch) for batch in batches} == {NamedList}
    assert alike(batches, torch_batches(dataset, 4))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_arrive_from_workers_but_cannot_be_collated():
    dataset = [torch.nested.nested_tensor([torch.full((2,), float(i)), torch.zeros(3)]) for i in range(4)]
    [batch] = gpuload_batches(dataset, 4, num_workers=1, collate_fn=list)
    assert [tensor.unbind()[0].tolist() for tensor in batch] == [[float(i)] * 2 for i in range(4)]
    for workers in (0, 1):
        with pytest.raises(RuntimeError, match=r"the samples .*not currently supported by the default collate_fn"):
            gpuload_batches(dataset, 4, num_workers=workers)


@pytest.mark.processes
def test_named_tuple_defined_in_a_class_body_has_one_class_from_all_workers(tmp_path, monkeypatch):
    """Each worker imports the module. DataLoader cannot pickle such a tuple."""
    (tmp_path / "named_tuple_module.py").write_text(
        "import collections, time\n"
        "class ClassWithNamedTuple:\n"
        "    Pair = collections.namedtuple('Pair', ['left', 'right'])\n"
        "    def __len__(self): return 16\n"
        "    def __getitem__(self, index): return time.sleep(0.005) or self.Pair(index, index)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import named_tuple_module  # pyright: ignore[reportMissingImports]

    batches = gpuload_batches(named_tuple_module.ClassWithNamedTuple(), 16, num_workers=2, chunk_size=1)
    assert [type(batch) for batch in batches] == [named_tuple_module.ClassWithNamedTuple.Pair]


@dataclass
class Labelled:
    value: float
    name: str


def test_dataclasses_are_collated_where_dataloader_raises():
    dataset = [Labelled(0.0, "n0"), Labelled(0.5, "n1")]
    with pytest.raises(TypeError, match="Labelled"):
        torch_batches(dataset, 2)
    [batch] = gpuload_batches(dataset, 2)
    assert alike(batch, Labelled(torch.tensor([0.0, 0.5], dtype=torch.float64), ["n0", "n1"]))


def test_dicts_with_keys_in_different_order_are_collated_as_in_dataloader():
    def alternating(index):
        items = [("label", index), ("name", f"n{index}"), ("array", np.full(2, index))]
        return dict(items if index % 2 else items[::-1])

    assert alike(gpuload_batches(MapDataset(alternating, 6), 3), torch_batches(MapDataset(alternating, 6), 3))


def test_dicts_with_different_keys_raise_where_dataloader_drops_keys():
    dataset = [{"a": 0}, {"a": 1, "b": 1}]
    assert alike(torch_batches(dataset, 2), [{"a": torch.tensor([0, 1])}])
    with pytest.raises(gl.CollateError, match=r"sample 0 is {'a': ·}.*but sample 1 is {'a': ·, 'b': ·}"):
        gpuload_batches(dataset, 2)


REFUSED = {
    "a set": lambda i: {i},
    "None within": lambda i: (i, None),
    "an object": lambda i: SimpleNamespace(a=i),
    "an array of strings": lambda i: np.array(["a"]),
    "an array of objects": lambda i: np.array([i, "a"], object),
    "lists of different length": lambda i: [i] * (i + 1),
    "tensors of different shape": lambda i: torch.zeros(i),
    "a big-endian array": lambda i: np.full(3, i, ">i4"),
    "an integer that no tensor holds": lambda i: 2**70,
    "a read-only mapping of sets": lambda i: MappingProxyType({"a": {i}}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_samples_that_dataloader_cannot_collate_raise(kind):
    make = REFUSED[kind]
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        torch_batches(MapDataset(make, 2), 2)
    with pytest.raises((gl.CollateError, gl.SampleError)) as caught:
        gpuload_batches(MapDataset(make, 2), 2)
    assert "sample 0" in str(caught.value)


@pytest.mark.processes
def test_memmap_as_dataset_equals_dataloaders_batches(tmp_path):
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(6, 1000))
    rows[:] = np.arange(6000).reshape(6, 1000)
    assert alike(gpuload_batches(rows, 4), torch_batches(rows, 4))
    assert alike(gpuload_batches(rows, 4, num_workers=1), torch_batches(rows, 4))


UINT8_SAMPLES = {
    "H×W×C": lambda i: np.full((4, 5, 3), i, np.uint8),
    "H×W×1": lambda i: (torch.full((3, 64, 64), i / 2), np.full((64, 64, 1), i, np.uint8)),
    "a large array H×W×C": lambda i: (np.full((50, 60, 3), i, np.uint8), i),
    "tensors C×H×W": lambda i: {"a": torch.full((3, 4, 5), i, dtype=torch.uint8), "b": torch.full((1, 4, 5), i)},
    "a list of frames": lambda i: [np.full((40, 50, 3), i, np.uint8), np.full((40, 50, 3), 1 + i, np.uint8)],
    "a clip": lambda i: (np.full((2, 40, 50, 3), i, np.uint8), i),
    "H×W": lambda i: (np.full((40, 50), i, np.uint8), i),
}


@pytest.mark.parametrize("transforms", [None, []])
@pytest.mark.parametrize("kind", UINT8_SAMPLES)
def test_plain_uint8_arrays_are_not_treated_as_images(kind, transforms):
    """H×W×C stays as it is: only `gpuload.Image` and types like it are images."""
    dataset = MapDataset(UINT8_SAMPLES[kind], 5)
    assert alike(gpuload_batches(dataset, 2, transforms=transforms), torch_batches(dataset, 2))
    assert alike(gpuload_batches(dataset, None, transforms=transforms), torch_batches(dataset, None))


@pytest.mark.processes
def test_instance_masks_of_torchvisions_detection_preset_are_not_treated_as_images():
    """The masks are uint8 tensors n×H×W, with n from 1 to 3, which could also be the channels of an image."""

    def make(index):
        count = 1 + index % 3
        target = {"masks": torch.full((count, 40, 50), index, dtype=torch.uint8), "labels": torch.arange(count)}
        return torch.full((3, 40, 50), index / 8), target

    def zipped(samples):
        return tuple(zip(*samples, strict=True))

    for workers in (0, 1):
        batches = gpuload_batches(MapDataset(make, 6), 3, collate_fn=zipped, num_workers=workers)
        assert alike(batches, torch_batches(MapDataset(make, 6), 3, collate_fn=zipped))
    with pytest.raises(gl.SampleError, match=r'sample\[1\]\["masks"\], uint8 tensor 1×40×50, has the name of a mask'):
        gpuload_batches(MapDataset(make, 6), 3, collate_fn=zipped, transforms=[T.RandomHorizontalFlip()])


def test_boxes_with_a_plain_array_raise_because_they_have_no_image():
    dataset = MapDataset(lambda i: (np.zeros((4, 5, 3), np.uint8), gl.Boxes([[0, 0, 2, 2]])), 2)
    message = r"no image to which they belong: sample\[0\], uint8 array 4×5×3, counts as "
    with pytest.raises(gl.SampleError, match=message):
        gpuload_batches(dataset, 2)


def test_batches_of_the_same_object_share_no_memory():
    tensor = torch.zeros(2000)
    first, second = gpuload_batches(MapDataset(lambda i: tensor, 4), 2)
    first += 1
    assert not second.any()
    assert not tensor.any()


# -- torch's datasets -------------------------------------------------------------------------------------------------

COLUMNS = torch.arange(20.0).view(10, 2), torch.arange(10)


def torch_datasets():
    tensors = TensorDataset(*COLUMNS)
    halves = random_split(tensors, [0.3, 0.7], torch.Generator().manual_seed(3))
    return {
        "tensors": tensors,
        "one tensor": TensorDataset(COLUMNS[0]),
        "subset": Subset(tensors, [7, 2, 2, 5]),
        "subset of a subset": Subset(Subset(tensors, [9, 7, 5, 3]), [3, 0]),
        "subset of many": Subset(BatchedMapDataset(samples=10), [7, 2, 5]),
        "concatenated": ConcatDataset([tensors, Subset(tensors, [3]), tensors]),
        "added": tensors + Subset(tensors, [3]),
        "stacked": StackDataset(tensors, MapDataset(lambda i: f"n{i}")),
        "stacked by name": StackDataset(column=TensorDataset(COLUMNS[1]), name=MapDataset(lambda i: i / 2)),
        "stacked many": StackDataset(BatchedMapDataset(samples=10), MapDataset(float)),
        "first part": halves[0],
        "second part": halves[1],
        "both parts": ConcatDataset(halves),
        "a tensor itself": COLUMNS[0],
        "an array itself": COLUMNS[0].numpy(),
        "a list": list(range(7)),
        "a string": "abcdefg",
        "a dict": {index: index * 2 for index in range(6)},
    }


@pytest.mark.parametrize("name", torch_datasets())
def test_torch_datasets_give_the_same_batches_as_in_dataloader(name):
    assert alike(gpuload_batches(torch_datasets()[name], 3), torch_batches(torch_datasets()[name], 3))


@pytest.mark.processes
def test_torch_datasets_give_the_same_batches_in_workers():
    tensors = TensorDataset(*COLUMNS)
    chosen = ConcatDataset([Subset(tensors, [7, 2, 2, 5]), random_split(tensors, [4, 6])[0]])
    assert alike(gpuload_batches(chosen, 3, num_workers=1), torch_batches(chosen, 3))


def test_shuffled_random_split_gives_each_sample_once():
    first, second = random_split(MapDataset(int, 10), [0.4, 0.6], torch.Generator().manual_seed(0))
    seen = [torch.cat(gpuload_batches(part, 4, shuffle=True)).tolist() for part in (first, second)]
    assert [sorted(part) for part in seen] == [sorted(first.indices), sorted(second.indices)]
    assert sorted(seen[0] + seen[1]) == list(range(10))


# -- small rows -------------------------------------------------------------------------------------------------------


def rows_of(name):
    numbers = np.arange(70).reshape(35, 2) % 2 if name == "bool" else np.arange(70).reshape(35, 2)
    return numbers.astype(name)


@pytest.mark.parametrize("name", sorted(NUMBERS))
@pytest.mark.parametrize("form", [lambda rows: rows, lambda rows: torch.from_numpy(rows)], ids=["arrays", "tensors"])
def test_small_rows_of_any_dtype_equal_dataloaders_batches(form, name):
    rows = form(rows_of(name))
    column = torch.from_numpy(rows_of(name)[:, 0].copy())  # DataLoader refuses numpy's scalars of uint64
    for dataset in (rows, TensorDataset(column), list(rows), MapDataset(lambda i: (rows[i], column[i]), 35)):
        expected = torch_batches(dataset, 20)
        assert alike(gpuload_batches(dataset, 20), expected)
        assert alike(gpuload_batches(dataset, 20, collate_fn=default_collate), expected)


@pytest.mark.parametrize("name", sorted(NUMBERS - {"uint64"}))
def test_numpy_scalars_of_any_dtype_equal_dataloaders_batches(name):
    numbers = rows_of(name)[:, 0]
    for dataset in (numbers, MapDataset(lambda i: (numbers[i], {"own": numbers[i]}), 35)):
        assert alike(gpuload_batches(dataset, 20), torch_batches(dataset, 20))


@pytest.mark.processes
def test_small_rows_from_workers_equal_dataloaders_batches():
    rows = np.random.default_rng(0).random((200, 8), np.float32)

    def row(index):
        return {"row": rows[index], "label": np.int64(index), "tensor": torch.tensor([index, -1])}

    stacked = StackDataset(x=rows, y=TensorDataset(torch.arange(200)), name=[f"n{i}" for i in range(200)])
    for dataset in (stacked, Subset(stacked, range(150, 20, -1)), MapDataset(row, 200)):
        batches = gpuload_batches(dataset, 64, num_workers=2, epochs=2)
        assert alike(batches, torch_batches(dataset, 64) * 2)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_small_row_that_fails_is_skipped(workers):
    def fails_at_11(index):
        if index == 11:
            raise ValueError("no such row")
        return np.full(4, index), np.int32(index), float(index)

    dataset = MapDataset(fails_at_11, 40)
    with pytest.warns(RuntimeWarning, match="no such row"):
        batches = gpuload_batches(dataset, 16, num_workers=workers, on_error="skip")
    expected = [[*range(11), *range(12, 16)], range(16, 32), range(32, 40)]
    assert alike(batches, [torch_batches(Subset(dataset, rows), 16)[0] for rows in expected])


@pytest.mark.processes
def test_small_rows_that_cannot_be_pickled_raise_sample_error():
    with pytest.raises(gl.SampleError, match=r"cannot be sent to the main process \(TypeError: cannot pickle"):
        gpuload_batches(MapDataset(lambda i: np.array([threading.Lock()]), 4), 4, num_workers=1)


def counted_reads(folder, draw) -> MapDataset:
    """Return a dataset of small rows that counts the reads of each sample in files."""

    def read(index):
        with open(folder / str(index), "a") as file:
            file.write(".")
        return np.full(64, index), draw(index)

    return MapDataset(read, 200)


def draws_always(index):
    return random.random(), np.random.rand(), torch.rand(()).item()


def draws_after_150(index):
    return draws_always(index) if index > 150 else (0.0, 0.0, torch.initial_seed() / 2)


@pytest.mark.processes
@pytest.mark.parametrize("draw", [draws_always, draws_after_150, float])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_random_numbers_of_small_rows_depend_only_on_their_position(tmp_path, workers, draw):
    """Rows may begin to draw in a later chunk, whose samples are then read twice."""
    batches = gpuload_batches(counted_reads(tmp_path, draw), 50, num_workers=workers, epochs=2, chunk_size=50)
    expected = gpuload_batches(counted_reads(tmp_path, draw), 50, epochs=2, chunk_size=1)
    assert alike(batches, expected)


@pytest.mark.processes
@pytest.mark.parametrize("draw", [draws_always, float])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_small_row_is_read_once(tmp_path, workers, draw):
    gpuload_batches(counted_reads(tmp_path, draw), 50, num_workers=workers)
    assert [(tmp_path / str(index)).read_text() for index in range(200)] == ["."] * 200


# -- __getitems__ -----------------------------------------------------------------------------------------------------


def test_getitems_is_called_with_the_keys_of_one_chunk():
    dataset = BatchedMapDataset(samples=10)
    assert torch.cat(gpuload_batches(dataset, 8, chunk_size=4)).tolist() == list(range(10))
    assert sorted(dataset.calls) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_getitems_with_a_wrong_number_of_samples_raises():
    class Short(BatchedMapDataset):
        def __getitems__(self, keys):
            return super().__getitems__(keys)[:-1]

    with pytest.raises(gl.SampleError, match=r"Short.__getitems__ was called with 1 keys and returned 0 samples"):
        gpuload_batches(Short(), 4)


def test_exception_in_getitems_names_the_sample():
    def fails_at_5(key):
        return 1 // (key != 5)

    with pytest.raises(gl.SampleError, match=r"sample 5, at position 5.*ZeroDivisionError"):
        gpuload_batches(BatchedMapDataset(fails_at_5), 10)
    with pytest.warns(RuntimeWarning, match="sample 5"):
        [batch] = gpuload_batches(BatchedMapDataset(fails_at_5), 10, on_error="skip")
    assert len(batch) == 9
