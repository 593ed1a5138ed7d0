"""Small rows in memory: samples a second, beside DataLoader in the same run.

    python -m benchmarks.rows [--workers 0,2] [--rounds 5] [--only KIND] [--json FILE]

Shuffled batches of 256, on the CPU. Each kind is one dataset object that both loaders get. A loader's workers live for
all rounds, and a round is one epoch of each loader, one after the other; the first round is not counted. Medians, and
the median of the rounds' ratios.

- tensors: torch's TensorDataset of 64 floats and a label; views: a Subset of one.
- array, pair: one array of 64 floats; such an array and its labels, in torch's StackDataset.
- list: a list of arrays.
- own, digits, small: a class of the user's own, with a numpy row and a label; of 64 floats, 1×28×28 and 3×96×96.
- many: the same class, of 64 floats, with `__getitems__`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.running import make_parser, write_json

BATCH: Final = 256
ROWS: Final = 60_000
KINDS: Final = ("tensors", "views", "array", "pair", "list", "own", "many", "digits", "small")
SHAPES: Final = {"digits": (1, 28, 28), "small": (3, 96, 96)}


class Rows:
    """Rows of an array, and labels."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.rows[index], int(self.labels[index])


class ManyRows(Rows):
    """The same, many at a time."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        return list(zip(self.rows[indices], self.labels[indices].tolist(), strict=True))


def dataset_of(kind: str, count: int = ROWS) -> Any:
    """The dataset of a kind."""
    import torch
    from torch.utils import data

    count = count if kind != "small" else count // 8
    rows = np.random.default_rng(0).random((count, *SHAPES.get(kind, (64,))), np.float32)
    labels = np.arange(count) % 10
    tensors = torch.from_numpy(rows), torch.from_numpy(labels)
    arrays: Any = rows, labels  # torch wants datasets, and takes arrays
    makers = {
        "tensors": lambda: data.TensorDataset(*tensors),
        "views": lambda: data.Subset(data.TensorDataset(*tensors), range(0, count, 2)),
        "array": lambda: rows,
        "pair": lambda: data.StackDataset(*arrays),
        "list": lambda: list(rows),
        "many": lambda: ManyRows(rows, labels),
    }
    return makers.get(kind, lambda: Rows(rows, labels))()


def loaders_of(dataset: Any, workers: int) -> dict[str, Any]:
    """gpuload's loader and torch's."""
    from torch.utils.data import DataLoader

    import gpuload as gl

    return {
        "gpuload": gl.Loader(dataset, BATCH, True, num_workers=workers, device="cpu", persistent_workers=True),
        "DataLoader": DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
    }


def rate(loader: Iterable[Any], count: int) -> float:
    """Samples a second, in one epoch."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return count / (time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all kinds, and print them."""
    parser = make_parser("rows", __doc__, "json", rounds=5)
    parser.add_argument("--workers", default="0,2", help="numbers of workers (default 0,2)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of a dataset (default {ROWS}; an eighth of 3×96×96)")
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, list[float]]] = {}
    print(f"{'samples/s, batch 256':22} {'gpuload':>12} {'DataLoader':>12} {'ratio':>8}")
    for kind in [options.only] if options.only else KINDS:
        for workers in map(int, options.workers.split(",")):
            dataset = dataset_of(kind, options.rows)
            loaders = loaders_of(dataset, workers)
            rates: dict[str, list[float]] = {name: [] for name in loaders}
            for number in range(options.rounds + 1):
                for name, loader in loaders.items():
                    found = rate(loader, len(dataset))
                    rates[name] += [found] if number else []
            loaders["gpuload"].close()
            results[f"{kind} {workers}"] = rates
            ours, theirs = (statistics.median(own) for own in rates.values())
            ratio = statistics.median(one / other for one, other in zip(*rates.values(), strict=True))
            print(f"{kind:10} {workers} workers {ours:15,.0f} {theirs:12,.0f} {ratio:8.2f}", flush=True)
            del loaders, dataset
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
