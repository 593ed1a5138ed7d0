"""Inspects datasets with the workers of a `Loader`. The record of an image takes about 75 bytes, so a million images
take 75 MB. This module runs in the main process.

If a file kills a worker, the worker is restarted and the file counts as damaged, as in training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from gpuload.errors import GpuloadError
from gpuload.inspection.files import DAMAGED, FILE_FIELDS, GOOD, PIXELS, ROW, InspectedImages, class_name_of
from gpuload.loader.loader import Loader
from gpuload.workers.faults import Faults

__all__ = ["Measurements", "ProgressCallback", "measure_files", "measure_pixels"]

BATCH_SIZE: Final = 256
MAX_CAUSES: Final = 10_000  # the maximum number of stored causes; all damaged images are counted
MAX_CLASSES: Final = 100_000  # more distinct labels than this are not treated as classes

ProgressCallback = Callable[[int, int], None]
"""A progress callback, which takes the number of completed images and the total number of images."""


@dataclass
class PixelSums:
    """Sums over the pixels of all measured images with the same number of channels and bits. `sums` and `squares` are
    arrays of Python integers, which cannot overflow."""

    images: int = 0
    pixels: int = 0
    sums: Any = 0
    squares: Any = 0
    levels: Any = 0

    def add(self, records: np.ndarray) -> None:
        """Add `PIXELS` records, all with this number of channels and bits."""
        channels = records["channels"][0]
        self.images += len(records)
        self.pixels += int(records["count"].sum())
        self.sums += records["sums"][:, :channels].astype(object).sum(axis=0)
        self.squares += records["squares"][:, :channels].astype(object).sum(axis=0)
        self.levels += records["levels"].sum(axis=0)


@dataclass
class Measurements:
    """The rows of all inspected images of several datasets, and the causes of damage.

    Attributes:
        names: the names of the datasets.
        datasets: the datasets.
        rows: one `ROW` per inspected image, in the order of the datasets.
        classes: the class names of all datasets; the rows' labels are indices into this list.
        causes: the causes of damage or refusal, keyed by row; only the first 10,000.
        is_sampled: whether only a random selection of the images is decoded.
        groups: the pixel sums of all measured images, keyed by channels and bits.
    """

    names: list[str]
    datasets: list[Any]
    rows: np.ndarray
    classes: list[str] = field(default_factory=list)
    causes: dict[int, str] = field(default_factory=dict)
    is_sampled: bool = False
    groups: dict[tuple[int, int], PixelSums] = field(default_factory=dict)

    def record_damage(self, row: int, cause: str) -> None:
        self.rows["state"][row] = DAMAGED
        if len(self.causes) < MAX_CAUSES:
            self.causes[row] = cause

    def class_name(self, row: int) -> str | None:
        """Return the name of an image's class; None if it has none."""
        label = self.rows["label"][row]
        return self.classes[label] if self.classes and label >= 0 else None

    def name_of(self, row: int, *, full: bool = False) -> str:
        """Return an image's path, relative to the dataset's root unless `full`; without a path, its key or index."""
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


def measure_files(
    datasets: Sequence[Any],
    names: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    update_progress: ProgressCallback = lambda done, total: None,
) -> Measurements:
    """Check the files of all samples, or of `limit` random samples of each dataset.

    Raises:
        WorkerError, TooManyErrors: workers cannot start, or too many files kill them.
    """
    rng = np.random.default_rng(seed)
    chosen_indices = [_draw_subset(rng, np.arange(len(dataset)), limit) for dataset in datasets]
    rows = np.zeros(sum(map(len, chosen_indices)), ROW)
    rows["index"], rows["label"] = np.concatenate(chosen_indices), -1
    rows["which"] = np.repeat(np.arange(len(chosen_indices)), [len(indices) for indices in chosen_indices])
    measurements = Measurements(list(names), list(datasets), rows)
    classes = [str(name) for dataset in datasets for name in getattr(dataset, "classes", None) or ()]
    labels = {name: label for label, name in enumerate(dict.fromkeys(classes))}

    def label_of_class(name: str) -> int:
        return labels.setdefault(name, len(labels)) if name and len(labels) <= MAX_CLASSES else -1

    for row_indices, records, class_names in _inspect(
        measurements, np.arange(len(rows)), workers, update_progress, pixels=False
    ):
        for name in FILE_FIELDS:
            rows[name][row_indices] = records[name]
        rows["label"][row_indices] = [label_of_class(name) for name in class_names]
    for row in np.flatnonzero((rows["label"] < 0) & (rows["nbytes"] == 0)).tolist():  # these files killed workers
        rows["label"][row] = label_of_class(class_name_of(datasets[rows["which"][row]], int(rows["index"][row])))
    if len(labels) > MAX_CLASSES:
        rows["label"] = -1
    else:
        measurements.classes = list(labels)
    return measurements


def measure_pixels(
    measurements: Measurements,
    *,
    max_images: int | None,
    seed: int = 0,
    workers: int | None = None,
    update_progress: ProgressCallback = lambda done, total: None,
) -> None:
    """Decode all undamaged images, or at most `max_images` images drawn at random, and add up their pixels."""
    rows = measurements.rows
    good_rows = np.flatnonzero(rows["state"] == GOOD)
    selected_rows = _draw_subset(np.random.default_rng(seed), good_rows, max_images)
    measurements.is_sampled = len(selected_rows) < len(good_rows)
    for indices, records, _ in (
        _inspect(measurements, selected_rows, workers, update_progress, pixels=True) if len(selected_rows) else ()
    ):
        # A sample that replaces a skipped sample occurs twice.
        is_new = (records["bits"] > 0) & ~rows["measured"][indices]
        indices, records = indices[is_new], records[is_new]
        rows["measured"][indices], rows["flat"][indices], rows["pixels"][indices] = (
            True,
            records["flat"],
            records["digest"],
        )
        keys = records[["channels", "bits"]]
        for key in np.unique(keys):
            measurements.groups.setdefault(key.item(), PixelSums()).add(records[keys == key])


def _draw_subset(rng: np.random.Generator, values: np.ndarray, count: int | None) -> np.ndarray:
    """Draw `count` of the `values` at random, and return them in order; None means all."""
    if count is None or count >= len(values):
        return values
    return np.sort(rng.choice(values, count, replace=False, shuffle=False))


def _inspect(
    measurements: Measurements,
    indices: np.ndarray,
    workers: int | None,
    update_progress: ProgressCallback,
    *,
    pixels: bool,
) -> Iterator[tuple[np.ndarray, np.ndarray, list[str]]]:
    """Have workers inspect the rows with these `indices`. For each batch, yield the row indices, the `ROW` or `PIXELS`
    records, and the class names. Record images that are damaged or that killed a worker."""
    images, dtype = (
        InspectedImages(measurements.datasets, measurements.rows, indices, pixels=pixels),
        PIXELS if pixels else ROW,
    )
    faults = Faults(on_error="skip", max_error_rate=1.0, max_restarts=1000)
    with (
        Loader(images, BATCH_SIZE, num_workers=workers, device="cpu", faults=faults, rank=0, world_size=1) as loader,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*Further failures are only recorded", category=RuntimeWarning)
        update_progress(0, len(images))
        for batch, (row_indices, records, labels, causes) in enumerate(loader, 1):
            for row, cause in zip(row_indices.tolist(), causes, strict=True):
                if cause:
                    measurements.record_damage(row, cause)
            yield row_indices.numpy(), records.numpy().view(dtype)[:, 0], labels
            update_progress(min(len(images), batch * BATCH_SIZE), len(images))
        for error in loader.errors:
            position: Any = error.index
            measurements.record_damage(int(indices[position]), error.cause)
