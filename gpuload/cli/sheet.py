"""The contact sheet: augmented images as a training step sees them, in rows, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

__all__ = ["ContactSheet", "to_uint8"]

THUMB_PX = 128
GAP_PX = 6
CAPTION_PX = 18
BACKGROUND = (24, 24, 27)
INK = (228, 228, 231)


def to_uint8(images_nchw: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised float images back to uint8 N×H×W×C."""
    pixels = images_nchw.detach().float().cpu()
    pixels = (pixels * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)) * 255
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


class ContactSheet:
    """Collects up to `columns` images for each of up to `rows` classes, or of any if there are no classes."""

    def __init__(self, classes: Sequence[str], *, rows: int = 8, columns: int = 8) -> None:
        self.classes = list(classes)
        self.columns = columns
        self.rows: list[list[np.ndarray]] = [[] for _ in range(min(rows, len(classes)) if classes else rows)]

    @property
    def full(self) -> bool:
        return all(len(row) == self.columns for row in self.rows)

    def add(self, images_nhwc: np.ndarray, labels: Sequence[int] | None) -> None:
        """Put images into the row of their class, or without classes into the first that has room, if there is one."""
        for number, image in enumerate(images_nhwc):
            if labels is not None:
                room = self.rows[labels[number] : labels[number] + 1]
            else:
                room = [row for row in self.rows if len(row) < self.columns][:1]
            if room and len(room[0]) < self.columns:
                room[0].append(image)

    def write(self, path: Path) -> None:
        """Write the sheet as PNG."""
        rows = [(name, row) for name, row in zip(self._captions(), self.rows, strict=True) if row]
        caption = CAPTION_PX if self.classes else 0
        cell = THUMB_PX + GAP_PX
        width = GAP_PX + cell * max((len(row) for _, row in rows), default=1)
        sheet = Image.new("RGB", (width, GAP_PX + (cell + caption) * max(1, len(rows))), BACKGROUND)
        draw = ImageDraw.Draw(sheet)
        top = GAP_PX
        for name, row in rows:
            if caption:
                draw.text((GAP_PX, top), name, fill=INK, font=ImageFont.load_default(13))
            for column, image in enumerate(row):
                thumb = Image.fromarray(image).resize((THUMB_PX, THUMB_PX), Image.Resampling.LANCZOS)
                sheet.paste(thumb, (GAP_PX + cell * column, top + caption))
            top += cell + caption
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)

    def _captions(self) -> list[str]:
        return self.classes[: len(self.rows)] if self.classes else [""] * len(self.rows)
