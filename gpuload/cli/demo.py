"""``gpuload demo``: real photographs through gpuload and through torch's DataLoader, by turns, and a contact sheet of
augmented images. Everything runs in the foreground of one process and its workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

import gpuload as gl
from gpuload.cli.bench import PREFETCH, Bench, Row, compare, comparison, images_of
from gpuload.cli.console import bars, busy, count_of, device_of, fail, make_console, progress, say
from gpuload.cli.pictures import PhotographsMissing, make_folder
from gpuload.cli.source import MEAN, STD, source_of, usual_recipe
from gpuload.cli.torch_way import DECODER
from gpuload.errors import GpuloadError
from gpuload.loader.limits import usable_cpus

__all__ = ["ContactSheet", "run", "to_uint8"]

MOST_WORKERS: Final = 8
THUMB_PX, GAP_PX, CAPTION_PX = 128, 6, 18
BACKGROUND, INK = (24, 24, 27), (228, 228, 231)


def run(
    data: str | None,
    *,
    out: Path,
    workers: int | None,
    batch_size: int,
    seconds: float,
    rounds: int,
    device: str | None,
    images: int,
    console: Console | None = None,
) -> int:
    """Run the demo. Return the exit status."""
    console = console or make_console()
    try:
        dataset, origin = _dataset(data, out, images, console)
        place = device_of(device)
        workers = min(MOST_WORKERS, usable_cpus()) if workers is None else workers
        bench = Bench(dataset=dataset, transforms=usual_recipe(), batch_size=batch_size, device=place, seconds=seconds)
        classes = list(getattr(dataset, "classes", []))
        of_classes = f" of {count_of(len(classes), 'class', 'classes')}" if classes else ""
        cpus, each = count_of(usable_cpus(), "CPU"), f"{count_of(workers, 'worker')} each"
        say(console, f"gpuload {gl.__version__} on {place}: {cpus}, batches of {batch_size}, torch {torch.__version__}")
        say(console, f"{count_of(len(dataset), 'image')}{of_classes} in {origin}")
        say(console, "Both decode, crop at random to 224×224, flip and normalise, with " + each)
        say(console, f"The DataLoader does it with {DECODER} and torch's own resize\n")
        if remark := busy():
            say(console, remark, "yellow")
        mine = Row(name="gpuload", images_per_s=0, num_workers=workers, prefetch_factor=PREFETCH)
        peer = Row(name="DataLoader", images_per_s=0, num_workers=workers)
        with progress(console, "rounds", 2 * rounds) as tell:
            done: list[Row] = []

            def report(row: Row) -> Row:
                done.append(row)
                tell(len(done), note=f"{row.name}: {row.images_per_s:,.0f} images/s")
                return row

            pairs = compare(bench, mine, peer, rounds, report)
        console.print(comparison(mine, peer, pairs))
        if failed := len(bench.failed):
            say(console, f"{count_of(failed, 'image')} cannot be loaded; left out on both sides", "yellow")
        path = out / "contact-sheet.png"
        sheet = ContactSheet(classes)
        with bench.loader(workers) as loader:
            for batch in loader:
                sheet.add(to_uint8(images_of(batch)), batch[1].tolist() if classes else None)
                if sheet.full:
                    break
        sheet.write(path)
        say(console, f"Contact sheet of augmented images: {path.resolve()}")
    except (GpuloadError, PhotographsMissing, OSError, ValueError, TypeError, RuntimeError) as error:
        return fail(console, error)
    return 0


def _dataset(data: str | None, out: Path, images: int, console: Console) -> tuple[Any, str]:
    """Return the images, with or without classes, and where they are, for the user to read."""
    if data is not None:
        return source_of(data, {}), data
    with bars(console) as begin:
        root = make_folder(out / "photographs", count=images, progress=begin("photographs made", images))
    return gl.ImageFolder(root), f"{root}, made from scikit-image's photographs"


def to_uint8(images_nchw: torch.Tensor) -> np.ndarray:
    """Return images that the usual recipe normalised as uint8 N×H×W×C."""
    pixels = images_nchw.detach().float().cpu()
    pixels = (pixels * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)) * 255
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


class ContactSheet:
    """Rows of up to `columns` images: one row for each of up to `rows` classes, or rows of any if there are none."""

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
        names = self.classes[: len(self.rows)] or [""] * len(self.rows)
        rows = [(name, row) for name, row in zip(names, self.rows, strict=True) if row]
        caption, cell = CAPTION_PX if self.classes else 0, THUMB_PX + GAP_PX
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
