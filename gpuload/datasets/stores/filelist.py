"""`FileList`: image files that a manifest or a table lists.

The main process reads a manifest once, row by row, into one buffer of paths and one array of targets per column. If
the manifest is long, the result is cached in a file.

The cells of a target column determine whether it holds integers, floats, or class names. Python's `int` and `float`
accept text that does not mean a number in a table: ``007`` is a code, ``nan`` and ``inf`` are words, and ``1_000`` is
not a number in CSV.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuload.checks import integer, is_sequence, one_of
from gpuload.datasets.base import ImageFileDataset, shrink_integers
from gpuload.datasets.classes import Classes, check_known_class, class_names
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import MODES, Encoded, Mode
from gpuload.datasets.scan import Paths, path_text
from gpuload.datasets.stores.cached import load_or_build
from gpuload.datasets.stores.opening import (
    is_url,
    join_path,
    open_seekable,
    open_stream,
    remote_options,
    scope_of,
    without_query,
)
from gpuload.datasets.stores.store import absolute_path, existing_file, replace_errors, stamp, value_of
from gpuload.errors import import_optional

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["FileList", "encode_targets"]

Rows = Iterable[tuple[int, Sequence[Any]]]  # for each row: its line or row number, and its cells (path and targets)
INDEX_VERSION: Final = 4  # cached indexes of other versions are rebuilt
NUL: Final = "a NUL byte, so it is damaged or not in UTF-8 (UTF-16 text is full of NUL bytes); save the table as UTF-8"
TABLES: Final = (("pandas", "DataFrame"), ("pyarrow", "Table"))  # recognized by name, without importing the libraries
SEPARATORS: Final = (",", ";", "\t", "|")
INTEGER: Final = re.compile(r"\s*[+-]?(0|[1-9][0-9]*)\s*")
NUMBER: Final = re.compile(r"\s*[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
INT64_LIMIT: Final = 1 << 63
INT64_DIGITS: Final = 20  # the longest int64, including the sign


class FileList(ImageFileDataset):
    """Image files listed in a manifest or a table.

    Yields ``(Encoded, target)``, or `Encoded` if there are no targets. With several target columns, targets are dicts::

        gl.FileList("train.csv", root="/data/images")                       # columns path and label
        gl.FileList(frame, path="file", target=["age", "sex"], root="/data")  # a pandas.DataFrame; target: a dict

    Args:
        manifest: a CSV file (tab-separated if its name ends in ``.tsv`` or ``.txt``), a ``.parquet`` file (needs
            pyarrow: ``pip install 'gpuload[parquet]'``), a ``pandas.DataFrame``, or a ``pyarrow.Table``.
        path: the column of paths: its name, or for a CSV file without a header, its index, counted from 0.
        target: the column of targets, by name or index; None for no targets; or a list of columns: each target is
            then a dict keyed by column. Numbers are used unchanged. If any cell of a column is not a number, all its
            cells are class names, and each target is the index of its name among the sorted names. Text such as
            ``007``, ``nan``, ``inf`` and ``1_000`` is a name.
        classes: the names of all classes, in the order of their labels; or a dataset, such as the train split, whose
            `classes` are used. Each target is then the index of its name in this list; an unknown name is an error. For
            several target columns, a dict from column to names.
        root: the folder that paths are relative to; paths must not point outside it. Default: the folder of the
            manifest, or the working directory. Absolute paths must be inside it.
        delimiter: the character that separates the columns of a CSV file.
        mode: the pixel mode of images, see `Encoded`.
        storage_options: for a manifest or root at a URL, fsspec options or a `Remote`.

    Attributes:
        paths: the full path of each image, as a lazy sequence of str.
        labels: the target of each image, as an array, or None; also available as `targets`. With a list of target
            columns, a dict of arrays.
        classes: the class names, or None. With a list of target columns, a dict of the columns that have class names.

    Warns:
        UserWarning: most targets of a column are numbers, but not all, so they were treated as class names.

    Raises:
        FileNotFoundError: the manifest does not exist. (Image files are only checked when they are read.)
        TypeError: the manifest is neither a path nor a table.
        ValueError: a column or a cell is missing, a path points outside the root, or a target is not among `classes`
            (the message includes the line); or arguments cannot be combined.

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
        mode: Mode = "RGB",
        storage_options: StorageOptions = None,
    ) -> None:
        self.mode: Mode = one_of("mode", mode, MODES)
        is_table = any((cls.__module__.partition(".")[0], cls.__name__) in TABLES for cls in type(manifest).__mro__)
        if not is_table and "{index" in path_text(manifest):
            raise ValueError(
                f"{path_text(manifest)!r} is not a manifest, and FileList generates no names; pass a table of them, as "
                "in pandas.DataFrame({'path': [f'img_{index:07d}.jpg' for index in range(n)], 'label': labels})"
            )
        selection = _select_columns(path, target, classes)
        (_, *columns), _ = selection
        if is_table:
            self._remote = remote_options(root, storage_options)
            folder = absolute_path("." if root is None else root)
            source = TableSource(f"the {type(manifest).__name__}", "row", folder, root is not None, *selection)
            arrays = _pack_rows(_table_rows(manifest, source), source)
        else:
            remote = remote_options([manifest, root], storage_options)
            file = existing_file(manifest, "a manifest (.csv or .parquet)", allow_streams=True)
            file_name = without_query(file)
            folder = os.path.dirname(file_name) if root is None else absolute_path(root)
            delimiter = _check_delimiter(delimiter) or ("\t" if file_name.endswith((".tsv", ".txt")) else ",")
            read_rows, unit = (
                (_parquet_rows, "row") if file_name.endswith(".parquet") else (partial(_csv_rows, delimiter), "line")
            )
            source = TableSource(repr(file), unit, folder, root is not None, *selection)
            self._remote = remote if is_url(folder) else None
            arrays = load_or_build(
                file,
                [INDEX_VERSION, *stamp(file, remote), *scope_of(remote), folder, *selection, delimiter],
                lambda: _pack_rows(read_rows(file, source, remote), source),
            )
        self.paths: Any = Paths(folder, arrays["data"], arrays["offsets"])
        targets: list[Any] = [arrays[f"targets {column_index}"] for column_index in range(len(columns))]
        names, messages = json.loads(arrays["words"].tobytes())
        self.labels: Any = next(iter(targets), None)
        self.classes: Any = next(iter(names), None)
        if target is not None and not isinstance(target, str | int):
            self.labels = dict(zip(columns, targets, strict=True))
            self.classes = {column: entry for column, entry in zip(columns, names, strict=True) if entry is not None}
        for message in messages:
            warnings.warn(message, stacklevel=3)

    @property
    def targets(self) -> Any:
        """The labels, under torchvision's name."""
        return self.labels

    def _make_sample(self, index: int, image: Encoded) -> Any:
        if isinstance(self.labels, dict):
            return image, {name: value_of(labels, index) for name, labels in self.labels.items()}
        return image if self.labels is None else (image, value_of(self.labels, index))

    def __repr__(self) -> str:
        return f"FileList({self.root!r}: {len(self)} images)"


class TableSource(NamedTuple):
    """The manifest or table that is being read.

    Attributes:
        name, unit: the words with which messages refer to the table, and to one of its rows (``"line"`` or ``"row"``).
        root, has_root: the folder that paths are relative to, and whether the user has passed it.
        columns: the column of paths, followed by the target columns.
        classes: for each target column, the class names that the user has passed, or None.
    """

    name: str
    unit: str
    root: str
    has_root: bool
    columns: list[str | int]
    classes: list[list[str] | None]

    def row_name(self, row_number: int) -> str:
        """Return the words with which messages refer to a row."""
        return f"{self.unit} {row_number} of {self.name}"


def _select_columns(path: str | int, target: Any, classes: object) -> tuple[list[str | int], list[list[str] | None]]:
    """Validate the column arguments. Return the column of paths followed by the target columns, and the classes of each
    target column."""
    path = _column("path", path)
    if target is None or not is_sequence(target):
        if classes is not None and target is None:
            raise ValueError("classes= names the targets, but target=None reads no targets; omit one of them")
        return ([path], []) if target is None else ([path, _column("target", target)], [class_names(classes)])
    targets = [_column("target", name) for name in target]
    if not targets or len(set(targets)) < len(targets):
        raise ValueError(f"target must be a column, or a list of distinct columns, got {target!r}")
    if classes is not None and (not isinstance(classes, Mapping) or not set(classes) <= set(targets)):
        raise ValueError(f"with several targets, classes= must be a dict {{{targets[0]!r}: names, …}}, got {classes!r}")
    return [path, *targets], [class_names((classes or {}).get(name)) for name in targets]


def _column(name: str, value: object) -> str | int:
    """Return the name of a column, or its index."""
    return value if isinstance(value, str) else integer(f"{name}, unless it is a string,", value)


def _check_delimiter(delimiter: str | None) -> str | None:
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n'):
        raise ValueError(f"delimiter must be one character, such as ';' or '\\t', got {delimiter!r}")
    return delimiter


def _class_indices(values: list[Any], classes: list[str], describe_position: Callable[[int], str]) -> np.ndarray:
    """Return the index of each value in the list of class names. Errors name a value's position as `describe_position`
    does."""
    indices = {name: index for index, name in enumerate(classes)}
    for row, value in enumerate(values):
        if str(value) not in indices:
            check_known_class(str(value), indices, describe_position(row))
    return shrink_integers(np.array([indices[str(value)] for value in values]))


def _table_rows(table: Any, source: TableSource) -> Rows:
    """Return the rows of a pyarrow or pandas table."""
    columns = source.columns
    if hasattr(table, "to_batches"):
        return _arrow_rows(table.to_batches(), table.column_names, columns, source)
    _check_names(list(table.columns), columns, source)
    values = [  # None for NaN and missing values of pandas
        [value if is_present else None for value, is_present in zip(column.tolist(), column.notna(), strict=True)]
        for column in (table[name] for name in columns)
    ]
    return enumerate(zip(*values, strict=True))


def _parquet_rows(file: str, source: TableSource, remote: Remote | None) -> Rows:
    columns = list(map(str, source.columns))
    parquet = import_optional("pyarrow.parquet", "FileList", "parquet")
    with replace_errors(file, lambda text: ValueError(f"{file!r} is not a Parquet file, or is truncated: {text}")):
        parquet_file = parquet.ParquetFile(open_seekable(file, remote) if is_url(file) else file)
    with replace_errors(file, lambda text: ValueError(f"{file!r} cannot be read: {text}")), parquet_file:
        batches = parquet_file.iter_batches(columns=list(dict.fromkeys(columns)), use_threads=False)
        yield from _arrow_rows(batches, parquet_file.schema_arrow.names, columns, source)


def _arrow_rows(batches: Iterable[Any], names: list[str], columns: Sequence[str | int], source: TableSource) -> Rows:
    _check_names(names, columns, source)
    rows = (zip(*(batch.column(name).to_pylist() for name in columns), strict=True) for batch in batches)
    return enumerate(chain.from_iterable(rows))


def _check_names(names: list[Any], columns: Sequence[str | int], source: TableSource) -> None:
    for column in columns:
        if column not in names:
            raise ValueError(
                f"{source.name} has no column {column!r}; its columns are {', '.join(map(repr, names))}. Select "
                "columns with path= and target="
            )


def _csv_rows(delimiter: str, file: str, source: TableSource, remote: Remote | None) -> Rows:
    columns = source.columns
    if len({type(column) for column in columns}) > 1:
        raise ValueError(
            f"path and target must be either column names, or column indices (for a file without a header), got "
            f"{columns}"
        )
    with io.TextIOWrapper(open_stream(file, remote), encoding="utf-8-sig", newline="") as text_file:
        rows = csv.reader(text_file, delimiter=delimiter, strict=True)
        try:
            if isinstance(columns[0], str):
                names = next(rows, [])
                _check_header(file, names, [str(column) for column in columns], delimiter)
                positions = [names.index(str(column)) for column in columns]
            else:
                positions = [int(column) for column in columns]
            last = max(positions)
            for row in rows:
                if not row:
                    continue
                if len(row) <= last:
                    separator = next((sep for sep in SEPARATORS if len(delimiter.join(row).split(sep)) > last), None)
                    hint = (
                        ""
                        if separator is None
                        else f"; if {separator!r} separates the fields, pass delimiter={separator!r}"
                    )
                    raise ValueError(
                        f"{source.row_name(rows.line_num)} has {len(row)} fields, but column {last} (counted from 0) "
                        f"is needed: {row}{hint}"
                    )
                yield rows.line_num, [row[position] for position in positions]
        except (csv.Error, UnicodeDecodeError) as error:
            remedy = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
            raise ValueError(
                f"{file!r} cannot be read as CSV in UTF-8, near line {rows.line_num}: {error}{remedy}"
            ) from error


def _check_header(file: str, names: list[str], required: list[str], delimiter: str) -> None:
    """Raise a ValueError, with a likely remedy, if the first line lacks a column."""
    text = delimiter.join(names)
    if "\0" in text:
        raise ValueError(f"the first line of {file!r} has {NUL}")
    for column in required:
        if column in names:
            continue
        remedy = "Select columns with path= and target=, by index if the file has no header"
        separator = next((sep for sep in SEPARATORS if set(required) <= set(text.split(sep))), None)
        similar = next((name for name in names if name.strip().casefold() == column.strip().casefold()), None)
        if separator is not None:
            remedy = f"Its columns are separated by {separator!r}: pass delimiter={separator!r}"
        elif similar is not None:
            remedy = f"If you mean {similar!r}, pass {'path' if column == required[0] else 'target'}={similar!r}"
        raise ValueError(f"{file!r} has no column {column!r}; its first line is {names}. {remedy}")


def _pack_rows(rows: Rows, source: TableSource) -> dict[str, np.ndarray]:
    """Read all rows. Return the paths relative to the root, in one buffer; an array for each target column; and, as
    JSON, the class names of each column and the warnings."""
    path_bytes, lengths = bytearray(), array("q")
    columns: list[list[Any]] = [[] for _ in source.classes]
    row_numbers = array("q")  # the line or row number of each row
    for row_number, (path, *values) in rows:
        where = source.row_name(row_number)
        relative = _encode_relative_path(path, where, source)
        path_bytes += relative
        lengths.append(len(relative))
        row_numbers.append(row_number)
        for column, value in zip(columns, values, strict=True):
            if value is None or value == "":
                raise ValueError(f"{where} has no target; remove such rows, or pass target=None to read no targets")
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{where} has {NUL}")
            column.append(value)
    if not lengths:
        raise ValueError(f"{source.name} lists no images")
    paths = Paths.pack(source.root, path_bytes, lengths)
    arrays = {"data": paths.data, "offsets": paths.offsets}
    names_and_warnings: tuple[list[Any], list[str]] = [], []
    for index, (target, names, values) in enumerate(zip(source.columns[1:], source.classes, columns, strict=True)):
        if names is not None:
            targets = _class_indices(values, names, lambda row: source.row_name(row_numbers[row]))
        else:
            targets, names = encode_targets(values)
            non_numbers = _find_non_numbers({value for value in values if isinstance(value, str)})
            other_rows = [row for row, value in enumerate(values) if value in non_numbers]
            if names is not None and 0 < len(other_rows) < len(values) / 2:
                names_and_warnings[1].append(
                    f"the targets in the column {target!r} of {source.name} are treated as class names, because "
                    f"{source.row_name(row_numbers[other_rows[0]])} has {values[other_rows[0]]!r}, which is not a "
                    "number; correct such cells, or list the names in classes="
                )
        arrays[f"targets {index}"] = targets
        names_and_warnings[0].append(names)
    return {**arrays, "words": np.frombuffer(json.dumps(names_and_warnings).encode(), np.uint8)}


def _encode_relative_path(path: object, where: str, source: TableSource) -> bytes:
    """Return a path relative to the root, encoded for the file system."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise ValueError(f"{where} must have a path, got {path!r}")
    if "\0" in path:
        raise ValueError(f"{where} has {NUL}")
    if path.startswith("/") or ".." in path or is_url(path):
        prefix = os.path.join(source.root, "")
        joined_path = path if is_url(path) else join_path(source.root, path)
        if not joined_path.startswith(prefix) or "/../" in joined_path:
            if path.startswith("/") and not source.has_root:
                raise ValueError(
                    f"{where} has the absolute path {path!r}, which is outside {source.root!r}, the default of root=; "
                    f"pass the folder that holds all images, as in root={os.path.dirname(path)!r}"
                )
            raise ValueError(
                f"{where} has the path {path!r}, which points outside {source.root!r}; pass a root= that "
                "contains all images"
            )
        path = joined_path[len(prefix) :]
    return os.fsencode(path)


def encode_targets(values: list[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Encode a column. If all values are numbers, return them as an integer or float64 array, and None. Otherwise
    return the index of each value in the sorted list of names, and that list."""
    texts = {value for value in values if isinstance(value, str)}
    value_types = set(map(type, values)) - {str}
    if not _find_non_numbers(texts) and value_types <= {int, bool, float, Decimal}:
        if value_types <= {int, bool} and all(map(INTEGER.fullmatch, texts)):
            if all(-INT64_LIMIT <= value < INT64_LIMIT for value in values if not isinstance(value, str)):
                return shrink_integers(np.fromiter(map(int, values), np.int64, len(values))), None
        else:
            return np.fromiter(map(float, values), np.float64, len(values)), None
    names = sorted(set(map(str, values)))
    return _class_indices(values, names, str), names


def _find_non_numbers(texts: Collection[str]) -> set[str]:
    """Return the texts that are not numbers. If all texts are integers, return those that do not fit into int64."""
    words = {text for text in texts if NUMBER.fullmatch(text) is None or not math.isfinite(float(text))}
    if words or not all(map(INTEGER.fullmatch, texts)):
        return words
    return {text for text in texts if len(text.strip()) > INT64_DIGITS or not -INT64_LIMIT <= int(text) < INT64_LIMIT}
