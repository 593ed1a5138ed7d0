"""NVIDIA DALI: its file reader, its decoder of random crops, resize, and crop-mirror-normalize.

The arrangement is that of DALI's own ImageNet training example, on the recipe's device; `variant` ``"mixed"`` decodes
on the GPU, any other on the CPU. `num_threads` takes the place of workers. With the dynamic executor, batches are
handed to torch without a copy.
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
def training(recipe: Recipe):
    encoded, labels = fn.readers.file(file_root=recipe.root, random_shuffle=True, name="reader")
    images = fn.decoders.image_random_crop(
        encoded,
        device="mixed" if recipe.variant == "mixed" else "cpu",
        output_type=types.RGB,
        random_aspect_ratio=[3 / 4, 4 / 3],
        random_area=[0.08, 1.0],
        num_attempts=10,
    )
    if recipe.device != "cpu":
        images, labels = images.gpu(), labels.gpu()
    images = fn.resize(images, size=[recipe.size] * 2, interp_type=types.INTERP_LINEAR, antialias=True)
    if recipe.jitter:
        brightness, contrast, saturation = (
            fn.random.uniform(range=[1 - recipe.jitter, 1 + recipe.jitter]) for _ in range(3)
        )
        images = fn.color_twist(images, brightness=brightness, contrast=contrast, saturation=saturation)
    images = fn.crop_mirror_normalize(
        images,
        dtype={"float32": types.FLOAT, "float16": types.FLOAT16}[recipe.dtype],
        output_layout="HWC" if recipe.channels_last else "CHW",
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
        mirror=fn.random.coin_flip(),
    )
    return images, labels


def build(recipe: Recipe) -> Peer:
    pipeline = training(
        recipe,
        batch_size=recipe.batch_size,
        num_threads=recipe.workers,
        device_id=None if recipe.device == "cpu" else torch.device(recipe.device).index or 0,
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
            images, labels = batch["data"], batch["label"].squeeze(-1).long()
            if recipe.channels_last:
                images = images.permute(0, 3, 1, 2)
            yield images, labels

    return Peer(epoch, {"dali": dali.__version__})


if __name__ == "__main__":
    main(build)
