"""Takes a batch through DALI: from the stage's memory, through records, into the memory of the results.

Inputs are views that go to DALI through DLPack and are never copied; results are in DALI's memory and are copied once,
by torch, which also makes float16 and bfloat16 of them. On the way images are levels, uint8 H×W×C: a batch of 64 at
224×224 is 10 MB, where float32 would be 39 MB that every operator reads and writes. The operator at the end makes
numbers and planes of them. On the CPU a batch goes in pieces, so that what is between two operators stays small. Only
the engine is kept from call to call; its operators hold no images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.dali.engine import Engine, evaluated, ndd, samples
from gpuload.stage.dali.operators import apply_program, cut
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Flip

__all__ = ["DaliLate", "DaliLevels", "batch_of"]

PIECE: Final = 64  # images at once on the CPU


class DaliLevels:
    """Runs records that work on levels, and finishes the results."""

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
        on_finished: Program | None,
    ) -> Program | None:
        with self._engine.running():
            for rows in _pieces(np.arange(len(images)), self._engine):
                windows = tuple(window[rows] for window in windows_tlhw)
                records = program if len(rows) == len(program) else program.take(rows)
                batch = apply_program(batch_of(images.take(rows), windows[0]), records, windows)
                batch = evaluated(ndd.crop_mirror_normalize(batch, **self._options))
                if on_finished is not None:
                    batch = apply_program(
                        batch, on_finished.take(rows), tuple(w[rows] for w in on_finished.windows_tlhw)
                    )
                _copy(batch, outputs[rows[0] : rows[-1] + 1])
        return None


class DaliLate:
    """Erases and flips finished images in place."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, outputs: Outputs, on_finished: Program, partners: np.ndarray | None) -> None:
        with self._engine.running():
            for rows in _pieces(_changed_rows(on_finished), self._engine):
                changed = [outputs[row] for row in rows.tolist()]
                images = [image.float() if image.is_floating_point() else image for image in changed]
                batch = ndd.as_batch([image.contiguous() for image in images], layout="CHW")
                _copy(
                    apply_program(batch, on_finished.take(rows), tuple(w[rows] for w in on_finished.windows_tlhw)),
                    changed,
                )


def _pieces(rows: np.ndarray, engine: Engine) -> Iterator[np.ndarray]:
    step = PIECE if engine.on_cpu else max(len(rows), 1)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _changed_rows(on_finished: Program) -> np.ndarray:
    """Return the rows that a record flips, or erases a box of, int64."""
    changes = np.zeros(len(on_finished), np.bool_)
    for record in on_finished.records:
        rows = slice(None) if record.rows is None else record.rows
        if isinstance(record, Flip):
            changes[rows] |= record.flipped
        elif isinstance(record, Erase):
            changes[rows] |= record.boxes_tlhw[:, :, 2].any(axis=1)
    return np.flatnonzero(changes)


def batch_of(images: RaggedImages, windows_tlhw: np.ndarray) -> ndd.Batch:
    """Windows of images: views of their memory, if these are the whole decoded regions."""
    assert images.steps is None
    views = [
        images.pixels[offset : offset + height * width * channels].view(height, width, channels)
        for offset, (height, width, channels) in zip(images.offsets.tolist(), images.shapes.tolist(), strict=True)
    ]
    batch = ndd.as_batch(views, layout="HWC")
    if np.array_equal(windows_tlhw, images.regions_tlhw):
        return batch
    return evaluated(cut(batch, windows_tlhw - np.pad(images.regions_tlhw[:, :2], ((0, 0), (0, 2)))))


def _copy(batch: ndd.Batch, outputs: Outputs) -> None:
    if isinstance(outputs, torch.Tensor):
        outputs.copy_(batch.torch())
        return
    for output, sample in zip(outputs, samples(batch), strict=True):
        output.copy_(sample.torch())
