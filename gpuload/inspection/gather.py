"""Inspects data sets with the workers of a `Loader`. Each image takes a row of numbers of about 75 bytes, so a million
images take 75 MB. Runs in the main process.

If a file kills a worker, the worker is restarted and the file counts as damaged, as in training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from gpuload.errors import GpuloadError
from gpuload.inspection.files import DAMAGED, FILE_FIELDS, GOOD, PIXELS, ROW, InspectedImages, class_of
from gpuload.loader.loader import Loader
from gpuload.workers.faults import Faults

__all__ = ["Gathered", "ProgressCallback", "gather", "gather_pixels"]

BATCH: Final = 256
MAX_CAUSES: Final = 10_000  # the maximum number of stored causes; all damaged images are counted
MAX_CLASSES: Final = 100_000  # more distinct labels than this are not treated as classes

ProgressCallback = Callable[[int, int], None]
"""A progress callback: takes the number of completed images and the total number of images."""


@dataclass
class PixelSums:
    """Sums over the pixels of all measured images with the same numbers of channels and bits. `sums` and `squares` are
    arrays of Python integers, which cannot overflow."""

    images: int = 0
    pixels: int = 0
    sums: Any = 0
    squares: Any = 0
    levels: Any = 0

    def add(self, records: np.ndarray) -> None:
        """Add `PIXELS` records of these channels and bits."""
        channels = records["channels"][0]
        self.images += len(records)
        self.pixels += int(records["count"].sum())
        self.sums += records["sums"][:, :channels].astype(object).sum(axis=0)
        self.squares += records["squares"][:, :channels].astype(object).sum(axis=0)
        self.levels += records["levels"].sum(axis=0)


@dataclass
class Gathered:
    """The rows of all inspected images of several data sets, and the causes of damage.

    Attributes:
        names: the names of the data sets.
        datasets: the data sets.
        rows: one `ROW` per inspected image, in the order of the data sets.
        classes: the class names of all data sets; the rows' labels are positions in this list.
        causes: the causes of damage or refusal, keyed by row; only the first 10,000.
        drawn: whether only a random selection of the images is decoded.
        groups: the sums over all measured images, keyed by channels and bits.
    """

    names: list[str]
    datasets: list[Any]
    rows: np.ndarray
    classes: list[str] = field(default_factory=list)
    causes: dict[int, str] = field(default_factory=dict)
    drawn: bool = False
    groups: dict[tuple[int, int], PixelSums] = field(default_factory=dict)

    def note_damage(self, row: int, cause: str) -> None:
        self.rows["state"][row] = DAMAGED
        if len(self.causes) < MAX_CAUSES:
            self.causes[row] = cause

    def label_of(self, row: int) -> str | None:
        """Return the name of an image's class; None if it has none."""
        label = self.rows["label"][row]
        return self.classes[label] if self.classes and label >= 0 else None

    def name_of(self, row: int, *, full: bool = False) -> str:
        """Return an image's path, relative to the data set's root unless `full`; without a path, its key or index."""
        dataset, index = self.datasets[self.rows["which"][row]], int(self.rows["index"][row])
        if isinstance(dataset, list):
            return getattr(dataset[index], "source", None) or f"sample {index}"
        for names in ("paths", "keys"):
            try:
                name = getattr(dataset, names)[index]
            except (AttributeError, TypeError, LookupError, GpuloadError):
                continue
            if isinstance(name, str):
                root = getattr(dataset, "root", None)
                return name if full or not isinstance(root, str) else name.removeprefix(f"{root}/")
            if isinstance(name, bytes):
                return name.decode("utf-8", "surrogateescape")
        return f"sample {index}"


def gather(
    datasets: Sequence[Any],
    names: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    update_progress: ProgressCallback = lambda done, total: None,
) -> Gathered:
    """Check the files of all samples, or of `limit` random samples of each data set.

    Raises:
        WorkerError, TooManyErrors: workers cannot start, or too many files kill them.
    """
    rng = np.random.default_rng(seed)
    chosen_indices = [_draw(rng, np.arange(len(dataset)), limit) for dataset in datasets]
    rows = np.zeros(sum(map(len, chosen_indices)), ROW)
    rows["index"], rows["label"] = np.concatenate(chosen_indices), -1
    rows["which"] = np.repeat(np.arange(len(chosen_indices)), [len(indices) for indices in chosen_indices])
    gathered = Gathered(list(names), list(datasets), rows)
    classes = [str(name) for dataset in datasets for name in getattr(dataset, "classes", None) or ()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(classes))}

    def number_of(name: str) -> int:
        return numbers.setdefault(name, len(numbers)) if name and len(numbers) <= MAX_CLASSES else -1

    for at, records, labels in _batches(gathered, np.arange(len(rows)), workers, update_progress, pixels=False):
        for name in FILE_FIELDS:
            rows[name][at] = records[name]
        rows["label"][at] = [number_of(name) for name in labels]
    for row in np.flatnonzero((rows["label"] < 0) & (rows["nbytes"] == 0)).tolist():  # these files killed workers
        rows["label"][row] = number_of(class_of(datasets[rows["which"][row]], int(rows["index"][row])))
    if len(numbers) > MAX_CLASSES:
        rows["label"] = -1
    else:
        gathered.classes = list(numbers)
    return gathered


def gather_pixels(
    gathered: Gathered,
    *,
    max_images: int | None,
    seed: int = 0,
    workers: int | None = None,
    update_progress: ProgressCallback = lambda done, total: None,
) -> None:
    """Decode all undamaged images, or at most `max_images` random ones, and add up their pixels."""
    rows = gathered.rows
    good_rows = np.flatnonzero(rows["state"] == GOOD)
    selected_rows = _draw(np.random.default_rng(seed), good_rows, max_images)
    gathered.drawn = len(selected_rows) < len(good_rows)
    for at, records, _ in (
        _batches(gathered, selected_rows, workers, update_progress, pixels=True) if len(selected_rows) else ()
    ):
        is_new = (records["bits"] > 0) & ~rows["measured"][at]  # a sample that replaces a skipped sample occurs twice
        at, records = at[is_new], records[is_new]
        rows["measured"][at], rows["flat"][at], rows["pixels"][at] = True, records["flat"], records["digest"]
        kinds = records[["channels", "bits"]]
        for kind in np.unique(kinds):
            gathered.groups.setdefault(kind.item(), PixelSums()).add(records[kinds == kind])


def _draw(rng: np.random.Generator, numbers: np.ndarray, count: int | None) -> np.ndarray:
    """Draw `count` of the `numbers` at random, and return them in order; None means all."""
    if count is None or count >= len(numbers):
        return numbers
    return np.sort(rng.choice(numbers, count, replace=False, shuffle=False))


def _batches(
    gathered: Gathered, numbers: np.ndarray, workers: int | None, update_progress: ProgressCallback, *, pixels: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, list[str]]]:
    """Have workers inspect these rows; yield the row numbers, their `ROW` or `PIXELS` records, and their class names.
    Record the images that are damaged or killed a worker."""
    images, dtype = InspectedImages(gathered.datasets, gathered.rows, numbers, pixels=pixels), PIXELS if pixels else ROW
    faults = Faults(on_error="skip", max_error_rate=1.0, max_restarts=1000)
    with Loader(images, BATCH, num_workers=workers, device="cpu", faults=faults) as loader, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Further failures are only recorded", category=RuntimeWarning)
        update_progress(0, len(images))
        for batch, (at, records, labels, causes) in enumerate(loader, 1):
            for row, cause in zip(at.tolist(), causes, strict=True):
                if cause:
                    gathered.note_damage(row, cause)
            yield at.numpy(), records.numpy().view(dtype)[:, 0], labels
            update_progress(min(len(images), batch * BATCH), len(images))
        for error in loader.errors:
            place: Any = error.index
            gathered.note_damage(int(numbers[place]), error.cause)
