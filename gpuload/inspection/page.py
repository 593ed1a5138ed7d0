"""Creates the page, a self-contained HTML file that works offline and without scripts, and its pictures.

Texts from the data (names of files and classes, causes) are untrusted: jinja2 escapes them, invisible characters are
shown as escapes, and a content security policy forbids everything but the page's own pictures and style.

Pictures are small JPEGs in data URIs, which show the original images and the output of a recipe. They come from a
`Loader`, as in training; in each epoch, every image gets new random parameters.
"""

from __future__ import annotations

import base64
import datetime
import io
import warnings
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

import numpy as np
import torch

from gpuload.errors import visible
from gpuload.inspection.files import GOOD, SelectedImages
from gpuload.inspection.measure import Measurements
from gpuload.inspection.summary import Advice
from gpuload.loader.loader import Loader
from gpuload.transforms import Chain, Normalize
from gpuload.workers.faults import Faults

__all__ = ["SIDE", "choose_rows", "duplicate_rows", "format_bytes", "make_contact_sheet", "make_pictures", "render"]

SHOWN: Final = {
    "groups": 12,  # groups of duplicates with pictures, per kind
    "images": 4,  # pictures per group
    "files": 200,  # damaged images
    "classes": 24,  # classes with a bar
}
WIDTH, HEIGHT = 320, 96  # the size of a chart, in its own units
SIDE: Final = 176  # the longer side of a picture, in pixels
QUALITY: Final = 82


# -- pictures ---------------------------------------------------------------------------------------------------------


def choose_rows(measurements: Measurements, images: int) -> list[int]:
    """Return rows for a contact sheet, spread over the data and over as many classes as possible. All images have the
    mode that is most frequent among the measured images: a batch needs images with the same number of channels."""
    rows = np.flatnonzero(measurements.rows["measured"])
    if not len(rows) or not images:
        return []
    modes = measurements.rows["mode"][rows].astype(np.int64) << 16 | measurements.rows["deep"][rows]
    distinct_modes, counts = np.unique(modes, return_counts=True)
    rows = rows[modes == distinct_modes[counts.argmax()]]
    _, positions = np.unique(measurements.rows["label"][rows], return_index=True)
    if len(positions) > images:
        positions = positions[np.linspace(0, len(positions) - 1, images).round().astype(int)]
    other_positions = np.setdiff1d(np.arange(len(rows)), positions)
    missing_count = min(images - len(positions), len(other_positions))
    if missing_count > 0:
        positions = np.r_[
            positions, other_positions[np.linspace(0, len(other_positions) - 1, missing_count).round().astype(int)]
        ]
    return np.sort(rows[positions]).tolist()


def duplicate_rows(summary: dict[str, Any]) -> list[int]:
    """Return the rows of the duplicates that the page shows."""
    return [
        image["row"]
        for kind in ("files", "pixels")
        for group in summary["duplicates"][kind]["listed"][: SHOWN["groups"]]
        for image in group["images"][: SHOWN["images"]]
    ]


def make_contact_sheet(
    measurements: Measurements,
    rows: Sequence[int],
    recipe: Sequence[object],
    *,
    draws: int,
    seed: int,
    workers: int | None,
) -> list[dict[str, Any]]:
    """Return a dict for each image with its ``row``, ``name``, ``label``, ``size`` (width and height), and ``after``,
    `draws` random outputs of the recipe."""
    outputs = make_pictures(measurements, dict.fromkeys(rows, SIDE), recipe, draws=draws, seed=seed, workers=workers)
    return [
        {
            "row": row,
            "name": measurements.name_of(row),
            "label": measurements.class_name(row) or "",
            "size": measurements.rows[["width", "height"]][row].item(),
            "after": outputs[row],
        }
        for row in rows
    ]


def make_pictures(
    measurements: Measurements,
    sides: dict[int, int],
    recipe: Sequence[Any] | None = None,
    *,
    draws: int = 1,
    seed: int = 0,
    workers: int | None,
) -> dict[int, list[str]]:
    """Return small pictures of images as data URIs, keyed by row. Without a recipe, the pictures show the entire
    images, and images that cannot be shown are omitted; with a recipe, they show its outputs.

    Args:
        sides: the longer side of the picture in pixels, keyed by row.
        recipe: the transforms; None means the original images.
        draws: the number of random outputs of the recipe per image.

    Raises:
        SampleError, TypeError, ValueError: the recipe cannot be applied to these images.
    """
    rows = [row for row in sides if measurements.rows["state"][row] == GOOD]
    if not rows:
        return {}
    uris_by_row: dict[int, list[str]] = {row: [] for row in rows}
    chain = Chain(recipe or ())
    # Modules and mixing need a batch of images of the same size.
    needs_equal_sizes = bool(chain.modules) or chain.mixing is not None
    loader = Loader(
        SelectedImages(measurements.datasets, measurements.rows[rows]),
        1 if recipe is None else len(rows),  # several large images in one batch could exceed the memory
        transforms=recipe or (),
        num_workers=workers,
        device="cpu",
        rank=0,
        world_size=1,
        ragged="error" if needs_equal_sizes else "list",
        seed=seed,
        info=True,
        faults=Faults(on_error="skip" if recipe is None else "raise", max_error_rate=1.0, max_restarts=100),
    )
    with loader, warnings.catch_warnings():
        if recipe is None:
            warnings.simplefilter("ignore", RuntimeWarning)  # warnings about skipped images
        for _ in range(draws):
            for batch, info in loader:
                images = batch[0] if isinstance(batch, list | tuple) else batch
                for index, views in zip(info.indices.tolist(), _views(images, len(info.indices)), strict=True):
                    row = rows[index]
                    uris_by_row[row] += [_to_data_uri(_to_uint8(view, recipe or ()), sides[row]) for view in views]
    return {row: uris for row, uris in uris_by_row.items() if uris}


def _views(batch: Any, count: int) -> list[list[torch.Tensor]]:
    """Return the recipe's output for each image: one picture, or one picture per view of a `MultiView`."""
    if (
        isinstance(batch, list | tuple)
        and len(batch)
        and (len(batch) != count or not isinstance(batch[0], torch.Tensor) or batch[0].ndim == 4)
    ):
        return [list(views) for views in zip(*batch, strict=True)]
    return [[image] for image in batch]


def _to_uint8(image: torch.Tensor, recipe: Sequence[object]) -> np.ndarray:
    """Convert a C×H×W image of any dtype to uint8 H×W×3, and reverse the recipe's `Normalize`."""
    pixels = image.detach().cpu()
    if pixels.dtype != torch.uint8:
        is_deep, pixels = pixels.dtype == torch.uint16, pixels.float()
        normalize = next((step for step in reversed(recipe) if isinstance(step, Normalize)), None)
        if normalize is not None and len(normalize.mean) in (1, len(pixels)):
            pixels = pixels * torch.tensor(normalize.std)[:, None, None] + torch.tensor(normalize.mean)[:, None, None]
        if is_deep:
            pixels = pixels / 257
        elif normalize is not None or float(pixels.abs().max()) <= 2:
            pixels = pixels * 255
        pixels = pixels.round().clamp(0, 255).to(torch.uint8)
    pixels_hwc = pixels.permute(1, 2, 0).numpy()
    return pixels_hwc[:, :, :3] if pixels_hwc.shape[2] >= 3 else np.repeat(pixels_hwc[:, :, :1], 3, axis=2)


def _to_data_uri(pixels_hwc: np.ndarray, side: int) -> str:
    from PIL import Image as Pillow

    picture, file = Pillow.fromarray(np.ascontiguousarray(pixels_hwc)), io.BytesIO()
    picture.thumbnail((side, side), Pillow.Resampling.LANCZOS)
    picture.save(file, "JPEG", quality=QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


# -- the page ----------------------------------------------------------------------------------------------------------


def render(
    summary: dict[str, Any],
    advice: Sequence[Advice],
    sheet: Sequence[dict[str, Any]],
    pictures: dict[int, list[str]],
    **run: object,
) -> str:
    """Return the page as HTML.

    Args:
        summary, advice: the result of the inspection.
        sheet: the contact sheet.
        pictures: pictures of the images on the sheet and of the duplicates that the summary lists.
        **run: the ``recipe`` as text, the ``seed``, and gpuload's ``version``.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        visible=visible, size=format_bytes, count=lambda number: f"{number:,}", short=_format_number
    )
    environment.globals.update(outline=_chart_outline, share=_share, WIDTH=WIDTH, HEIGHT=HEIGHT, SHOWN=SHOWN)
    template = environment.from_string(files("gpuload.inspection").joinpath("page.html").read_text("utf-8"))
    timestamp = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return template.render(summary=summary, advice=advice, sheet=sheet, pictures=pictures, timestamp=timestamp, **run)


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with a unit, such as ``1.2 GB``."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def _format_number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.2f}"


def _share(part: int, total: int) -> str:
    if not total or not part:
        return "0%"
    share = 100 * part / total
    return "<0.1%" if share < 0.1 else f"{share:.1f}%" if share < 10 or 99 < share < 100 else f"{share:.0f}%"


def _chart_outline(counts: list[int], max_count: int) -> str:
    """Return the outline of a bar chart as the points of a polygon. Counts above `max_count`, such as the counts of
    clipped pixel values at both ends, are cut off."""
    step = WIDTH / (len(counts) - 1)
    points = [f"{step * at:.1f},{HEIGHT * (1 - min(1.0, count / max_count)):.1f}" for at, count in enumerate(counts)]
    return " ".join([f"0,{HEIGHT}", *points, f"{WIDTH},{HEIGHT}"])
