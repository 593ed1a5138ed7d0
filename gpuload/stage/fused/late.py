"""The fused backend on finished images: one kernel mixes all pairs in place, another erases in place what comes after
mixing. (Erasing that comes first is part of the pass that makes the images.)

Runs in the process of the stage, on the current stream; nothing is kept.
"""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.finish import UNCHANGED, Outputs, neighbours
from gpuload.stage.fused.erasing import erase_images
from gpuload.stage.fused.mixing import mix
from gpuload.stage.fused.runner import FusedRunner
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Mix

__all__ = ["apply", "trial"]


def apply(outputs: Outputs, late: Program, partners: np.ndarray | None) -> None:
    """Apply what was drawn to finished images; arguments as for `gpuload.stage.finish.apply_late`."""
    for record in late.records:
        match record:
            case Mix():
                mix(outputs, record, neighbours(len(late)) if partners is None else partners)
            case Erase():
                erase_images(outputs, record)


def trial(device: torch.device) -> None:
    """Compile two small kernels and run them; raises whatever Triton raises."""
    image = RaggedImages.from_arrays([np.zeros((4, 4, 1), np.uint8)], device)
    nothing = Program((), image.sizes_hw, image.sizes_hw)
    output = torch.empty(1, 1, 4, 4, dtype=torch.uint8, device=device)
    runner = FusedRunner(UNCHANGED, device)
    runner.launch(runner.prepare(image, nothing, nothing.windows_tlhw, output), image.pixels, output)
    box = Erase(np.array([[[1, 1, 2, 2]]], np.int64), np.zeros((1, 2), np.uint64))
    erase_images(torch.zeros(1, 1, 4, 4, device=device), box)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
