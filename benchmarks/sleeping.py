"""A dataset whose samples take time but hardly any CPU, and processes that only sleep for this time.

    python -m benchmarks.sleeping PROCESSES SAMPLES_PER_SLEEP

prints how many samples per second such processes finish together, without a loader. Workers import this module, so it
imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import gpuload as gl

__all__ = ["SAMPLE_MS", "SIDE", "SleepingImages", "sleep_alone"]

# The time that one of 15 workers takes to decode a photograph on an H200's host, and its coefficient of variation.
SAMPLE_MS, VARIATION = 1.93, 0.31
SIDE: Final = 32  # height and width of the images, in pixels
SECONDS: Final = 3.0  # how long the processes sleep


def draw_times(count: int) -> np.ndarray:
    """Return the time that each sample takes, in seconds, float64 (count,)."""
    return np.random.default_rng(0).gamma(VARIATION**-2, SAMPLE_MS / 1000 * VARIATION**2, count)


class SleepingImages:
    """A dataset of images and ints. A chunk sleeps once, for the time of all its samples."""

    def __init__(self, count: int) -> None:
        self.seconds = draw_times(count)
        self.image = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        time.sleep(float(self.seconds[np.asarray(indices)].sum()))
        return [(gl.Image(self.image), int(index)) for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


def sleep_alone(processes: int, chunk: int) -> float:
    """Return the samples per second of processes that only sleep, each for the time of `chunk` samples at once."""
    seconds = draw_times(1000 * chunk).reshape(-1, chunk).sum(axis=1)
    read_end, write_end = os.pipe()
    for number in range(processes):
        if os.fork() == 0:
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < SECONDS:
                time.sleep(float(seconds[(97 * number + count) % len(seconds)]))
                count += 1
            os.write(write_end, f"{count * chunk / (time.perf_counter() - start)}\n".encode())
            os._exit(0)
    os.close(write_end)
    with open(read_end) as rates:
        total = sum(map(float, rates))
    for _ in range(processes):
        os.wait()
    return total


if __name__ == "__main__":
    print(json.dumps({"samples_per_s": sleep_alone(*map(int, sys.argv[1:]))}))
