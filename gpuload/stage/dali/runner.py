"""Takes a batch through DALI: from the stage's memory, through a line of transforms, into the memory of the results.

Inputs are views that go to DALI through DLPack and are never copied; results are in DALI's memory and are copied once,
by torch, which also makes float16 and bfloat16 of them on the CPU. There a batch goes in pieces, so that the images
between two operators stay small: 39 MB for 64 of 224×224 as float32. Only the engine is kept from call to call; its
operators hold no images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from gpuload.stage.dali.engine import Engine, ndd, samples
from gpuload.stage.dali.images import Images
from gpuload.stage.dali.line import apply_program
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Flip

__all__ = ["DaliLate", "DaliLevels"]

PIECE: Final = 64  # images at once on the CPU


class DaliLevels:
    """Runs transforms that work on levels, and finishes the results.

    Args:
        engine: DALI on the device.
        finish: the end of the chain.
    """

    def __init__(self, engine: Engine, finish: Finish) -> None:
        self._engine = engine
        self._finish = finish

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late: Program | None,
    ) -> Program | None:
        with self._engine.running():
            step = PIECE if self._engine.on_cpu else len(images)
            for start in range(0, len(images), step):
                rows = np.arange(start, min(start + step, len(images)))
                windows = tuple(window[rows] for window in windows_tlhw)
                drawn = program if len(rows) == len(program) else program.take(rows)
                some = apply_program(Images.of_ragged(images.take(rows), windows[0]), drawn, windows)
                self._write(some, outputs[start : start + len(rows)], None if late is None else late.take(rows))
        return None

    def _write(self, images: Images, outputs: Outputs, late: Program | None) -> None:
        layout, finish = _layout(outputs), self._finish
        if finish.dtype == torch.uint8:
            finished = images.batch if layout == "HWC" else images.finished("CHW", ndd.uint8)
        else:
            direct = finish.dtype == torch.float16 and late is None and not self._engine.on_cpu
            mean = tuple(-b / a for a, b in zip(finish.scale, finish.bias, strict=True))
            std = tuple(1 / a for a in finish.scale)
            finished = images.finished(layout, ndd.float16 if direct else ndd.float32, mean, std)
        if late is not None:
            finished = apply_program(Images(finished), late, late.windows_tlhw).batch
        _copy(finished, outputs)


class DaliLate:
    """Erases and flips finished images in place.

    Args:
        engine: DALI on the device.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, outputs: Outputs, late: Program, partners: np.ndarray | None) -> None:
        rows = np.flatnonzero(_changed(late))
        step = PIECE if self._engine.on_cpu else max(len(rows), 1)
        with self._engine.running():
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                self._change([outputs[row] for row in some.tolist()], late.take(some))

    def _change(self, outputs: Sequence[torch.Tensor], late: Program) -> None:
        layout = _layout(outputs)
        views = [output if layout == "CHW" else output.permute(1, 2, 0) for output in outputs]
        given = ndd.as_batch([view.to(_worked(view.dtype)).contiguous() for view in views], layout=layout)
        _copy(apply_program(Images(given), late, late.windows_tlhw).batch, outputs)


def _layout(outputs: Outputs) -> str:
    """The layout of each result in memory."""
    return "HWC" if not outputs[0].is_contiguous() and outputs[0].permute(1, 2, 0).is_contiguous() else "CHW"


def _worked(dtype: torch.dtype) -> torch.dtype:
    """The dtype that DALI works on: float32 for floats, else the same."""
    return torch.float32 if dtype.is_floating_point else dtype


def _copy(batch: ndd.Batch, outputs: Outputs) -> None:
    """Copy results H×W×C or C×H×W to the outputs."""
    order = (2, 0, 1) if batch.layout == "HWC" else (0, 1, 2)
    if isinstance(outputs, torch.Tensor):
        outputs.copy_(batch.torch().permute(0, *(axis + 1 for axis in order)))
        return
    for output, sample in zip(outputs, samples(batch), strict=True):
        output.copy_(sample.torch().permute(order))


def _changed(late: Program) -> np.ndarray:
    """Which images are changed, bool (n,)."""
    found = np.zeros(len(late), np.bool_)
    for record in late.records:
        match record:
            case Flip():
                changed = record.flipped
            case Erase():
                changed = record.boxes_tlhw[:, :, 2].max(axis=1) > 0
            case _:
                continue
        found[slice(None) if record.rows is None else record.rows] |= changed
    return found
