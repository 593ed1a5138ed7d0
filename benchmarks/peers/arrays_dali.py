"""NVIDIA DALI over arrays in memory: its external source, read by as many processes as the others have workers."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# (DALI makes its operators and constants at run time.)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import nvidia.dali as dali
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from benchmarks.peers.arrays import Arrays
from benchmarks.peers.protocol import Peer, Recipe, main


class Shuffled:
    """What DALI asks for each sample."""

    def __init__(self, arrays: Arrays, batch_size: int) -> None:
        self.arrays = arrays
        self.samples = len(arrays) // batch_size * batch_size
        self.order = np.empty(0, np.int64)
        self.epoch = -1

    def __call__(self, info: Any) -> tuple[np.ndarray, np.ndarray]:
        if info.idx_in_epoch >= self.samples:
            raise StopIteration
        if info.epoch_idx != self.epoch:
            self.epoch = info.epoch_idx
            self.order = np.random.default_rng(self.epoch).permutation(len(self.arrays))
        image, label = self.arrays[int(self.order[info.idx_in_epoch])]
        return image, np.array([label], np.int64)


@pipeline_def
def arrays(source: Shuffled):
    images, labels = fn.external_source(
        source=source,
        num_outputs=2,
        batch=False,
        parallel=True,
        prefetch_queue_depth=2,
        dtype=[types.UINT8, types.INT64],
    )
    return images, labels


def build(recipe: Recipe) -> Peer:
    source = Shuffled(Arrays(recipe.samples, recipe.size), recipe.batch_size)
    pipeline = arrays(
        source,
        batch_size=recipe.batch_size,
        num_threads=recipe.workers,
        device_id=None,
        py_num_workers=recipe.workers,
        py_start_method="fork",
        prefetch_queue_depth=2,
        exec_dynamic=True,
    )
    pipeline.build()
    loader = DALIGenericIterator(
        pipeline,
        ["data", "label"],
        size=source.samples,
        last_batch_policy=LastBatchPolicy.DROP,
        auto_reset=True,
        prepare_first_batch=False,
    )

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for (batch,) in loader:
            yield batch["data"], batch["label"].reshape(-1)

    return Peer(epoch, {"dali": dali.__version__})


if __name__ == "__main__":
    main(build, torch.uint8)
