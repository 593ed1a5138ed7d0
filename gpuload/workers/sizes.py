"""Whether an image has the size that its targets were made for.

Boxes say it where their source does (COCO's JSON, torchvision's `canvas_size`). The decoded image has another one where
EXIF turns it, or where it was resized later, and then its boxes are in the wrong places. Runs in workers, and with
``num_workers=0`` in the main process; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from gpuload.datasets.sample import Boxes, Encoded
from gpuload.decode.header import read_header
from gpuload.decode.options import Decode
from gpuload.decode.orientation import is_transposed

__all__ = ["REMARK", "SizeCheck"]

REMARK: Final = "the boxes of "  # how a remark begins


class SizeCheck:
    """Looks for boxes of an image of another size, until the first ones are found.

    Attributes:
        remark: what to tell the user of them; empty if there are none, or it was said.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._found = False
        self.remark = ""

    def look(self, targets: Iterable[Any], leaf: Any, size_hw: tuple[int, int], source: str | None) -> None:
        """Compare the boxes among the targets of an image with its size."""
        if self._found:
            return
        for target in targets:
            canvas_hw = target.canvas_hw if isinstance(target, Boxes) else None
            if canvas_hw is not None and canvas_hw != size_hw:
                self._found = True
                self.remark = (
                    f"{REMARK}{'a sample' if source is None else repr(source)} are for an image of {_text(canvas_hw)} "
                    f"(height × width), but it is decoded to {_text(size_hw)}: {self.advice(canvas_hw, leaf, size_hw)}"
                )
                return

    def advice(self, expected_hw: tuple[int, int], leaf: Any, size_hw: tuple[int, int]) -> str:
        """Return what to do about an image of another size; `leaf` is the image as the dataset gave it."""
        if expected_hw != size_hw[::-1]:
            return "scale the targets as the image was scaled, or give the image that they were made for"
        if not isinstance(leaf, Encoded) or not self._is_turned(leaf):
            return "height and width are swapped; turn the image or the targets"
        if self._decode.exif:
            return (
                "its EXIF tag turns it, but the targets are those of the image as it is stored; leave exif=True out of "
                "Decode"
            )
        return "its EXIF tag turns it; write Loader(decode=gpuload.Decode(exif=True))"

    def _is_turned(self, encoded: Encoded) -> bool:
        """Whether EXIF swaps height and width."""
        return is_transposed(read_header(encoded.data, replace(self._decode, exif=True)).orientation)


def _text(size_hw: tuple[int, int]) -> str:
    return f"{size_hw[0]}×{size_hw[1]}"
