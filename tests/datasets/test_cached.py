"""`Cached`: samples that workers and runs share and that follow changes of the dataset; `pack` and `unpack`."""

from __future__ import annotations

import json
import os
import pickle
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from helpers.both_loaders import alike, gpuload_batches
from helpers.file_descriptors import open_of
from helpers.jpeg_dataset import COUNT, LABELS, InMemoryDataset, assert_batches_equal, jpegs
from helpers.matrix import matrix
from helpers.processes import exit_code_in_fork
from helpers.programs import run_python
from helpers.tar_files import archive
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets import cached as cached_module
from gpuload.datasets.cached import Cached, pack, unpack
from gpuload.datasets.kinds import is_deterministic, uses_getitems
from gpuload.datasets.sample import as_meta

LIMIT = 4 << 20
SETTLED_S = cached_module.SETTLED_NS / 1e9


class RecordingDataset(InMemoryDataset):
    def __init__(self) -> None:
        super().__init__(jpegs(), LABELS)
        self.requests: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.requests.append(indices)
        return [self[index] for index in indices]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cached_module, "SETTLED_NS", 0)
    for number, data in enumerate(jpegs()):
        path = tmp_path / "images" / str(LABELS[number]) / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "images"


def test_cached_reads_missing_samples_at_once_and_only_once() -> None:
    inner = RecordingDataset()
    dataset = Cached(inner, LIMIT)
    samples = dataset.__getitems__([3, 1, 3, -1])
    assert inner.requests == [[3, 1, 11]]
    assert dataset.__getitems__([1, 2, 11]) == [samples[1], inner[2], samples[3]]
    assert inner.requests == [[3, 1, 11], [2]]
    assert dataset[2] == inner[2]
    statistics = dataset.statistics()
    # Samples 3, 1, 11 and 2 were missing; 1, 11 and 2 were hits later.
    assert (statistics.hits, statistics.misses, statistics.entries, statistics.hit_rate) == (3, 4, 4, 3 / 7)
    assert (statistics.bytes_allowed, statistics.bytes_limit) == (LIMIT, LIMIT)
    with pytest.raises(AttributeError):
        statistics.hits = 3
    with pytest.raises(IndexError, match="index 12 is out of range: the cached dataset has 12 samples"):
        dataset[12]


def batches_of_epochs(dataset: Any, workers: int, count: int = 2) -> list[Any]:
    steps = [T.RandomResizedCrop(16), T.RandomHorizontalFlip()]
    return gpuload_batches(dataset, 5, shuffle=True, transforms=steps, num_workers=workers, epochs=count)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_cached_is_shared_by_workers_and_loaders_with_equal_batches(where: str, folder: Path) -> None:
    image_folder = gl.ImageFolder(folder)
    expected = batches_of_epochs(image_folder, 0)
    time.sleep(SETTLED_S)  # workers have the original SETTLED_NS, which the fixture changed here
    dataset = Cached(image_folder, LIMIT, where=where, **({"path": folder.parent / "cache"} if where == "disk" else {}))
    assert_batches_equal(batches_of_epochs(dataset, 2), expected)
    statistics = dataset.statistics()
    assert (statistics.hits, statistics.misses, statistics.entries) == (COUNT, COUNT, COUNT)
    assert_batches_equal(batches_of_epochs(dataset, 0), expected)
    assert dataset.statistics().hits == 3 * COUNT  # in each epoch but the first


@pytest.mark.processes
@pytest.mark.slow
def test_cached_survives_a_killed_worker(tmp_path: Path) -> None:
    class KillsItsWorker(InMemoryDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and not os.path.exists(killed_path):
                Path(killed_path).touch()
                os.kill(os.getpid(), 9)
            return super().__getitem__(index)

    killed_path = str(tmp_path / "killed")
    dataset = Cached(KillsItsWorker(jpegs(), LABELS), LIMIT)
    batches = batches_of_epochs(dataset, 1)
    assert os.path.exists(killed_path)
    assert_batches_equal(batches, batches_of_epochs(InMemoryDataset(jpegs(), LABELS), 0))
    assert dataset.statistics().entries == COUNT


def test_cached_unpickled_copy_begins_empty_and_closes_its_descriptors() -> None:
    dataset = Cached(RecordingDataset(), LIMIT)
    dataset[1]
    copy = pickle.loads(cloudpickle.dumps(dataset))
    assert copy._location.fd != dataset._location.fd
    assert copy[1] == dataset[1]
    assert (copy.statistics().hits, copy.statistics().misses) == (0, 1)
    memory_file = os.fstat(copy._location.fd)
    assert open_of(memory_file) == 3  # of the location, of the entries, and of their mapping
    del copy
    assert open_of(memory_file) == 0


def test_cached_reads_a_changed_file_again(folder: Path) -> None:
    dataset = Cached(gl.ImageFolder(folder), LIMIT)
    dataset[0]
    old_image, _ = dataset[0]
    path = Path(dataset.paths[0])
    os.utime(path, (1, 1))  # the bytes are the same, which Cached cannot know
    assert dataset[0][0].data == old_image.data
    assert dataset.statistics().hits == 1
    new_path = path.with_name("new")
    new_path.write_bytes(jpegs()[5])
    os.replace(new_path, path)
    assert dataset[0][0].data == jpegs()[5] != old_image.data
    assert dataset[0][0].data == jpegs()[5]
    assert dataset.statistics().hits == 2


def test_cached_does_not_store_a_recently_changed_file(folder: Path) -> None:
    dataset = Cached(gl.ImageFolder(folder), LIMIT)
    cached_module.SETTLED_NS = 10**15
    assert dataset[0] == dataset[0]
    assert (dataset.statistics().hits, dataset.statistics().entries) == (0, 0)


@pytest.mark.processes
def test_cached_on_disk_is_reused_by_the_next_process_unless_the_dataset_changed(folder: Path) -> None:
    program = """
        import sys, gpuload as gl
        from gpuload.datasets import cached as module
        module.SETTLED_NS = 0
        dataset = gl.Cached(gl.ImageFolder(sys.argv[1]), 4 << 20, where="disk", path=sys.argv[2])
        samples = dataset.__getitems__(range(len(dataset)))
        print(dataset.statistics().hits, len(dataset), "torch" in sys.modules)
    """

    def run() -> str:
        return run_python(textwrap.dedent(program), folder, folder.parent / "cache")[0].strip()

    assert run() == "0 12 False"
    assert run() == "12 12 False"
    os.unlink(next(folder.rglob("*.jpg")))  # which changes the dataset
    assert run() == "0 11 False"
    assert sorted(os.listdir(folder.parent / "cache")) == ["in-use", "samples.gpuload-cache"]


def test_cached_folder_is_shared_only_with_the_same_version_and_limit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"where": "disk", "path": tmp_path / "cache"}
    first = Cached(RecordingDataset(), LIMIT, version="1", **options)
    second = Cached(RecordingDataset(), LIMIT, version="1", **options)
    assert first[3] == second[3]
    assert (second.dataset.requests, first.statistics().hits, second.statistics().hits) == ([], 1, 1)
    pattern = re.escape(repr(str(tmp_path / "cache")))
    with pytest.raises(ValueError, match=f"^the cache in {pattern} is in use for another dataset, or another version"):
        Cached(RecordingDataset(), LIMIT, version="2", **options)
    with pytest.raises(ValueError, match=f"^the cache in {pattern} is in use with bytes_limit=4194304, got 5242880"):
        Cached(RecordingDataset(), 5 << 20, version="1", **options)
    del first, second
    larger = Cached(RecordingDataset(), 5 << 20, version="1", **options)
    assert larger[3] == larger.dataset[3]
    assert (larger.statistics().hits, larger.statistics().bytes_allowed) == (1, 5 << 20)
    del larger
    assert Cached(RecordingDataset(), LIMIT, version="2", **options).statistics().entries == 0


JPEG, STEPS = jpegs()[0], [T.Resize((8, 8))]


@pytest.mark.parametrize("bad", [b"<!doctype html><title>Log in</title>", b"", JPEG[: len(JPEG) // 2], JPEG[:-2]])
def test_cached_does_not_store_incomplete_images(bad: bytes) -> None:
    images = [(gl.Encoded(bad, source="https://host/0.jpg"), 0)]
    dataset = Cached(images, LIMIT)
    assert dataset[0][0].data == bad
    images[0] = gl.Encoded(JPEG, source="https://host/0.jpg"), 0
    assert [dataset[0][0].data for _ in range(2)] == [JPEG, JPEG]
    assert dataset.statistics().hits == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_cached_drops_a_sample_that_cannot_be_decoded_and_names_the_cache(workers: int, tmp_path: Path) -> None:
    class RepairedLater(InMemoryDataset):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return gl.Encoded(b"BM" + bytes(100)) if index == 5 and not os.path.exists(repaired_path) else image, label

    repaired_path = str(tmp_path / "repaired")
    inner = Cached(RepairedLater(jpegs(), LABELS), LIMIT)
    dataset = Cached(inner, LIMIT, where="disk", path=tmp_path / "cache", version="1")
    message = f"; it was dropped from the cache in '{tmp_path}/cache' and the cache in memory, and will be read again"
    with gl.Loader(dataset, 4, num_workers=workers, device="cpu", on_error="skip", transforms=STEPS) as loader:
        with pytest.warns(RuntimeWarning, match=message):
            assert sum(len(labels) for _, labels in loader) == COUNT - 1
        Path(repaired_path).touch()
        for _ in range(2):
            assert sum(len(labels) for _, labels in loader) == COUNT
    assert [dataset.statistics().entries, inner.statistics().entries] == [COUNT, COUNT]


def lmdb_store(path: Path, images: list[bytes]) -> Any:
    import lmdb

    with lmdb.open(str(path), subdir=False) as env, env.begin(write=True) as transaction:
        for number, data in enumerate(images):
            transaction.put(f"{number}".encode(), data)
    return lambda: gl.LMDB(path)


def hdf5_store(path: Path, images: list[bytes]) -> Any:
    import h5py

    with h5py.File(path, "w") as file:
        for number, data in enumerate(images):
            file.require_dataset("images", (len(images),), h5py.vlen_dtype("uint8"))[number] = np.frombuffer(data, "u1")
    return lambda: gl.HDF5(path, target=None)


def parquet_store(path: Path, images: list[bytes]) -> Any:
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.table({"image": [{"bytes": data, "path": ""} for data in images]}), path)
    return lambda: gl.Parquet(path, target=None)


def tar_store(path: Path, images: list[bytes]) -> Any:
    archive(path, [(f"{number}.jpg", data) for number, data in enumerate(images)])
    return lambda: gl.TarShards(path, fields=("jpg",))


def array_store(path: Path, images: list[bytes]) -> Any:
    np.save(path.with_suffix(".npy"), np.array([[list(data[-40:])] for data in images], np.uint8))
    return lambda: gl.ArrayFile(path.with_suffix(".npy"), layout="data")


STORES = {"lmdb": lmdb_store, "hdf5": hdf5_store, "parquet": parquet_store, "tar": tar_store, "array": array_store}


@matrix(store=STORES, wrapper=["alone", "joined", "cached", "view"], strength=1)
def test_cached_reads_a_rewritten_store_again(store: str, wrapper: str, tmp_path: Path) -> None:
    wrap = {
        "alone": lambda store: store,
        "joined": lambda store: store + store,
        "cached": lambda store: Cached(store, LIMIT),
        "view": lambda store: torch.utils.data.Subset(store, range(len(store))),
    }[wrapper]
    images, packed_samples, hits = jpegs(), [], []
    for step in (1, 1, -1):
        path = tmp_path / "store"
        if step == -1 or not packed_samples:
            for file in tmp_path.glob("store*"):
                file.unlink()
            make = STORES[store](path, images[:4:2][::step])
        dataset = Cached(wrap(make()), LIMIT, where="disk", path=tmp_path / "cache")
        packed_samples.append([pack(sample)[-500:] for sample in dataset.__getitems__(range(2))])
        hits.append(dataset.statistics().hits)
        del dataset
    assert hits == [0, 2, 0]  # the third dataset reads the store with its two images exchanged
    assert packed_samples[0] == packed_samples[1] == packed_samples[2][::-1] != packed_samples[2]


def test_cached_forwards_the_attributes_of_its_dataset(folder: Path) -> None:
    image_folder = gl.ImageFolder(folder)
    dataset = Cached(image_folder, LIMIT)
    assert (len(dataset), dataset.classes, dataset.blocks()) == (COUNT, ["0", "1", "2"], None)
    assert (is_deterministic(dataset), uses_getitems(dataset)) == (True, True)
    user_dataset = InMemoryDataset(jpegs(), LABELS)
    assert (is_deterministic(Cached(user_dataset, LIMIT)), uses_getitems(Cached(user_dataset, LIMIT))) == (False, False)
    assert len(dataset + dataset) == 2 * COUNT
    assert repr(dataset) == f"Cached({image_folder!r}, bytes_limit=4194304, where='memory')"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dataset.nothing


class DatasetWithEpochs(InMemoryDataset):
    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("dataset", "options", "error", "text"),
    [
        (iter([]), {}, TypeError, "Cached() takes a map-style dataset, which has __len__ and __getitem__, got"),
        (DatasetWithEpochs([], []), {}, TypeError, "Epochs has set_epoch(), so its samples change while it is used"),
        ([], {"bytes_limit": 1 << 60}, ValueError, "of memory on this machine; use where='disk'"),
        (
            [],
            {"where": "disk"},
            ValueError,
            "where='disk' needs path=, a folder on a local disk that no other dataset uses",
        ),
        ([], {"path": "a"}, ValueError, "path= applies to where='disk' only; remove it, or write where='disk'"),
        ([], {"where": "disk", "path": "/tmp"}, TypeError, "whether a list yields the same samples next time: pass"),
    ],
)
def test_cached_refuses_wrong_arguments(dataset: Any, options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Cached(dataset, **{"bytes_limit": LIMIT, **options})


@pytest.mark.parametrize("workers", [0, 1])
def test_cached_tensors_are_tensors_in_the_next_epoch(workers: int) -> None:
    dataset = Cached([(torch.full((3, 2, 2), i / 4), torch.tensor(i)) for i in range(4)], LIMIT)
    for images, numbers in gpuload_batches(dataset, 4, num_workers=workers, epochs=2):
        assert torch.equal(images, torch.arange(4)[:, None, None, None] / 4 * torch.ones(4, 3, 2, 2))
        assert numbers.tolist() == [0, 1, 2, 3]
    assert (dataset.statistics().hits, dataset.statistics().misses) == (4, 4)


@pytest.mark.processes
def test_cached_is_shared_with_a_fork() -> None:
    dataset = Cached([np.arange(5), 1], LIMIT)
    dataset[0]
    assert exit_code_in_fork(lambda: np.array_equal(dataset[0], np.arange(5)) and dataset.statistics().hits == 1) == 0
    assert dataset.statistics().hits == 1


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(gl.Encoded, st.binary(), st.sampled_from(["RGB", "L", "unchanged"]), st.none() | st.text())
)
SAMPLES = st.recursive(
    VALUES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


def pack_and_unpack(sample: Any) -> Any:
    return unpack(memoryview(pack(sample)))


@pytest.mark.slow
@settings(max_examples=40)
@given(SAMPLES)
def test_unpack_inverts_pack_with_types_and_order_of_keys(sample: Any) -> None:
    unpacked = pack_and_unpack(sample)
    assert unpacked == sample
    assert repr(unpacked) == repr(sample), "types or the order of keys differ"


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(["cat", "dog"]),
        np.array([True, False]),
        np.array(3.5),
        np.float16(1.5),
        np.int64(-3),
        np.arange(12).reshape(3, 4).T,
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
def test_unpacked_arrays_and_tensors_keep_type_dtype_and_shape_and_are_writable(value: Any) -> None:
    unpacked = pack_and_unpack({"a": [value]})["a"][0]
    assert (type(unpacked), unpacked.dtype, unpacked.shape) == (type(value), value.dtype, value.shape)
    assert (unpacked == value).all()
    if not isinstance(value, np.generic):
        unpacked[...] = 0  # without a warning that the memory of a tensor is read-only


@pytest.mark.parametrize(
    "value",
    [
        *(gl.Image(np.arange(6 * n, dtype=np.uint16).reshape(n, 2, 3), layout="CHW") for n in (1, 3, 13)),
        gl.Mask(gl.Encoded(b"png")),
        gl.Mask(np.eye(3, dtype=np.uint8)),
        gl.Boxes([[1, 2, 3, 4]], "xywh"),
        gl.Keypoints([[1.5, 2.0]]),
    ],
)
def test_unpacked_images_and_targets_equal_the_packed_ones(value: Any) -> None:
    assert alike(pack_and_unpack((1, value)), (1, value))


class Unsupported:
    pass


@pytest.mark.parametrize(
    ("sample", "location"),
    [
        ((1, {"x": Unsupported()}), f"[1]['x'] of the sample is a {__name__}.Unsupported"),
        ([np.array([None])], "[0] of the sample is a numpy.ndarray"),
        ((torch.ones(2, requires_grad=True),), "[0] of the sample is a torch.Tensor"),
        ((torch.eye(2).to_sparse(),), "[0] of the sample is a torch.Tensor"),
        ({"a": torch.tensor([1 + 2j]).conj()}, "['a'] of the sample is a torch.Tensor"),
        ({"a": torch.tensor([1 + 2j]).conj().imag}, "['a'] of the sample is a torch.Tensor"),
        ((nn.Parameter(torch.ones(2)),), "[0] of the sample is a torch.nn.parameter.Parameter"),
    ],
    ids=["class", "objects", "gradient", "sparse", "conjugate", "negative", "parameter"],
)
def test_cached_names_a_value_that_it_cannot_store(sample: Any, location: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{location}, which gpuload.Cached cannot store; expected")):
        Cached([sample], LIMIT)[0]


def test_cached_names_a_key_that_it_cannot_store() -> None:
    text = "the sample has the key (1, 2), a tuple; dict keys must be str, int, float, bool or None"
    with pytest.raises(TypeError, match=re.escape(text)):
        pack({(1, 2): 3})


@pytest.mark.parametrize("value", [{"a": [None]}, [1], "x", 3, 0.5, None])
def test_unpacked_metadata_keep_value_and_type(value: Any) -> None:
    unpacked = unpack(memoryview(pack((1, as_meta(value)))))[1]
    assert unpacked == value
    assert type(unpacked) is type(as_meta(value))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.binary(max_size=60), SAMPLES)
def test_unpack_of_damaged_bytes_raises_nothing_but_value_error(junk: bytes, sample: Any) -> None:
    packed = pack(sample)
    for data in (junk, packed[:-1], packed + b"x", packed[: len(packed) // 2] + junk):
        try:
            unpack(memoryview(data))
        except ValueError:
            continue


@pytest.mark.parametrize(
    "description",
    [
        *(["tensor", *more] for more in (["float32", [3]], ["save", [8]], ["float32", [-1, -1]], ["no", [8]])),
        *(["array", *more] for more in (["O", [1]], ["V8", [1]], ["<f8", [1 << 40]])),
        *(["exec", "1"], ["mask", 3], [], ["tuple"]),
    ],
)
def test_unpack_refuses_invalid_descriptions(description: Any) -> None:
    header = json.dumps([description, [8]]).encode()
    with pytest.raises(ValueError, match="not a packed sample"):
        unpack(memoryview(len(header).to_bytes(4, "little") + header + bytes(8)))
