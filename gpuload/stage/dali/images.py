"""The images of a batch as DALI holds them, on their way through a line of transforms.

They are levels, uint8 H×W×C, up to the end: a batch of 64 at 224×224 is 10 MB, where float32 would be 39 MB that every
operator reads and writes. The operator at the end (`finished`) makes the numbers and the layout of the results, and can
mirror too, so a horizontal flip that comes last waits for it.

An `Images` is immutable and lives as long as a call of the stage; the first one is a view of the stage's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuload.stage.dali.engine import ndd, own, samples
from gpuload.stage.ragged import RaggedImages

__all__ = ["Images", "grouped", "merged"]


@dataclass(frozen=True, eq=False)
class Images:
    """Images of any sizes and one number of channels.

    Attributes:
        raw: of layout "HWC", finished images also "CHW", before `mirrored`.
        mirrored: bool (n,), which of them are still to be mirrored left to right; None: none.
    """

    raw: ndd.Batch
    mirrored: np.ndarray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", own(self.raw))

    @classmethod
    def of_ragged(cls, images: RaggedImages, windows_tlhw: np.ndarray) -> Images:
        """Windows of images: views of their memory, if these are the whole decoded regions."""
        views = [
            images.pixels[offset : offset + height * width * channels].view(height, width, channels)
            for offset, (height, width, channels) in zip(images.offsets.tolist(), images.shapes.tolist(), strict=True)
        ]
        found = cls(ndd.as_batch(views, layout="HWC"))
        if np.array_equal(windows_tlhw, images.regions_tlhw):
            return found
        return found.cut(windows_tlhw - np.pad(images.regions_tlhw[:, :2], ((0, 0), (0, 2))))

    def __len__(self) -> int:
        return self.raw.batch_size

    @property
    def layout(self) -> str:
        """ "HWC" or "CHW"."""
        return self.raw.layout or "HWC"

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self.raw.shape[0][self.layout.index("C")]

    @property
    def sizes_hw(self) -> np.ndarray:
        """int64 (n, 2)."""
        start = self.layout.index("H")
        return np.array(self.raw.shape, np.int64)[:, start : start + 2]

    @property
    def batch(self) -> ndd.Batch:
        """The images, mirrored."""
        return self.raw if self.mirrored is None else _flip(self.raw, horizontal=self.mirrored)

    def finished(self, layout: str, dtype: Any, mean: Sequence[float] = (), std: Sequence[float] = ()) -> ndd.Batch:
        """(level - mean) / std in a layout, as numbers of a type."""
        more: dict[str, Any] = {"mean": list(mean), "std": list(std)} if mean else {}
        if self.mirrored is not None:
            more["mirror"] = ndd.as_batch(self.mirrored.astype(np.int32))
        return ndd.crop_mirror_normalize(self.raw, dtype=dtype, output_layout=layout, **more)

    def flip(self, flipped: np.ndarray, axis: int) -> Images:
        """Mirror some of them: `axis` 0 upside down, 1 left to right."""
        if not flipped.any():
            return self
        if axis == 1:
            return replace(self, mirrored=flipped if self.mirrored is None else self.mirrored ^ flipped)
        return Images(_flip(self.raw, horizontal=self.mirrored, vertical=flipped))

    def cut(self, tlhw: np.ndarray, fill: Sequence[float] = (0,)) -> Images:
        """Boxes of them, int64 (n, 4); the outside is filled with one number or one for each channel."""
        return Images(
            ndd.slice(
                self.batch,
                start=ndd.as_batch(tlhw[:, :2].astype(np.int32)),
                shape=ndd.as_batch(tlhw[:, 2:].astype(np.int32)),
                axis_names="HW",
                out_of_bounds_policy="pad",
                fill_values=list(fill),
            )
        )

    def take(self, rows: np.ndarray) -> Images:
        """Some of them."""
        mirrored = None if self.mirrored is None else self.mirrored[rows]
        found = samples(self.raw)
        return Images(ndd.as_batch([found[row] for row in rows.tolist()]), mirrored)


def merged(parts: Sequence[tuple[np.ndarray, Images]]) -> Images:
    """Images from parts of their batch, each with its rows."""
    if len(parts) == 1:
        rows, images = parts[0]
        return images if np.array_equal(rows, np.arange(len(rows))) else images.take(np.argsort(rows))
    found: list[Any] = [None] * sum(len(rows) for rows, _ in parts)
    for rows, images in parts:
        for row, sample in zip(rows.tolist(), samples(images.batch), strict=True):
            found[row] = sample
    return Images(ndd.as_batch(found))


def grouped(images: Images, keys: np.ndarray, change: Callable[[Images, np.ndarray, Any], Images]) -> Images:
    """Change images in groups of equal keys, (n,): `change` is given a group, its rows and the key."""
    images, parts = Images(images.batch), []
    for key in np.unique(keys).tolist():
        rows = np.flatnonzero(keys == key)
        parts.append((rows, change(images if len(rows) == len(keys) else images.take(rows), rows, key)))
    return merged(parts)


def _flip(batch: ndd.Batch, *, horizontal: np.ndarray | None = None, vertical: np.ndarray | None = None) -> ndd.Batch:
    still = np.zeros(batch.batch_size, np.int32)
    across, down = (still if flags is None else flags.astype(np.int32) for flags in (horizontal, vertical))
    return ndd.flip(batch, horizontal=ndd.as_batch(across), vertical=ndd.as_batch(down))
