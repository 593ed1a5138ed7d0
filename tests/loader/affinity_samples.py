"""A dataset whose samples say on which CPUs and in which process they are read."""

from __future__ import annotations

import os
import signal

import numpy as np


class AffinitySamples:
    """Eight samples; the first read of sample 3 kills its worker if `marker` is a path, and makes that file."""

    def __init__(self, marker: str = "") -> None:
        self.marker = marker

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        if index == 3 and self.marker and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros((4, 4, 3), np.uint8), sum(1 << cpu for cpu in os.sched_getaffinity(0)), os.getpid()
