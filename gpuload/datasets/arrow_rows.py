"""Rows of a Hugging Face dataset for workers, which need only pyarrow, not `datasets` with its dependencies (pandas,
fsspec and others).

`ArrowRows.from_dataset` runs in the main process when a wrapped dataset is pickled; workers read the rows. Values are
converted with pyarrow's ``as_py()``, as in `datasets`. Only features that `datasets` does not convert any further are
supported.

A memory-mapped table is pickled as the path of its file, with the changes that its `datasets` object has recorded so
that copies can replay them; a worker maps the file again. Therefore the pickle of a memory-mapped dataset does not
grow with the number of rows. A table in memory is pickled as its buffers, and so is a memory-mapped table whose file
has been replaced or deleted, as by a later `map`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from gpuload.datasets.file_id import FileId, FileMappings, check_replaced_size
from gpuload.datasets.kinds import type_name

__all__ = ["ArrowRows", "PickledDataset", "Unsuitable", "reduce_mapped_table"]

# Features, by module and name, whose values are the same in `datasets` and pyarrow (for images: without decoding).
PLAIN: Final = {
    ("datasets.features.features", "Value"),
    ("datasets.features.features", "ClassLabel"),
    ("datasets.features.image", "Image"),
}
LISTS: Final = {("datasets.features.features", name) for name in ("List", "LargeList", "Sequence")}
# Changes of a memory-mapped table that pyarrow alone can replay, as names of pyarrow.Table methods.
REPLAYABLE: Final = {"slice", "combine_chunks", "remove_column", "rename_columns", "drop", "select"}
IN_MEMORY: Final = ("datasets.table", "InMemoryTable")
MAPPED: Final = ("datasets.table", "MemoryMappedTable")
MAX_UNUSED_BYTES: Final = 64 << 10  # a table is copied if its buffers exceed its own data by more than this


class Unsuitable(Exception):
    """The error for a dataset that only `datasets` itself can read; its message says why."""


@dataclass(frozen=True)
class MappedTable:
    """A memory-mapped table: the path and identity of its file (an Arrow stream), and the pyarrow method calls to
    replay."""

    path: str
    file_id: FileId
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]

    def open(self) -> pa.Table:
        self.file_id.check(self.path)
        # Workers are forked from a template process, which must not have threads.
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.memory_map(self.path) as file, pa.ipc.open_stream(file, options=options) as reader:
            table = reader.read_all()
        for name, args, keywords in self.calls:
            table = getattr(table, name)(*args, **keywords)
        return table


@dataclass(frozen=True)
class TableGrid:
    """A table as a grid of blocks: the rows of the grid are concatenated vertically, and the blocks of a row side by
    side."""

    rows: list[list[MappedTable | pa.Table]]
    columns: list[str]

    def open(self) -> pa.Table:
        tables = []
        for row in self.rows:
            table, *side_by_side = [block.open() if isinstance(block, MappedTable) else block for block in row]
            for block in side_by_side:
                for name, column in zip(block.column_names, block.columns, strict=True):
                    table = table.append_column(name, column)
            tables.append(table.select(self.columns))
        return pa.concat_tables(tables, promote_options="default")


class ArrowRows:
    """The rows of a dataset, as dicts. Its pickle contains the blocks; unpickling opens the tables.

    Args:
        data: the columns of a sample, in the sample's order.
        indices: a column with the indices of the selected rows of `data`; None means all rows in order.
    """

    def __init__(self, data: TableGrid, indices: TableGrid | None) -> None:
        self._data, self._indices = data, indices

    @classmethod
    def from_dataset(
        cls, dataset: Any, columns: list[str], copies: dict[int, pa.Table], mappings: FileMappings
    ) -> ArrowRows:
        """Return the rows of a ``datasets.Dataset`` without a format.

        Args:
            dataset: the dataset.
            columns: the names of a sample's columns, in the sample's order.
            copies: an output argument, which receives the version of each table that is pickled as its buffers, keyed
                by the `id` of the dataset's table.
            mappings: the current mappings of this process.

        Raises:
            Unsuitable: a column, or the history of its table, needs `datasets`.
            ValueError: a file has been replaced or deleted, and its table is too large to be pickled instead.
        """
        if dataset.format["type"] is not None:
            raise Unsuitable(f"it has the format {dataset.format['type']!r}")
        for name in columns:
            if not _is_plain(dataset.info.features[name]):
                raise Unsuitable(f"column {name!r} is {dataset.info.features[name]!r}")
        data = _convert_table(dataset._data, columns, copies, mappings)
        indices = dataset._indices
        names = [] if indices is None else indices.column_names[:1]
        return cls(data, None if indices is None else _convert_table(indices, names, copies, mappings))

    @cached_property
    def _columns(self) -> list[pa.ChunkedArray]:
        return self._data.open().columns

    @cached_property
    def _row_indices(self) -> pa.ChunkedArray | None:
        return None if self._indices is None else self._indices.open().column(0)

    def __getstate__(self) -> tuple[TableGrid, TableGrid | None]:
        return self._data, self._indices

    def __setstate__(self, state: tuple[TableGrid, TableGrid | None]) -> None:
        self._data, self._indices = state
        _ = self._columns, self._row_indices  # open them once in the workers' template, not in each worker

    def __len__(self) -> int:
        return len(self._columns[0] if self._row_indices is None else self._row_indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"Invalid key: {index} is out of bounds for size {count}")
        index %= count
        if self._row_indices is not None:
            index = self._row_indices[index].as_py()
        columns = zip(self._data.columns, self._columns, strict=True)
        return {name: column[index].as_py() for name, column in columns}


class PickledDataset:
    """A pickled ``datasets.Dataset`` without the tables whose buffers workers already have in `ArrowRows`.

    Args:
        dataset: the dataset.
        tables, mappings: as for `ArrowRows.from_dataset`.
    """

    def __init__(self, dataset: Any, tables: dict[int, pa.Table], mappings: FileMappings) -> None:
        import cloudpickle  # not needed in workers

        positions = {table_id: position for position, table_id in enumerate(tables)}

        class Pickler(cloudpickle.Pickler):
            def persistent_id(self, obj: Any) -> int | None:
                return positions.get(id(obj)) if isinstance(obj, pa.Table) else None

            def reducer_override(self, obj: Any) -> Any:
                if type_name(obj) == IN_MEMORY or (type_name(obj) == MAPPED and id(obj.table) in positions):
                    # Older versions of `datasets` pickle more than the table.
                    return sys.modules["datasets.table"].InMemoryTable, (obj.table,)
                return reduce_mapped_table(obj, mappings) if type_name(obj) == MAPPED else super().reducer_override(obj)

        file = io.BytesIO()
        Pickler(file).dump(dataset)
        self._pickled, self._tables = file.getvalue(), list(tables.values())

    def load(self) -> Any:
        """Unpickle the dataset, which imports `datasets`."""
        tables = self._tables

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, pid: int) -> pa.Table:
                return tables[pid]

        return Unpickler(io.BytesIO(self._pickled)).load()


def _is_plain(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, list | tuple):
        return all(map(_is_plain, feature))
    if type_name(feature) in LISTS:
        return _is_plain(feature.feature)
    # pyarrow imports pandas for nanosecond timestamps and for time zones.
    return type_name(feature) in PLAIN and not any(text in str(feature.dtype) for text in ("[ns", "tz="))


def _convert_table(table: Any, columns: list[str], copies: dict[int, pa.Table], mappings: FileMappings) -> TableGrid:
    """Convert a `datasets` table to blocks."""
    grid = table.blocks if type(table).__name__ == "ConcatenationTable" else [[table]]
    rows = [[_convert_block(block, copies, mappings) for block in row] for row in grid if row]
    for row in grid:
        for name in set(columns).difference(*(block.column_names for block in row)) if row else ():
            raise Unsuitable(f"column {name!r} is missing from a part of the dataset")
    return TableGrid(rows, columns)


def _convert_block(table: Any, copies: dict[int, pa.Table], mappings: FileMappings) -> MappedTable | pa.Table:
    if type_name(table) == MAPPED:
        if (file_id := _identify(table, mappings)) is not None:
            return _convert_mapped_table(table, file_id)
    elif type_name(table) != IN_MEMORY:
        raise Unsuitable(f"its table is a {'.'.join(type_name(table))}")
    for field in table.table.schema:
        if isinstance(field.type, pa.BaseExtensionType):
            raise Unsuitable(f"column {field.name!r} is stored as {field.type}")
    if id(table.table) not in copies:
        copies[id(table.table)] = _drop_unused_bytes(table.table)
    return copies[id(table.table)]


def _identify(table: Any, mappings: FileMappings) -> FileId | None:
    """Return the identity of a memory-mapped `datasets` table's file; None if the table must be sent as its buffers,
    since its file has been replaced or deleted.

    Raises:
        ValueError: the table is too large for this.
    """
    buffers = (
        buffer
        for column in table.table.columns
        for chunk in column.iterchunks()
        for buffer in chunk.buffers()
        if buffer
    )
    # A column that was cast, for example, is no longer in the file's mapping.
    mapped_addresses = (
        buffer.address for buffer in buffers if (mapping := mappings.find(buffer.address)) and mapping.inode
    )
    file_id = mappings.identify(table.path, next(mapped_addresses, 0))
    if file_id is None:
        check_replaced_size(table.path, table.table.nbytes)
    return file_id


def reduce_mapped_table(table: Any, mappings: FileMappings) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a memory-mapped `datasets` table for a pickle: to the path of its file, or to a table in memory if its
    file has been replaced or deleted.

    Raises:
        ValueError: the table is too large for this.
    """
    file_id = _identify(table, mappings)
    if file_id is None:
        return sys.modules["datasets.table"].InMemoryTable, (_drop_unused_bytes(table.table),)
    return _open_mapped_table, (type(table), table.path, file_id, table.replays)


def _open_mapped_table(cls: Any, path: str, file_id: FileId, replays: list[Any]) -> Any:
    file_id.check(path)
    return cls.from_file(path, replays=replays)


def _convert_mapped_table(table: Any, file_id: FileId) -> MappedTable:
    """Convert a memory-mapped `datasets` table, and its recorded changes to pyarrow method calls."""
    with pa.memory_map(table.path) as file, pa.ipc.open_stream(file) as reader:
        empty_table = reader.schema.empty_table()
    calls: list[Any] = []
    for name, args, keywords in table.replays:
        if name == "replace_schema_metadata":
            continue
        if name == "cast":
            schema = args[0] if args else keywords["target_schema"]
            if sorted(empty_table.column_names) != sorted(schema.names):
                raise Unsuitable("a cast changed the columns of its table")
            for field in empty_table.schema:
                if schema.field(field.name).type != field.type:
                    raise Unsuitable(f"column {field.name!r} is {field.type} in its file, but was cast")
            name, args, keywords = "select", (schema.names,), {}  # only the order and the metadata changed
        if name not in REPLAYABLE:
            raise Unsuitable(f"its table was changed by {name}()")
        empty_table = getattr(empty_table, name)(*args, **keywords)
        calls.append((name, args, keywords))
    return MappedTable(table.path, file_id, calls)


def _drop_unused_bytes(table: pa.Table) -> pa.Table:
    """Return a copy of a table without the unused parts of its buffers, if these are large: a slice would otherwise be
    pickled with its entire original table."""
    if table.get_total_buffer_size() <= table.nbytes + MAX_UNUSED_BYTES:
        return table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        return reader.read_all()
