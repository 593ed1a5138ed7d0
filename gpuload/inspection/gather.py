"""Looks at data sets with the workers of a `Loader`, and keeps a row of numbers for each image, some 60 bytes, so a
million take 60 MB. Main process.

A worker that a file kills is restarted, and the file is a damaged one, as in training.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from gpuload.errors import GpuloadError
from gpuload.inspection.files import DAMAGED, GOOD, PIXELS, ROW, Looked
from gpuload.loader.loader import Loader
from gpuload.workers.faults import Faults

__all__ = ["Gathered", "Tell", "gather", "gather_pixels"]

BATCH: Final = 256
MOST_NOTES: Final = 10_000  # causes that are kept; all are counted
MOST_CLASSES: Final = 100_000  # more labels than these are not classes

# Of a measured image, what is needed after its numbers were added up.
COMPACT: Final = np.dtype([("flat", "?"), ("digest", "i8", 2)])

Tell = Callable[[int, int], None]
"""Called with how many images are done, of how many."""


@dataclass
class PixelSums:
    """The pixels of all measured images that have the same number of channels and bits, added up."""

    images: int = 0
    pixels: int = 0
    sums: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    levels: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """Add `PIXELS` of this kind."""
        channels = int(rows["channels"][0])
        self.images += len(rows)
        self.pixels += int(rows["count"].sum())
        for name in ("sums", "squares"):  # as Python's integers, which have no end
            before = getattr(self, name) or [0] * channels
            more = [sum(column) for column in rows[name][:, :channels].T.tolist()]
            setattr(self, name, [one + other for one, other in zip(before, more, strict=True)])
        levels = rows["levels"].sum(axis=0)
        self.levels = levels if self.levels is None else self.levels + levels


@dataclass
class Gathered:
    """What is known of data sets.

    Attributes:
        names: of the data sets, as the user calls them.
        datasets: the data sets.
        rows: one `ROW` for each image that was looked at, those of the first data set first.
        indices: of each row in its data set.
        classes: the names that the rows' labels number, over all data sets.
        notes: why images are damaged or refused, by row; the first 10,000.
        drawn: whether not all images were decoded, but some, drawn at random.
        measured: the rows of which pixels were counted; pixels: a `COMPACT` for each, in order.
        groups: the sums over all images of the same channels and bits.
    """

    names: list[str]
    datasets: list[Any]
    rows: np.ndarray
    indices: np.ndarray
    classes: list[str] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)
    drawn: bool = False
    measured: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pixels: np.ndarray = field(default_factory=lambda: np.empty(0, COMPACT))
    groups: dict[tuple[int, int], PixelSums] = field(default_factory=dict)

    @property
    def main(self) -> tuple[int, int] | None:
        """The channels and bits that most of the measured images have."""
        return max(self.groups, key=lambda key: self.groups[key].images, default=None)

    def note(self, row: int, cause: str) -> None:
        """Keep why an image is damaged."""
        if len(self.notes) < MOST_NOTES:
            self.notes[row] = cause

    def label_of(self, row: int) -> str | None:
        """Return the name of an image's class; None if it has none."""
        label = self.rows["label"][row]
        return self.classes[label] if self.classes and label >= 0 else None

    def name_of(self, row: int, *, full: bool = False) -> str:
        """Return an image's path, from the data set's root on if not `full`; else its key; else its index."""
        dataset, index = self.datasets[self.rows["which"][row]], int(self.indices[row])
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
    tell: Tell = lambda done, total: None,
) -> Gathered:
    """Look at the files of all samples, or of `limit` of each data set, drawn at random.

    Raises:
        WorkerError, TooManyErrors: workers cannot be started, or too many files kill them.
    """
    rng = np.random.default_rng(seed)
    chosen = [_draw(rng, np.arange(len(dataset)), limit) for dataset in datasets]
    rows = np.zeros(sum(map(len, chosen)), ROW)
    gathered = Gathered(list(names), list(datasets), rows, np.concatenate(chosen))
    rows["which"] = np.repeat(np.arange(len(chosen)), [len(indices) for indices in chosen])
    rows["label"] = -1
    labels = _Labels(datasets)
    looked = Looked(gathered.datasets, rows["which"], gathered.indices, "files")
    for at, numbers, texts in _batches(looked, workers, gathered, tell):
        for place, name in enumerate(
            ("state", "format", "mode", "sampling", "orientation", "flags", "height", "width")
        ):
            rows[name][at] = numbers[:, place]
        rows["nbytes"][at], rows["digest"][at] = numbers[:, 8], numbers[:, 9:]
        for row, text in zip(at.tolist(), texts, strict=True):
            note = json.loads(text or "{}")
            if "cause" in note:
                gathered.note(row, note["cause"])
            if "label" in note:
                rows["label"][row] = labels.number(int(rows["which"][row]), note["label"])
    labels.from_arrays(rows, gathered.indices)
    if len(labels.names) > MOST_CLASSES:
        rows["label"] = -1
    else:
        gathered.classes = list(labels.names)
    return gathered


def gather_pixels(
    gathered: Gathered,
    *,
    most: int | None,
    seed: int = 0,
    workers: int | None = None,
    tell: Tell = lambda done, total: None,
) -> None:
    """Decode all images that are not damaged, or `most` of them, drawn at random, and add up their pixels."""
    every = np.flatnonzero(gathered.rows["state"] == GOOD)
    good = _draw(np.random.default_rng(seed), every, most)
    gathered.drawn = len(good) < len(every)
    compact, is_measured = np.zeros(len(good), COMPACT), np.zeros(len(good), bool)
    if len(good):
        looked = Looked(gathered.datasets, gathered.rows["which"][good], gathered.indices[good], "pixels")
        for at, numbers, texts in _batches(looked, workers, gathered, tell, good):
            pixels = np.ascontiguousarray(numbers).view(PIXELS).reshape(-1)
            for row, text in zip(good[at].tolist(), texts, strict=True):
                if text:
                    gathered.rows["state"][row] = DAMAGED
                    gathered.note(row, json.loads(text)["cause"])
            for name in COMPACT.names or ():
                compact[name][at] = pixels[name]
            known = pixels["bits"] > 0
            pixels = pixels[known & ~is_measured[at]]  # one that stands in for a lost one comes twice
            is_measured[at] |= known
            for channels, bits in {(int(one["channels"]), int(one["bits"])) for one in pixels}:
                same = pixels[(pixels["channels"] == channels) & (pixels["bits"] == bits)]
                gathered.groups.setdefault((channels, bits), PixelSums()).add(same)
    gathered.measured, gathered.pixels = good[is_measured], compact[is_measured]


def _draw(rng: np.random.Generator, numbers: np.ndarray, count: int | None) -> np.ndarray:
    """Return so many of these numbers, drawn at random, in order; None: all."""
    if count is None or count >= len(numbers):
        return numbers
    return np.sort(rng.choice(numbers, count, replace=False, shuffle=False))


def _batches(
    looked: Looked, workers: int | None, gathered: Gathered, tell: Tell, rows: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, list[str]]]:
    """Yield numbers of samples, the array of each, and its text. Note the samples that killed workers.

    Args:
        rows: the row of each sample; by default these are its number.
    """
    done = 0
    faults = Faults(on_error="skip", max_error_rate=1.0, max_restarts=1000)
    with Loader(looked, BATCH, num_workers=workers, device="cpu", faults=faults) as loader, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Further ones are only recorded", category=RuntimeWarning)
        tell(0, len(looked))
        for at, numbers, texts in loader:
            yield at.numpy(), numbers.numpy().reshape(len(at), -1), list(texts)
            done = min(len(looked), done + BATCH)
            tell(done, len(looked))
        for error in loader.errors:
            number: Any = error.index
            row = int(number if rows is None else rows[number])
            gathered.rows["state"][row] = DAMAGED
            gathered.note(row, error.cause)


class _Labels:
    """Numbers for the names of classes, the same in all data sets."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.names: dict[str, int] = {}
        self._datasets = datasets
        self._classes = [getattr(dataset, "classes", None) for dataset in datasets]
        for classes in self._classes:
            for name in classes or ():
                self.names.setdefault(str(name), len(self.names))

    def number(self, which: int, label: int | str) -> int:
        """Return the number of a label, as a data set has it; -1 if there are too many to be classes."""
        classes = self._classes[which]
        known = isinstance(label, int) and classes is not None and 0 <= label < len(classes)
        name = str(classes[label]) if known else str(label)  # type: ignore[index]
        if len(self.names) > MOST_CLASSES:
            return -1
        return self.names.setdefault(name, len(self.names))

    def from_arrays(self, rows: np.ndarray, indices: np.ndarray) -> None:
        """Fill in labels of samples that could not be read, where the data set has all labels beside them."""
        for which, dataset in enumerate(self._datasets):
            labels = getattr(dataset, "labels", None)
            if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.ndim != 1:
                continue
            for row in np.flatnonzero((rows["which"] == which) & (rows["label"] < 0)).tolist():
                rows["label"][row] = self.number(which, int(labels[indices[row]]))
