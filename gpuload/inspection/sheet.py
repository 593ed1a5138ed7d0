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

from gpuload.datasets.sample import Encoded, Image
from gpuload.inspection.files import DEEP, GOOD, take_apart
from gpuload.inspection.gather import Gathered, name_of
from gpuload.loader.loader import Loader
from gpuload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop
from gpuload.workers.faults import Faults

__all__ = ["Strip", "contact_sheet", "default_recipe", "thumbnails"]

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


class Picked:
    """A dataset of some images of others, each with its label, or 0 if that is no number."""

    def __init__(self, found: Gathered, rows: Sequence[int]) -> None:
        self._datasets = found.datasets
        self._places = [(int(found.rows["which"][row]), int(found.indices[row])) for row in rows]
        self._deep = [bool(found.rows["flags"][row] & DEEP) for row in rows]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> tuple[Encoded | Image, int]:
        which, index = self._places[number]
        image, label = take_apart(self._datasets[which][index])
        if isinstance(image, Encoded) and self._deep[number]:
            image = Encoded(image.data, "unchanged", image.source)
        return image, label if isinstance(label, int) else 0


def contact_sheet(
    found: Gathered, recipe: Sequence[Any], *, images: int, draws: int, seed: int, workers: int | None
) -> list[Strip]:
    """Images from all over the data, from as many classes as there can be, before and after the recipe.

    Raises:
        SampleError, TypeError, ValueError: the recipe cannot be applied to such images.
    """
    rows = _chosen(found, images)
    if not rows:
        return []
    before = thumbnails(found, rows, workers=workers)
    after: list[list[str]] = [[] for _ in rows]
    with _loader(Picked(found, rows), len(rows), seed, workers, recipe, on_error="raise") as loader:
        for _ in range(draws):
            for batch, _ in loader:
                for place, views in enumerate(
                    _views(batch[0] if isinstance(batch, list | tuple) else batch, len(rows))
                ):
                    after[place] += [_uri(_levels(view, recipe)) for view in views]
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


def thumbnails(found: Gathered, rows: Sequence[int], *, workers: int | None, side: int = SIDE) -> dict[int, str]:
    """Small pictures of whole images, by row; without those that cannot be shown."""
    shown: dict[int, str] = {}
    rows = list(dict.fromkeys(row for row in rows if found.rows["state"][row] == GOOD))
    if not rows:
        return shown
    # One by one: a few large ones at once could take more memory than there is.
    with _loader(Picked(found, rows), 1, 0, workers, [], on_error="skip") as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that one is skipped
        for (images, _), info in loader:
            for image, index in zip(images, info.indices.tolist(), strict=True):
                shown[rows[index]] = _uri(_levels(image, []), side)
    return shown


def _loader(
    dataset: Any, batch_size: int, seed: int, workers: int | None, recipe: Sequence[Any], *, on_error: Any
) -> Loader:
    return Loader(
        dataset,
        batch_size,
        transforms=recipe,
        num_workers=workers,
        device="cpu",
        ragged="list",
        seed=seed,
        info=True,
        faults=Faults(on_error=on_error, max_error_rate=1.0, max_restarts=100),
    )


def _chosen(found: Gathered, images: int) -> list[int]:
    """Rows of the kind that most measured images are of, one of each of as many classes as there can be."""
    rows = found.measured
    if not len(rows):
        return []
    modes = found.rows["mode"][rows].astype(np.int64) << 16 | (found.rows["flags"][rows] & DEEP)
    kinds, counts = np.unique(modes, return_counts=True)
    rows = rows[modes == kinds[counts.argmax()]]
    labels = found.rows["label"][rows]
    _, first = np.unique(labels, return_index=True)
    if len(first) > images:
        first = first[np.linspace(0, len(first) - 1, images).round().astype(int)]
    rest = np.setdiff1d(np.arange(len(rows)), first)
    more = min(images - len(first), len(rest))
    if more > 0:
        first = np.r_[first, rest[np.linspace(0, len(rest) - 1, more).round().astype(int)]]
    return np.sort(rows[first]).tolist()


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
    pixels = image.detach().float().cpu()
    if image.is_floating_point():
        normalize = next((step for step in reversed(recipe) if isinstance(step, Normalize)), None)
        if normalize is not None and len(normalize.mean) in (1, len(pixels)):
            pixels = pixels * torch.tensor(normalize.std)[:, None, None] + torch.tensor(normalize.mean)[:, None, None]
        if normalize is not None or float(pixels.abs().max()) <= 2:
            pixels = pixels * 255
    elif image.dtype == torch.uint16:
        pixels = pixels / 257
    pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def _uri(levels_hwc: np.ndarray, side: int = SIDE) -> str:
    from PIL import Image as Pillow

    picture, file = Pillow.fromarray(np.ascontiguousarray(levels_hwc)), io.BytesIO()
    picture.thumbnail((side, side), Pillow.Resampling.LANCZOS)
    picture.save(file, "JPEG", quality=QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
