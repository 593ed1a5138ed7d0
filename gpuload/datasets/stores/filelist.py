"""`FileList`: image files that a manifest or a table names, or whose names are made of their numbers.

A manifest is read once, in the main process, row by row whatever its form, to paths in one buffer and an array of
targets for each column. Those of a long manifest are kept in a file for the next time. Generated names take no memory.

Whether a column of targets holds whole numbers, numbers, or names of classes is read from its cells. Python's own `int`
and `float` take more for a number than a table means by one: ``007`` is a code, ``nan`` and ``inf`` are words,
``1_000`` has no place in a CSV file.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuload.datasets.base import ImageFileDataset, in_smallest_type
from gpuload.datasets.classes import Classes, check_known, class_names
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.datasets.scan import Lazy, Paths
from gpuload.datasets.stores.cached import cached
from gpuload.datasets.stores.opening import is_url, normal, open_seekable, open_stream, remote_for, scope_of
from gpuload.datasets.stores.store import absolute, existing_file, labels_array, naming, stamp, value_of
from gpuload.errors import import_optional

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["FileList", "NumberedPaths", "encode_targets", "stray_cells"]

Rows = Iterable[tuple[int, Sequence[Any]]]  # of each its line or number, and its cells: the path, then the targets
INDEX: Final = 3  # which form an index has; one of another form is built again
NUL: Final = "a NUL byte; it is damaged, or not in UTF-8 (in UTF-16 every other byte is one): save it as UTF-8"
TABLES: Final = (("pandas", "DataFrame"), ("pyarrow", "Table"))  # told by their names, without an import
SEPARATORS: Final = (",", ";", "\t", "|")
WHOLE: Final = re.compile(r"\s*[+-]?(0|[1-9][0-9]*)\s*")
NUMBER: Final = re.compile(r"\s*[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
PADDED: Final = re.compile(r"0[0-9]+")
WIDEST: Final = 1 << 63
STRAYS: Final = 10  # at most one of this many cells is a stray
DIGITS: Final = 20  # of the longest int64, with its sign
FEWEST: Final = 4  # cells, of which one is a stray


@dataclass(frozen=True, repr=False)
class NumberedPaths(Lazy[str]):
    """Paths that are made of their numbers, each when it is asked for.

    Args:
        root: an absolute path, which names are relative to.
        pattern: with ``{index}`` where the number stands, and a format as in ``{index:07d}``.
        length: how many there are.
        start: the first number.

    Example:
        >>> NumberedPaths("/data", "img_{index:04d}.jpg", 10_000_000, 1)[-1]
        '/data/img_10000000.jpg'
    """

    root: str
    pattern: str
    length: int
    start: int

    def __len__(self) -> int:
        return self.length

    def _entry(self, number: int) -> str:
        return os.path.join(self.root, self.pattern.format(index=self.start + number))

    def __repr__(self) -> str:
        return f"<{self.length} paths like {self.pattern!r} in {self.root!r}>"


class FileList(ImageFileDataset):
    """Image files from a list: of a manifest or a table, or with generated names.

    Yields ``(Encoded, target)``, or `Encoded` where there are no targets; of several columns of targets a dict::

        gl.FileList("train.csv", root="/data/images")                       # columns path and label
        gl.FileList(frame, path="file", target=["age", "sex"], root="/data")  # a pandas.DataFrame; target: a dict
        gl.FileList("img_{index:07d}.jpg", root="/data", count=10_000_000, labels=labels)

    Args:
        manifest: a CSV file (``.tsv`` and ``.txt``: separated by tabs), a ``.parquet`` file (needs pyarrow:
            ``pip install 'gpuload[parquet]'``), a ``pandas.DataFrame``, a ``pyarrow.Table``, or a name with
            ``{index}`` in it.
        path: the column of paths: its name, or its number from 0 in a CSV file without a line of names.
        target: the column of targets, likewise; None for none; or a list of several, whose values come as a dict with
            the columns as keys. Numbers come as they are; where one cell is none, all are names of classes, and targets
            their places among the sorted names. Text such as ``007``, ``nan``, ``inf`` and ``1_000`` is a name.
        classes: the names of all classes, in the order of their labels; or a data set whose `classes` they are, such
            as the train split. Targets are then their places among these; one that is not among them is an error. For
            several targets, a dict of names by column.
        root: the folder that paths are relative to, and may not leave. Default: the manifest's own, or the working
            directory. Absolute paths need one that they are in.
        delimiter: what separates the columns of a CSV file.
        count, start: how many generated names there are, and the first number.
        labels: of generated names, one for each: an array or list. With `classes`, names or their places.
        mode: what the pixels become, see `Encoded`.
        storage_options: of a manifest or root at a URL, what fsspec takes, or a `Remote`.

    Attributes:
        paths: the full path of each image: a sequence that makes each str when it is asked for.
        labels: the target of each image, as an array; or None. Also `targets`. Of several targets a dict of arrays.
        classes: the names of classes, or None. Of several targets a dict of those that have names.

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
        manifest: str | os.PathLike[str] | Any,
        *,
        path: str | int = "path",
        target: str | int | Sequence[str | int] | None = "label",
        classes: Classes | Mapping[str | int, Classes] | None = None,
        root: str | os.PathLike[str] | None = None,
        delimiter: str | None = None,
        count: int | None = None,
        start: int = 0,
        labels: Any = None,
        mode: Mode = "RGB",
        storage_options: StorageOptions = None,
    ) -> None:
        self.mode: Mode = check_mode(mode)
        is_table = any((cls.__module__.partition(".")[0], cls.__name__) in TABLES for cls in type(manifest).__mro__)
        name = "" if is_table else os.fsdecode(manifest)
        if "{index" in name:
            self._generate(name, root, count, start, labels, class_names(classes), storage_options)
            return
        if count is not None or start or labels is not None:
            raise ValueError(
                "count=, start= and labels= are for generated names, as in 'img_{index:07d}.jpg'; a manifest has its "
                f"own, got the manifest {'a table' if is_table else repr(name)}"
            )
        wanted = _wanted(path, target, classes)
        (_, *columns), _ = wanted
        if is_table:
            self._remote = remote_for(root, storage_options)
            folder = absolute("." if root is None else root)
            source = Source(f"the {type(manifest).__name__}", "row", folder, root is not None, *wanted)
            arrays = _packed(_table_rows(manifest, source), source)
        else:
            remote = remote_for([manifest, root], storage_options)
            file = existing_file(manifest, "a manifest, .csv or .parquet, or a name with {index} in it", streams=True)
            folder = os.path.dirname(file) if root is None else absolute(root)
            between = _checked_delimiter(delimiter) or ("\t" if file.endswith((".tsv", ".txt")) else ",")
            read, unit = (_parquet_rows, "row") if file.endswith(".parquet") else (partial(_csv_rows, between), "line")
            source = Source(repr(file), unit, folder, root is not None, *wanted)
            self._remote = remote if is_url(folder) else None
            arrays = cached(
                file,
                [INDEX, *stamp(file, remote), *scope_of(remote), folder, *wanted, between],
                lambda: _packed(read(file, source, remote), source),
            )
        self.paths: Any = Paths(folder, arrays["data"], arrays["offsets"])
        targets: list[Any] = [arrays[f"targets {place}"] for place in range(len(columns))]
        names, remarks = json.loads(arrays["words"].tobytes())
        self.labels: Any = next(iter(targets), None)
        self.classes: Any = next(iter(names), None)
        if target is not None and not isinstance(target, str | int):
            self.labels = dict(zip(columns, targets, strict=True))
            self.classes = {column: entry for column, entry in zip(columns, names, strict=True) if entry is not None}
        for remark in remarks:
            warnings.warn(remark, stacklevel=3)

    def _generate(
        self, pattern: str, root: Any, count: int | None, start: int, labels: Any, classes: Any, storage_options: Any
    ) -> None:
        remote = remote_for([pattern, root], storage_options)
        self.paths = _numbered(pattern, root, count, start)
        self.labels = labels_array(labels, len(self.paths), f"the {len(self.paths)} generated names")
        self.classes = classes
        if classes is not None:
            self.labels = _check_places(self.labels, classes)
        self._remote = remote if is_url(self.paths.root) else None

    @property
    def targets(self) -> Any:
        """The labels, under torchvision's name."""
        return self.labels

    def _with(self, number: int, image: Encoded) -> Any:
        if isinstance(self.labels, dict):
            return image, {name: value_of(labels, number) for name, labels in self.labels.items()}
        return image if self.labels is None else (image, value_of(self.labels, number))

    def __repr__(self) -> str:
        return f"FileList({self.root!r}: {len(self)} images)"


class Source(NamedTuple):
    """A table that is read: what messages call it and its rows; the folder of the paths, and whether the user named it;
    the column of paths and those of targets, and the classes of each of these, or None."""

    name: str
    unit: str
    root: str
    has_root: bool
    columns: list[str | int]
    classes: list[list[str] | None]

    def where(self, number: int) -> str:
        return f"{self.unit} {number} of {self.name}"


def _wanted(path: str | int, target: Any, classes: Any) -> tuple[list[str | int], list[list[str] | None]]:
    """Return the columns that are asked for, of paths first, and the classes of the others, checked."""
    if target is None or isinstance(target, str | int):
        if classes is not None and target is None:
            raise ValueError("classes= numbers the targets, but target=None reads none; leave one of the two out")
        return ([path], []) if target is None else ([path, target], [class_names(classes)])
    targets = list(target)
    if not targets or len(set(targets)) < len(targets) or not all(isinstance(name, str | int) for name in targets):
        raise ValueError(f"target must be the name of a column, or a list of several, each once, got {target!r}")
    if classes is not None and (not isinstance(classes, Mapping) or not set(classes) <= set(targets)):
        raise ValueError(f"with several targets classes= is a dict of them, {{{targets[0]!r}: names}}, got {classes!r}")
    return [path, *targets], [class_names((classes or {}).get(name)) for name in targets]


def _checked_delimiter(delimiter: str | None) -> str | None:
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n'):
        raise ValueError(f"delimiter must be one character, such as ';' or '\\t', got {delimiter!r}")
    return delimiter


def _check_places(labels: np.ndarray | None, classes: list[str]) -> np.ndarray:
    """Return labels of generated names, which are names of classes or their places, as places."""
    if labels is None:
        raise ValueError("classes= numbers the labels, but there are none; give labels=, or leave classes out")
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise ValueError(
            f"with classes= labels must be names of classes or their places, one for each, got {labels.dtype} of shape "
            f"{labels.shape}"
        )
    if labels.dtype.kind == "U":
        return _places(labels.tolist(), classes, "labels[{}]".format)
    outside = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(outside):
        raise ValueError(
            f"labels[{outside[0]}] is {labels[outside[0]]}, but the {len(classes):,} classes have the places 0 … "
            f"{len(classes) - 1:,}"
        )
    return labels


def _places(values: list[Any], classes: list[str], where: Callable[[int], str]) -> np.ndarray:
    """Return the places of values among the names of classes; `where` says in an error where a value is."""
    places = {name: place for place, name in enumerate(classes)}
    for number, value in enumerate(values):
        if str(value) not in places:
            check_known(str(value), places, where(number))
    return in_smallest_type(np.array([places[str(value)] for value in values]))


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


def _table_rows(table: Any, source: Source) -> Rows:
    """Return the rows of a table of pyarrow or pandas."""
    columns = source.columns
    if hasattr(table, "to_batches"):
        return _arrow_rows(table.to_batches(), table.column_names, columns, source)
    _check_names(list(table.columns), columns, source)
    values = [  # None where pandas has NaN or no value
        [value if there else None for value, there in zip(column.tolist(), column.notna(), strict=True)]
        for column in (table[name] for name in columns)
    ]
    return enumerate(zip(*values, strict=True))


def _parquet_rows(file: str, source: Source, remote: Remote | None) -> Rows:
    columns = list(map(str, source.columns))
    parquet = import_optional("pyarrow.parquet", "FileList", "parquet")
    with naming(file, lambda text: ValueError(f"{file!r} is no Parquet file, or is cut off: {text}")):
        opened = parquet.ParquetFile(open_seekable(file, remote) if is_url(file) else file)
    with naming(file, lambda text: ValueError(f"{file!r} cannot be read: {text}")), opened:
        batches = opened.iter_batches(columns=list(dict.fromkeys(columns)), use_threads=False)
        yield from _arrow_rows(batches, opened.schema_arrow.names, columns, source)


def _arrow_rows(batches: Iterable[Any], names: list[str], columns: Sequence[str | int], source: Source) -> Rows:
    _check_names(names, columns, source)
    rows = (zip(*(batch.column(name).to_pylist() for name in columns), strict=True) for batch in batches)
    return enumerate(chain.from_iterable(rows))


def _check_names(names: list[Any], columns: Sequence[str | int], source: Source) -> None:
    for column in columns:
        if column not in names:
            raise ValueError(
                f"{source.name} has no column {column!r}; its columns are {', '.join(map(repr, names))}. Name them "
                "with path= and target="
            )


def _csv_rows(delimiter: str, file: str, source: Source, remote: Remote | None) -> Rows:
    columns = source.columns
    if len({type(column) for column in columns}) > 1:
        raise ValueError(
            f"path and target must both be names of columns, or both numbers (without a line of names), got {columns}"
        )
    with io.TextIOWrapper(open_stream(file, remote), encoding="utf-8-sig", newline="") as opened:
        rows = csv.reader(opened, delimiter=delimiter, strict=True)
        try:
            if isinstance(columns[0], str):
                names = next(rows, [])
                _check_first_line(file, names, [str(column) for column in columns], delimiter)
                places = [names.index(str(column)) for column in columns]
            else:
                places = [int(column) for column in columns]
            most = max(places)
            for row in rows:
                if not row:
                    continue
                if len(row) <= most:
                    other = next((one for one in SEPARATORS if len(delimiter.join(row).split(one)) > most), None)
                    hint = "" if other is None else f"; if {other!r} separates them, write delimiter={other!r}"
                    raise ValueError(
                        f"{source.where(rows.line_num)} has {len(row)} fields, but column {most} (from 0) is needed: "
                        f"{row}{hint}"
                    )
                yield rows.line_num, [row[place] for place in places]
        except (csv.Error, UnicodeDecodeError) as error:
            remedy = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
            raise ValueError(
                f"{file!r} cannot be read as CSV in UTF-8, near line {rows.line_num}: {error}{remedy}"
            ) from error


def _check_first_line(file: str, names: list[str], wanted: list[str], delimiter: str) -> None:
    """Refuse a first line that lacks a column; the message says what may be wrong with the line."""
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


def _packed(rows: Rows, source: Source) -> dict[str, np.ndarray]:
    """Return the paths relative to the root in one buffer, an array for each column of targets, and as JSON the names
    of the classes of each column and the remarks on all of them."""
    joined, lengths = bytearray(), array("q")
    columns: list[list[Any]] = [[] for _ in source.classes]
    numbers = array("q")  # the line or number of each row
    for number, (path, *values) in rows:
        where = source.where(number)
        relative = _relative(path, where, source)
        joined += relative
        lengths.append(len(relative))
        numbers.append(number)
        for column, value in zip(columns, values, strict=True):
            if value is None or value == "":
                raise ValueError(f"{where} has no target; leave such rows out, or read none with target=None")
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{where} has {NUL}")
            column.append(value)
    if not lengths:
        raise ValueError(f"{source.name} names no images")
    paths = Paths.pack(source.root, joined, lengths)
    arrays = {"data": paths.data, "offsets": paths.offsets}
    words: tuple[list[Any], list[str]] = [], []
    for place, (target, names, values) in enumerate(zip(source.columns[1:], source.classes, columns, strict=True)):
        if names is not None:
            targets = _places(values, names, lambda row: source.where(numbers[row]))
        else:
            targets, names = encode_targets(values)
            if names is not None and (stray_numbers := stray_cells(values)):
                words[1].append(_remark(values, stray_numbers, numbers, source, target))
        arrays[f"targets {place}"] = targets
        words[0].append(names)
    return {**arrays, "words": np.frombuffer(json.dumps(words).encode(), np.uint8)}


def _relative(path: Any, where: str, source: Source) -> bytes:
    """Return a path as one relative to the root, in the file system's bytes."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise ValueError(f"{where} has no path, but {path!r}")
    if "\0" in path:
        raise ValueError(f"{where} has {NUL}")
    if path.startswith("/") or ".." in path or is_url(path):
        inside = os.path.join(source.root, "")
        full = path if is_url(path) else normal(source.root, path)
        if not full.startswith(inside) or "/../" in full:
            if path.startswith("/") and not source.has_root:
                raise ValueError(
                    f"{where} has the absolute path {path!r}, but without root= paths are below {source.root!r}; name "
                    f"the folder that holds all images, as root={os.path.dirname(path)!r}"
                )
            raise ValueError(
                f"{where} has the path {path!r}, which leads out of {source.root!r}; give a root= that holds all images"
            )
        path = full[len(inside) :]
    return os.fsencode(path)


def _remark(
    values: list[Any], stray_numbers: list[int], numbers: Sequence[int], source: Source, target: str | int
) -> str:
    """Return what to say of a column that is not of numbers because of a few cells."""
    first, count = stray_numbers[0], len(stray_numbers)
    more = f", and {count - 1:,} more are none" if count > 1 else ""
    return (
        f"{len(values) - count:,} of the {len(values):,} targets in the column {target!r} of {source.name} are "
        f"numbers, but {source.unit} {numbers[first]} has {values[first]!r}{more}: so all became names of classes, and "
        "labels are their places among the sorted names, in which '10' comes before '9'. Correct the cell, or leave "
        "its row out; if they are names, list them in classes="
    )


def encode_targets(values: list[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Return targets as integers or float64; or as the places among the sorted names, and these names."""
    texts = {value for value in values if isinstance(value, str)}
    kinds = set(map(type, values)) - {str}
    if not _not_numbers(texts) and kinds <= {int, bool, float, Decimal}:
        if kinds <= {int, bool} and all(map(WHOLE.fullmatch, texts)):
            if all(-WIDEST <= value < WIDEST for value in values if not isinstance(value, str)):
                return in_smallest_type(np.fromiter(map(int, values), np.int64, len(values))), None
        else:
            return np.fromiter(map(float, values), np.float64, len(values)), None
    names = sorted(set(map(str, values)))
    return _places(values, names, str), names


def stray_cells(values: list[Any]) -> list[int]:
    """Return which of the values are no numbers, if these are few: one of four or more, or one of ten. Codes that are
    padded with zeros to one length (``08``, ``09``, ``10``) are no strays.
    """
    texts = Counter(value for value in values if isinstance(value, str))
    stray_numbers = _not_numbers(texts)
    if len(values) < FEWEST or sum(texts[text] for text in stray_numbers) > max(1, len(values) // STRAYS):
        return []
    if all(map(PADDED.fullmatch, stray_numbers)) and len(set(map(len, texts))) == 1:
        return []
    return [number for number, value in enumerate(values) if value in stray_numbers]


def _not_numbers(texts: Collection[str]) -> set[str]:
    """Return the texts that are no numbers; where all are whole numbers, those that int64 does not hold."""
    others = {text for text in texts if NUMBER.fullmatch(text) is None or not math.isfinite(float(text))}
    if others or not all(map(WHOLE.fullmatch, texts)):
        return others
    return {text for text in texts if len(text.strip()) > DIGITS or not -WIDEST <= int(text) < WIDEST}
