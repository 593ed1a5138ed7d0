"""Looks at data sets with the workers of a `Loader`, and keeps a row of numbers for each image. Main process.

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
from gpuload.inspection.files import DAMAGED, GOOD, ROW
from gpuload.inspection.pixels import PIXELS
from gpuload.inspection.seen import Seen
from gpuload.loader.loader import Loader
from gpuload.workers.faults import Faults

__all__ = ["Gathered", "Told", "gather", "gather_pixels", "name_of"]

BATCH: Final = 256
MOST_NOTES: Final = 10_000  # causes that are kept; all are counted
MOST_CLASSES: Final = 100_000  # more labels than these are no classes

Told = Callable[[int, int], None]
"""Called with how many images are done, of how many."""


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
        main: the channels and bits that most of the measured images have.
        groups: for each channels and bits: images, pixels, and the sums and sums of squares of each channel.
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
    groups: dict[tuple[int, int], Group] = field(default_factory=dict)

    @property
    def main(self) -> tuple[int, int] | None:
        return max(self.groups, key=lambda key: self.groups[key].images, default=None)

    def note(self, row: int, cause: str) -> None:
        """Keep why an image is damaged."""
        if len(self.notes) < MOST_NOTES:
            self.notes[row] = cause


# Of a measured image, what is needed after its numbers were added up.
COMPACT: Final = np.dtype([("flat", "?"), ("digest", "i8", 2), ("looks", "i8", 2)])


@dataclass
class Group:
    """The measured images that have the same number of channels and bits, added up."""

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
            found = [sum(column) for column in rows[name][:, :channels].T.tolist()]
            setattr(self, name, [one + other for one, other in zip(before, found, strict=True)])
        levels = rows["levels"].sum(axis=0)
        self.levels = levels if self.levels is None else self.levels + levels


def gather(
    datasets: Sequence[Any],
    names: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    told: Told = lambda done, total: None,
) -> Gathered:
    """Look at the files of all samples, or of `limit` of each data set, drawn at random.

    Raises:
        WorkerError, TooManyErrors: workers cannot be started, or too many files kill them.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for dataset in datasets:
        count = len(dataset)
        some = limit is not None and limit < count
        chosen.append(np.sort(rng.choice(count, limit, replace=False, shuffle=False)) if some else np.arange(count))
    found = Gathered(
        list(names),
        list(datasets),
        np.zeros(sum(map(len, chosen)), ROW),
        np.concatenate([indices.astype(np.int64) for indices in chosen]),
    )
    rows = found.rows
    rows["which"] = np.repeat(np.arange(len(chosen)), [len(indices) for indices in chosen])
    rows["label"] = -1
    labels = _Labels(datasets)
    seen = Seen(found.datasets, rows["which"], found.indices, "files")
    for at, numbers, texts in _batches(seen, workers, found, told):
        for place, name in enumerate(
            ("state", "format", "mode", "sampling", "orientation", "flags", "height", "width")
        ):
            rows[name][at] = numbers[:, place]
        rows["nbytes"][at], rows["digest"][at] = numbers[:, 8], numbers[:, 9:]
        for row, text in zip(at.tolist(), texts, strict=True):
            if text:
                note = json.loads(text)
                if "cause" in note:
                    found.note(row, note["cause"])
                if "label" in note:
                    rows["label"][row] = labels.number(int(rows["which"][row]), note["label"])
    labels.from_arrays(rows, found.indices)
    if len(labels.names) > MOST_CLASSES:
        rows["label"] = -1
    else:
        found.classes = list(labels.names)
    return found


def gather_pixels(
    found: Gathered,
    *,
    most: int | None,
    seed: int = 0,
    workers: int | None = None,
    told: Told = lambda done, total: None,
) -> None:
    """Decode all images that are not damaged, or `most` of them, drawn at random, and add up their pixels."""
    rng = np.random.default_rng(seed)
    good = np.flatnonzero(found.rows["state"] == GOOD)
    if most is not None and most < len(good):
        good, found.drawn = np.sort(rng.choice(good, most, replace=False, shuffle=False)), True
    compact, kept = np.zeros(len(good), COMPACT), np.zeros(len(good), bool)
    if len(good):
        seen = Seen(found.datasets, found.rows["which"][good], found.indices[good], "pixels")
        for at, numbers, texts in _batches(seen, workers, found, told, good):
            pixels = np.ascontiguousarray(numbers).view(PIXELS).reshape(-1)
            for place, text in zip(at.tolist(), texts, strict=True):
                if text:
                    row = int(good[place])
                    found.rows["state"][row] = DAMAGED
                    found.note(row, json.loads(text)["cause"])
            for name in COMPACT.names or ():
                compact[name][at] = pixels[name]
            kept[at] = pixels["bits"] > 0
            for channels, bits in {(int(one["channels"]), int(one["bits"])) for one in pixels if one["bits"]}:
                alike = pixels[(pixels["channels"] == channels) & (pixels["bits"] == bits)]
                found.groups.setdefault((channels, bits), Group()).add(alike)
    found.measured, found.pixels = good[kept], compact[kept]


def _batches(
    seen: Seen, workers: int | None, found: Gathered, told: Told, rows: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, list[str]]]:
    """What the samples come to: their numbers, each one's array, and its text. Notes those that killed workers.

    Args:
        rows: the row of each sample; by default these are its number.
    """
    done = 0
    loader = Loader(
        seen,
        BATCH,
        num_workers=workers,
        device="cpu",
        faults=Faults(on_error="skip", max_error_rate=1.0, max_restarts=1000),
    )
    with loader, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Further ones are only recorded", category=RuntimeWarning)
        for at, numbers, texts in loader:
            yield at.numpy(), numbers.numpy().reshape(len(at), -1), list(texts)
            done = min(len(seen), done + BATCH)
            told(done, len(seen))
        for error in loader.errors:
            row = error.index if rows is None else int(rows[error.index])  # type: ignore[index]
            found.rows["state"][row] = DAMAGED
            found.note(row, error.cause)  # type: ignore[arg-type]


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
        """That of a label, as a data set has it; -1 if there are too many to be classes."""
        classes = self._classes[which]
        known = isinstance(label, int) and classes is not None and 0 <= label < len(classes)
        name = str(classes[label]) if known else str(label)  # type: ignore[index]
        if len(self.names) > MOST_CLASSES:
            return -1
        return self.names.setdefault(name, len(self.names))

    def from_arrays(self, rows: np.ndarray, indices: np.ndarray) -> None:
        """Labels of samples that could not be read, where the data set has all labels beside them."""
        for which, dataset in enumerate(self._datasets):
            labels = getattr(dataset, "labels", None)
            if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.ndim != 1:
                continue
            for row in np.flatnonzero((rows["which"] == which) & (rows["label"] < 0)).tolist():
                rows["label"][row] = self.number(which, int(labels[indices[row]]))


def name_of(found: Gathered, row: int, *, full: bool = False) -> str:
    """How an image is called: its path, from the data set's root on if not `full`; else its key; else its index."""
    dataset, index = found.datasets[found.rows["which"][row]], int(found.indices[row])
    if isinstance(dataset, list):
        return getattr(dataset[index], "source", None) or f"sample {index}"
    for names in ("paths", "keys"):
        try:
            name = getattr(dataset, names)[index]
        except (AttributeError, TypeError, LookupError, GpuloadError):
            continue
        if isinstance(name, str):
            root = getattr(dataset, "root", None)
            inside = isinstance(root, str) and name.startswith(root + "/")
            return name[len(root) + 1 :] if inside and not full else name  # type: ignore[arg-type]
        if isinstance(name, bytes):
            return name.decode("utf-8", "surrogateescape")
    return f"sample {index}"
