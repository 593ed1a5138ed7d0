"""NVIDIA DALI: pipelines of the recipe, of arrays in memory, and of entire images.

DALI has `num_threads` instead of workers. With its dynamic executor, batches are passed to torch without a copy.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# (DALI creates its operators and constants at run time.)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import nvidia.dali as DALI
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from benchmarks.peers.gpuload import Arrays
from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe

Batches = Iterator[tuple[Any, torch.Tensor]]
VERSIONS = {"dali": DALI.__version__}


def build_pipeline(recipe: Recipe, definition: Any, argument: Any, **options: Any) -> Any:
    """Build a pipeline on the recipe's device."""
    pipeline = pipeline_def(definition)(
        argument,
        batch_size=recipe.batch_size,
        num_threads=recipe.workers,
        device_id=None if recipe.device == "cpu" else torch.device(recipe.device).index or 0,
        prefetch_queue_depth=2,
        exec_dynamic=True,
        seed=0,
        **options,
    )
    pipeline.build()
    return pipeline


def iterator_of(pipeline: Any, **length: Any) -> DALIGenericIterator:
    """Make an iterator over epochs of full batches, as dictionaries."""
    return DALIGenericIterator(
        pipeline,
        ["data", "label"],
        last_batch_policy=LastBatchPolicy.DROP,
        auto_reset=True,
        prepare_first_batch=False,  # so that the time to the first batch counts from iter(), as for other peers
        **length,
    )


def training(recipe: Recipe) -> Any:
    """Define the pipeline like DALI's own ImageNet training example."""
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
        strengths = [1 - recipe.jitter, 1 + recipe.jitter]
        brightness, contrast, saturation = (fn.random.uniform(range=strengths) for _ in range(3))
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


def dali(recipe: Recipe) -> Peer:
    """Build DALI's file reader, random-crop decoder, resize, and crop-mirror-normalize. The variant ``"mixed"`` decodes
    on the GPU, any other on the CPU."""
    loader = iterator_of(build_pipeline(recipe, training, recipe), reader_name="reader")

    def epoch() -> Batches:
        for (batch,) in loader:
            images, labels = batch["data"], batch["label"].squeeze(-1).long()
            yield images.permute(0, 3, 1, 2) if recipe.channels_last else images, labels

    return Peer(epoch, VERSIONS)


class Shuffled:
    """A source of shuffled arrays, which DALI calls for each sample."""

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


def external(source: Shuffled) -> Any:
    outputs: dict[str, Any] = {"num_outputs": 2, "dtype": [types.UINT8, types.INT64]}
    return tuple(fn.external_source(source=source, batch=False, parallel=True, prefetch_queue_depth=2, **outputs))


def arrays_dali(recipe: Recipe) -> Peer:
    """Build DALI's external source, read by as many processes as other peers have workers."""
    source = Shuffled(Arrays(recipe.samples, recipe.size), recipe.batch_size)
    pipeline = build_pipeline(recipe, external, source, py_num_workers=recipe.workers, py_start_method="fork")
    loader = iterator_of(pipeline, size=source.samples)
    return Peer(lambda: ((batch["data"], batch["label"].reshape(-1)) for (batch,) in loader), VERSIONS, levels=True)


def whole_images(root: str) -> Any:
    encoded, labels = fn.readers.file(file_root=root, random_shuffle=True, name="reader")
    return fn.decoders.image(encoded, device="cpu", output_type=types.RGB), labels


def whole_dali(recipe: Recipe) -> Peer:
    """Build DALI's file reader and its decoder; a batch is a list of tensors H×W×C."""
    pipeline = build_pipeline(recipe, whole_images, recipe.root)

    def epoch() -> Batches:
        for _ in range(pipeline.reader_meta("reader")["epoch_size"] // recipe.batch_size):
            images, labels = pipeline.run()
            yield list(map(torch.from_dlpack, images)), torch.from_dlpack(labels.as_tensor()).squeeze(-1).long()

    return Peer(epoch, VERSIONS, levels=True)
