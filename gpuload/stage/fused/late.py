"""The fused backend on finished images: mixed in place by one kernel for all pairs, erased in place where that comes
behind mixing. (Erasing that comes first is part of the pass that makes the images.)

Runs in the process of the stage, on the current stream; nothing is kept.
"""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.finish import UNCHANGED
from gpuload.stage.finished import Outputs, neighbours
from gpuload.stage.fused.erasing import erase_images
from gpuload.stage.fused.mixing import mix
from gpuload.stage.fused.runner import FusedRunner
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms import Draws, RandomErasing
from gpuload.transforms.base import Standing
from gpuload.transforms.mixing import drawn_mix
from gpuload.transforms.program.ops import Branches, Erase

__all__ = ["apply", "trial"]


def apply(outputs: Outputs, late: Draws, partners: np.ndarray | None) -> None:
    """Apply what was drawn to finished images; arguments as for `gpuload.stage.finished.apply_late`."""
    _line(outputs, late, np.arange(len(late), dtype=np.int64), partners)


def _line(outputs: Outputs, late: Draws, rows: np.ndarray, partners: np.ndarray | None) -> None:
    """The same, for some of the images."""
    for number, (transform, params) in enumerate(zip(late.transforms, late.params, strict=True)):
        if transform.mixes:  # all images of a batch, or none
            drawn = drawn_mix(Draws((transform,), (params,), late.sizes_hw[number : number + 2]))
            if drawn is not None:
                mix(outputs, drawn, neighbours(len(rows)) if partners is None else partners)
        elif isinstance(params, Erase):
            assert isinstance(transform, RandomErasing)
            erase_images(outputs, rows, params, transform)
        elif isinstance(params, Branches):
            for own, inner in zip(params.rows, params.draws, strict=True):
                _line(outputs, inner, rows[own], partners)


def trial(device: torch.device) -> None:
    """Compile two small kernels and run them: whatever keeps Triton from that is raised."""
    image = RaggedImages.from_arrays([np.zeros((4, 4, 1), np.uint8)], device)
    nothing, output = Draws((), (), (image.sizes_hw,)), torch.empty(1, 1, 4, 4, dtype=torch.uint8, device=device)
    runner = FusedRunner(UNCHANGED, device)
    runner.launch(runner.prepare(image, nothing, nothing.windows_tlhw, output), image.pixels, output)
    transform = RandomErasing(1.0).standing(Standing("normalized", True, 1.0))
    params = Erase(np.array([[[1, 1, 2, 2]]], np.int64), np.zeros((1, 2), np.uint64))
    erase_images(torch.zeros(1, 1, 4, 4, device=device), np.zeros(1, np.int64), params, transform)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
