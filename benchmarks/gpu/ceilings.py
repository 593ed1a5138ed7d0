"""What nothing on this device can be faster than: its copies, and each network on one batch that stays there.

python -m benchmarks.gpu.ceilings RECIPE PACE

Prints a line of JSON after each.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch

from benchmarks.augmentation.clocks import CpuClock, CudaClock, copy_bandwidth, upload_bandwidth
from benchmarks.gpu.feeding import measured, tell
from benchmarks.gpu.networks import training_step
from benchmarks.gpu.plan import NETWORKS, Pace
from benchmarks.gpu.runtime import Runtime
from benchmarks.peers.recipe import Recipe

__all__ = ["main"]


def main() -> None:
    recipe, pace = Recipe(**json.loads(sys.argv[1])), Pace(**json.loads(sys.argv[2]))
    runtime = Runtime(recipe.device)
    clock = CpuClock() if runtime.device.type == "cpu" else CudaClock()
    tell({"copy_gb_s": copy_bandwidth(runtime.device, clock) / 1e9})
    tell({"upload_gb_s": upload_bandwidth(runtime.device, clock) / 1e9})
    images = torch.randn(recipe.batch_size, 3, recipe.size, recipe.size, device=runtime.device)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    images = images.to(getattr(torch, recipe.dtype), memory_format=layout)
    labels = torch.arange(recipe.batch_size, device=runtime.device)
    for network in NETWORKS:
        step = training_step(network, runtime.device, small=pace.small, channels_last=recipe.channels_last)
        tell({network: measured(itertools.repeat((images, labels)), step, runtime, pace)})


if __name__ == "__main__":
    main()
