"""Applies programs to a batch with DALI, from the stage's input to the memory of the results.

Inputs are views that are passed to DALI through DLPack without a copy, or with one if they are windows of larger
images. Results are in DALI's memory, because no operator takes an output; torch copies them once, and converts them to
float16 or bfloat16 if needed. Intermediate images are H×W×C uint8 images: a batch of 64 at 224×224 takes 10 MB, where
float32 would take 39 MB that every operator reads and writes. The last operator, `crop_mirror_normalize`, converts them
to final values and planes, and mirrors images. On the CPU, batches are processed in pieces, so that intermediate
results stay small. Only the engine is kept between batches; its operators keep no images.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.dali.engine import DaliEngine, evaluate, ndd
from gpuload.stage.dali.operators import apply_records, commutes_with_flips
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import CHANGES_PIXELS, Flip, Ops, Record

__all__ = ["DaliLevels", "make_batch"]

CPU_PIECE_IMAGES: Final = 64  # images processed at a time on the CPU


class DaliLevels:
    """A runner that applies records to levels, converts the levels to results, and applies the late records that follow
    directly."""

    def __init__(self, engine: DaliEngine, finish: Finish) -> None:
        self._engine = engine
        self._options: dict[str, Any] = {
            "output_layout": "CHW",
            "dtype": ndd.uint8 if finish.dtype == torch.uint8 else ndd.float32,
            "mean": [-b / a for a, b in zip(finish.scale, finish.bias, strict=True)],
            "std": [1 / a for a in finish.scale],
        }

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None,
    ) -> Program | None:
        with self._engine.activate():
            step = CPU_PIECE_IMAGES if self._engine.is_on_cpu else len(images)
            for start in range(0, len(images), step):
                rows = np.arange(start, min(start + step, len(images)))
                windows = [window[rows] for window in windows_tlhw]
                batch = make_batch(images.take(rows), windows[0])
                records = [*program.take(rows).records]
                mirrored = _remove_last_flip(records, windows)
                batch = apply_records(batch, records, windows)
                mirror = {"mirror": ndd.as_batch(mirrored)} if mirrored.any() else {}  # takes time even if it is 0
                batch = evaluate(ndd.crop_mirror_normalize(batch, **self._options, **mirror))
                if late_program is not None:
                    late_windows = tuple(window[rows] for window in late_program.windows_tlhw)
                    batch = apply_records(batch, late_program.take(rows).records, late_windows)
                _copy_results(batch, outputs[start : start + len(rows)])
        return None


def _remove_last_flip(records: list[Record], windows_tlhw: list[np.ndarray]) -> np.ndarray:
    """Remove a horizontal flip after which only colours change, and return which images it mirrors, int32 (n,). They
    are mirrored at the end instead, which takes less time."""
    mirrored = np.zeros(len(windows_tlhw[0]), np.int32)
    for index in reversed(range(len(records))):
        record = records[index]
        if (windows_tlhw[index] != windows_tlhw[-1]).any():
            break  # the flip would mirror another window
        if isinstance(record, Flip) and record.axis == 1:
            mirrored[slice(None) if record.rows is None else record.rows] = record.flipped
            del records[index], windows_tlhw[index]
            break
        if isinstance(record, CHANGES_PIXELS) and not (isinstance(record, Ops) and commutes_with_flips(record)):
            break
    return mirrored


def make_batch(images: RaggedImages, windows_tlhw: np.ndarray) -> ndd.Batch:
    """Make a DALI batch of windows of images, as views of the images' memory where they are contiguous."""
    assert images.steps is None
    corners, views = windows_tlhw[:, :2] - images.regions_tlhw[:, :2], []
    for offset, shape, (top, left), (height, width) in zip(
        images.offsets.tolist(), images.shapes.tolist(), corners.tolist(), windows_tlhw[:, 2:].tolist(), strict=True
    ):
        image = images.pixels[offset : offset + prod(shape)].view(shape)
        # DALI reads only contiguous images. On the CPU, torch copies a window five times as fast as DALI's `slice`.
        views.append(image[top : top + height, left : left + width].contiguous())
    return ndd.as_batch(views, layout="HWC")


def _copy_results(batch: ndd.Batch, outputs: Outputs) -> None:
    if isinstance(outputs, torch.Tensor):
        outputs.copy_(batch.torch())
        return
    # The tensors of `Batch.tensors` and the batch would reference each other until the next garbage collection.
    for row, output in enumerate(outputs):
        output.copy_(ndd.Tensor(batch.evaluate()._storage[row]).torch())
