"""The stores that gpuload reads, each written once from the same photographs, and the datasets that read them.

    BASE/train/class_0/00000.jpg …      the files (`benchmarks.photos.copy_photos`), in the order of `ImageFolder`
    BASE/stores/STORE                   all other stores, with the same samples in the same order

`gpuload.pack` writes the tar archives, the Parquet files and the LMDB. The target of each photograph is its class, for
`Coco` with a box. `ArrayFile` and the HDF5 file of pixels hold centre squares. This module does not import torch, since
workers import it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

import gpuload as gl

SHARDS: Final = 4  # approximate number of archives and of Parquet files
SIDE: Final = 224  # side of the squares in arrays, in pixels
SEED: Final = 0
BOX: Final = (4, 8, 12, 16)  # in every photograph: left, top, width, height

Samples = Iterator[tuple[str, bytes, int]]
"""For each photograph, its path below train/, its bytes, and its class."""


class Dataset(NamedTuple):
    """The functions that write a store and open gpuload's dataset of it.

    Attributes:
        store: the store's folder; "" if the files themselves are the store.
        write: writes the store to its folder, from the samples and their number; None means `gpuload.pack`.
        open: makes the dataset from BASE, a folder or a URL; for a URL it also accepts `storage_options`.
        is_remote: whether BASE can be a URL.
    """

    store: str
    write: Callable[[Path, Samples, int], None] | None
    open: Callable[..., Any]
    is_remote: bool = True


def paths_in(base: Path) -> list[Path]:
    """Return the paths of the photographs, in the order of all stores."""
    return sorted((base / "train").rglob("*.jpg"))


def labels_in(base: Path) -> list[int]:
    """Return the class of each photograph."""
    classes = sorted(path.name for path in (base / "train").iterdir())
    return [classes.index(path.parent.name) for path in paths_in(base)]


def write(base: Path, names: Sequence[str] | None = None) -> None:
    """Write the stores of these datasets (default: all); complete stores are reused."""
    paths, labels = paths_in(base), labels_in(base)
    for name in names or STORES:
        store, writer, *_ = STORES[name]
        folder = base / "stores" / store
        if not store or (folder / "manifest.json").exists() or (folder / "complete").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if writer is None:
            shard_bytes = 1 + sum(path.stat().st_size for path in paths) // SHARDS
            to: Any = store
            gl.pack(gl.ImageFolder(base / "train"), folder, to=to, shard_bytes=shard_bytes, workers=0)
        else:
            files = ((str(path.relative_to(base / "train")), path.read_bytes()) for path in paths)
            writer(folder, ((*file, label) for file, label in zip(files, labels, strict=True)), len(paths))
            (folder / "complete").touch()


def archives_in(base: Path) -> list[Path]:
    """Return the tar archives."""
    return sorted((base / "stores" / "tar").glob("*.tar"))


def order(count: int, random: bool) -> list[int]:
    """Return the indices of the samples, in stored order or in a random order that is the same for all stores."""
    return (np.random.default_rng(SEED).permutation(count) if random else np.arange(count)).tolist()


def squares(data: bytes) -> np.ndarray:
    """Crop a photograph to its largest centred square and resize it to `SIDE` × `SIDE`."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    return np.asarray(image.resize((SIDE, SIDE), box=(left, top, left + side, top + side)))


class InMemory:
    """A dataset of files by path, or of squares in memory, with their classes."""

    def __init__(self, images: Sequence[Any], labels: Sequence[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        image = self.images[number]
        return gl.read(image) if isinstance(image, Path) else gl.Image(image), self.labels[number]


class Stream:
    """A stream of the same samples, split among workers by archive, as by `TarShards(stream=True)`."""

    def __init__(self, dataset: InMemory, archives: Sequence[Path]) -> None:
        self.dataset = dataset
        self.ends = np.cumsum([len(gl.TarShards(path, fields=("jpg", "cls"))) for path in archives]).tolist()

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info = gl.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for start, end in list(zip([0, *self.ends], self.ends, strict=False))[first::step]:
            yield from map(self.dataset.__getitem__, range(start, end))


def hdf5(folder: Path, samples: Samples, count: int, pixels: bool = False) -> None:
    """Write encoded files or decoded squares to an HDF5 dataset."""
    import h5py

    with h5py.File(folder / "train.h5", "w") as file:
        labels = file.create_dataset("labels", (count,), "int64")
        if pixels:
            images = file.create_dataset("images", (count, SIDE, SIDE, 3), "uint8", chunks=(1, SIDE, SIDE, 3))
        else:
            images = file.create_dataset("images", (count,), h5py.vlen_dtype("uint8"))
        for number, (_, data, label) in enumerate(samples):
            images[number], labels[number] = squares(data) if pixels else np.frombuffer(data, np.uint8), label


def arrays(folder: Path, samples: Samples, count: int) -> None:
    pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, (count, SIDE, SIDE, 3))
    labels = np.zeros(count, np.int64)
    for number, (_, data, label) in enumerate(samples):
        pixels[number], labels[number] = squares(data), label
    pixels.flush()
    np.save(folder / "labels.npy", labels)


def file_list(folder: Path, samples: Samples, count: int) -> None:
    with open(folder / "train.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label"))
        rows.writerows((name, label) for name, _, label in samples)


def coco(folder: Path, samples: Samples, count: int) -> None:
    dataset: dict[str, list[Any]] = {"images": [], "annotations": []}
    for number, (name, data, label) in enumerate(samples):
        width, height = Image.open(io.BytesIO(data)).size
        dataset["images"].append({"id": number, "file_name": name, "width": width, "height": height})
        annotation = {"id": number, "image_id": number, "bbox": BOX, "category_id": label, "area": BOX[2] * BOX[3]}
        dataset["annotations"].append({**annotation, "iscrowd": 0})
    dataset["categories"] = [{"id": label, "name": f"class_{label}"} for label in range(10)]
    (folder / "coco.json").write_text(json.dumps(dataset))


def _at(function: Callable[..., Any], path: str, **options: Any) -> Callable[..., Any]:
    """Make a function that opens a dataset below BASE."""
    return lambda base, **remote: function(f"{base}/{path}", **options, **remote)


def _squares_file(base: str, **remote: Any) -> Any:
    return gl.ArrayFile(f"{base}/stores/arrays/pixels.npy", labels=f"{base}/stores/arrays/labels.npy", **remote)


def _coco(base: str, **remote: Any) -> Any:
    return gl.Coco(f"{base}/train", f"{base}/stores/coco/coco.json", targets=(), **remote)


def _file_list(base: str, **remote: Any) -> Any:
    return gl.FileList(f"{base}/stores/list/train.csv", root=f"{base}/train", **remote)


_tar = partial(_at, gl.TarShards, "stores/tar/*.tar", fields=("jpg", "cls"))
_lmdb = _at(gl.LMDB, "stores/lmdb", image="{}.image", target="{}.label", target_type="int")
_parquet = _at(gl.Parquet, "stores/parquet", image="image.bytes", target="label")
STORES: Final[dict[str, Dataset]] = {
    "ImageFolder": Dataset("", None, _at(gl.ImageFolder, "train")),
    "TarShards": Dataset("tar", None, _tar()),
    "TarShards, stream": Dataset("tar", None, _tar(stream=True)),
    "LMDB": Dataset("lmdb", None, _lmdb, is_remote=False),
    "HDF5": Dataset("hdf5", hdf5, _at(gl.HDF5, "stores/hdf5/train.h5")),
    "Parquet": Dataset("parquet", None, _parquet),
    "FileList": Dataset("list", file_list, _file_list),
    "Coco": Dataset("coco", coco, _coco),
    "ArrayFile": Dataset("arrays", arrays, _squares_file),
    "HDF5, pixels": Dataset("pixels", partial(hdf5, pixels=True), _at(gl.HDF5, "stores/pixels/train.h5")),
}
ARRAYS: Final = ("ArrayFile", "HDF5, pixels")  # squares, already decoded
