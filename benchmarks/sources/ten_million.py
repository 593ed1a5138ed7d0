"""What the index of ten million samples takes: bytes, the time to open it from its cached form, and who shares it.

    python -m benchmarks.sources.ten_million [--samples 10000000] [--only LMDB,Coco]

For each dataset a source of so many samples is made, as small as it can be, in a temporary folder. It is opened once,
which builds the index where there is one, and then by a fresh process, which is timed. That process starts two workers,
which read all of the index; what each has of its own, beside what all share, is read from /proc.

What ten million files would only make slow is left out: `ImageFolder` and `ImageFiles` scan real folders, and are told
the names of files in them; `TarShards` reads a thousand hard links to one archive, with copies of its index; the
annotations of `Coco` are those of ten thousand images, repeated.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import gpuload as gl
from benchmarks.machine import cpu_model
from gpuload.datasets import coco
from gpuload.datasets.scan import Scanner
from gpuload.datasets.stores.tar.shards import SUFFIX

__all__ = ["CASES", "MOST_BYTES", "MOST_S", "main"]

MOST_BYTES: Final = 100  # of a sample's index
MOST_S: Final = 1.0  # to open it
OWN_MB: Final = 60.0  # what a worker may have for itself
FOLDERS: Final = 1000  # classes, and archives
PIECE: Final = 10_000  # images whose annotations are repeated
REPOSITORY: Final = Path(__file__).parents[2]


def _files(folder: Path, count: int) -> None:
    """Empty folders; `_told` says what is in them."""
    for number in range(FOLDERS):
        (folder / "train" / f"n{number:08d}").mkdir(parents=True)
    past = time.time() - 3600
    for path in (*(folder / "train").iterdir(), folder / "train"):
        os.utime(path, (past, past))


def _told(count: int) -> Any:
    """In the place of a folder's scan: the names of so many images in all."""
    each = count // FOLDERS

    def images(scanner: Scanner, start: bytes = b"") -> tuple[bytes, np.ndarray]:
        folders = [start] if start else scanner.folders()
        found = real(scanner, start)
        assert not len(found[1]), "the folders are empty"
        names = [b"%s/%s_%05d.JPEG" % (folder, folder, number) for folder in folders for number in range(each)]
        return b"".join(names), np.fromiter(map(len, names), np.uint32, len(names))

    real = Scanner.images
    return (mock.patch.object(Scanner, "images", images),)


def _csv(folder: Path, count: int) -> None:
    with open(folder / "train.csv", "w") as file:
        file.write("path,label\n")
        for start in range(0, count, PIECE):
            label = start // PIECE % FOLDERS
            numbers = range(start, min(start + PIECE, count))
            file.write("".join(f"n{label:08d}/{number:08d}.JPEG,{label}\n" for number in numbers))


def _tar(folder: Path, count: int) -> None:
    """A real archive, and hard links to it: since size and time are equal, the index of one is that of all."""
    each = -(-count // FOLDERS)
    with tarfile.open(folder / "train-000.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(each):
            for ending, data in (("jpg", b"\xff\xd8\xff"), ("cls", b"7")):
                info = tarfile.TarInfo(f"n01440764_{number:08d}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    first = folder / "train-000.tar"
    gl.TarShards(first)
    for number in range(1, FOLDERS):
        os.link(first, folder / f"train-{number:03d}.tar")
        shutil.copyfile(f"{first}{SUFFIX}", folder / f"train-{number:03d}.tar{SUFFIX}")


def _lmdb(folder: Path, count: int) -> None:
    import lmdb

    with lmdb.open(str(folder / "train.lmdb"), subdir=False, lock=False, map_size=1 << 36) as env:
        for start in range(0, count, 1_000_000):
            with env.begin(write=True) as transaction:
                for number in range(start, min(start + 1_000_000, count)):
                    transaction.put(b"%010d" % number, b"\xff", append=True)


def _hdf5(folder: Path, count: int) -> None:
    import h5py

    with h5py.File(folder / "train.h5", "w") as file:
        file.create_dataset("images", data=np.zeros((count, 2, 2), np.uint8))
        file.create_dataset("labels", data=np.arange(count, dtype=np.int64) % FOLDERS)


def _parquet(folder: Path, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    each = -(-count // 100)
    images = pa.array([b"\xff\xd8\xff"] * each, pa.binary())
    labels = pa.array(np.arange(each, dtype=np.int64) % FOLDERS)
    table = pa.table({"image": pa.StructArray.from_arrays([images], ["bytes"]), "label": labels})
    for number in range(100):
        pq.write_table(table, folder / f"train-{number:03d}.parquet", row_group_size=100, compression="none")


def _array(folder: Path, count: int) -> None:
    np.save(folder / "train.npy", np.zeros((count, 2, 2), np.uint8))
    np.save(folder / "labels.npy", np.arange(count, dtype=np.int64) % FOLDERS)


def _coco(folder: Path, count: int) -> None:
    (folder / "images").mkdir()
    images = [{"id": n, "file_name": f"{n:012d}.jpg", "width": 640, "height": 480} for n in range(PIECE)]
    one = {"bbox": [473.07, 395.93, 38.65, 28.67], "category_id": 18, "area": 702.1, "iscrowd": 0}
    objects = [{"id": 10 * n + k, "image_id": n, **one} for n in range(PIECE) for k in range(n % 3)]
    text = {"images": images, "annotations": objects, "categories": [{"id": 18, "name": "dog"}]}
    (folder / "annotations.json").write_text(json.dumps(text))


def _repeated(count: int) -> Any:
    """In the place of COCO's index: the one of the file, repeated until there are so many images."""

    def index(*arguments: Any) -> dict[str, np.ndarray]:
        found = real(*arguments)
        times = -(-count // PIECE)
        for name in ("path_offsets", "list_offsets"):
            offsets = found[name].astype(np.int64)
            starts = offsets[:-1] + np.arange(times)[:, None] * offsets[-1]
            found[name] = np.append(starts.ravel(), times * offsets[-1])
        found["path_offsets"] = found["path_offsets"].astype(np.uint32)
        found["ids"] = np.arange(times * PIECE)
        return {**found, **{name: np.tile(found[name], times) for name in ("paths", "lists", "sizes_hw")}}

    real = coco._index
    return (mock.patch.object(coco, "_index", index),)


def _nothing(folder: Path, count: int) -> None:
    """Nothing is written."""


def _as_it_is(count: int) -> Any:
    return ()


def _images(folder: Path) -> str:
    return str(folder / "train")


Case = tuple[Callable[[Path, int], None], Callable[[int], Any], Callable[[Path, int], Any]]
# How a source is made; what stands in for a part of it while the index is built; how it is opened.
CASES: Final[dict[str, Case]] = {
    "ImageFolder": (_files, _told, lambda at, count: gl.ImageFolder(_images(at))),
    "ImageFiles": (_files, _told, lambda at, count: gl.ImageFiles(_images(at))),
    "FileList": (_csv, _as_it_is, lambda at, count: gl.FileList(at / "train.csv")),
    "FileList, generated names": (
        _nothing,
        _as_it_is,
        lambda at, count: gl.FileList("img_{index:07d}.jpg", root=at, count=count),
    ),
    "TarShards": (_tar, _as_it_is, lambda at, count: gl.TarShards(f"{at}/train-*.tar", fields=("jpg", "cls"))),
    "LMDB": (_lmdb, _as_it_is, lambda at, count: gl.LMDB(at / "train.lmdb")),
    "HDF5": (_hdf5, _as_it_is, lambda at, count: gl.HDF5(at / "train.h5")),
    "Parquet": (_parquet, _as_it_is, lambda at, count: gl.Parquet(str(at / "train-*.parquet"))),
    "Coco": (_coco, _repeated, lambda at, count: gl.Coco(at / "images", at / "annotations.json")),
    "ArrayFile": (_array, _as_it_is, lambda at, count: gl.ArrayFile(at / "train.npy", labels=at / "labels.npy")),
}


def _arrays_in(value: Any, seen: set[int]) -> Iterator[np.ndarray]:
    """All arrays that an object of gpuload's refers to, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif type(value).__module__.startswith("gpuload.") and hasattr(value, "__dict__"):
        parts = (part for name, part in vars(value).items() if name not in ("_opened", "_columns"))
    for part in parts:
        yield from _arrays_in(part, seen)


class _Touched:
    """A dataset whose index each worker reads from end to end; a sample says which process that was."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.sum = -1

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> np.ndarray:
        if self.sum < 0:
            self.sum = sum(int(array.view(np.uint8).max(initial=0)) for array in _arrays_in(self.dataset, set()))
        return np.array([os.getpid()])


def _memory_mb(pid: int) -> dict[str, float]:
    """What a process has in memory: all, and what no other has mapped."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {"rss": found["Rss"], "own": found["Private_Clean"] + found["Private_Dirty"]}


def opened(name: str, folder: Path, count: int) -> dict[str, Any]:
    """Open the dataset in this process; start workers with it."""
    started, cpu = time.perf_counter(), time.process_time()
    dataset = CASES[name][2](folder, count)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    assert len(dataset) == count, len(dataset)
    arrays = list(_arrays_in(dataset, set()))
    notes = dataset.targets.lists.data.nbytes if name == "Coco" else 0
    with gl.Loader(_Touched(dataset), 8, num_workers=2, device="cpu") as loader:
        workers: set[int] = set()
        for batch in loader:
            workers |= set(batch.flatten().tolist())
            if len(workers) == 2:
                break
        memory = [_memory_mb(pid) for pid in workers]
    return {
        "bytes": (sum(array.nbytes for array in arrays) - notes) / count,
        "annotations": notes / count,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "rss_mb": max(one["rss"] for one in memory),
        "own_mb": max(one["own"] for one in memory),
    }


def built(name: str, folder: Path, count: int) -> float:
    """Make the source, and its index. Returns how long the index took."""
    make, stand_in, open_ = CASES[name]
    make(folder, count)
    patches = stand_in(count)
    for patch in patches:
        patch.start()
    started = time.perf_counter()
    open_(folder, count)
    built_s = time.perf_counter() - started
    for patch in patches:
        patch.stop()
    return built_s


def _in_a_process(what: str, name: str, folder: Path, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sources.ten_million", "--process", what, name, str(folder), str(count)]
    environment = {**os.environ, "GPULOAD_CACHE": str(folder / "cache")}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 where a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sources.ten_million", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--samples", type=int, default=10_000_000, help="a multiple of 10,000 (default ten million)")
    parser.add_argument("--only", help=f"separated by semicolons, of: {'; '.join(CASES)}")
    parser.add_argument("--folder", type=Path, help="where sources are made, and removed (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--process", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.process:
        what, name, folder, count = options.process
        run = built if what == "build" else opened
        print(json.dumps(run(name, Path(folder), int(count))))
        return 0
    if options.samples < 1 or options.samples % PIECE:
        parser.error(f"--samples must be a multiple of {PIECE:,}, got {options.samples:,}")
    names = [name.strip() for name in options.only.split(";")] if options.only else list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"--only takes some of {'; '.join(CASES)}; got {'; '.join(sorted(unknown))}")

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    results: dict[str, Any] = {}
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix="ten-million-", dir=options.folder))
        try:
            with console.status(name):
                build_s = _in_a_process("build", name, folder, options.samples)
                failed = isinstance(build_s, dict)
                found = build_s if failed else _in_a_process("open", name, folder, options.samples)
            results[name] = {**found, "build_s": build_s}
        finally:
            shutil.rmtree(folder)
    console.print(_table(results))
    for name, found in results.items():
        if "error" in found:
            console.print(f"[red]{name}: {found['error']}[/]", soft_wrap=True)
    missed = [name for name, found in results.items() if not _is_met(found)]
    console.print(
        f"{options.samples:,} samples, two workers; {cpu_model()}, {len(os.sched_getaffinity(0))} CPUs\n"
        f"under {MOST_BYTES} bytes a sample, opened in under {MOST_S:.0f} s, shared (a worker has less than "
        f"{OWN_MB:.0f} MB of its own): {'missed by ' + '; '.join(missed) if missed else 'met by all'}",
        soft_wrap=True,
    )
    if options.json:
        options.json.write_text(json.dumps({"samples": options.samples, "results": results}, indent=1) + "\n")
    return 1 if missed else 0


def _is_met(found: dict[str, Any]) -> bool:
    return (
        "error" not in found and found["bytes"] < MOST_BYTES and found["wall_s"] < MOST_S and found["own_mb"] < OWN_MB
    )


def _table(results: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("dataset", no_wrap=True)
    headings = ("bytes of\na sample", "of which\nannotations", "built\ns", "opened\ns", "CPU s", "a worker\nMB")
    for heading in (*headings, "of its\nown, MB"):
        table.add_column(heading, justify="right")
    for name, found in results.items():
        if "error" not in found:
            table.add_row(
                name,
                f"{found['bytes'] + found['annotations']:.1f}",
                f"{found['annotations']:.1f}",
                f"{found['build_s']:.1f}",
                f"{found['wall_s']:.3f}",
                f"{found['cpu_s']:.3f}",
                f"{found['rss_mb']:.0f}",
                f"{found['own_mb']:.0f}",
            )
    return table


if __name__ == "__main__":
    sys.exit(main())
