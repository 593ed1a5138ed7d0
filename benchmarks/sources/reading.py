"""One reader, in a process of its own: ``python -m benchmarks.sources.reading TASK``, with the task as JSON.

Two epochs, the first with an empty page cache ("cold"), the second after it ("warm"):

- "raw": the bytes of the files, in this one process, read by what a worker reads them with: in chunks of 32, of which
  the next one is named to the kernel while they come from the disk. None is kept. Decoded squares are copied once, as
  to a slot.
- "decoded": batches of the training recipe from a loader with workers. The cold epoch is the first of a new loader, so
  the start of its workers is in it; the warm one is the next.

The reader "memcpy" copies squares of a mapped array by numpy, one by one; it has no loader.

Prints one line of JSON, the last on its standard output.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from benchmarks.peers.recipe import MEAN, STD
from benchmarks.sources.pages import Drop, bytes_from_disk, drop
from benchmarks.sources.stores import ARRAYS, STORES, order
from gpuload.cli.processes import cpu_seconds
from gpuload.datasets.kinds import row_bytes
from gpuload.datasets.worker import THIS_PROCESS
from gpuload.workers.protocol import Request
from gpuload.workers.source import Source

__all__ = ["LEVELS", "MEMCPY", "NATIVE", "ORDERS", "STATES", "Task", "main"]

LEVELS: Final = ("raw", "decoded")
ORDERS: Final = ("in order", "random")
STATES: Final = ("cold", "warm")
MEMCPY: Final = "memcpy"
NATIVE: Final = {  # other libraries' readers, and what they import
    "torchvision ImageFolder": "torchvision",
    "WebDataset": "webdataset",
    "Hugging Face datasets": "datasets",
    "LitData": "litdata",
    "Mosaic Streaming": "streaming",
}
CHUNK: Final = 32
RING: Final = 6 * CHUNK  # squares that copies go to, in turn: as many as slots hold for two workers


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be measured: a reader of `stores.STORES`, of `natives.NATIVES`, or `MEMCPY`.

    Attributes:
        base: the folder, as `stores` lays it out.
        level: which of `LEVELS`.
        how: how the page cache is emptied.
    """

    reader: str
    base: str
    workers: int
    batch_size: int
    level: str
    random: bool
    how: Drop

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Own:
    """gpuload's dataset of a store."""

    package = "gpuload"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.open: Callable[[], Any] = lambda: STORES[task.reader].open(task.base)

    def raw(self, random: bool) -> Callable[[], Iterator[int]] | None:
        dataset = self.open()
        if not hasattr(dataset, "__getitem__"):
            return None if random else lambda: (len(image.data) for image, _ in dataset)
        numbers = order(len(dataset), random)
        if self.task.reader in ARRAYS:
            return lambda: _copied(dataset, numbers)
        return lambda: (len(sample[0].data) for sample in _as_worker(dataset, numbers))

    def loader(self, random: bool, workers: int, batch_size: int) -> Iterable[Any] | None:
        import gpuload as gl
        from gpuload import transforms as T

        dataset = self.open()
        if not hasattr(dataset, "__getitem__"):
            if random:
                return None
            random = False
        steps = [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)]
        return gl.Loader(dataset, batch_size, shuffle=random, transforms=steps, num_workers=workers, device="cpu")


def _as_worker(dataset: Any, numbers: list[int]) -> Iterator[Any]:
    chunks = [np.array(numbers[at : at + CHUNK]) for at in range(0, len(numbers), CHUNK)]
    requests = [Request(0, 0, 0, 0, chunk, chunk) for chunk in chunks]
    source = Source(dataset, 0)
    for request, following in zip(requests, [*requests[1:], None], strict=True):
        if source.reads_ahead:
            source.will_need(following)
        yield from map(source.open(request), range(len(request.indices)))


class Memcpy:
    """What any reader of decoded squares has to do at least: copy each once from the page cache."""

    package = "numpy"

    def __init__(self, task: Task) -> None:
        self.path = f"{task.base}/stores/pixels.npy"

    def raw(self, random: bool) -> Callable[[], Iterator[int]]:
        pixels = np.load(self.path, mmap_mode="r")
        numbers = order(len(pixels), random)

        def epoch() -> Iterator[int]:
            ring = _ring(pixels.shape[1:])
            for at, number in enumerate(numbers):
                ring[at % RING] = pixels[number]
                yield ring[0].nbytes

        return epoch

    def loader(self, random: bool, workers: int, batch_size: int) -> None:
        return None


_rings: dict[tuple[int, ...], np.ndarray] = {}


def _ring(shape: tuple[int, ...]) -> np.ndarray:
    """Memory that has been written to."""
    if shape not in _rings:
        _rings[shape] = np.ones((RING, *shape), np.uint8)
    return _rings[shape]


def _copied(dataset: Any, numbers: list[int]) -> Iterator[int]:
    """Squares, copied as workers copy them to slots: rows of the file where they may be."""
    at, ring = 0, None
    for start in range(0, len(numbers), CHUNK):
        chunk = numbers[start : start + CHUNK]
        if row_bytes(dataset):
            arrays = map(dataset._image_rows(chunk).__getitem__, chunk)
        else:
            arrays = (image.hwc for image, _ in dataset.__getitems__(chunk))
        for array in arrays:
            ring = _ring(array.shape) if ring is None else ring
            ring[at % RING] = array
            at += 1
            yield array.nbytes


def measure(epoch: Callable[[], Iterable[Any]], count_of: Callable[[Any], int], cpu_s: Callable[[], float]) -> Any:
    """Run an epoch: its rate, CPU time, and what came from the disk meanwhile."""
    disk, cpu, started = bytes_from_disk(), cpu_s(), time.perf_counter()
    count = sum(map(count_of, epoch()))
    wall_s = time.perf_counter() - started
    return {
        "images": count,
        "images_per_s": count / wall_s,
        "cpu_us": 1e6 * (cpu_s() - cpu) / count,
        "disk_mb": (bytes_from_disk() - disk) / 1e6,
    }


def run(task: Task) -> dict[str, Any]:
    """Two epochs, a cold one and a warm one; None for both where the reader has none of that kind."""
    if task.reader == MEMCPY:
        reader: Any = Memcpy(task)
    elif task.reader in STORES:
        reader = Own(task)
    else:
        if importlib.util.find_spec(NATIVE[task.reader]) is None:
            raise ModuleNotFoundError(f"{NATIVE[task.reader]} is not installed")
        from benchmarks.sources.natives import NATIVES

        reader = NATIVES[task.reader](Path(task.base))
        reader.write()
    if task.level == "raw":
        THIS_PROCESS.is_worker = True
        epoch, count_of, cpu_s = reader.raw(task.random), lambda nbytes: 1, time.process_time
    else:
        loader = reader.loader(task.random, task.workers, task.batch_size)
        epoch = None if loader is None else cast(Any, loader).__iter__
        count_of, cpu_s = lambda batch: len(batch[0]), lambda: cpu_seconds(os.getpid())
    found: dict[str, Any] = dict.fromkeys(STATES)
    if epoch is not None:
        drop(Path(task.base), task.how)
        found = {state: measure(epoch, count_of, cpu_s) for state in STATES}
    return {**found, "versions": {reader.package: metadata.version(reader.package)}}


def main() -> None:
    print(json.dumps(run(Task(**json.loads(sys.argv[1])))), flush=True)


if __name__ == "__main__":
    main()
