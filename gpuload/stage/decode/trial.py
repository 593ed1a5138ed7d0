"""A small picture that a decoder has to decode before it is used."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from gpuload.stage.decode.backend import Pixels, Refused, Source

__all__ = ["complaint_about"]

MOST_LEVELS: Final = 4.0  # in the mean between two decoders: more is another picture


def complaint_about(decode: Callable[[Sequence[Source]], list[Pixels | Refused]]) -> str:
    """What is wrong with a decoder; "" if nothing is."""
    from PIL import Image

    ramp = np.add.outer(np.arange(48) * 3, np.arange(64) * 2).astype(np.uint8)
    picture = np.stack([ramp, ramp[::-1], ramp[:, ::-1]], axis=2)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=95)
    [found] = decode([Source(np.frombuffer(file.getvalue(), np.uint8), 48, 64, False, (0, 0, 48, 64))])
    if isinstance(found, Refused):
        return found.why
    difference = np.abs(found.tensor.cpu().numpy().astype(np.float32) - np.asarray(Image.open(file))).mean()
    return "" if difference <= MOST_LEVELS else f"its picture is another one ({difference:.0f} levels away)"
