"""What each kind of parameters does to the images of a batch in DALI, from window to window.

The same for images that are levels and for those that are finished: of the latter, only `Flip`, `Erase` and what holds
these are asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.stage.dali.erasing import erase
from gpuload.stage.dali.geometry import crop, resize, warp
from gpuload.stage.dali.images import Images, merged
from gpuload.stage.dali.operations import operate
from gpuload.stage.finished import boxes_within
from gpuload.transforms import Draws
from gpuload.transforms.program.ops import Box, Branches, Erase, Flip, Ops, Warp

__all__ = ["apply_line"]


def apply_line(images: Images, draws: Draws, windows_tlhw: tuple[np.ndarray, ...]) -> Images:
    """Take images through transforms; windows as for `gpuload.stage.backend.Levels`."""
    for number, (transform, params) in enumerate(zip(draws.transforms, draws.params, strict=True)):
        images = _apply(images, transform, params, windows_tlhw[number], windows_tlhw[number + 1])
    return images


def _apply(images: Images, transform: Any, params: Any, before: np.ndarray, after: np.ndarray) -> Images:
    match params:
        case Flip():
            return images.flip(params.flipped, params.axis)
        case Box() if transform.pads:
            return crop(images, transform, params, before, after)
        case Box():
            return resize(images, transform, params, before, after)
        case Warp():
            return warp(images, transform, params, after)
        case Ops():
            images = operate(images, transform, params)
            return images if np.array_equal(before, after) else images.cut(after)
        case Erase():
            return erase(images, transform, boxes_within(params, before), params.keys)
        case Branches():
            return _branch(images, params, after)
    return images


def _branch(images: Images, params: Branches, after: np.ndarray) -> Images:
    """Each way for the images that take it."""
    parts = []
    for rows, draws in zip(params.rows, params.draws, strict=True):
        if len(rows):
            parts.append((rows, apply_line(images.take(rows), draws, draws.windows_for(after[rows]))))
    taken = np.concatenate([rows for rows, _ in parts]) if parts else np.empty(0, np.int64)
    rest = np.setdiff1d(np.arange(params.count), taken)
    if len(rest):
        parts.append((rest, images.take(rest)))
    return merged(parts)
