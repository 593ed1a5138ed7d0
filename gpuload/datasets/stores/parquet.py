"""`Parquet`: rows of Parquet files, with the bytes of an image in one column.

A Parquet file is read in row groups. The footers state the number of rows of each group, so the index is a few numbers
per group. A worker caches the columns of recently read groups. If a call needs several samples of one group, the group
is read only once.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.checks import flag, integer, one_of, optional, strings
from gpuload.datasets.files import byte_limit, check_expanded
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import MODES, Encoded, Mode, as_meta
from gpuload.datasets.stores.cached import load_or_build
from gpuload.datasets.stores.opening import (
    display_path,
    is_url,
    open_seekable,
    remote_options,
    scope_of,
    without_query,
)
from gpuload.datasets.stores.store import (
    Store,
    absolute_path,
    as_list,
    check_stamp,
    decode_error_at,
    existing_file,
    match_pattern,
    replace_errors,
    stamp,
)
from gpuload.errors import import_optional, visible

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["Parquet"]

OPEN_FILES: Final = 16  # per worker
MAX_BATCH_ROWS: Final = 64  # rows to read before checking their memory usage again
LEAST_BYTES: Final = 32 << 10  # the index of 4,000 row groups; reading their footers takes 100 times as long


class Parquet(Store):
    """Images and targets in the columns of Parquet files, such as Hugging Face's.

    Yields ``(Encoded, target)``, only `Encoded` with ``target=None``, or a dict if there are additional `columns`. The
    samples are in the order of the files, and of the rows in each file. Needs pyarrow: ``pip install
    'gpuload[parquet]'``.

    Row groups are read in full, so for a shuffled order, write groups of about 100 rows (``row_group_size=100``).

    Args:
        paths: a file, a pattern such as ``"data/train-*.parquet"``, a folder (its ``*.parquet`` files), or a list of
            these. The files of a pattern or folder are sorted by name.
        image: the column with the bytes of the images; ``"image.bytes"`` selects a field in a column of structs, which
            is Hugging Face's layout.
        target: the column of targets, or None. Numbers and strings are not changed; lists of numbers become arrays.
            Structs, maps and other lists are metadata: null becomes None, and a batch contains a list of the rows'
            values.
        columns: additional columns. A sample is then a dict of the image (its key is the column's name without
            ``.bytes``), the target, and these columns. No other columns are read.
        mode, exif: the pixel mode of images, and whether they are turned upright, see `Encoded`.
        cache_bytes: the size of each worker's cache of recently read row groups. The last group is always cached.
        storage_options: for URLs, fsspec options or a `Remote`.

    Attributes:
        files: the path of each file.

    Raises:
        FileNotFoundError: no files are found.
        TypeError: the column of images does not contain bytes.
        ValueError: a file is not Parquet, is truncated, lacks a column, or has a column of another type.
        ModuleNotFoundError: pyarrow is not installed.

    While reading, a DecodeError names the file and row group of damaged data, and for a null, also the row.
    """

    @dataset_arguments
    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        image: str = "image.bytes",
        target: str | None = "label",
        columns: Sequence[str] = (),
        mode: Mode = "RGB",
        exif: bool | None = None,
        cache_bytes: int = 256 << 20,
        storage_options: StorageOptions = None,
    ) -> None:
        columns = strings("columns", columns)
        cache_bytes = integer("cache_bytes", cache_bytes, minimum=0)
        self.mode: Mode = one_of("mode", mode, MODES)
        self.exif = optional(flag, "exif", exif)
        patterns = as_list(paths)
        self._remote = remote_options(patterns, storage_options)
        self.files = _find_files(patterns, self._remote)
        self.path = self.files[0] if len(self.files) == 1 or self._remote else os.path.commonpath(self.files)
        self.image, self.target, self.columns = image, target, columns
        self._cache_bytes = cache_bytes
        selected = [image, *([] if target is None else [target]), *columns]
        import_optional("pyarrow.parquet", "Parquet", "parquet")
        stamps = [stamp(path, self._remote) for path in self.files]
        identity = ["parquet", self.files, stamps, selected, *scope_of(self._remote)]
        index = load_or_build(self.path, identity, lambda: self._read_footers(selected), min_bytes=LEAST_BYTES)
        self._column_names = list(dict.fromkeys(selected))
        self._image_key = image.removesuffix(".bytes")
        self._stamps = np.array(stamps, np.int64).reshape(-1, 2)
        self._ends = np.cumsum(index["rows"], dtype=np.int64)  # per row group, across all files
        self._first_groups = np.cumsum([0, *index["groups"][:-1]])  # per file

    def _read_footers(self, names: list[str]) -> dict[str, np.ndarray]:
        """Return the number of row groups in each file and of rows in each group, and check that the schemas match."""
        first_types: list[Any] = []
        groups: list[int] = []
        rows: list[int] = []
        for path in self.files:
            make_error = lambda text, path=path: ValueError(f"{path!r} cannot be read as Parquet: {text}")  # noqa: E731
            with replace_errors(path, make_error), _open(path, self._remote) as file:
                schema, meta = file.schema_arrow.empty_table(), file.metadata
                types = [_column_type(schema, name, path) for name in names]
                groups.append(meta.num_row_groups)
                rows += [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
            if not first_types:
                first_types = types
                _check_image_type(schema, types[0], self.image, path)
            for name, column_type, first_type in zip(names, types, first_types, strict=True):
                if column_type != first_type:
                    raise ValueError(
                        f"{path!r} and {self.files[0]!r} have different schemas: column {name!r} is "
                        f"{visible(str(column_type))} in the former, {visible(str(first_type))} in the latter; read "
                        "them as two datasets, or rewrite one of the files"
                    )
        return {"groups": np.array(groups, np.int64), "rows": np.array(rows, np.int64)}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def blocks(self) -> np.ndarray:
        """Return the first row of each row group, and the number of rows at the end, for ``shuffle="block"``."""
        return np.concatenate([np.zeros(1, np.int64), self._ends])

    def _open(self) -> _GroupCache:
        return _GroupCache(self._cache_bytes, self._remote)

    def _read(self, handle: _GroupCache, indices: list[int]) -> list[Any]:
        global_groups = np.searchsorted(self._ends, indices, "right").tolist()  # counted across all files
        samples: list[Any] = [None] * len(indices)
        for global_group in sorted(set(global_groups)):
            begin = int(self._ends[global_group - 1]) if global_group else 0
            file_index = int(np.searchsorted(self._first_groups, global_group, "right")) - 1
            group = global_group - int(self._first_groups[file_index])
            columns = handle.get_columns(
                global_group, lambda file_index=file_index, group=group: self._read_columns(handle, file_index, group)
            )
            path = self.files[file_index]
            for position, index in enumerate(indices):
                if global_groups[position] == global_group:
                    problem = f"row {index - begin} of row group {group} cannot be read"
                    with replace_errors(
                        path, lambda text, path=path, problem=problem: decode_error_at(path, f"{problem}: {text}")
                    ):
                        samples[position] = self._make_sample(columns, file_index, group, index - begin)
        return samples

    def _read_columns(self, handle: _GroupCache, file_index: int, group: int) -> dict[str, Any]:
        path = self.files[file_index]
        file = handle.open_file(path, tuple(self._stamps[file_index].tolist()))
        with replace_errors(path, lambda text: decode_error_at(path, f"row group {group} cannot be read: {text}")):
            table = self._read_group(file, path, group)
            return {name: _find_column(table, name) for name in self._column_names}

    def _read_group(self, file: Any, path: str, group: int) -> Any:
        """Read a row group a few rows at a time, and check its size in memory: with dictionary encoding, a small file
        can contain a long value that all rows repeat."""
        columns = _columns_of(file.metadata.row_group(group), self._column_names)
        if self._remote is not None:
            file.source.load([_byte_range(column) for column in columns])
        description, remedy = f"row group {group}", ", or write smaller row groups"
        nbytes = sum(column.total_uncompressed_size for column in columns)
        check_expanded(nbytes, description, remedy, path)
        batch_rows = int(min(max(byte_limit() / max(nbytes, 1), 1), MAX_BATCH_ROWS))
        batches, nbytes = [], 0
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=self._column_names, use_threads=False):
            nbytes += batch.nbytes
            check_expanded(nbytes, description, remedy, path)
            batches.append(batch)
        return import_optional("pyarrow", "Parquet", "parquet").Table.from_batches(batches)

    def _make_sample(self, columns: dict[str, Any], file_index: int, group: int, row: int) -> Any:
        values = {name: column[row] for name, column in columns.items()}
        for name, value in values.items():
            if not value.is_valid and not _is_meta(value.type):
                hint = "; if the row has only the path of its image, rewrite the file with the bytes"
                is_nested_image = name == self.image and "." in name
                problem = f"row {row} of row group {group} has no {name!r} (null){hint if is_nested_image else ''}"
                raise decode_error_at(self.files[file_index], problem)
        data = values[self.image].as_py()
        encoded = Encoded(
            data, self.mode, f"{display_path(self.files[file_index])}: row group {group}, row {row}", self.exif
        )
        if self.columns:
            names = [name for name in self._column_names if name != self.image]
            return {self._image_key: encoded, **{name: _convert_value(values[name]) for name in names}}
        return encoded if self.target is None else (encoded, _convert_value(values[self.target]))

    def __repr__(self) -> str:
        return f"Parquet({self.path!r}: {len(self)} rows in {len(self.files)} files)"


class _GroupCache:
    """A process's cache of open files, and of recently read row groups, whose total size is limited."""

    def __init__(self, limit_bytes: int, remote: Remote | None) -> None:
        self._limit, self._nbytes = limit_bytes, 0
        self._groups: OrderedDict[int, tuple[Any, int]] = OrderedDict()

        @functools.lru_cache(OPEN_FILES)
        def open_file(path: str, expected_stamp: tuple[int, int]) -> Any:
            check_stamp(path, expected_stamp, remote)
            return _open(path, remote)

        self.open_file = open_file

    def get_columns(self, global_group: int, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if global_group in self._groups:
            self._groups.move_to_end(global_group)
            return self._groups[global_group][0]
        columns = read()
        nbytes = sum(column.nbytes for column in columns.values())
        self._groups[global_group] = columns, nbytes
        self._nbytes += nbytes
        while self._nbytes > self._limit and len(self._groups) > 1:
            self._nbytes -= self._groups.popitem(last=False)[1][1]
        return columns


def _open(path: str, remote: Remote | None) -> Any:
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    with replace_errors(path, lambda text: ValueError(f"{path!r} is not a Parquet file, or is truncated: {text}")):
        if not is_url(path):
            return parquet.ParquetFile(path, page_checksum_verification=True)
        source = open_seekable(path, remote)
        file = parquet.ParquetFile(source, page_checksum_verification=True, pre_buffer=False)
        file.source = source
        return file


def _columns_of(group: Any, names: list[str]) -> list[Any]:
    """Return the footer's metadata of these columns; for struct columns, of their fields."""
    columns = [group.column(number) for number in range(group.num_columns)]
    return [chunk for chunk in columns if any((chunk.path_in_schema + ".").startswith(name + ".") for name in names)]


def _byte_range(column: Any) -> tuple[int, int]:
    begin = min(filter(None, (column.data_page_offset, column.dictionary_page_offset)))
    return begin, begin + column.total_compressed_size


def _find_files(patterns: list[Any], remote: Remote | None) -> list[str]:
    files: list[str] = []
    for path in patterns:
        location = absolute_path(path)
        problem = f"no files match {location!r}"
        if is_url(location):
            name = without_query(location)
            pattern = location if "*" in name else f"{location}/*.parquet"
            is_file = pattern != location and name.endswith(".parquet")
            matches = [location] if is_file else match_pattern(pattern, remote)
            problem = f"no files match {display_path(pattern)!r}"
        elif os.path.isdir(location):
            matches = match_pattern(os.path.join(glob.escape(location), "*.parquet"))
            problem = f"the folder {location!r} contains no *.parquet files"
        elif glob.has_magic(location) and not os.path.exists(location):
            matches = match_pattern(location)
        else:
            matches = [existing_file(path, "a Parquet file, a folder of them, or a pattern")]
        if not matches:
            raise FileNotFoundError(problem)
        files += matches
    if not files:
        raise FileNotFoundError("paths is empty; expected at least one Parquet file")
    return files


def _find_column(table: Any, name: str) -> Any:
    """Return a column of a table, or a field of a struct column at any depth; None if there is no such column."""
    while name not in table.column_names:
        flat = table.flatten()
        if flat.column_names == table.column_names:
            return None
        table = flat
    return table.column(name)


def _column_type(table: Any, name: str, path: str) -> Any:
    if (column := _find_column(table, name)) is None:
        columns = ", ".join(f"{field.name!r}: {visible(str(field.type))}" for field in table.schema)
        raise ValueError(
            f"{path!r} has no column {name!r}; its columns are {columns}. Select columns with image= and target="
        )
    return column.type


def _check_image_type(table: object, dtype: object, name: str, path: str) -> None:
    if str(dtype) in ("binary", "large_binary", "binary_view") or str(dtype).startswith("fixed_size_binary"):
        return
    hint = "" if _find_column(table, f"{name}.bytes") is None else f"; did you mean image={name + '.bytes'!r}?"
    raise TypeError(
        f"column {name!r} of {path!r} is {visible(str(dtype))}; expected the bytes of encoded images, of type "
        f"binary{hint}"
    )


def _convert_value(value: Any) -> Any:
    """Convert an Arrow value for a sample: lists of numbers become arrays, and other nested values metadata."""
    plain = value.as_py()
    if _is_meta(value.type):
        return as_meta(plain)
    if not isinstance(plain, list):
        return plain
    dtype = np.dtype(value.type.value_type.to_pandas_dtype())
    return as_meta(plain) if None in plain and dtype.kind != "f" else np.array(plain, dtype)


@functools.cache
def _is_meta(arrow_type: Any) -> bool:
    """Return whether values of an Arrow type are metadata: nested values, except lists of numbers."""
    if not arrow_type.num_fields:
        return False
    if not hasattr(arrow_type, "value_type"):
        return True
    with contextlib.suppress(NotImplementedError):
        return np.dtype(arrow_type.value_type.to_pandas_dtype()).kind not in "biuf"
    return True
