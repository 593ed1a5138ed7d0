"""Datasets at URLs: the samples of the local files, few requests, caches per store, and errors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.both_loaders import cpu_loader, gpuload_batches
from helpers.http_server import Server, served
from helpers.jpeg_dataset import COUNT, LABELS, check_loader, jpegs
from helpers.programs import run_python
from helpers.tar_files import archive

import gpuload as gl
from gpuload import transforms as T
from gpuload.cli.source import open_source
from gpuload.datasets import files
from gpuload.datasets.stores import remote_failures
from gpuload.datasets.stores.opening import client
from gpuload.datasets.stores.remote import digest_of
from gpuload.datasets.stores.tar.shards import SUFFIX

CROP = [T.CenterCrop(16)]


@pytest.fixture(scope="module")
def local_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same images in each format."""
    root = tmp_path_factory.mktemp("everything")
    names = [f"img/{'a-b' if label else 'a'}/sub {label}/{n:03d}.jpg" for n, label in enumerate(LABELS)]
    for name, data in zip(names, jpegs(), strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    for shard in range(2):
        numbers = range(shard * 6, shard * 6 + 6)
        members = [pair for n in numbers for pair in ((f"{n}.jpg", jpegs()[n]), (f"{n}.cls", str(LABELS[n]).encode()))]
        archive(root / f"t-{shard}.tar", members)
    pixels = np.arange(COUNT * 8 * 9 * 3, dtype=np.uint16).reshape(COUNT, 8, 9, 3)
    np.save(root / "a.npy", pixels)
    np.save(root / "l.npy", LABELS)
    (root / "m.csv").write_text(
        "path,label\n" + "".join(f"{name},{label}\n" for name, label in zip(names, LABELS, strict=True))
    )
    images = [{"id": n, "file_name": name[len("img/") :], "height": 24, "width": 32} for n, name in enumerate(names)]
    boxes = [{"id": 1, "image_id": 3, "bbox": [1, 2, 10, 12], "category_id": 1, "area": 3, "iscrowd": 0}]
    annotation_file = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    (root / "c.json").write_text(json.dumps(annotation_file))
    return root


@pytest.fixture
def server(local_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_failures, "FIRST_WAIT_S", 0.01)
    local_files = {
        path.relative_to(local_root).as_posix(): path.read_bytes() for path in local_root.rglob("*") if path.is_file()
    }
    with served({name: data for name, data in local_files.items() if not name.endswith(SUFFIX)}) as server:
        yield server


def to_plain_values(sample: Any) -> Any:
    if isinstance(sample, gl.Encoded):
        return sample.data
    if isinstance(sample, gl.Image):
        return sample.hwc.tolist()
    if isinstance(sample, gl.Boxes | np.ndarray):
        return np.asarray(getattr(sample, "array", sample)).tolist()
    if isinstance(sample, dict):
        return {key: to_plain_values(value) for key, value in sample.items()}
    return tuple(map(to_plain_values, sample)) if isinstance(sample, tuple | list) else sample


def contents(dataset: Any) -> list[Any]:
    """Return all samples as plain values, in a shuffled order if the dataset has indices."""
    if not hasattr(dataset, "__len__"):
        return list(map(to_plain_values, dataset))
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    if hasattr(dataset, "__getitems__"):
        return list(map(to_plain_values, dataset.__getitems__(order)))
    return [to_plain_values(dataset[number]) for number in order]


DATASETS: dict[str, Callable[..., Any]] = {
    "ImageFolder": lambda root, **options: gl.ImageFolder(f"{root}/img", **options),
    "ImageFiles": lambda root, **options: gl.ImageFiles(f"{root}/img/", **options),
    "TarShards": lambda root, **options: gl.TarShards(root + "/t-{0..1}.tar", fields=("jpg", "cls"), **options),
    "TarShards, wildcard": lambda root, **options: gl.TarShards(f"{root}/t-*.tar", **options),
    "TarShards, stream": lambda root, **options: gl.TarShards([f"{root}/t-1.tar"], stream=True, **options),
    "ArrayFile": lambda root, **options: gl.ArrayFile(f"{root}/a.npy", labels=f"{root}/l.npy", **options),
    "FileList": lambda root, **options: gl.FileList(f"{root}/m.csv", **options),
    "Coco": lambda root, **options: gl.Coco(f"{root}/img", f"{root}/c.json", **options),
    "parquet": lambda root, **options: gl.Parquet(f"{root}/p.parquet", columns=("n",), **options),
    "hdf5": lambda root, **options: gl.HDF5(f"{root}/h.h5", **options),
}


def add_parquet_and_hdf5(root: Path) -> None:
    """Write the files for which pyarrow and h5py are needed."""
    if not (root / "p.parquet").exists():
        import pyarrow as arrow
        from pyarrow import parquet as writer

        image = [{"bytes": data, "path": "x"} for data in jpegs()]
        table = arrow.table({"image": image, "label": LABELS, "n": list(range(COUNT)), "unread": ["x" * 9999] * COUNT})
        writer.write_table(table, root / "p.parquet", row_group_size=4, compression="none", use_dictionary=False)
        names = [path.relative_to(root).as_posix() for path in sorted((root / "img").rglob("*.jpg"))]
        writer.write_table(arrow.table({"path": names, "label": [0] * len(names)}), root / "m.parquet")
    if not (root / "h.h5").exists():
        import h5py

        with h5py.File(root / "h.h5", "w") as file:
            images = file.create_dataset("images", (COUNT,), h5py.vlen_dtype("uint8"))
            for number, data in enumerate(jpegs()):
                images[number] = np.frombuffer(data, np.uint8)
            file["labels"] = LABELS


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_at_a_url_equals_the_local_dataset(name: str, local_root: Path, server: Server, tmp_path: Path) -> None:
    if name in ("parquet", "hdf5"):
        add_parquet_and_hdf5(local_root)
        server.files |= {file: (local_root / file).read_bytes() for file in ("p.parquet", "h.h5")}
    make = DATASETS[name]
    expected = contents(make(str(local_root)))
    dataset = make(server.url)
    assert contents(dataset) == expected
    assert contents(pickle.loads(pickle.dumps(dataset))) == expected
    options = {"cache_bytes": 1 << 22, "cache_folder": tmp_path / "blocks"}
    filling_cache, reading_cache = (make(server.url, storage_options=gl.Remote(**options)) for _ in range(2))
    assert contents(filling_cache) == expected
    server.requests.clear()
    assert contents(reading_cache) == expected
    assert server.ranges() == [], "bytes were requested that are in the cache"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda url: gl.Parquet(url, columns=("n",)), "p.parquet"),
        (gl.FileList, "m.csv"),
        (gl.FileList, "m.tsv"),
        (gl.FileList, "m.parquet"),
        (lambda url: gl.TarShards(url, fields=("jpg", "cls")), "t-0.tar"),
        (lambda url: open_source(url, {}), "p.parquet"),
        (lambda url: open_source(url, {}), "t-0.tar"),
    ],
)
def test_dataset_at_a_presigned_url_is_recognized_by_its_extension(
    make: Callable[[str], Any], name: str, local_root: Path, server: Server
) -> None:
    add_parquet_and_hdf5(local_root)
    server.files |= {name: (local_root / name).read_bytes() for name in ("p.parquet", "m.parquet")}
    server.files["m.tsv"] = server.files["m.csv"].replace(b",", b"\t")
    dataset = make(f"{server.url}/{name}?X-Amz-Credential=key/2026/s3&X-Amz-Signature=a*b")
    assert len(dataset) in (COUNT, COUNT // 2)  # an archive holds half of the images
    sample = dataset[COUNT // 2 - 1]
    values = sample.values() if isinstance(sample, dict) else sample
    [image] = [value for value in values if isinstance(value, gl.Encoded)]
    assert image.data in jpegs()


def test_errors_and_sources_of_presigned_urls_hide_the_signature(server: Server) -> None:
    with pytest.raises(FileNotFoundError, match=r"/no/\*\.parquet'$"):
        gl.Parquet(f"{server.url}/no/*.parquet?signature=secret")
    server.files["cat.jpg?signature=secret"] = server.files["cat.jpg"] = b"no image"
    image = gl.read(server.url + "/cat.jpg?signature=secret")
    assert image == gl.Encoded(b"no image", "RGB", server.url + "/cat.jpg")


def test_parquet_at_a_url_reads_only_the_selected_columns_in_one_request(local_root: Path, server: Server) -> None:
    add_parquet_and_hdf5(local_root)
    server.files["p.parquet"] = (local_root / "p.parquet").read_bytes()
    dataset = gl.Parquet(f"{server.url}/p.parquet")
    server.requests.clear()
    dataset.__getitems__([0, 1, 2, 3])
    *footer, columns = server.ranges()  # one request for adjacent columns
    assert len(footer) <= 1
    begin, end = map(int, columns.removeprefix("bytes=").split("-"))
    assert 0 < end - begin - sum(map(len, jpegs()[:4])) < 2000


@pytest.mark.parametrize("has_dictionary", [False, True])
def test_parquet_at_a_url_reads_row_group_in_one_request(tmp_path: Path, server: Server, has_dictionary: bool) -> None:
    import pyarrow as arrow
    from pyarrow import parquet as writer

    long_jpegs = [data + bytes(20_000) for data in jpegs()]  # so that the footer's window does not contain them all
    table = arrow.table({"image": [{"bytes": data} for data in long_jpegs], "label": LABELS})
    writer.write_table(table, tmp_path / "p.parquet", compression="none", use_dictionary=has_dictionary)
    server.files["p.parquet"] = (tmp_path / "p.parquet").read_bytes()
    dataset = gl.Parquet(f"{server.url}/p.parquet")
    dataset[0]  # opens the file
    dataset.close()
    server.requests.clear()
    assert dataset[COUNT - 1][0].data == long_jpegs[-1]
    assert len(server.ranges()) == 2  # the footer and the columns


@pytest.mark.processes
def test_tar_shards_at_a_url_batches_equal_batches_of_the_images(server: Server) -> None:
    check_loader(gl.TarShards(server.url + "/t-{0..1}.tar", fields=("jpg", "cls")))


def test_loader_without_workers_reads_memory_urls(local_root: Path) -> None:
    import fsspec

    memory_files = {f"/loader/{path.name}": path.read_bytes() for path in (local_root / "img/a/sub 0").iterdir()}
    fsspec.filesystem("memory").pipe(memory_files)
    assert [len(batch) for batch in gpuload_batches(gl.ImageFiles("memory://loader"), 2, transforms=CROP)] == [2, 2]
    assert gl.read("memory://loader/000.jpg").data == jpegs()[0]


def test_loader_skips_a_missing_image_at_a_url(server: Server) -> None:
    dataset = gl.ImageFolder(server.url + "/img")
    del server.files["img/a/sub 0/003.jpg"]
    loader = cpu_loader(dataset, 4, transforms=CROP, on_error="skip")
    with pytest.warns(RuntimeWarning, match=r"003.jpg\), at position 1 of epoch 0: FileNotFoundError"):
        assert sum(len(labels) for _, labels in loader) == COUNT - 1
    (record,) = loader.errors
    assert "the file does not exist: 'http://127.0.0.1" in record.cause
    with pytest.raises(FileNotFoundError, match=r"image 3 of 'http.*c.json' is not in the folder"):
        gl.Coco(server.url + "/img", server.url + "/c.json")[3]


def test_remote_cache_drops_a_file_that_cannot_be_decoded(server: Server, tmp_path: Path) -> None:
    folder, name = tmp_path / "blocks", "img/a/sub 0/003.jpg"
    jpeg = server.files[name]
    server.files[name] = b"BM" + bytes(100)  # a BMP, which does not show that it is incomplete
    store = gl.Remote(cache_bytes=1 << 20, cache_folder=folder)
    dataset = gl.ImageFolder(server.url + "/img", storage_options=store)
    joined = torch.utils.data.Subset(dataset + dataset, range(len(dataset), 2 * len(dataset)))
    assert dataset[1][0].data == server.files[name]
    loader = cpu_loader(joined, 4, transforms=CROP, on_error="skip")
    message = rf"; it was dropped from the cache of URLs in '{folder}', and will be read again the next time"
    with pytest.warns(RuntimeWarning, match=message):
        assert sum(len(labels) for _, labels in loader) == COUNT - 1
    server.files[name] = jpeg
    assert sum(len(labels) for _, labels in loader) == COUNT
    server.requests.clear()
    assert sum(len(labels) for _, labels in loader) == COUNT
    assert server.ranges() == []


def test_tar_index_at_a_url_takes_few_requests_and_is_cached(server: Server) -> None:
    name = "/t-{0..1}.tar"
    gl.TarShards(server.url + name)
    assert 2 <= len(server.ranges(".tar")) <= 2 * 2  # the first bytes, and a window
    server.requests.clear()
    gl.TarShards(server.url + name)
    assert server.ranges() == []
    server.version = "2"
    gl.TarShards(server.url + name)
    assert server.ranges(".tar")


def test_tar_index_at_a_url_is_used(
    local_root: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t-0.tar"
    shutil.copy(local_root / "t-0.tar", path)
    expected = contents(gl.TarShards(path))
    index = (tmp_path / f"t-0.tar{SUFFIX}").read_bytes()
    server.files[f"t-0.tar{SUFFIX}"] = index
    dataset = gl.TarShards(server.url + "/t-0.tar")
    assert server.ranges(".tar") == []
    assert contents(dataset) == expected
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "other"))
    server.files["t-0.tar"] += bytes(10240)  # another size, for which the index is not used
    server.requests.clear()
    assert contents(gl.TarShards(server.url + "/t-0.tar")) == expected
    assert server.ranges(".tar")


def test_tar_shards_at_a_url_refuse_a_changed_archive(server: Server) -> None:
    dataset = gl.TarShards(server.url + "/t-0.tar")
    server.version = "2"
    with pytest.raises(ValueError, match=r"t-0.tar' was changed after its index was read"):
        dataset[0]


def test_datasets_at_urls_name_missing_files_and_wrong_options(server: Server, local_root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the file does not exist: 'http.*/none.tar'"):
        gl.TarShards(server.url + "/none.tar")
    with pytest.raises(FileNotFoundError, match=r"no shards match 'http.*/x-\*.tar'"):
        gl.TarShards(server.url + "/x-*.tar")
    with pytest.raises(ValueError, match=r"LMDB maps its file into memory, so the file must be on this machine"):
        gl.LMDB(server.url + "/data.mdb")
    with pytest.raises(ValueError, match=r"storage_options= applies only to URLs such as .*, but the path is .*; omit"):
        gl.ImageFolder(local_root / "img", storage_options={"anon": True})
    with pytest.raises(TypeError, match=r"storage_options, unless it is a gpuload\.Remote, must be a dict"):
        gl.ImageFolder(server.url + "/img", storage_options="anon")
    server.always = 403
    for make in DATASETS.values():
        with pytest.raises(OSError, match=r"permission denied \(the server answered 403\)"):
            contents(make(server.url))


@pytest.mark.parametrize("path", ["../x.jpg", "a/../../x.jpg", "/x.jpg", "http://other/x.jpg"])
def test_file_list_and_coco_refuse_paths_outside_a_remote_root(path: str, server: Server) -> None:
    server.files["m.csv"] = f"path,label\n{path},1\n".encode()
    with pytest.raises(ValueError, match="points outside"):
        gl.FileList(server.url + "/m.csv", root=server.url + "/img")
    annotation_file = json.loads(server.files["c.json"])
    annotation_file["images"][0]["file_name"] = path
    server.files["c.json"] = json.dumps(annotation_file).encode()
    if not path.startswith("http"):  # Coco takes a URL for a name in the folder
        with pytest.raises(ValueError, match="points outside"):
            gl.Coco(server.url + "/img", server.url + "/c.json")


def test_read_of_a_large_url_refuses_non_images(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGE_BYTES", 1000)
    server.files |= {"large.jpg": b"\xff\xd8\xff" + bytes(5000), "large.bin": bytes(5000)}
    assert gl.read(server.url + "/large.jpg").data == server.files["large.jpg"]
    with pytest.raises(gl.DecodeError, match=r"large.bin': not an image that gpuload decodes: 5000 bytes"):
        gl.read(server.url + "/large.bin")


@pytest.mark.processes
def test_fsspec_is_not_imported_before_a_url_is_read() -> None:
    program = "import sys, gpuload as gl; gl.ImageFolder; gl.TarShards; print('fsspec' in sys.modules)"
    assert run_python(program) == ("False\n", "")


def test_client_counts_its_requests(server: Server) -> None:
    remote = gl.Remote()
    dataset = gl.ImageFolder(server.url + "/img", storage_options=remote)
    requests_before = client(remote).requests
    dataset.__getitems__(range(COUNT))
    assert client(remote).requests - requests_before == COUNT


@pytest.fixture
def two_stores(tmp_path: Path, index_cache: Path) -> list[gl.Remote]:
    """Two folders with files of equal names, sizes and times, but different images. Both are at twin://; the options
    select the folder, like the endpoints of two S3 stores."""
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.registry import register_implementation

    class Twin(DirFileSystem):
        protocol = "twin"
        async_impl = False

        def __init__(self, path: str) -> None:
            super().__init__(path, LocalFileSystem())

    register_implementation("twin", Twin, clobber=True)
    stores = []
    for store in range(2):
        root = tmp_path / str(store) / "data"
        (root / "img" / "a").mkdir(parents=True)
        pixels = np.full((4, 8, 9, 3), store, np.uint8)
        for n in range(4):
            (root / "img" / "a" / f"{n}.ppm").write_bytes(b"P6 9 8 255\n" + pixels[n].tobytes())
        np.save(root / "a.npy", pixels)
        members = [(f"{n}.{'ppm' if store else 'pnm'}", b"P6 9 8 255\n" + pixels[n].tobytes()) for n in range(4)]
        archive(root / "t.tar", members)
        (root / "m.csv").write_text(f"path,label\nimg/a/{store}.ppm,{store}\n")
        for path in root.rglob("*.*"):
            os.utime(path, (1e9, 1e9))
        stores.append(gl.Remote({"path": str(root.parent)}, cache_bytes=1 << 30, cache_folder=tmp_path / "blocks"))
    return stores


STORES: dict[str, Callable[[gl.Remote], Any]] = {
    "files": lambda store: gl.ImageFiles("twin://data/img", extensions=(".ppm",), storage_options=store),
    "blocks": lambda store: gl.ArrayFile("twin://data/a.npy", storage_options=store),
    "an index of an archive": lambda store: gl.TarShards("twin://data/t.tar", storage_options=store),
    "a list": lambda store: gl.FileList("twin://data/m.csv", storage_options=store),
}


@pytest.mark.parametrize("kind", STORES)
def test_caches_of_one_store_are_not_used_for_another(two_stores: list[gl.Remote], kind: str) -> None:
    expected = [contents(STORES[kind](store)) for store in two_stores]
    assert expected[0] != expected[1]
    assert [contents(STORES[kind](store)) for store in two_stores] == expected  # from the caches


def test_cache_of_a_store_is_found_by_an_unpickled_remote(two_stores: list[gl.Remote]) -> None:
    unpickled = pickle.loads(pickle.dumps(two_stores[0]))
    assert digest_of(unpickled) == digest_of(two_stores[0]) != digest_of(two_stores[1])
    expected = contents(STORES["blocks"](two_stores[0]))
    path = Path(unpickled.options["path"], "data", "a.npy")
    path.write_bytes(path.read_bytes().replace(b"\0", b"\1"))
    os.utime(path, (1e9, 1e9))
    assert contents(STORES["blocks"](unpickled)) == expected


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_PROFILE", "HF_ENDPOINT"])
def test_digest_of_depends_on_environment_and_settings_of_fsspec(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import fsspec.config

    monkeypatch.delenv(name, raising=False)
    unset_digest = digest_of(gl.Remote())
    monkeypatch.setenv(name, "http://one")
    first_digest = digest_of(gl.Remote())
    monkeypatch.setenv(name, "http://other")
    second_digest = digest_of(gl.Remote())
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://one"})
    assert len({unset_digest, first_digest, second_digest, digest_of(gl.Remote())}) == 4


def test_digest_of_distinguishes_options_that_are_objects() -> None:
    digests = [
        digest_of(gl.Remote({"token": value}))
        for value in (b"a", b"b", frozenset("a"), ["a"], {"a": 1}, Path("a"), lambda: 1)
    ]
    assert len(set(digests)) == len(digests)
