"""Small rows in memory: samples per second of gpuload and of DataLoader in the same run.

    python -m benchmarks.rows [--workers 0,2] [--rounds 5] [--only KIND] [--json FILE]

Batches of 256 are shuffled, on the CPU. Each kind is one dataset object that both loaders share. A loader's workers
persist through all rounds. A round is one epoch of each loader, one after the other; the first round is not counted.
The output shows medians, and the median of the ratios within rounds.

- tensors: torch's TensorDataset, rows of 64 floats and a label; views: a Subset of a TensorDataset.
- array: one array, rows of 64 floats; pair: such an array and its labels in torch's StackDataset.
- list: a list of arrays.
- own, digits, small: a user-defined class that returns a numpy row and a label; 64 floats, 1×28×28 and 3×96×96.
- many: the same class, with rows of 64 floats and `__getitems__`.
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
    """A dataset of array rows and labels."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.rows[index], int(self.labels[index])


class ManyRows(Rows):
    """A dataset like `Rows`, with `__getitems__`, which returns many rows at a time."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        return list(zip(self.rows[indices], self.labels[indices].tolist(), strict=True))


def build_dataset(kind: str, count: int = ROWS) -> Any:
    """Build the dataset of a kind."""
    import torch
    from torch.utils import data

    count = count if kind != "small" else count // 8
    rows = np.random.default_rng(0).random((count, *SHAPES.get(kind, (64,))), np.float32)
    labels = np.arange(count) % 10
    tensors = torch.from_numpy(rows), torch.from_numpy(labels)
    arrays: Any = rows, labels  # torch's annotation is Dataset, but torch accepts arrays
    makers = {
        "tensors": lambda: data.TensorDataset(*tensors),
        "views": lambda: data.Subset(data.TensorDataset(*tensors), range(0, count, 2)),
        "array": lambda: rows,
        "pair": lambda: data.StackDataset(*arrays),
        "list": lambda: list(rows),
        "many": lambda: ManyRows(rows, labels),
    }
    return makers.get(kind, lambda: Rows(rows, labels))()


def build_loaders(dataset: Any, workers: int) -> dict[str, Any]:
    """Build gpuload's loader and torch's."""
    from torch.utils.data import DataLoader

    import gpuload as gl

    return {
        "gpuload": gl.Loader(dataset, BATCH, True, num_workers=workers, device="cpu", persistent_workers=True),
        "DataLoader": DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
    }


def measure_rate(loader: Iterable[Any], count: int) -> float:
    """Run one epoch and return the samples per second."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return count / (time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all kinds and print the results. Return the exit status 0."""
    parser = make_parser("rows", __doc__, "json", rounds=5)
    parser.add_argument("--workers", default="0,2", help="numbers of workers (default 0,2)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows per dataset (default {ROWS}; 3×96×96: an eighth)")
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, list[float]]] = {}
    print(f"{'samples/s, batch 256':22} {'gpuload':>12} {'DataLoader':>12} {'ratio':>8}")
    for kind in [options.only] if options.only else KINDS:
        for workers in map(int, options.workers.split(",")):
            dataset = build_dataset(kind, options.rows)
            loaders = build_loaders(dataset, workers)
            rates: dict[str, list[float]] = {name: [] for name in loaders}
            for round_index in range(options.rounds + 1):
                for name, loader in loaders.items():
                    samples_per_s = measure_rate(loader, len(dataset))
                    rates[name] += [samples_per_s] if round_index else []
            loaders["gpuload"].close()
            results[f"{kind} {workers}"] = rates
            gpuload_rate, torch_rate = map(statistics.median, rates.values())
            ratio = statistics.median(
                gpuload_samples_per_s / torch_samples_per_s
                for gpuload_samples_per_s, torch_samples_per_s in zip(*rates.values(), strict=True)
            )
            print(f"{kind:10} {workers} workers {gpuload_rate:15,.0f} {torch_rate:12,.0f} {ratio:8.2f}", flush=True)
            del loaders, dataset
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
