"""One reader, in its own process: ``python -m benchmarks.sources.reading TASK``, with the task as JSON.

It runs two epochs, the first with an empty page cache ("cold"), the second right after it ("warm"), at one level:

- "raw": the bytes of the files, read in this process with the code of a worker: in chunks of 32, where the kernel is
  told to read the next chunk ahead while files come from the disk. The bytes are discarded. Decoded squares are copied
  once, as to a slot.
- "decoded": batches of the training recipe from a loader with workers. The cold epoch is the first of a new loader, so
  it includes the start of the workers; the warm epoch is the next.

The reader "memcpy" copies squares from a memory-mapped array with numpy, one by one; it has no loader.

Prints one line of JSON, the last on its standard output.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np

from benchmarks.peers.protocol import MEAN, STD
from benchmarks.sources.stores import ARRAYS, STORES, order
from gpuload.cli.processes import cpu_seconds, tree
from gpuload.datasets.kinds import row_bytes
from gpuload.datasets.worker import THIS_PROCESS
from gpuload.workers.protocol import Request
from gpuload.workers.source import Source

LEVELS: Final = ("raw", "decoded")
ORDERS: Final = ("in order", "random")
STATES: Final = ("cold", "warm")
MEMCPY: Final = "memcpy"
NATIVE: Final = {  # other libraries' readers, and the module that each imports
    "torchvision ImageFolder": "torchvision",
    "WebDataset": "webdataset",
    "Hugging Face datasets": "datasets",
    "LitData": "litdata",
    "Mosaic Streaming": "streaming",
}
Drop = Literal["kernel", "files"]
"""The way to empty the page cache: completely, by the kernel; or file by file."""
DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
CHUNK: Final = 32
RING: Final = 6 * CHUNK  # squares in the target of copies: as many as the slots of two workers hold


def best_drop() -> Drop:
    """Choose the most reliable way that is permitted; dropping everything needs root."""
    return "kernel" if os.access(DROP_CACHES, os.W_OK) else "files"


def drop(base: Path, how: Drop) -> None:
    """Drop all files below a folder from the page cache. Pages that a process has mapped stay."""
    os.sync()
    if how == "kernel":
        DROP_CACHES.write_text("1")
        return
    for folder, _, names in os.walk(base):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def bytes_from_disk() -> int:
    """Return how many bytes this process and its living descendants have read from disks so far."""
    total = 0
    for pid in tree(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return total


class GpuloadReader:
    """gpuload's dataset of a store."""

    package = "gpuload"

    def __init__(self, reader: str, base: str) -> None:
        self.dataset = STORES[reader].open(base)
        self.is_stream = not hasattr(self.dataset, "__getitem__")
        self.is_squares = reader in ARRAYS

    def raw(self, random: bool) -> Callable[[], Iterator[Any]] | None:
        if self.is_stream:
            return None if random else lambda: iter(self.dataset)
        numbers = order(len(self.dataset), random)
        return lambda: (_copied if self.is_squares else _as_worker)(self.dataset, numbers)

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any] | None:
        import gpuload as gl
        from gpuload import transforms as T

        if self.is_stream and random:
            return None
        steps = [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)]
        options: dict[str, Any] = {"transforms": steps, "num_workers": workers, "device": "cpu"}
        return gl.Loader(self.dataset, batch_size, shuffle=random, **options)


def _as_worker(dataset: Any, numbers: list[int]) -> Iterator[Any]:
    chunks = [np.array(numbers[at : at + CHUNK]) for at in range(0, len(numbers), CHUNK)]
    requests = [Request(0, 0, 0, 0, chunk, chunk) for chunk in chunks]
    source = Source(dataset, 0)
    for request, following in zip(requests, [*requests[1:], None], strict=True):
        if source.reads_ahead:
            source.store_next_keys(following)
        yield from map(source.open(request), range(len(request.indices)))


class Memcpy:
    """The minimum work of any reader of decoded squares: one copy of each from the page cache."""

    package = "numpy"

    def __init__(self, base: str) -> None:
        self.path = f"{base}/stores/arrays/pixels.npy"

    def raw(self, random: bool) -> Callable[[], Iterator[Any]]:
        pixels = np.load(self.path, mmap_mode="r")
        numbers = order(len(pixels), random)
        return lambda: _into_ring(pixels[number] for number in numbers)

    def loader(self, random: bool, workers: int, batch_size: int) -> None:
        return None


@cache
def _ring(shape: tuple[int, ...]) -> np.ndarray:
    """Allocate memory whose pages are present, since they have been written."""
    return np.ones((RING, *shape), np.uint8)


def _into_ring(squares: Iterable[np.ndarray]) -> Iterator[int]:
    for at, square in enumerate(squares):
        _ring(square.shape)[at % RING] = square
        yield at


def _copied(dataset: Any, numbers: list[int]) -> Iterator[int]:
    """Copy squares as workers copy them to slots, as rows of the file where the dataset allows it."""

    def squares() -> Iterator[np.ndarray]:
        for start in range(0, len(numbers), CHUNK):
            chunk = numbers[start : start + CHUNK]
            if row_bytes(dataset):
                yield from map(dataset._image_rows(chunk).__getitem__, chunk)
            else:
                yield from (image.hwc for image, _ in dataset.__getitems__(chunk))

    return _into_ring(squares())


def measure(epoch: Callable[[], Iterable[Any]], count_of: Callable[[Any], int], cpu_s: Callable[[], float]) -> Any:
    """Run an epoch. Returns its rate, its CPU time, and the MB read from the disk."""
    disk, cpu, started = bytes_from_disk(), cpu_s(), time.perf_counter()
    count = sum(map(count_of, epoch()))
    wall_s = time.perf_counter() - started
    return {
        "images": count,
        "images_per_s": count / wall_s,
        "cpu_us": 1e6 * (cpu_s() - cpu) / count,
        "disk_mb": (bytes_from_disk() - disk) / 1e6,
    }


def run(reader: str, base: str, level: str, random: bool, how: Drop, workers: int, batch_size: int) -> dict[str, Any]:
    """Measure a reader of `stores.STORES`, of `natives.NATIVES`, or `MEMCPY` at one of `LEVELS`, over the stores of
    `base`.

    `how` is the way to empty the page cache. Returns the figures of a cold and a warm epoch, which are None if the
    reader does not support this level and order.
    """
    if reader == MEMCPY:
        opened: Any = Memcpy(base)
    elif reader in STORES:
        opened = GpuloadReader(reader, base)
    else:
        if importlib.util.find_spec(NATIVE[reader]) is None:
            raise ModuleNotFoundError(f"{NATIVE[reader]} is not installed")
        from benchmarks.sources.natives import NATIVES

        opened = NATIVES[reader](Path(base))
    if level == "raw":
        THIS_PROCESS.is_worker = True
        epoch, count_of, cpu_s = opened.raw(random), lambda sample: 1, time.process_time
    else:
        loader = opened.loader(random, workers, batch_size)
        epoch = None if loader is None else cast(Any, loader).__iter__
        count_of, cpu_s = lambda batch: len(batch[0]), lambda: cpu_seconds(os.getpid())
    figures: dict[str, Any] = dict.fromkeys(STATES)
    if epoch is not None:
        drop(Path(base), how)
        figures = {state: measure(epoch, count_of, cpu_s) for state in STATES}
    return {**figures, "versions": {opened.package: metadata.version(opened.package)}}


if __name__ == "__main__":
    print(json.dumps(run(*json.loads(sys.argv[1]))), flush=True)
