"""Pictures for the page: images as they are, and as a recipe makes them, each as a small JPEG in a data URI.

All are made by a `Loader`, in its workers, as in training; each epoch gives every image another draw.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from gpuload.inspection.files import DEEP, GOOD
from gpuload.inspection.gather import Gathered, name_of
from gpuload.inspection.seen import Picked
from gpuload.loader.loader import Loader
from gpuload.transforms import Chain, Normalize, RandomHorizontalFlip, RandomResizedCrop
from gpuload.workers.faults import Faults

__all__ = ["SIDE", "Strip", "chosen", "contact_sheet", "default_recipe", "thumbnails"]

SIDE: Final = 176  # pixels of the longer side
QUALITY: Final = 82


def default_recipe() -> list[Any]:
    """What is done to images where no recipe is given."""
    return [RandomResizedCrop(224), RandomHorizontalFlip()]


@dataclass(frozen=True)
class Strip:
    """One image of the contact sheet.

    Attributes:
        name, label: of the image; the label is empty if there is none.
        size: width and height.
        before: the whole image, as a data URI; None if it cannot be shown.
        after: what the recipe made of it, draw by draw.
    """

    name: str
    label: str
    size: tuple[int, int]
    before: str | None
    after: list[str]


def chosen(found: Gathered, images: int) -> list[int]:
    """Rows for a contact sheet: from all over the data, one of each of as many classes as there can be. All are of the
    kind that most measured images are of, since a batch has one."""
    rows = found.measured
    if not len(rows) or not images:
        return []
    modes = found.rows["mode"][rows].astype(np.int64) << 16 | (found.rows["flags"][rows] & DEEP)
    kinds, counts = np.unique(modes, return_counts=True)
    rows = rows[modes == kinds[counts.argmax()]]
    _, first = np.unique(found.rows["label"][rows], return_index=True)
    if len(first) > images:
        first = first[np.linspace(0, len(first) - 1, images).round().astype(int)]
    rest = np.setdiff1d(np.arange(len(rows)), first)
    more = min(images - len(first), len(rest))
    if more > 0:
        first = np.r_[first, rest[np.linspace(0, len(rest) - 1, more).round().astype(int)]]
    return np.sort(rows[first]).tolist()


def contact_sheet(
    found: Gathered,
    rows: Sequence[int],
    recipe: Sequence[Any],
    before: dict[int, str],
    *,
    draws: int,
    seed: int,
    workers: int | None,
) -> list[Strip]:
    """Images before and after the recipe.

    Args:
        rows: of the images.
        before: pictures of them as they are.

    Raises:
        SampleError, TypeError, ValueError: the recipe cannot be applied to such images.
    """
    if not rows:
        return []
    after: list[list[str]] = [[] for _ in rows]
    with _loader(_picked(found, rows), len(rows), seed, workers, recipe, on_error="raise") as loader:
        for _ in range(draws):
            for batch, _ in loader:
                images = batch[0] if isinstance(batch, list | tuple) else batch
                for place, views in enumerate(_views(images, len(rows))):
                    after[place] += [_uri(_levels(view, recipe), SIDE) for view in views]
    labels = found.rows["label"]
    return [
        Strip(
            name_of(found, row),
            found.classes[labels[row]] if found.classes and labels[row] >= 0 else "",
            (int(found.rows["width"][row]), int(found.rows["height"][row])),
            before.get(row),
            after[place],
        )
        for place, row in enumerate(rows)
    ]


def thumbnails(found: Gathered, sides: dict[int, int], *, workers: int | None) -> dict[int, str]:
    """Small pictures of whole images, by row; without those that cannot be shown.

    Args:
        sides: for each row how many pixels the longer side has.
    """
    shown: dict[int, str] = {}
    rows = [row for row in sides if found.rows["state"][row] == GOOD]
    if not rows:
        return shown
    # One by one: a few large ones at once could take more memory than there is.
    with _loader(_picked(found, rows), 1, 0, workers, [], on_error="skip") as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that one is skipped
        for (images, _), info in loader:
            for image, index in zip(images, info.indices.tolist(), strict=True):
                shown[rows[index]] = _uri(_levels(image, []), sides[rows[index]])
    return shown


def _picked(found: Gathered, rows: Sequence[int]) -> Picked:
    own = found.rows[np.asarray(rows)]
    return Picked(found.datasets, own["which"], found.indices[np.asarray(rows)], own["flags"] & DEEP > 0)


def _loader(
    dataset: Any, batch_size: int, seed: int, workers: int | None, recipe: Sequence[Any], *, on_error: Any
) -> Loader:
    chain = Chain(recipe)
    whole = chain.module is not None or chain.mixing is not None  # these take a batch of one size
    return Loader(
        dataset,
        batch_size,
        transforms=chain,
        num_workers=workers,
        device="cpu",
        ragged="error" if whole else "list",
        seed=seed,
        info=True,
        faults=Faults(on_error=on_error, max_error_rate=1.0, max_restarts=100),
    )


def _views(batch: Any, count: int) -> list[list[torch.Tensor]]:
    """For each image what a recipe made of it: one picture, or one for each view of a `MultiView`."""
    if (
        isinstance(batch, list | tuple)
        and len(batch)
        and (len(batch) != count or not isinstance(batch[0], torch.Tensor) or batch[0].ndim == 4)
    ):
        return [list(views) for views in zip(*batch, strict=True)]
    return [[image] for image in batch]


def _levels(image: torch.Tensor, recipe: Sequence[Any]) -> np.ndarray:
    """A finished image, C×H×W of any type, as levels H×W×3 to look at: a `Normalize` of the recipe is taken back."""
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
