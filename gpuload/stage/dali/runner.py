"""Applies programs to a batch with DALI, from the stage's input to the memory of the results.

Inputs are views that are passed to DALI through DLPack without a copy. Results are in DALI's memory; torch copies them
once, and converts them to float16 or bfloat16 if needed. Intermediate images are H×W×C uint8 images: a batch of 64 at
224×224 takes 10 MB, where float32 would take 39 MB that every operator reads and writes. The last operator converts
them to final values and planes. On the CPU, batches are processed in pieces, so that intermediate results stay small.
Only the engine is kept between batches; its operators keep no images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.dali.engine import Engine, evaluate, image_tensors, ndd
from gpuload.stage.dali.operators import apply_records, changes_only_colours, crop
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import CHANGES_PIXELS, Flip, Ops, Record

__all__ = ["DaliLevels", "make_batch"]

CPU_PIECE_IMAGES: Final = 64  # images processed at a time on the CPU


class DaliLevels:
    """A runner that applies records to levels, converts the levels to results, and applies the late records that follow
    directly."""

    def __init__(self, engine: Engine, finish: Finish) -> None:
        self._engine = engine
        self._options: dict[str, Any] = {"output_layout": "CHW", "dtype": ndd.uint8}
        if finish.dtype != torch.uint8:
            self._options["dtype"] = ndd.float32
            self._options["mean"] = [-b / a for a, b in zip(finish.scale, finish.bias, strict=True)]
            self._options["std"] = [1 / a for a in finish.scale]

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None,
    ) -> Program | None:
        with self._engine.activate():
            for rows in _split_rows(len(images), self._engine):
                windows = tuple(window[rows] for window in windows_tlhw)
                part = program if len(rows) == len(program) else program.take(rows)
                batch = make_batch(images.take(rows), windows[0])
                records, windows, mirrored = _split_last_flip(part, windows)
                batch = apply_records(batch, records, windows)
                # Without flipped images, the argument is omitted, because it costs time.
                options = {"mirror": ndd.as_batch(mirrored)} if mirrored.any() else {}
                batch = evaluate(ndd.crop_mirror_normalize(batch, **self._options, **options))
                if late_program is not None:
                    late_windows = tuple(window[rows] for window in late_program.windows_tlhw)
                    batch = apply_records(batch, late_program.take(rows).records, late_windows)
                _copy_results(batch, outputs[rows[0] : rows[-1] + 1])
        return None


def _split_rows(count: int, engine: Engine) -> Iterator[np.ndarray]:
    step = CPU_PIECE_IMAGES if engine.is_on_cpu else max(count, 1)
    for start in range(0, count, step):
        yield np.arange(start, min(start + step, count))


def _split_last_flip(
    program: Program, windows_tlhw: Sequence[np.ndarray]
) -> tuple[Sequence[Record], Sequence[np.ndarray], np.ndarray]:
    """Split off a horizontal flip after which only colours change: the operator that converts levels to results mirrors
    the images instead, in less time.

    Returns:
        The other records; their windows; and the images to mirror, int32 (n,).
    """
    records, mirrored = program.records, np.zeros(len(program), np.int32)
    for index in reversed(range(len(records))):
        record = records[index]
        if isinstance(record, Flip) and record.axis == 1:
            mirrored[slice(None) if record.rows is None else record.rows] = record.flipped
            # The windows before and after this flip are the same: complete results.
            return records[:index] + records[index + 1 :], windows_tlhw[:index] + windows_tlhw[index + 1 :], mirrored
        if isinstance(record, CHANGES_PIXELS) and not (isinstance(record, Ops) and changes_only_colours(record)):
            break
    return records, windows_tlhw, mirrored


def make_batch(images: RaggedImages, windows_tlhw: np.ndarray) -> ndd.Batch:
    """Make a DALI batch of windows of images. If the windows are the decoded regions, the batch consists of views of
    the images' memory."""
    assert images.steps is None
    corners = windows_tlhw - np.pad(images.regions_tlhw[:, :2], ((0, 0), (0, 2)))
    is_on_cpu = images.pixels.device.type == "cpu"
    views = []
    for offset, (height, width, channels), (top, left, rows, columns) in zip(
        images.offsets.tolist(), images.shapes.tolist(), corners.tolist(), strict=True
    ):
        image = images.pixels[offset : offset + height * width * channels].view(height, width, channels)
        # DALI reads only contiguous images. On the CPU, torch copies windows in a fifth of the time that DALI takes.
        views.append(image[top : top + rows, left : left + columns].contiguous() if is_on_cpu else image)
    batch = ndd.as_batch(views, layout="HWC")
    if is_on_cpu or np.array_equal(windows_tlhw, images.regions_tlhw):
        return batch
    return evaluate(crop(batch, corners))


def _copy_results(batch: ndd.Batch, outputs: Outputs) -> None:
    if isinstance(outputs, torch.Tensor):
        outputs.copy_(batch.torch())
        return
    for output, sample in zip(outputs, image_tensors(batch), strict=True):
        output.copy_(sample.torch())
