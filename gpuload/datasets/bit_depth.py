"""Refuses images of more than 8 bits where Pillow would clip them: all but their darkest pixels would become white. In
workers."""

from __future__ import annotations

from typing import Final

__all__ = ["too_deep"]

# Pillow's modes of more than 8 bits, all with one number for each pixel (it reduces colours to 8 bits itself). It opens
# no format of up to 8 bits in one of them.
DEEP: Final[dict[str, str]] = {
    "I;16": "16 bits a pixel",
    "I;16L": "16 bits a pixel",
    "I;16B": "16 bits a pixel",
    "I;16N": "16 bits a pixel",
    "I": "32-bit integers",
    "F": "32-bit floats",
}


def too_deep(what: str, mode: str, way: str = "gpuload.Image(array)") -> str | None:
    """Why `what`, of this Pillow mode, cannot be an image of 8 bits, and what to do; None if it can. `way`: what to
    write for the values as they are.

    Example:
        >>> too_deep("this PNG", "RGB")
        >>> too_deep("this PNG", "I;16").partition(",")[0]
        "this PNG holds 16 bits a pixel (Pillow mode 'I;16')"
    """
    if mode not in DEEP:
        return None
    return (
        f"{what} holds {DEEP[mode]} (Pillow mode {mode!r}), which Pillow would clip to 8; for its values as they are "
        f"yield {way}, of uint16 or float32, or scale them to 0 … 255; if they are classes or depths, yield a "
        "gpuload.Mask"
    )
