"""Applies programs to a batch with DALI, from the stage's input to the memory of the results.

Inputs are views that are passed to DALI through DLPack without a copy. Results are in DALI's memory; torch copies them
once, and converts them to float16 or bfloat16 if needed. Intermediate images are H×W×C uint8 images: a batch of 64 at
224×224 takes 10 MB, where float32 would take 39 MB that every operator reads and writes. The last operator converts
them to final values and planes. On the CPU, batches are processed in pieces, so that intermediate results stay small.
Only the engine is kept between batches; its operators keep no images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.dali.engine import Engine, evaluate, image_tensors, ndd
from gpuload.stage.dali.operators import apply_program, crop
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Flip

__all__ = ["DaliLate", "DaliLevels", "make_batch"]

CPU_PIECE_IMAGES: Final = 64  # images processed at a time on the CPU


class DaliLevels:
    """A runner that applies records to levels, and converts the levels to results."""

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
            for rows in _split_rows(np.arange(len(images)), self._engine):
                windows = tuple(window[rows] for window in windows_tlhw)
                records = program if len(rows) == len(program) else program.take(rows)
                batch = apply_program(make_batch(images.take(rows), windows[0]), records, windows)
                batch = evaluate(ndd.crop_mirror_normalize(batch, **self._options))
                if late_program is not None:
                    batch = apply_program(
                        batch, late_program.take(rows), tuple(window[rows] for window in late_program.windows_tlhw)
                    )
                _copy_results(batch, outputs[rows[0] : rows[-1] + 1])
        return None


class DaliLate:
    """A runner that erases and flips finished images in place."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, outputs: Outputs, late_program: Program, partners: np.ndarray | None) -> None:
        with self._engine.activate():
            for rows in _split_rows(_changed_rows(late_program), self._engine):
                targets = [outputs[row] for row in rows.tolist()]
                images = [image.float() if image.is_floating_point() else image for image in targets]
                batch = ndd.as_batch([image.contiguous() for image in images], layout="CHW")
                _copy_results(
                    apply_program(
                        batch, late_program.take(rows), tuple(window[rows] for window in late_program.windows_tlhw)
                    ),
                    targets,
                )


def _split_rows(rows: np.ndarray, engine: Engine) -> Iterator[np.ndarray]:
    step = CPU_PIECE_IMAGES if engine.is_on_cpu else max(len(rows), 1)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _changed_rows(late_program: Program) -> np.ndarray:
    """Return the batch indices of the images that a record flips or erases boxes in, int64."""
    changes = np.zeros(len(late_program), np.bool_)
    for record in late_program.records:
        rows = slice(None) if record.rows is None else record.rows
        if isinstance(record, Flip):
            changes[rows] |= record.flipped
        elif isinstance(record, Erase):
            changes[rows] |= record.boxes_tlhw[:, :, 2].any(axis=1)
    return np.flatnonzero(changes)


def make_batch(images: RaggedImages, windows_tlhw: np.ndarray) -> ndd.Batch:
    """Make a DALI batch of windows of images. If the windows are the decoded regions, the batch consists of views of
    the images' memory."""
    assert images.steps is None
    views = [
        images.pixels[offset : offset + height * width * channels].view(height, width, channels)
        for offset, (height, width, channels) in zip(images.offsets.tolist(), images.shapes.tolist(), strict=True)
    ]
    batch = ndd.as_batch(views, layout="HWC")
    if np.array_equal(windows_tlhw, images.regions_tlhw):
        return batch
    return evaluate(crop(batch, windows_tlhw - np.pad(images.regions_tlhw[:, :2], ((0, 0), (0, 2)))))


def _copy_results(batch: ndd.Batch, outputs: Outputs) -> None:
    if isinstance(outputs, torch.Tensor):
        outputs.copy_(batch.torch())
        return
    for output, sample in zip(outputs, image_tensors(batch), strict=True):
        output.copy_(sample.torch())
