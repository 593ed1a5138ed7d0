"""NVIDIA DALI on the CPU: its file reader, its decoder of random crops, resize, and crop-mirror-normalize.

The arrangement is that of DALI's own ImageNet training example, with every operator on the CPU. `num_threads` takes the
place of workers. With the dynamic executor, batches are handed to torch without a copy.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# (DALI makes its operators and constants at run time.)

from __future__ import annotations

from collections.abc import Iterator

import nvidia.dali as dali
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator

from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe, main


@pipeline_def
def training(root: str, size: int):
    encoded, labels = fn.readers.file(file_root=root, random_shuffle=True, name="reader")
    images = fn.decoders.image_random_crop(
        encoded,
        device="cpu",
        output_type=types.RGB,
        random_aspect_ratio=[3 / 4, 4 / 3],
        random_area=[0.08, 1.0],
        num_attempts=10,
    )
    images = fn.resize(images, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=True)
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
        mirror=fn.random.coin_flip(),
    )
    return images, labels


def build(recipe: Recipe) -> Peer:
    pipeline = training(
        recipe.root,
        recipe.size,
        batch_size=recipe.batch_size,
        num_threads=recipe.workers,
        device_id=None,
        prefetch_queue_depth=2,
        exec_dynamic=True,
        seed=0,
    )
    pipeline.build()
    loader = DALIClassificationIterator(
        pipeline,
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.DROP,
        auto_reset=True,
        prepare_first_batch=False,  # so that the time to the first batch is counted from iter(), as for the others
    )

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for (batch,) in loader:
            yield batch["data"], batch["label"].squeeze(-1).long()

    return Peer(epoch, {"dali": dali.__version__})


if __name__ == "__main__":
    main(build)
