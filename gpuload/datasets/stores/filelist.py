"""`FileList`: image files that a manifest names (CSV or Parquet), or whose names are made of their numbers.

A manifest is read once, in the main process, to paths in one buffer and targets in an array; a long one is kept so and
read from there the next time. Generated names take no memory at all.
"""

from __future__ import annotations

import csv
import io
import json
import operator
import os
import warnings
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import numpy as np

from gpuload.datasets.base import ImageFileDataset
from gpuload.datasets.classes import Classes, check_known, class_names
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.paths import Paths
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.datasets.stores.cached import cached
from gpuload.datasets.stores.column import encode_targets, stray_cells
from gpuload.datasets.stores.opening import is_url, normal, open_seekable, open_stream, remote_for, scope_of
from gpuload.datasets.stores.store import absolute, existing_file, labels_array, stamp, value_of
from gpuload.errors import import_optional, visible

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote.options import Remote, StorageOptions

__all__ = ["FileList", "NumberedPaths"]

Row = tuple[int, Any, Any]  # where it stands, path, target
NUL: Final = "a NUL byte; it is damaged, or not in UTF-8 (in UTF-16 every other byte is one): save it as UTF-8"
SEPARATORS: Final = (",", ";", "\t", "|")


class NumberedPaths(Sequence[str]):
    """Paths that are made of their numbers, each when it is asked for.

    Args:
        root: an absolute path, which names are relative to.
        pattern: with ``{index}`` where the number stands, and a format as in ``{index:07d}``.
        count: how many there are.
        start: the first number.

    Example:
        >>> NumberedPaths("/data", "img_{index:04d}.jpg", 10_000_000, 1)[-1]
        '/data/img_10000000.jpg'
    """

    def __init__(self, root: str, pattern: str, count: int, start: int) -> None:
        self.root, self.pattern, self.start = root, pattern, start
        self._length = count

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        i = operator.index(index)
        if not -self._length <= i < self._length:
            raise IndexError(f"index {i} is out of range: there are {self._length} paths")
        return os.path.join(self.root, self.pattern.format(index=self.start + i % self._length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberedPaths) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._length} paths like {self.pattern!r} in {self.root!r}>"


class FileList(ImageFileDataset):
    """Image files from a list: of a manifest, or with generated names.

    Yields ``(Encoded, target)``, or `Encoded` where there are no targets::

        gl.FileList("train.csv", root="/data/images")                       # columns path and label
        gl.FileList("img_{index:07d}.jpg", root="/data", count=10_000_000, labels=labels)

    Args:
        manifest: a CSV file (``.tsv`` and ``.txt``: separated by tabs), a ``.parquet`` file (needs pyarrow:
            ``pip install 'gpuload[parquet]'``), or a name with ``{index}`` in it.
        path: the column of paths: its name, or its number from 0 in a CSV file without a line of names.
        target: the column of targets, likewise; None for none. Whole numbers and numbers come as they are; where one
            is neither, all are names of classes, and targets their places among the sorted names. Text such as
            ``007``, ``nan``, ``inf`` and ``1_000`` is a name. A column of numbers with a few other cells is warned of.
        classes: the names of all classes, in the order of their labels; or a data set whose `classes` they are, such
            as the train split. Targets are then their places in it, also where this list lacks some of them, and a
            target that is not among them is an error.
        root: the folder that paths are relative to, and may not leave. Default: the manifest's own, or the working
            directory.
        delimiter: what separates the columns of a CSV file.
        count, start: how many generated names there are, and the first number.
        labels: of generated names, one for each: an array or list. With `classes`, names or their places.
        mode: what the pixels become, see `Encoded`.
        storage_options: of a manifest or root at a URL, what fsspec takes, or a `Remote`.

    Attributes:
        paths: the full path of each image: a sequence that makes each str when it is asked for.
        labels: the target of each image, as an array; or None. Also `targets`.
        classes: the names of classes, or None.

    Warns:
        UserWarning: nearly all targets are numbers, but not all, so that they became names.

    Raises:
        FileNotFoundError: there is no such manifest. (Image files are looked for when they are read.)
        TypeError: `labels` are neither numbers nor strings.
        ValueError: a column or an entry is missing, a path leaves the root, or a target is not among `classes`, with
            the line; arguments do not go together.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = pathlib.Path(folder, "train.csv").write_text("path,label\\na.jpg,dog\\nb.jpg,cat\\n")
        ...     dataset = FileList(folder + "/train.csv")
        >>> dataset.classes, dataset.labels, dataset.paths[1].endswith("/b.jpg")
        (['cat', 'dog'], array([1, 0], dtype=uint8), True)
    """

    @dataset_arguments
    def __init__(
        self,
        manifest: str | os.PathLike[str],
        *,
        path: str | int = "path",
        target: str | int | None = "label",
        classes: Classes | None = None,
        root: str | os.PathLike[str] | None = None,
        delimiter: str | None = None,
        count: int | None = None,
        start: int = 0,
        labels: Any = None,
        mode: Mode = "RGB",
        storage_options: StorageOptions = None,
    ) -> None:
        self.mode: Mode = check_mode(mode)
        self.classes = class_names(classes)
        name = os.fsdecode(manifest)
        remote = remote_for([manifest, root], storage_options)
        if "{index" in name:
            self.paths: Any = _numbered(name, root, count, start)
            self.labels = labels_array(labels, len(self.paths), f"the {len(self.paths)} generated names")
            if self.classes is not None:
                self.labels = _places_of(self.labels, self.classes)
            self._remote = remote if is_url(self.paths.root) else None
            return
        if count is not None or start or labels is not None:
            raise ValueError(
                "count=, start= and labels= are for generated names, as in 'img_{index:07d}.jpg'; a manifest has its "
                f"own, got the manifest {name!r}"
            )
        if self.classes is not None and target is None:
            raise ValueError("classes= numbers the targets, but target=None reads none; leave one of the two out")
        between = _checked_delimiter(delimiter)
        file = existing_file(manifest, "a manifest, .csv or .parquet, or a name with {index} in it", streams=True)
        folder = os.path.dirname(file) if root is None else absolute(root)
        is_parquet = file.endswith(".parquet")
        between = between or ("\t" if file.endswith((".tsv", ".txt")) else ",")
        known = self.classes

        def build() -> dict[str, np.ndarray]:
            if is_parquet:
                rows = _parquet_rows(file, path, target, remote)
            else:
                rows = _csv_rows(file, path, target, between, remote)
            return _packed(rows, file, folder, "row" if is_parquet else "line", target, known)

        self._remote = remote if is_url(folder) else None
        asked = [*stamp(file, remote), *scope_of(remote), folder, path, target, between, known]
        found = cached(file, asked, build)
        self.paths = Paths(folder, found["data"], found["offsets"])
        self.labels = found.get("targets")
        if "classes" in found:
            self.classes = json.loads(found["classes"].tobytes())
        if "remark" in found:
            warnings.warn(found["remark"].tobytes().decode(), stacklevel=3)

    @property
    def targets(self) -> np.ndarray | None:
        """The labels, under torchvision's name."""
        return self.labels

    def __getitem__(self, index: SupportsIndex) -> Any:
        number = self._from_start(index)
        return self._with(number, self._encoded(number))

    def _with(self, number: int, image: Encoded) -> Any:
        return image if self.labels is None else (image, value_of(self.labels, number))

    def __repr__(self) -> str:
        return f"FileList({self.root!r}: {len(self)} images)"


def _checked_delimiter(delimiter: str | None) -> str | None:
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n'):
        raise ValueError(f"delimiter must be one character, such as ';' or '\\t', got {delimiter!r}")
    return delimiter


def _places_of(labels: np.ndarray | None, classes: list[str]) -> np.ndarray:
    """Labels of generated names, which are names of classes or their places, as places."""
    if labels is None:
        raise ValueError("classes= numbers the labels, but there are none; give labels=, or leave classes out")
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise ValueError(
            f"with classes= labels must be names of classes or their places, one for each, got {labels.dtype} of shape "
            f"{labels.shape}"
        )
    if labels.dtype.kind == "U":
        places = {name: place for place, name in enumerate(classes)}
        for number, name in enumerate(labels.tolist()):
            check_known(name, places, f"labels[{number}]")
        return _smallest(np.array([places[name] for name in labels.tolist()], np.int64))
    outside = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(outside):
        raise ValueError(
            f"labels[{outside[0]}] is {labels[outside[0]]}, but the {len(classes):,} classes have the places 0 … "
            f"{len(classes) - 1:,}"
        )
    return labels


def _numbered(pattern: str, root: str | os.PathLike[str] | None, count: int | None, start: int) -> NumberedPaths:
    if type(count) is not int or count < 1:
        raise ValueError(f"generated names need count=, how many there are, got {count!r}")
    if type(start) is not int:
        raise ValueError(f"start must be a whole number, the first index, got {start!r}")
    try:
        pattern.format(index=start)
    except (ValueError, LookupError) as error:
        raise ValueError(
            f"{pattern!r} cannot be filled in: {error}; expected a name such as 'img_{{index:07d}}.jpg'"
        ) from None
    if is_url(pattern):
        above, _, pattern = pattern.rpartition("/")
        if root is not None or "{index" in above:
            raise ValueError(
                f"{above + '/' + pattern!r} is a URL: give root= the part that stays the same, and the generated name "
                "below it"
            )
        root = above
    return NumberedPaths(absolute("." if root is None else root), pattern, count, start)


def _csv_rows(
    file: str, path: str | int, target: str | int | None, delimiter: str, remote: Remote | None
) -> Iterator[Row]:
    """The rows of a CSV file, with their lines."""
    wanted = [path] if target is None else [path, target]
    if len({type(column) for column in wanted}) > 1:
        raise ValueError(
            f"path and target must both be names of columns, or both numbers (without a line of names), got {wanted}"
        )
    with io.TextIOWrapper(open_stream(file, remote), encoding="utf-8-sig", newline="") as opened:
        rows = csv.reader(opened, delimiter=delimiter, strict=True)
        try:
            if isinstance(path, str):
                names = next(rows, [])
                _check_columns(file, names, [str(column) for column in wanted], delimiter)
                places = [names.index(str(column)) for column in wanted]
            else:
                places = [int(column) for column in wanted]
            at, to, most = places[0], places[-1], max(places)
            for row in rows:
                if not row:
                    continue
                if len(row) <= most:
                    other = next((one for one in SEPARATORS if len(delimiter.join(row).split(one)) > most), None)
                    hint = "" if other is None else f"; if {other!r} separates them, write delimiter={other!r}"
                    raise ValueError(
                        f"line {rows.line_num} of {file!r} has {len(row)} fields, but column {most} (from 0) is "
                        f"needed: {row}{hint}"
                    )
                yield rows.line_num, row[at], row[to]
        except (csv.Error, UnicodeDecodeError) as error:
            remedy = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
            raise ValueError(
                f"{file!r} cannot be read as CSV in UTF-8, near line {rows.line_num}: {error}{remedy}"
            ) from error


def _check_columns(file: str, names: list[str], wanted: list[str], delimiter: str) -> None:
    """Refuse a first line that lacks a column; the message says what may be wrong with it."""
    text = delimiter.join(names)
    if "\0" in text:
        raise ValueError(f"the first line of {file!r} has {NUL}")
    for column in wanted:
        if column in names:
            continue
        remedy = "Name columns with path= and target=, or give their numbers if that line is no header"
        other = next((one for one in SEPARATORS if set(wanted) <= set(text.split(one))), None)
        alike = next((name for name in names if name.strip().casefold() == column.strip().casefold()), None)
        if other is not None:
            remedy = f"It is separated by {other!r}: write delimiter={other!r}"
        elif alike is not None:
            remedy = f"If {alike!r} is meant, write {'path' if column == wanted[0] else 'target'}={alike!r}"
        raise ValueError(f"{file!r} has no column {column!r}; its first line says {names}. {remedy}")


def _parquet_rows(file: str, path: str | int, target: str | int | None, remote: Remote | None) -> Iterator[Row]:
    """The rows of a Parquet file, with their numbers."""
    wanted = [path] if target is None else [path, target]
    parquet = import_optional("pyarrow.parquet", "FileList", "parquet")
    try:
        opened = parquet.ParquetFile(open_seekable(file, remote) if is_url(file) else file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file!r} is no Parquet file, or is cut off: {visible(str(error))}") from error
    with opened:
        for column in wanted:
            if column not in opened.schema_arrow.names:
                names = ", ".join(map(repr, opened.schema_arrow.names))
                raise ValueError(
                    f"{file!r} has no column {column!r}; its columns are {names}. Name them with path= and target="
                )
        row = 0
        for batch in opened.iter_batches(columns=list(dict.fromkeys(wanted)), use_threads=False):
            columns = [batch.column(str(name)).to_pylist() for name in wanted]
            for name, target_ in zip(columns[0], columns[-1], strict=True):
                yield row, name, target_
                row += 1


def _packed(
    rows: Iterator[Row], file: str, root: str, unit: str, target: str | int | None, classes: list[str] | None
) -> dict[str, np.ndarray]:
    """Paths relative to the root in one buffer, and targets in an array."""
    joined, lengths = bytearray(), []
    values: list[Any] = []
    numbers = array("q")  # where each value stands
    inside = os.path.join(root, "")
    places = None if classes is None else {name: place for place, name in enumerate(classes)}
    for number, path, value in rows:
        where = f"{unit} {number} of {file!r}"
        if not isinstance(path, str) or not path:
            raise ValueError(f"{where} has no path, but {path!r}")
        if "\0" in path or (isinstance(value, str) and "\0" in value):
            raise ValueError(f"{where} has {NUL}")
        if path.startswith("/") or ".." in path or is_url(path):
            full = path if is_url(path) else normal(root, path)
            if not full.startswith(inside) or "/../" in full:
                raise ValueError(
                    f"{where} has the path {path!r}, which leads out of {root!r}; give a root= that holds all images"
                )
            path = full[len(inside) :]
        raw = os.fsencode(path)
        joined += raw
        lengths.append(len(raw))
        if target is not None:
            if value is None or value == "":
                raise ValueError(f"{where} has no target; leave such rows out, or read none with target=None")
            if places is not None:
                check_known(str(value), places, where)
            values.append(value)
            numbers.append(number)
    if not lengths:
        raise ValueError(f"{file!r} names no images")
    packed = Paths.pack(root, [(bytes(joined), np.array(lengths, np.int64))])
    arrays = {"data": packed.data, "offsets": packed.offsets}
    if target is None:
        return arrays
    if places is None:
        targets, names = encode_targets(values)
        if names is not None:
            arrays["classes"] = np.frombuffer(json.dumps(names).encode(), np.uint8)
            if remark := _remark(values, numbers, file, unit, target):
                arrays["remark"] = np.frombuffer(remark.encode(), np.uint8)
    else:
        targets = np.fromiter((places[str(value)] for value in values), np.int64, len(values))
    return {**arrays, "targets": targets if targets.dtype.kind == "f" else _smallest(targets)}


def _remark(values: list[Any], numbers: Sequence[int], file: str, unit: str, target: str | int) -> str:
    """What to say of a column that is not of numbers because of a few cells."""
    strays = stray_cells(values)
    if not strays:
        return ""
    first, count = strays[0], len(strays)
    more = f", and {count - 1:,} more are none" if count > 1 else ""
    return (
        f"{len(values) - count:,} of the {len(values):,} targets in the column {target!r} of {file!r} are numbers, but "
        f"{unit} {numbers[first]} has {values[first]!r}{more}: so all became names of classes, and labels are their "
        "places among the sorted names, in which '10' comes before '9'. Correct the cell, or leave its row out; if "
        "they are names, list them in classes="
    )


def _smallest(array: np.ndarray) -> np.ndarray:
    """Integers in the smallest type that holds them."""
    dtype = np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    return array.astype(dtype) if dtype.kind in "iu" else array  # of uint64 and int8 numpy makes floats
