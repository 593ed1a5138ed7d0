"""The page: one HTML file that needs nothing else, no network and no script; and its pictures.

What comes from the data (names of files, classes, causes) is untrusted: jinja2 escapes all of it, characters that
cannot be seen are written out, and a content security policy forbids everything but the page's own pictures and style.

Pictures are small JPEGs in data URIs: images as they are, and as a recipe makes them. A `Loader` makes them, in its
workers, as in training; each epoch gives every image another draw.
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
from gpuload.inspection.files import GOOD, Picked
from gpuload.inspection.gather import Gathered
from gpuload.inspection.summary import Advice
from gpuload.loader.loader import Loader
from gpuload.transforms import Chain, Normalize
from gpuload.workers.faults import Faults

__all__ = ["SIDE", "bytes_text", "chosen", "contact_sheet", "listed_rows", "pictures", "render"]

SHOWN: Final = {
    "groups": 12,  # groups of duplicates with pictures, of each kind
    "images": 4,  # pictures of each
    "files": 200,  # damaged images
    "classes": 24,  # classes with a bar each
}
WIDTH, HEIGHT = 320, 96  # of a chart, in its own units
SIDE: Final = 176  # pixels of the longer side of a picture
QUALITY: Final = 82


# -- pictures ---------------------------------------------------------------------------------------------------------


def chosen(gathered: Gathered, images: int) -> list[int]:
    """Return rows for a contact sheet: from all over the data, one of each of as many classes as there can be. All are
    of the kind that most measured images are of, since a batch has one."""
    rows = np.flatnonzero(gathered.rows["measured"])
    if not len(rows) or not images:
        return []
    modes = gathered.rows["mode"][rows].astype(np.int64) << 16 | gathered.rows["deep"][rows]
    kinds, counts = np.unique(modes, return_counts=True)
    rows = rows[modes == kinds[counts.argmax()]]
    _, first = np.unique(gathered.rows["label"][rows], return_index=True)
    if len(first) > images:
        first = first[np.linspace(0, len(first) - 1, images).round().astype(int)]
    others = np.setdiff1d(np.arange(len(rows)), first)
    more = min(images - len(first), len(others))
    if more > 0:
        first = np.r_[first, others[np.linspace(0, len(others) - 1, more).round().astype(int)]]
    return np.sort(rows[first]).tolist()


def listed_rows(summary: dict[str, Any]) -> list[int]:
    """Return the rows of the duplicates that the page shows."""
    return [
        image["row"]
        for kind in ("files", "pixels")
        for group in summary["duplicates"][kind]["listed"][: SHOWN["groups"]]
        for image in group["images"][: SHOWN["images"]]
    ]


def contact_sheet(
    gathered: Gathered, rows: Sequence[int], recipe: Sequence[Any], *, draws: int, seed: int, workers: int | None
) -> list[dict[str, Any]]:
    """Return for each image its ``row``, ``name``, ``label``, ``size`` (width and height), and ``after``: what the
    recipe makes of it, draw by draw."""
    after = pictures(gathered, dict.fromkeys(rows, SIDE), recipe, draws=draws, seed=seed, workers=workers)
    return [
        {
            "row": row,
            "name": gathered.name_of(row),
            "label": gathered.label_of(row) or "",
            "size": gathered.rows[["width", "height"]][row].item(),
            "after": after[row],
        }
        for row in rows
    ]


def pictures(
    gathered: Gathered,
    sides: dict[int, int],
    recipe: Sequence[Any] | None = None,
    *,
    draws: int = 1,
    seed: int = 0,
    workers: int | None,
) -> dict[int, list[str]]:
    """Return small pictures of images, as data URIs, by row: of the whole images, without those that cannot be shown;
    or of what a recipe makes of them, draw by draw.

    Args:
        sides: for each row how many pixels the longer side has.
        recipe: the transforms; None means the images as they are.

    Raises:
        SampleError, TypeError, ValueError: the recipe cannot be applied to such images.
    """
    rows = [row for row in sides if gathered.rows["state"][row] == GOOD]
    if not rows:
        return {}
    shown: dict[int, list[str]] = {row: [] for row in rows}
    chain = Chain(recipe or ())
    one_size = chain.module is not None or chain.mixing is not None  # these take a batch of images of one size
    loader = Loader(
        Picked(gathered.datasets, gathered.rows[rows]),
        1 if recipe is None else len(rows),  # a few large ones at once could take more memory than there is
        transforms=recipe or (),
        num_workers=workers,
        device="cpu",
        ragged="error" if one_size else "list",
        seed=seed,
        info=True,
        faults=Faults(on_error="skip" if recipe is None else "raise", max_error_rate=1.0, max_restarts=100),
    )
    with loader, warnings.catch_warnings():
        if recipe is None:
            warnings.simplefilter("ignore", RuntimeWarning)  # that one is skipped
        for _ in range(draws):
            for batch, info in loader:
                images = batch[0] if isinstance(batch, list | tuple) else batch
                for index, views in zip(info.indices.tolist(), _views(images, len(info.indices)), strict=True):
                    row = rows[index]
                    shown[row] += [_uri(_to_uint8(view, recipe or ()), sides[row]) for view in views]
    return {row: uris for row, uris in shown.items() if uris}


def _views(batch: Any, count: int) -> list[list[torch.Tensor]]:
    """Return for each image what a recipe made of it: one picture, or one for each view of a `MultiView`."""
    if (
        isinstance(batch, list | tuple)
        and len(batch)
        and (len(batch) != count or not isinstance(batch[0], torch.Tensor) or batch[0].ndim == 4)
    ):
        return [list(views) for views in zip(*batch, strict=True)]
    return [[image] for image in batch]


def _to_uint8(image: torch.Tensor, recipe: Sequence[Any]) -> np.ndarray:
    """Return a finished image, C×H×W of any type, as levels H×W×3: a `Normalize` of the recipe is taken back."""
    pixels = image.detach().cpu()
    if pixels.dtype != torch.uint8:
        deep, pixels = pixels.dtype == torch.uint16, pixels.float()
        normalize = next((step for step in reversed(recipe) if isinstance(step, Normalize)), None)
        if normalize is not None and len(normalize.mean) in (1, len(pixels)):
            pixels = pixels * torch.tensor(normalize.std)[:, None, None] + torch.tensor(normalize.mean)[:, None, None]
        if deep:
            pixels = pixels / 257
        elif normalize is not None or float(pixels.abs().max()) <= 2:
            pixels = pixels * 255
        pixels = pixels.round().clamp(0, 255).to(torch.uint8)
    levels = pixels.permute(1, 2, 0).numpy()
    return levels[:, :, :3] if levels.shape[2] >= 3 else np.repeat(levels[:, :, :1], 3, axis=2)


def _uri(levels_hwc: np.ndarray, side: int) -> str:
    from PIL import Image as Pillow

    picture, file = Pillow.fromarray(np.ascontiguousarray(levels_hwc)), io.BytesIO()
    picture.thumbnail((side, side), Pillow.Resampling.LANCZOS)
    picture.save(file, "JPEG", quality=QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


# -- the page ----------------------------------------------------------------------------------------------------------


def render(
    summary: dict[str, Any],
    advice: Sequence[Advice],
    sheet: Sequence[dict[str, Any]],
    pictures: dict[int, list[str]],
    **run: Any,
) -> str:
    """Return the page, as text.

    Args:
        summary, advice: what is known of the data sets.
        sheet: the contact sheet.
        pictures: of the images on the sheet and of those that the summary lists.
        **run: the ``recipe`` as text, the ``seed``, gpuload's ``version``.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(visible=visible, size=bytes_text, count=lambda number: f"{number:,}", short=_short)
    environment.globals.update(outline=_outline, share=_share, WIDTH=WIDTH, HEIGHT=HEIGHT, SHOWN=SHOWN)
    template = environment.from_string(files("gpuload.inspection").joinpath("page.html").read_text("utf-8"))
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return template.render(summary=summary, advice=advice, sheet=sheet, pictures=pictures, written=now, **run)


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes with a unit, such as ``1.2 GB``."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.2f}"


def _share(part: int, whole: int) -> str:
    if not whole or not part:
        return "0%"
    share = 100 * part / whole
    return "<0.1%" if share < 0.1 else f"{share:.1f}%" if share < 10 or 99 < share < 100 else f"{share:.0f}%"


def _outline(counts: list[int], most: int) -> str:
    """Return the outline of how much there is of each, as the points of a polygon. What is more than `most`, as clipped
    levels at the ends may be, is cut off."""
    step = WIDTH / (len(counts) - 1)
    points = [f"{step * at:.1f},{HEIGHT * (1 - min(1.0, count / most)):.1f}" for at, count in enumerate(counts)]
    return " ".join([f"0,{HEIGHT}", *points, f"{WIDTH},{HEIGHT}"])
