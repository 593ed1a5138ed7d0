"""NVIDIA DALI on the CPU over whole images: its file reader and its decoder, the batch as a list of tensors H×W×C.

With the dynamic executor these are handed to torch without a copy. `num_threads` takes the place of workers.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# (DALI makes its operators and constants at run time.)

from __future__ import annotations

from collections.abc import Iterator

import nvidia.dali as dali
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import pipeline_def

from benchmarks.peers.protocol import Peer, Recipe, main


@pipeline_def
def whole(root: str):
    encoded, labels = fn.readers.file(file_root=root, random_shuffle=True, name="reader")
    return fn.decoders.image(encoded, device="cpu", output_type=types.RGB), labels


def build(recipe: Recipe) -> Peer:
    pipeline = whole(
        recipe.root,
        batch_size=recipe.batch_size,
        num_threads=recipe.workers,
        device_id=None,
        prefetch_queue_depth=2,
        exec_dynamic=True,
        seed=0,
    )
    pipeline.build()
    batches = pipeline.reader_meta("reader")["epoch_size"] // recipe.batch_size

    def epoch() -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        for _ in range(batches):
            images, labels = pipeline.run()
            yield (
                [torch.from_dlpack(image) for image in images],
                torch.from_dlpack(labels.as_tensor()).squeeze(-1).long(),
            )

    return Peer(epoch, {"dali": dali.__version__})


if __name__ == "__main__":
    main(build, torch.uint8)
