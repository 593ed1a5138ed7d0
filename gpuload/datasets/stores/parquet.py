"""`Parquet`: rows of Parquet files, with the image's bytes in one column.

A Parquet file is read by row groups. The footers say how many rows each has, so the index is a few numbers for each
group. A worker keeps the groups that it has read lately, as Arrow tables of the wanted columns; samples of one group
that are asked for together are taken from it together.
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

from gpuload.datasets.files import byte_limit, check_expanded
from gpuload.datasets.litter import without_litter
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Encoded, Mode, as_meta, check_mode
from gpuload.datasets.stores.cached import cached
from gpuload.datasets.stores.opening import client, is_url, named, open_seekable, remote_for, scope_of
from gpuload.datasets.stores.store import Store, absolute, check_stamp, damaged, existing_file, naming, stamp
from gpuload.errors import import_optional, visible

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["Parquet"]

OPEN_FILES: Final = 16  # in each worker
MOST_ROWS: Final = 64  # that are read between two looks at how much memory they take
LEAST_BYTES: Final = 32 << 10  # what 4,000 row groups take: reading it from so many takes a hundred times as long


class Parquet(Store):
    """Images and targets in the columns of Parquet files, such as Hugging Face's.

    Yields ``(Encoded, target)``, `Encoded` alone with ``target=None``, or a dict if there are further `columns`. Rows
    come in the order of the files and of the rows in each. Needs pyarrow: ``pip install 'gpuload[parquet]'``.

    A row group is read as a whole, so write groups of about 100 rows (``row_group_size=100``) for a shuffled order.

    Args:
        paths: a file, a pattern such as ``"data/train-*.parquet"``, a folder (its ``*.parquet``), or several of them.
            Files of a pattern or folder are sorted by name.
        image: the column of images' bytes; ``"image.bytes"`` is the field of a column of structs, Hugging Face's
            layout.
        target: the column of targets, or None. Numbers and strings come as such, lists of numbers as arrays; structs,
            maps and other lists are metadata: null is None there, and a batch has a list of the rows' values.
        columns: further columns. Then a sample is a dict of all: the image (its key is the column's name without
            ``.bytes``), the target, and these. No other columns are read.
        mode: what the pixels become, see `Encoded`.
        cache_bytes: how much of the row groups read last each worker keeps; of the last one everything.
        storage_options: of URLs, what fsspec takes, or a `Remote`.

    Attributes:
        files: the path of each file.

    Raises:
        FileNotFoundError: there are no such files.
        TypeError: a column of images holds something else than bytes.
        ValueError: a file is no Parquet file, is cut off, lacks a column or differs in the type of one.
        ModuleNotFoundError: pyarrow is not installed.

    While reading, DecodeError names file, row group and row of a null, and file and row group of damage.
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
        cache_bytes: int = 256 << 20,
        storage_options: StorageOptions = None,
    ) -> None:
        if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
            raise TypeError(f"columns must be the names of columns, as in ('caption',), got {columns!r}")
        if type(cache_bytes) is not int or cache_bytes < 0:
            raise ValueError(f"cache_bytes must be a number of bytes, 0 or more, got {cache_bytes!r}")
        self.mode: Mode = check_mode(mode)
        patterns = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        self._remote = remote_for(patterns, storage_options)
        self.files = _files(patterns, self._remote)
        self.path = self.files[0] if len(self.files) == 1 or self._remote else os.path.commonpath(self.files)
        self.image, self.target, self.columns = image, target, tuple(columns)
        self._cache_bytes = cache_bytes
        wanted = [image, *([] if target is None else [target]), *columns]
        import_optional("pyarrow.parquet", "Parquet", "parquet")
        stamps = [stamp(path, self._remote) for path in self.files]
        identity = ["parquet", self.files, stamps, wanted, *scope_of(self._remote)]
        index = cached(self.path, identity, lambda: self._look(wanted), least_bytes=LEAST_BYTES)
        self._wanted = list(dict.fromkeys(wanted))
        self._key = image.removesuffix(".bytes")
        self._stamps = np.array(stamps, np.int64).reshape(-1, 2)
        self._ends = np.cumsum(index["rows"], dtype=np.int64)  # of the row groups, one file after the other
        self._first_groups = np.cumsum([0, *index["groups"][:-1]])  # of the files

    def _look(self, wanted: list[str]) -> dict[str, np.ndarray]:
        """Return how many row groups each file has, and how many rows each group; refuse files that do not fit."""
        first: list[Any] = []
        groups: list[int] = []
        rows: list[int] = []
        for path in self.files:
            problem = lambda text, path=path: ValueError(f"{path!r} cannot be read as Parquet: {text}")  # noqa: E731
            with naming(path, problem), _open(path, self._remote) as file:
                schema, meta = file.schema_arrow.empty_table(), file.metadata
                types = [_type(schema, name, path) for name in wanted]
                groups.append(meta.num_row_groups)
                rows += [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
            if not first:
                first = types
                _check_image(schema, types[0], self.image, path)
            for name, kind, expected in zip(wanted, types, first, strict=True):
                if kind != expected:
                    raise ValueError(
                        f"{path!r} has another schema than {self.files[0]!r}: column {name!r} is {visible(str(kind))} "
                        f"there, {visible(str(expected))} in the first; read them as two datasets, or write one of "
                        "them anew"
                    )
        return {"groups": np.array(groups, np.int64), "rows": np.array(rows, np.int64)}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def blocks(self) -> np.ndarray:
        """Return where each row group begins, and the number of rows: what is read as one, for ``shuffle="block"``."""
        return np.concatenate([np.zeros(1, np.int64), self._ends])

    def _open(self) -> _Groups:
        return _Groups(self._cache_bytes, self._remote)

    def _read(self, handle: _Groups, numbers: list[int]) -> list[Any]:
        places = np.searchsorted(self._ends, numbers, "right").tolist()
        samples: list[Any] = [None] * len(numbers)
        for place in sorted(set(places)):
            begin = int(self._ends[place - 1]) if place else 0
            which = int(np.searchsorted(self._first_groups, place, "right")) - 1
            group = place - int(self._first_groups[which])
            columns = handle.columns(place, lambda which=which, group=group: self._columns(handle, which, group))
            path = self.files[which]
            for at, number in enumerate(numbers):
                if places[at] == place:
                    what = f"row {number - begin} of row group {group} cannot be read"
                    with naming(path, lambda text, path=path, what=what: damaged(path, f"{what}: {text}")):
                        samples[at] = self._sample(columns, which, group, number - begin)
        return samples

    def _columns(self, handle: _Groups, which: int, group: int) -> dict[str, Any]:
        path = self.files[which]
        file = handle.file(path, tuple(self._stamps[which].tolist()))
        with naming(path, lambda text: damaged(path, f"row group {group} cannot be read: {text}")):
            table = self._table(file, path, group)
            return {name: _column(table, name) for name in self._wanted}

    def _table(self, file: Any, path: str, group: int) -> Any:
        """Read a row group, a few rows at a time: a dictionary may hold one value for all rows, so that a few bytes
        become as many as they are long, times the rows."""
        columns = _columns_of(file.metadata.row_group(group), self._wanted)
        if self._remote is not None:
            file.source.load([_range(column) for column in columns])
        what, remedy = f"row group {group}", ", or write smaller row groups"
        nbytes = sum(column.total_uncompressed_size for column in columns)
        check_expanded(nbytes, what, remedy, path)
        rows = int(min(max(byte_limit() / max(nbytes, 1), 1), MOST_ROWS))
        batches, nbytes = [], 0
        for batch in file.iter_batches(rows, row_groups=[group], columns=self._wanted, use_threads=False):
            nbytes += batch.nbytes
            check_expanded(nbytes, what, remedy, path)
            batches.append(batch)
        return import_optional("pyarrow", "Parquet", "parquet").Table.from_batches(batches)

    def _sample(self, columns: dict[str, Any], which: int, group: int, row: int) -> Any:
        values = {name: column[row] for name, column in columns.items()}
        for name, value in values.items():
            if not value.is_valid and not _is_meta(value.type):
                hint = "; a row with nothing but the path of its image has to be written again with the bytes"
                is_nested_image = name == self.image and "." in name
                complaint = f"row {row} of row group {group} has no {name!r} (null){hint if is_nested_image else ''}"
                raise damaged(self.files[which], complaint)
        data = values[self.image].as_py()
        encoded = Encoded(data, self.mode, f"{named(self.files[which])}: row group {group}, row {row}")
        if self.columns:
            others = [name for name in self._wanted if name != self.image]
            return {self._key: encoded, **{name: _plain(values[name]) for name in others}}
        return encoded if self.target is None else (encoded, _plain(values[self.target]))

    def __repr__(self) -> str:
        return f"Parquet({self.path!r}: {len(self)} rows in {len(self.files)} files)"


class _Groups:
    """The data that a process has read last: columns of row groups, up to a number of bytes; and open files."""

    def __init__(self, limit_bytes: int, remote: Remote | None) -> None:
        self._limit, self._nbytes = limit_bytes, 0
        self._groups: OrderedDict[int, tuple[Any, int]] = OrderedDict()

        @functools.lru_cache(OPEN_FILES)
        def file(path: str, stamped: tuple[int, int]) -> Any:
            check_stamp(path, stamped, remote)
            return _open(path, remote)

        self.file = file

    def columns(self, place: int, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if place in self._groups:
            self._groups.move_to_end(place)
            return self._groups[place][0]
        columns = read()
        nbytes = sum(column.nbytes for column in columns.values())
        self._groups[place] = columns, nbytes
        self._nbytes += nbytes
        while self._nbytes > self._limit and len(self._groups) > 1:
            self._nbytes -= self._groups.popitem(last=False)[1][1]
        return columns


def _open(path: str, remote: Remote | None) -> Any:
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    with naming(path, lambda text: ValueError(f"{path!r} is no Parquet file, or is cut off: {text}")):
        if not is_url(path):
            return parquet.ParquetFile(path, page_checksum_verification=True)
        source = open_seekable(path, remote)
        file = parquet.ParquetFile(source, page_checksum_verification=True, pre_buffer=False)
        file.source = source
        return file


def _columns_of(group: Any, names: list[str]) -> list[Any]:
    """Return what the footer says of columns, or of the fields within them."""
    columns = [group.column(number) for number in range(group.num_columns)]
    return [one for one in columns if any((one.path_in_schema + ".").startswith(name + ".") for name in names)]


def _range(column: Any) -> tuple[int, int]:
    begin = min(filter(None, (column.data_page_offset, column.dictionary_page_offset)))
    return begin, begin + column.total_compressed_size


def _files(patterns: list[Any], remote: Remote | None) -> list[str]:
    files: list[str] = []
    for path in patterns:
        full = absolute(path)
        problem = f"no files match {full!r}"
        if is_url(full):
            pattern = full if "*" in full else f"{full}/*.parquet"
            is_file = pattern != full and full.endswith(".parquet")
            matches = [full] if is_file else without_litter(client(remote).glob(pattern), pattern)
            problem = f"no files match {pattern!r}"
        elif os.path.isdir(full):
            matches = sorted(glob.glob(os.path.join(glob.escape(full), "*.parquet")))
            problem = f"the folder {full!r} has no *.parquet in it"
        elif glob.has_magic(full) and not os.path.exists(full):
            matches = without_litter(sorted(glob.glob(full, recursive=True)), full)
        else:
            matches = [existing_file(path, "a Parquet file, a folder of them, or a pattern")]
        if not matches:
            raise FileNotFoundError(problem)
        files += matches
    if not files:
        raise FileNotFoundError("paths names no files; expected at least one Parquet file")
    return files


def _column(table: Any, name: str) -> Any:
    """Return a column of a table, or the field of a struct, at any depth; None if there is none."""
    while name not in table.column_names:
        flat = table.flatten()
        if flat.column_names == table.column_names:
            return None
        table = flat
    return table.column(name)


def _type(table: Any, name: str, path: str) -> Any:
    if (column := _column(table, name)) is None:
        columns = ", ".join(f"{field.name!r}: {visible(str(field.type))}" for field in table.schema)
        raise ValueError(
            f"{path!r} has no column {name!r}; its columns are {columns}. Say which with image= and target="
        )
    return column.type


def _check_image(table: Any, kind: Any, name: str, path: str) -> None:
    if str(kind) in ("binary", "large_binary", "binary_view") or str(kind).startswith("fixed_size_binary"):
        return
    hint = "" if _column(table, f"{name}.bytes") is None else f"; did you mean image={name + '.bytes'!r}?"
    raise TypeError(
        f"column {name!r} of {path!r} is {visible(str(kind))}; expected the bytes of encoded images, of type "
        f"binary{hint}"
    )


def _plain(value: Any) -> Any:
    """Return a value of Arrow's as a sample has it: lists of numbers as arrays, other nested values as metadata."""
    plain = value.as_py()
    if _is_meta(value.type):
        return as_meta(plain)
    if not isinstance(plain, list):
        return plain
    dtype = np.dtype(value.type.value_type.to_pandas_dtype())
    return as_meta(plain) if None in plain and dtype.kind != "f" else np.array(plain, dtype)


@functools.cache
def _is_meta(kind: Any) -> bool:
    """Return whether values of an Arrow type are metadata: nested, and no lists of numbers."""
    if not kind.num_fields:
        return False
    if not hasattr(kind, "value_type"):
        return True
    with contextlib.suppress(NotImplementedError):
        return np.dtype(kind.value_type.to_pandas_dtype()).kind not in "biuf"
    return True
