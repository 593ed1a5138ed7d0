"""Writers of stores: each takes a part and writes it, by libraries. It yields once, when it needs the samples no more;
run on, by any thread, it waits until all lies on the disk, and says what it has written.

- ``tar``: a shard with its index, by `tars`.
- ``parquet``: a file, by pyarrow: small row groups, uncompressed, pages with checksums.
- ``lmdb``: one database, which only one process can write: parts become files of keys and values, which
  `append_to_lmdb` puts into it in order, each in a transaction and with the file opened anew. (LMDB leaves what was
  in its memory before in the unused part of pages: opened anew, that is always zeros.)
- ``array``: the part's span of one ``.npy``, whose size is known before.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.errors import DecodeError, import_optional
from gpuload.packing.durable import Hashed, draft, new_hash
from gpuload.packing.samples import array_of, fields_of, row_of, values_of
from gpuload.packing.tars import TarWriter

if TYPE_CHECKING:
    from gpuload.packing.job import Job, Part

__all__ = ["WRITERS", "Writing", "append_to_lmdb", "array_file", "lmdb_file", "part_file", "schema_like"]

Writing = Generator[None, None, dict[str, Any]]

COPY_BYTES: Final = 1 << 20
GROUP_ROWS: Final = 16  # in a shuffled order nearly each sample is of another group, which is read as a whole
PAIR: Final = struct.Struct("<III")  # bytes of the key, of the image, of the label
NO_LABEL: Final = 0xFFFFFFFF
PAGE: Final = 4096


def part_file(job: Job, number: int) -> str:
    """The file that a part is in."""
    if job.to == "lmdb":
        return os.path.join(job.work, f"{number:05d}.pairs")
    if job.to == "array":
        return array_file(job)
    digits = max(5, len(str(len(job.bounds) - 2)))  # so that names are in order
    return os.path.join(job.folder, f"shard-{number:0{digits}d}.{job.to}")


def _write_tar(part: Part) -> Writing:
    path = part_file(part.job, part.number)
    names: list[list[str]] = []
    with draft(path, part.job.work) as name, Hashed(name, part.job.hash) as file:
        tar = TarWriter(file)
        for index, fields in part.prepared(lambda sample: fields_of(sample, part.images)):
            tar.add(part.job.key(index), fields)
            part.written(*(data for _, data in fields))
            for place, (ending, _) in enumerate(fields):
                if place == len(names):
                    names.append([])
                if ending not in names[place]:
                    names[place].append(ending)
        tar.end()
        yield
    if part.sums:
        tar.keep_index(path)
    return {**_told(part.job, path, file), "fields": names}


def _write_parquet(part: Part) -> Writing:
    arrow = import_optional("pyarrow", "pack(to='parquet')", "parquet")
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    path, schema, root = part_file(part.job, part.number), part.job.like, part.job.root
    rows: list[dict[str, Any]] = []

    def prepare(sample: Any) -> dict[str, Any]:
        row = row_of(sample, part.images, root)
        if row.keys() != set(schema.names):
            own, first = (", ".join(map(repr, names)) for names in (row, schema.names))
            raise ValueError(f"it has the columns {own}, the first sample has {first}")
        arrow.RecordBatch.from_pylist([row], schema)  # ArrowInvalid, a ValueError, where a value is of another type
        return row

    def write(writer: Any) -> None:
        if rows:
            writer.write_table(arrow.Table.from_pylist(rows, schema), row_group_size=GROUP_ROWS)
            rows.clear()

    options = {"compression": "none", "write_page_checksum": True, "use_dictionary": False, "write_statistics": False}
    with (
        draft(path, part.job.work) as name,
        Hashed(name, part.job.hash) as file,
        parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        for _, row in part.prepared(prepare):
            rows.append(row)
            part.written(*(value["bytes"] for value in row.values() if isinstance(value, dict)))
            if len(rows) == GROUP_ROWS:
                write(writer)
        write(writer)
        yield
    return _told(part.job, path, file)


def schema_like(row: dict[str, Any]) -> Any:
    """The schema of rows like this one."""
    arrow = import_optional("pyarrow", "pack(to='parquet')", "parquet")
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    kinds = {name: image if isinstance(value, dict) else arrow.array([value]).type for name, value in row.items()}
    return arrow.schema(list(kinds.items()))


def _write_pairs(part: Part) -> Writing:
    path = part_file(part.job, part.number)
    kind: str | None = None
    with draft(path, part.job.work, lasting=False) as name, Hashed(name, part.job.hash, read_soon=True) as file:
        for index, (image, label, told) in part.prepared(lambda sample: values_of(sample, part.images)):
            kind = told
            key = part.job.key(index).encode()
            head = PAIR.pack(len(key), len(image), NO_LABEL if label is None else len(label))
            for piece in (head + key, image, label or b""):
                file.write(piece)
            part.written(image, label)
        yield
    return {**_told(part.job, path, file), "file": "data.mdb", "label": kind}


def lmdb_file(job: Job) -> str:
    """The database, while it is written."""
    return os.path.join(job.work, "data.mdb")


def append_to_lmdb(job: Job, number: int) -> None:
    """Put a part into the database as its next transaction, unless it is there already; its file is then not needed."""
    lmdb = import_optional("lmdb", "pack(to='lmdb')", "lmdb")
    path, pairs = lmdb_file(job), part_file(job, number)
    # The size of the map is written to the file, so it must not depend on how often this was tried.
    room = before = 0
    for key, value in _pairs(pairs):
        room += 3 * PAGE + len(key) + len(value)
    if number:
        with lmdb.open(path, subdir=False, lock=False, readonly=True) as env:
            before = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    env = lmdb.open(path, subdir=False, lock=False, map_size=(before + 2 * room + 256 * PAGE) // PAGE * PAGE)
    try:
        if env.info()["last_txnid"] <= number:
            with env.begin(write=True) as transaction:
                for key, value in _pairs(pairs):
                    transaction.put(key, value, append=True)
                if not os.path.getsize(pairs):
                    transaction.put(b"__empty__", b"")  # so that each part is a transaction
                    transaction.delete(b"__empty__")
    finally:
        env.close()


def _pairs(path: str) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values, in the order of keys."""
    with open(path, "rb", buffering=COPY_BYTES) as file:
        while head := file.read(PAIR.size):
            of_key, of_image, of_label = PAIR.unpack(head)
            key = file.read(of_key)
            yield key + b".image", file.read(of_image)
            if of_label != NO_LABEL:
                yield key + b".label", file.read(of_label)


def array_file(job: Job) -> str:
    """The array, while it is written."""
    return os.path.join(job.work, "images.npy")


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What stands before the numbers of a ``.npy``."""
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def _write_span(part: Part) -> Writing:
    """Good samples close together, from where the part's first one would be."""
    job = part.job
    dtype, shape, _ = job.like
    each = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    start = len(npy_header(dtype, (job.bounds[-1], *shape))) + part.span.start * each
    labels: list[int | float | None] = []
    digest = new_hash(job.hash)

    def prepare(sample: Any) -> tuple[np.ndarray, int | float | None]:
        array, label, _ = array_of(sample, part.images)
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise DecodeError(
                f"an array holds entries of one shape, but this is {array.dtype} of shape {array.shape}, the first "
                f"{dtype} of shape {shape}; short_side makes squares of all"
            )
        return np.ascontiguousarray(array), label

    descriptor = os.open(array_file(job), os.O_WRONLY | os.O_CLOEXEC)
    try:
        at = start
        for _, (array, label) in part.prepared(prepare):
            data = memoryview(array.reshape(-1).view(np.uint8))
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], at + written)
            at += len(data)
            digest.update(data)
            labels.append(label)
            part.written(data)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"file": "images.npy", "bytes": at - start, job.hash: digest.hexdigest(), "labels": labels}


def _told(job: Job, path: str, file: Hashed) -> dict[str, Any]:
    return {"file": os.path.basename(path), "bytes": file.nbytes, job.hash: file.digest}


WRITERS: Final[dict[str, Callable[[Part], Writing]]] = {
    "tar": _write_tar,
    "parquet": _write_parquet,
    "lmdb": _write_pairs,
    "array": _write_span,
}
