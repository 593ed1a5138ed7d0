"""What was drawn for the images of a batch by transforms that stand one behind the other, and what it needs of them.

**The decode plan.** Going backwards from the whole result, every transform says which part (*window*) of its input it
needs; what comes out at the front is the region that a worker decodes. A crop narrows the window, a flip mirrors it, a
resize widens it by the support of its filter, and a transform that looks at the whole image (contrast) resets it. A
backend runs each transform from window to window, so the result is that of the whole chain on the whole image.

Made in workers and in the main process; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpuload.rng.philox import Key
from gpuload.transforms.base import Transform, Uniforms, full_windows
from gpuload.transforms.program.ops import Branches, Params, take
from gpuload.transforms.program.targets import move_boxes

__all__ = ["Draws", "draw_line"]


@dataclass(frozen=True)
class Draws:
    """What was drawn for the images of a batch.

    `params[i]` (also ``draws[i]``) are the parameters of transform i, or None; `sizes_hw[i]` int64 (B, 2) are the
    sizes of its inputs, and ``sizes_hw[-1]`` those of the results.
    """

    transforms: tuple[Transform, ...]
    params: tuple[Params | None, ...]
    sizes_hw: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        """How many images."""
        return len(self.sizes_hw[0])

    def __getitem__(self, transform: int) -> Any:
        return self.params[transform]

    @cached_property
    def windows_tlhw(self) -> tuple[np.ndarray, ...]:
        """The part of the input of each transform that matters, int64 (B, 4); one more, the whole, for the result."""
        return self.windows_for(full_windows(self.sizes_hw[-1]))

    def windows_for(self, results_tlhw: np.ndarray) -> tuple[np.ndarray, ...]:
        """The same, where only windows of the results are wanted."""
        windows = [results_tlhw]
        for transform, params, sizes in zip(
            reversed(self.transforms), reversed(self.params), reversed(self.sizes_hw[:-1]), strict=True
        ):
            if transform.needs_whole and not isinstance(params, Branches):  # there each sample's own way says it
                windows.append(full_windows(sizes))
            else:
                windows.append(transform.input_windows(params, sizes, windows[-1]))
        return tuple(reversed(windows))

    def split(self) -> tuple[Draws, Draws | None]:
        """What is drawn for transforms that work on levels, and for those behind them, if any, that work on finished
        images."""
        at = next((number for number, transform in enumerate(self.transforms) if transform.late), None)
        if at is None:
            return self, None
        return (
            Draws(self.transforms[:at], self.params[:at], self.sizes_hw[: at + 1]),
            Draws(self.transforms[at:], self.params[at:], self.sizes_hw[at:]),
        )

    def take(self, rows: np.ndarray) -> Draws:
        """The draws of some of the images."""
        return Draws(
            self.transforms,
            tuple(take(params, rows) for params in self.params),
            tuple(sizes[rows] for sizes in self.sizes_hw),
        )


def draw_line(
    transforms: Sequence[Transform],
    streams: Sequence[int],
    key: Key,
    positions: np.ndarray,
    sizes_hw: np.ndarray,
    boxes: Sequence[np.ndarray] | None = None,
) -> Draws:
    """Draw the parameters of transforms that stand one behind the other.

    Args:
        transforms: the declarations.
        streams: the counter stream of each.
        key: of the epoch.
        positions: int64 (B,), the places of the samples in the epoch's order.
        sizes_hw: int64 (B, 2), the sizes of their images.
        boxes: of each sample, float64 (n, 4) left, top, right, bottom; needed where a transform reads them.
    """
    sizes, params = [sizes_hw], []
    last = max((n for n, transform in enumerate(transforms) if transform.reads_boxes), default=-1)
    for number, (stream, transform) in enumerate(zip(streams, transforms, strict=True)):
        drawn = transform.draw(Uniforms(key, positions, stream, boxes if number <= last else None), sizes[-1])
        after = transform.output_sizes(drawn, sizes[-1])
        if boxes is not None and number < last:
            boxes = move_boxes(transform, drawn, boxes, sizes[-1], after)
        params.append(drawn)
        sizes.append(after)
    return Draws(tuple(transforms), tuple(params), tuple(sizes))
