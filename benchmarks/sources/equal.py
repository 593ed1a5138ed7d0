"""The same photographs through every dataset: are all batches equal, bit by bit?

    python -m benchmarks.sources.equal --photos DIR [--files 2000] [--remote]

Each dataset is read with no workers, with two workers, and from a saved state in the middle: without workers from the
state of two workers, and with two workers from the state of none. (The state of a stream needs the same number of
workers.) Images and targets of each batch are hashed. The expected batches are those of the files themselves; for
datasets of decoded squares, those of the same squares in memory; for a stream, which has the order of its archives,
those of the files in that order. ``--remote`` repeats everything over HTTP and S3 (`benchmarks.servers`).
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import gpuload as gl
from benchmarks.machine import versions
from benchmarks.peers.protocol import MEAN, STD
from benchmarks.photos import copy_photos, find_photos
from benchmarks.running import format_table, make_parser
from benchmarks.servers import serve_folder
from benchmarks.sources.stores import ARRAYS, STORES, InMemory, Stream, archives_in, labels_in, paths_in, squares, write
from gpuload import transforms as T

WAYS: Final = ("0 workers", "2 workers", "resumed by 0", "resumed by 2")


class Found(NamedTuple):
    """The result of one dataset.

    Attributes:
        equal: whether the batches are the expected ones, for each of `WAYS`; empty if there was an error.
        digest: the hash of all batches.
    """

    name: str
    where: str
    equal: tuple[bool, ...] = ()
    batches: int = 0
    digest: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def good(self) -> bool:
        return len(self.equal) == len(WAYS) and all(self.equal)


class Comparison:
    """A comparison of datasets of the same photographs.

    Args:
        base: the folder, laid out as in `stores`.
        size: the size of the crops.
    """

    def __init__(self, base: Path, batch_size: int = 64, size: int = 224) -> None:
        self._paths, self._labels, self._archives = paths_in(base), labels_in(base), archives_in(base)
        self._batch_size, self._size = batch_size, size
        self._half = len(self._paths) // batch_size // 2  # number of batches before states are saved
        self._digests: dict[tuple[str, int], list[bytes]] = {}

    def of(self, name: str, where: str, base: str, options: Mapping[str, Any]) -> Found:
        """Read the dataset of this name from `base` in all ways; `options` are fsspec's, used if `base` is a URL."""
        started = time.perf_counter()
        try:
            dataset = STORES[name].open(base, **({"storage_options": options} if "://" in base else {}))
            states: dict[int, Any] = {}
            digests = {workers: self._read(dataset, workers, states) for workers in (0, 2)}
            stream = not hasattr(dataset, "__getitem__")
            resumed = [self._read(dataset, w, {}, states[w if stream else 2 - w]) for w in (0, 2)]
        except Exception as error:
            return Found(name, where, error=f"{type(error).__name__}: {error}")
        kind = "stream" if stream else "squares" if name in ARRAYS else "files"
        expected = [self._expected(kind, workers) for workers in (0, 2)]
        equal = [digests[0] == expected[0], digests[2] == expected[1]]
        equal += [second_half == epoch[self._half :] for second_half, epoch in zip(resumed, expected, strict=True)]
        digest = hashlib.blake2b(b"".join(digests[0]), digest_size=6).hexdigest()
        return Found(name, where, tuple(equal), len(digests[0]), digest, time.perf_counter() - started)

    def _expected(self, kind: str, workers: int) -> list[bytes]:
        """Return the expected digests; only those of a stream depend on the number of workers."""
        key = kind, workers if kind == "stream" else 0
        if key not in self._digests:
            images = [squares(path.read_bytes()) for path in self._paths] if kind == "squares" else self._paths
            dataset = InMemory(images, self._labels)
            source = Stream(dataset, self._archives) if kind == "stream" else dataset
            self._digests[key] = self._read(source, key[1], {})
        return self._digests[key]

    def _read(self, dataset: Any, workers: int, states: dict[int, Any], state: Any = None) -> list[bytes]:
        """Return the digest of each batch from `state` on; save the state in the middle in ``states[workers]``."""
        steps = [T.RandomResizedCrop(self._size), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)]
        with gl.Loader(
            dataset,
            self._batch_size,
            shuffle=hasattr(dataset, "__getitem__"),
            transforms=steps,
            num_workers=workers,
            device="cpu",
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            digests = []
            for batch in loader:
                digests.append(_digest(batch))
                if len(digests) == self._half:
                    states[workers] = loader.state_dict()
        return digests


def _digest(batch: Any) -> bytes:
    """Hash all bits of the images and classes of a batch."""
    images, targets = batch
    if isinstance(targets, list):  # COCO's, with one box per photograph
        targets = torch.cat([target["labels"] for target in targets])
    digest = hashlib.blake2b(repr((tuple(images.shape), images.dtype)).encode(), digest_size=16)
    digest.update(images.contiguous().numpy().data)
    digest.update(targets.to(torch.int64).numpy().data)
    return digest.digest()


def _table(results: Sequence[Found]) -> str:
    rows = []
    for result in results:
        cells = ["equal" if same else "DIFFERENT" for same in result.equal] or ["error"] * len(WAYS)
        rows.append([result.name, result.where, *cells, str(result.batches), result.digest, f"{result.seconds:.0f}"])
    return format_table(["dataset", "where", *WAYS, "batches", "hash of all", "s"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Compare and report. Returns the exit status: 1 if batches differ or a dataset cannot be read."""
    parser = make_parser("sources.equal", __doc__, "photos", "cache", files=2000)
    parser.add_argument("--remote", action="store_true", help="also over HTTP (nginx) and S3 (rclone), on loopback")
    parser.add_argument("--only", help=f"datasets, separated by semicolons, from: {'; '.join(STORES)}")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.only.split(";")] if options.only else list(STORES)
    source, _ = find_photos(options.cache, options.photos)
    base = copy_photos(source, options.cache, options.files).parent
    write(base, names)
    comparison = Comparison(base)
    results = []
    with serve_folder(base) as servers:
        places = {"local": (str(base), {}), **(servers if options.remote else {})}
        for where, (url, storage_options) in places.items():
            for name in names if where == "local" else [name for name in names if STORES[name].is_remote]:
                results.append(comparison.of(name, where, url, storage_options))
                if results[-1].error:
                    print(f"{name}, {where}: {results[-1].error}")
    print(_table(results))
    if options.remote and len(places) < 3:
        print("a server is not installed: see benchmarks/servers.py")
    good = sum(result.good for result in results)
    print(f"{len(paths_in(base)):,} photographs of {source}: {good} of {len(results)} give equal batches")
    print(", ".join(f"{name} {number}" for name, number in versions().items()))
    return 0 if good == len(results) and (not options.remote or len(places) == 3) else 1


if __name__ == "__main__":
    sys.exit(main())
