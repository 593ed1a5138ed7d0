"""`TarShards`: samples by index, their batches, mapped archives, JSON, and errors about samples."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from helpers.both_loaders import gpuload_batches
from helpers.file_descriptors import open_below
from helpers.jpeg_dataset import check_loader
from helpers.map_datasets import MapDataset
from helpers.tar_files import archive, pictures_in, shards_of_pictures

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.kinds import is_deterministic, is_iterable, lazy_reader, uses_getitems
from gpuload.datasets.stores.opening import OpenFile
from gpuload.datasets.stores.tar import dataset as dataset_module
from gpuload.datasets.stores.tar.index import HEAD, MAGIC, Shard

FIELDS = ("jpg", "cls")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []  # offset and bytes of each read
    read_at = OpenFile.read_at
    monkeypatch.setattr(OpenFile, "read_at", lambda self, *span: spans.append(span) or read_at(self, *span))
    return spans


def test_tar_shards_index_the_samples_of_all_shards(tmp_path: Path) -> None:
    files = pictures_in(12)
    dataset = gl.TarShards(shards_of_pictures(tmp_path, 3, 4), fields=FIELDS)
    assert len(dataset) == 12
    for number in range(12):
        image, label = dataset[number]
        assert label == number
        name = f"{number:05d}"
        source = f"{tmp_path}/train-{number // 4:03d}.tar:{name}.jpg"
        assert image == gl.Encoded(files[f"{name}.jpg"], "RGB", source)
        assert dataset.keys[number] == name
    assert dataset[-1] == dataset[11]
    assert dataset.keys[-2:] == ["00010", "00011"]
    assert dataset.shards == [f"{tmp_path}/train-{number:03d}.tar" for number in range(3)]
    with pytest.raises(IndexError, match=r"index 12 is out of range: TarShards\('.*train-000.tar'\) has 12 samp"):
        dataset[12]
    with pytest.raises(TypeError, match="an index must be an integer"):
        dataset["00001"]


def test_tar_shards_read_only_the_selected_fields(tmp_path: Path, reads: list) -> None:
    files = {
        f"{n}.{field}": bytes([n]) * size for n in (1, 2) for field, size in (("jpg", 9), ("raw", 99_999), ("x", 7))
    }
    path = archive(tmp_path / "x.tar", files)
    dataset = gl.TarShards(path, fields=("x", "jpg"))
    reads.clear()
    x, image = dataset[0]
    assert (image.data, x) == (b"\1" * 9, b"\1" * 7)
    assert [nbytes for _, nbytes in reads] == [9, 7]


def test_tar_shards_getitems_reads_in_the_order_of_the_file(tmp_path: Path, reads: list) -> None:
    dataset = gl.TarShards(shards_of_pictures(tmp_path, 2, 4), fields="cls")
    reads.clear()
    assert dataset.__getitems__([6, 2, 1, 5, 1, -1]) == [6, 2, 1, 5, 1, 7]
    first_shard, second_shard = [offset for offset, _ in reads[:3]], [offset for offset, _ in reads[3:]]
    assert (len(reads), first_shard, second_shard) == (6, sorted(first_shard), sorted(second_shard))
    assert dataset.__getitems__([]) == []
    assert (uses_getitems(dataset), is_deterministic(dataset), is_iterable(dataset)) == (True, True, False)


def test_lazy_reader_reads_each_sample_on_request(tmp_path: Path, reads: list) -> None:
    big = {f"{n}.{field}": bytes([n]) * size for n in range(3) for field, size in (("jpg", 70_000), ("txt", 2))}
    small = {f"{n}.{field}": bytes([n]) * size for n in range(3, 6) for field, size in (("jpg", 700), ("txt", 2))}
    paths = [archive(tmp_path / f"{number}.tar", files) for number, files in enumerate((big, small))]
    dataset = gl.TarShards(paths, fields=("txt", "jpg"))
    order = [4, 1, 3, 0, -1, 2, 1]
    expected = dataset.__getitems__(order)
    reads.clear()
    read_sample = lazy_reader(dataset, order)
    assert read_sample is not None
    assert reads == []
    read_sizes = []
    for row, sample in enumerate(expected):
        assert read_sample(row) == sample
        read_sizes.append([nbytes for _, nbytes in reads])
        reads.clear()
    small_reads, big_reads = [700, 2], [70_000, 2]  # one read per field
    assert read_sizes == [small_reads, big_reads, small_reads, big_reads, small_reads, big_reads, big_reads]

    class SubclassedTarShards(gl.TarShards):
        pass

    assert lazy_reader(SubclassedTarShards(paths), order) is None


@pytest.mark.processes
def test_tar_shards_batches_equal_batches_of_the_files(tmp_path: Path) -> None:
    files = pictures_in(18)
    dataset = gl.TarShards(shards_of_pictures(tmp_path, 3, 6), fields=FIELDS)
    check_loader(dataset, [files[f"{number:05d}.jpg"] for number in range(18)], range(18))


@pytest.mark.processes
def test_tar_shards_are_mapped_by_workers_only(tmp_path: Path) -> None:
    dataset = gl.TarShards(shards_of_pictures(tmp_path, 3, 6), fields=FIELDS)

    def is_mapped(index: int) -> bool:
        dataset[index]
        return dataset.shards[dataset._locate(index)[0]] in Path("/proc/self/maps").read_text()

    for workers in (0, 1):
        [batch] = gpuload_batches(MapDataset(is_mapped, 18), 18, num_workers=workers)
        assert batch.tolist() == [bool(workers)] * 18


def test_tar_shards_use_mmap_in_workers_within_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = gl.TarShards(shards_of_pictures(tmp_path, 3, 6), fields=FIELDS)
    nbytes = sum(os.path.getsize(shard) for shard in dataset.shards)
    uses_mmap = []
    assert not dataset._uses_mmap()
    monkeypatch.setattr(dataset_module.THIS_PROCESS, "is_worker", True)
    for max_bytes, max_files in ((nbytes, 3), (nbytes - 1, 3), (nbytes, 2)):
        monkeypatch.setattr(dataset_module, "MAX_MAPPED_BYTES", max_bytes)
        monkeypatch.setattr(dataset_module, "MAX_OPEN_FILES", max_files)
        uses_mmap.append(dataset._uses_mmap())
    assert uses_mmap == [True, False, False]


@pytest.mark.processes
def test_loader_names_an_archive_that_is_truncated_while_a_worker_maps_it(tmp_path: Path) -> None:
    path = shards_of_pictures(tmp_path, 1, 40)
    dataset = gl.TarShards(path, fields=FIELDS)
    with gl.Loader(dataset, 2, num_workers=1, device="cpu", prefetch_factor=1, ragged="list") as loader:
        steps = iter(loader)
        next(steps)
        os.truncate(dataset.shards[0], 9000)
        with pytest.raises(gl.SampleError, match=r"-000.tar' returned \d+ bytes at offset .*, but its index expects"):
            list(steps)


def test_tar_shards_keep_at_most_max_open_files_archives_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_OPEN_FILES", 2)
    paths = [archive(tmp_path / f"{number}.tar", {"a.cls": b"%d" % number}) for number in range(4)]
    dataset = gl.TarShards(paths, fields="cls")
    assert [dataset[index] for index in (0, 1, 0, 2, 3, 2)] == [0, 1, 0, 2, 3, 2]
    assert open_below(tmp_path) == 2
    dataset.close()
    assert open_below(tmp_path) == 0


def test_tar_shards_pickle_out_of_band_without_descriptors(tmp_path: Path) -> None:
    dataset = gl.TarShards(shards_of_pictures(tmp_path, 3, 4), fields=FIELDS)
    dataset[5]
    assert dataset._opened is not None
    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(dataset, 5, buffer_callback=buffers.append)
    assert len(buffers) == 3
    assert sum(buffer.raw().nbytes for buffer in buffers) == dataset.nbytes
    assert len(data) < 1500
    copy = pickle.loads(data, buffers=buffers)
    assert copy._opened is None
    assert copy[5] == dataset[5]


def test_shard_of_a_million_samples_takes_few_bytes_and_copies_nothing() -> None:
    count, names = 1_000_000, b"jpg\0cls"
    columns = [np.arange(0, 2 * count + 1, 2), np.arange(count + 1) * 9, np.arange(2 * count) * 40,
               np.full(2 * count, 20_000), np.tile([0, 1], count)]  # fmt: skip
    arrays = [column.astype(np.uint32) for column in columns]
    arrays[4] = arrays[4].astype(np.uint8)  # the fields of the members
    size, mtime_ns, column_bytes, checksum, skipped_files = 1, 1, (4, 4, 4, 4, 1), 0, 0
    lengths = (count, 2 * count, 9 * count, len(names))  # samples, members, and bytes of the keys and of the names
    header = HEAD.pack(MAGIC, size, mtime_ns, *lengths, *column_bytes, checksum, skipped_files)
    parts = [header, *(array.tobytes() for array in arrays), b"000000001" * count, names]
    table = np.frombuffer(b"".join(part + bytes(-len(part) % 8) for part in parts), np.uint8)
    assert table.nbytes / count < 36
    tracemalloc.start()
    shard = Shard("x.tar", table)
    assert (shard.key(999_999), shard.columns.names) == ("000000001", ("jpg", "cls"))
    assert int(shard.columns.blocks[-1]) == 40 * (2 * count - 1)
    assert tracemalloc.get_traced_memory()[0] < 20_000
    tracemalloc.stop()


def test_tar_shards_name_the_shard_key_and_fields_of_a_sample_that_lacks_a_field(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {**pictures_in(1), "d/b.png": b"1", "d/b.txt": b"2"})
    dataset = gl.TarShards(path, fields=FIELDS)
    assert dataset[0][1] == 0
    text = f"sample 'd/b' of '{path}' has no field 'jpg'; its fields are: 'png', 'txt'"
    with pytest.raises(LookupError, match=f"^{text}$"):
        dataset[1]
    with pytest.raises(gl.SampleError, match=text) as caught:
        gpuload_batches(dataset, 2)
    assert caught.value.index == 1
    assert isinstance(caught.value, LookupError)


def test_tar_shards_with_one_key_in_two_shards_have_two_samples(tmp_path: Path) -> None:
    for number in (0, 1):
        archive(tmp_path / f"{number}.tar", {"a.cls": b"%d" % number})
    dataset = gl.TarShards(tmp_path / "*.tar", fields="cls")
    assert list(dataset.keys) == ["a", "a"]
    assert [dataset[0], dataset[1]] == [0, 1]


def test_tar_shards_names_with_dots_or_absolute_paths_are_keys_and_open_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("no")
    files = {f"{tmp_path}/secret.txt": b"yes", "../secret.txt": b"yes"}
    dataset = gl.TarShards(archive(tmp_path / "x.tar", files))
    assert list(dataset) == [{"__key__": f"{tmp_path}/secret", "txt": "yes"}, {"__key__": "../secret", "txt": "yes"}]
    assert sorted(os.listdir(tmp_path)) == ["secret.txt", "x.tar", "x.tar.gpuload-index"]


def test_tar_shards_without_samples_are_refused(tmp_path: Path) -> None:
    empty, path = archive(tmp_path / "empty.tar", {}), archive(tmp_path / "x.tar", {"a.cls": b"1"})
    with pytest.raises(ValueError, match=r"there are no samples in 1 shard\(s\), starting with '.*empty.tar': no file"):
        gl.TarShards(empty)
    assert len(gl.TarShards([empty, path, empty])) == 1


def test_tar_shards_refuse_a_shard_that_was_changed(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.cls": b"1", "b.cls": b"2"})
    dataset = gl.TarShards(path, fields="cls")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match=r"x.tar' was changed after its index was read \(it still has 10,240 bytes,"):
        dataset[0]
    dataset = gl.TarShards(path, fields="cls")
    assert dataset[0] == 1
    os.truncate(path, 1000)
    with pytest.raises(ValueError, match=r"x.tar' returned 0 bytes at offset 1,536, but its index expects 1: the"):
        dataset[1]
    assert dataset[0] == 1, "the beginning of the open file must still be readable"
    os.truncate(path, 600)
    copy = pickle.loads(pickle.dumps(dataset))
    with pytest.raises(ValueError, match=r"it had 10,240 bytes, and now has 600\); create the dataset again"):
        copy[0]


def test_loader_refuses_a_field_beyond_max_bytes(tmp_path: Path) -> None:
    dataset = gl.TarShards(archive(tmp_path / "x.tar", {"a.jpg": bytes(3000)}), fields="jpg")
    with pytest.raises(gl.SampleError, match=r"x.tar:a.jpg': the file has 3,000 bytes, more than max_bytes=2,000"):
        gpuload_batches(dataset, decode=gl.Decode(max_bytes=2000))


def test_tar_shards_refuse_shuffle_buffer_without_stream_and_addition_of_a_number(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.cls": b"1"})
    with pytest.raises(ValueError, match="shuffle_buffer=10 needs stream=True; to shuffle all samples, use"):
        gl.TarShards(path, shuffle_buffer=10)
    assert (gl.TarShards(path, fields="cls") + gl.TarShards(path, fields="cls"))[1] == 1
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = gl.TarShards(path) + 3


def test_will_need_advises_the_kernel_of_the_selected_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "x.tar", {"a.jpg": b"x" * 600, "a.cls": b"1", "a.txt": b"x" * 5000, "b.jpg": b"y" * 10})
    dataset, advised = gl.TarShards(path, fields=("jpg;none", "cls;txt;jpg")), []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *advice: advised.append((os.readlink(f"/proc/self/fd/{fd}"), *advice))
    )
    dataset.will_need([1, 0])
    data = path.read_bytes()
    image_b, fields_of_a = (data[begin : begin + nbytes] for _, begin, nbytes, _ in advised)
    assert image_b == b"y" * 10
    assert fields_of_a.startswith(b"x" * 600)
    assert fields_of_a.endswith(b"1")
    assert {advice for *_, advice in advised} == {os.POSIX_FADV_WILLNEED}
    advised.clear()
    for mapped, indices in ((False, [0, 1]), (True, [0, 1]), (True, [1]), (True, [1, 0])):
        monkeypatch.setattr(dataset, "_uses_mmap", lambda mapped=mapped: mapped)
        dataset.will_need(indices)
    assert len(advised) == 2 + 0 + 1 + 2, "the kernel itself reads ahead in a mapping that is read in order"


def archive_of_json(path: Path, values: list[Any]) -> Path:
    """Write an archive of samples with an image, a class, and one of these values as JSON."""
    members: dict[str, bytes] = {}
    for number, value in enumerate(values):
        files = {"jpg": pictures_in(1)["00000.jpg"], "cls": b"1", "json": json.dumps(value).encode()}
        members |= {f"{number}.{field}": data for field, data in files.items()}
    return archive(path, members)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fields", [("jpg", "json"), None])
def test_json_fields_batch_as_lists_of_objects(tmp_path: Path, workers: int, fields: tuple[str, ...] | None) -> None:
    values = [{"a": [1, 2]}, {"a": [1]}, {"a": None, "b": "x"}, [3], 4, "text", None, None]
    dataset = gl.TarShards(archive_of_json(tmp_path / "a.tar", values), fields=fields)
    for source in (dataset, gl.Cached(dataset, 1 << 20)):
        batches = gpuload_batches(source, 2, num_workers=workers, transforms=[T.Resize((8, 8))])
        values_of_batches = [batch["json"] if fields is None else batch[1] for batch in batches]
        assert values_of_batches == [values[start : start + 2] for start in range(0, len(values), 2)]
        kinds = {type(value) for batch in values_of_batches for value in batch}
        assert kinds == {dict, list, int, str, type(None)}, "values must have Python's types, not gpuload's"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("fields", [("jpg", "json"), ("cls", "json")])
def test_collate_fn_receives_json_as_plain_objects(tmp_path: Path, workers: int, fields: tuple[str, str]) -> None:
    values = [{"a": 1}, None, [2]]
    dataset = gl.TarShards(archive_of_json(tmp_path / "a.tar", values), fields=fields)
    types_of_json = lambda samples: [repr(type(value)) for _, value in samples]  # noqa: E731
    [kinds] = gpuload_batches(dataset, 3, num_workers=workers, collate_fn=types_of_json)
    assert kinds == [repr(kind) for kind in (dict, type(None), list)]
    [(_, collated)] = gpuload_batches(dataset, 3, num_workers=workers, collate_fn=gl.pad_collate)
    assert collated == values


@pytest.mark.processes
def test_pack_preserves_json_values(tmp_path: Path) -> None:
    values = [{"a": None}, [1, "x"], None, True]
    dataset = gl.TarShards(archive_of_json(tmp_path / "a.tar", values), fields=None)
    gl.pack(dataset, tmp_path / "packed", to="tar", workers=1)
    assert [sample["json"] for sample in gl.TarShards(tmp_path / "packed" / "*.tar")] == values
