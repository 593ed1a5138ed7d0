"""Photographs written once to each store that gpuload reads, and the dataset that reads it.

    BASE/train/class_0/00000.jpg …      the files (`benchmarks.photos.copy_photos`), in the order of `ImageFolder`
    BASE/stores/…                       all other stores, with the same samples in the same order

Names in a store are made of a sample's number, so every store gives the samples in this order. Each photograph has
its class as the target, and for `Coco` a box. `ArrayFile` and the HDF5 file of pixels hold squares cut from the
middle. This imports no torch: workers import it.
"""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

import gpuload as gl

__all__ = [
    "ARRAYS",
    "SEED",
    "SHARDS",
    "STORES",
    "Dataset",
    "Held",
    "Streamed",
    "labels_in",
    "order",
    "paths_in",
    "squares",
    "write",
]

SHARDS: Final = 4  # archives, and Parquet files
SIDE: Final = 224  # of the squares in arrays
ROWS: Final = 16  # of a row group
SEED: Final = 0
BOX: Final = (10, 20, 30, 40)  # in every photograph: left, top, width, height

Sample = tuple[str, bytes, int]  # its path below train/, the file, its class


@dataclass(frozen=True)
class Dataset:
    """How a store is written, and read by gpuload.

    Args:
        write: makes the store in a folder, from the samples and their number.
        open: makes the dataset from BASE, a folder or a URL; of a URL also with `storage_options`.
        is_remote: whether BASE may be a URL.
    """

    write: Callable[[Path, Iterator[Sample], int], None]
    open: Callable[..., Any]
    is_remote: bool = True


def paths_in(base: Path) -> list[Path]:
    """The photographs, in the order of all stores."""
    return sorted((base / "train").rglob("*.jpg"))


def labels_in(base: Path) -> list[int]:
    """The class of each."""
    classes = sorted(path.name for path in (base / "train").iterdir())
    return [classes.index(path.parent.name) for path in paths_in(base)]


def write(base: Path, names: Sequence[str] | None = None) -> None:
    """Write the stores of these names (default: all), each once; a finished one is used again."""
    paths, labels = paths_in(base), labels_in(base)

    def samples() -> Iterator[Sample]:
        for path, label in zip(paths, labels, strict=True):
            yield str(path.relative_to(base / "train")), path.read_bytes(), label

    for writer in dict.fromkeys(STORES[name].write for name in names or STORES):
        done = base / "stores" / f".{writer.__name__}"
        if not done.exists():
            done.parent.mkdir(exist_ok=True)
            writer(done.parent, samples(), len(paths))
            done.touch()


def order(count: int, random: bool) -> list[int]:
    """The numbers of samples, in the order in which they lie or in a random one, the same for all."""
    return (np.random.default_rng(SEED).permutation(count) if random else np.arange(count)).tolist()


def squares(data: bytes) -> np.ndarray:
    """A photograph's largest square, from the middle, at `SIDE` × `SIDE`."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    return np.asarray(image.resize((SIDE, SIDE), box=(left, top, left + side, top + side)))


class Held:
    """Files by their paths, or squares in memory, with their classes."""

    def __init__(self, images: Sequence[Any], labels: Sequence[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        image = self.images[number]
        return gl.read(image) if isinstance(image, Path) else gl.Image(image), self.labels[number]


class Streamed:
    """The same in one pass, shared out among workers as `TarShards(stream=True)` shares archives."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info = gl.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        count = len(self.held)
        for part in range(first, SHARDS, step):
            for number in range(part * count // SHARDS, (part + 1) * count // SHARDS):
                yield self.held[number]


def _parts(samples: Iterator[Sample], count: int) -> Iterator[tuple[int, list[tuple[int, Sample]]]]:
    """Numbered samples in `SHARDS` parts of about as many."""
    numbered = list(enumerate(samples))
    for part in range(SHARDS):
        yield part, numbered[part * count // SHARDS : (part + 1) * count // SHARDS]


def nothing(folder: Path, samples: Iterator[Sample], count: int) -> None:
    """The files themselves are the store."""


def tar(folder: Path, samples: Iterator[Sample], count: int) -> None:
    for part, own in _parts(samples, count):
        with tarfile.open(folder / f"train-{part:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, (_, data, label) in own:
                for ending, content in (("jpg", data), ("cls", b"%d" % label)):
                    info = tarfile.TarInfo(f"{number:08d}.{ending}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


def lmdb(folder: Path, samples: Iterator[Sample], count: int) -> None:
    import lmdb

    path = folder / "train.lmdb"
    path.unlink(missing_ok=True)
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 40) as env, env.begin(write=True) as transaction:
        for number, (_, data, label) in enumerate(samples):
            transaction.put(b"%08d.cls" % number, b"%d" % label, append=True)
            transaction.put(b"%08d.jpg" % number, data, append=True)


def hdf5(folder: Path, samples: Iterator[Sample], count: int) -> None:
    import h5py

    with h5py.File(folder / "train.h5", "w") as file:
        images = file.create_dataset("images", (count,), h5py.vlen_dtype("uint8"))
        labels = file.create_dataset("labels", (count,), "int64")
        for number, (_, data, label) in enumerate(samples):
            images[number] = np.frombuffer(data, np.uint8)
            labels[number] = label


def parquet(folder: Path, samples: Iterator[Sample], count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "parquet").mkdir(exist_ok=True)
    for part, own in _parts(samples, count):
        images = [{"bytes": data, "path": name} for _, (name, data, _) in own]
        table = pa.table({"image": images, "label": pa.array([label for *_, (_, _, label) in own], pa.int64())})
        path = folder / "parquet" / f"train-{part:03d}.parquet"
        pq.write_table(table, path, row_group_size=ROWS, compression="none", write_page_checksum=True)


def arrays(folder: Path, samples: Iterator[Sample], count: int) -> None:
    pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, (count, SIDE, SIDE, 3))
    labels = np.zeros(count, np.int64)
    for number, (_, data, label) in enumerate(samples):
        pixels[number], labels[number] = squares(data), label
    pixels.flush()
    np.save(folder / "labels.npy", labels)


def hdf5_pixels(folder: Path, samples: Iterator[Sample], count: int) -> None:
    import h5py

    with h5py.File(folder / "pixels.h5", "w") as file:
        images = file.create_dataset("images", (count, SIDE, SIDE, 3), "uint8", chunks=(1, SIDE, SIDE, 3))
        labels = file.create_dataset("labels", (count,), "int64")
        for number, (_, data, label) in enumerate(samples):
            images[number], labels[number] = squares(data), label


def file_list(folder: Path, samples: Iterator[Sample], count: int) -> None:
    with open(folder / "train.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label"))
        rows.writerows((name, label) for name, _, label in samples)


def coco(folder: Path, samples: Iterator[Sample], count: int) -> None:
    found: dict[str, list[Any]] = {"images": [], "annotations": []}
    for number, (name, data, label) in enumerate(samples):
        width, height = Image.open(io.BytesIO(data)).size
        found["images"].append({"id": number, "file_name": name, "width": width, "height": height})
        one = {"id": number, "image_id": number, "bbox": BOX, "category_id": label, "area": BOX[2] * BOX[3]}
        found["annotations"].append({**one, "iscrowd": 0})
    found["categories"] = [{"id": label, "name": f"class_{label}"} for label in range(10)]
    (folder / "coco.json").write_text(json.dumps(found))


def _shards(base: str, **options: Any) -> Any:
    return gl.TarShards(f"{base}/stores/train-{{000..{SHARDS - 1:03d}}}.tar", fields=("jpg", "cls"), **options)


def _arrays(base: str, **options: Any) -> Any:
    return gl.ArrayFile(f"{base}/stores/pixels.npy", labels=f"{base}/stores/labels.npy", **options)


def _coco(base: str, **options: Any) -> Any:
    return gl.Coco(f"{base}/train", f"{base}/stores/coco.json", targets=(), **options)


def _file_list(base: str, **options: Any) -> Any:
    return gl.FileList(f"{base}/stores/train.csv", root=f"{base}/train", **options)


def _lmdb(base: str) -> Any:
    return gl.LMDB(f"{base}/stores/train.lmdb", image="{}.jpg", target="{}.cls")


def _parquet(base: str, **options: Any) -> Any:
    return gl.Parquet([f"{base}/stores/parquet/train-{part:03d}.parquet" for part in range(SHARDS)], **options)


STORES: Final[dict[str, Dataset]] = {
    "ImageFolder": Dataset(nothing, lambda base, **options: gl.ImageFolder(f"{base}/train", **options)),
    "TarShards": Dataset(tar, _shards),
    "TarShards, stream": Dataset(tar, lambda base, **options: _shards(base, stream=True, **options)),
    "LMDB": Dataset(lmdb, _lmdb, is_remote=False),
    "HDF5": Dataset(hdf5, lambda base, **options: gl.HDF5(f"{base}/stores/train.h5", **options)),
    "Parquet": Dataset(parquet, _parquet),
    "FileList": Dataset(file_list, _file_list),
    "Coco": Dataset(coco, _coco),
    "ArrayFile": Dataset(arrays, _arrays),
    "HDF5, pixels": Dataset(hdf5_pixels, lambda base, **options: gl.HDF5(f"{base}/stores/pixels.h5", **options)),
}
ARRAYS: Final = ("ArrayFile", "HDF5, pixels")  # squares, already decoded
