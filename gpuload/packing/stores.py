"""Writers of stores: each takes a part, writes it, waits until it is on the disk, and returns what it wrote.

- ``tar``: a shard with its index, from what is known as it is written, so that nothing is read again. Members have no
  owner and no time, so that the bytes depend on the samples alone; they are those that tarfile writes. A header costs
  3 µs, by tarfile 60: more than to read, hash and write a small photograph.
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
import tarfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.datasets.stores.store import stamp
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.index import Shard, table_of
from gpuload.datasets.stores.tar.shards import keep
from gpuload.errors import DecodeError, import_optional
from gpuload.packing.durable import Hashed, draft, sha256
from gpuload.packing.samples import array_of, fields_of, row_of, values_of

if TYPE_CHECKING:
    from gpuload.packing.parts import Job, Part

__all__ = [
    "WRITERS", "TarWriter", "append_to_lmdb", "array_file", "array_layout", "lmdb_file", "part_file", "schema_like",
    "tar_header",
]  # fmt: skip

COPY_BYTES: Final = 1 << 20
GROUP_ROWS: Final = 16  # in a shuffled order nearly each sample is of another group, which is read as a whole
PAIR: Final = struct.Struct("<III")  # bytes of the key, of the image, of the label
NO_LABEL: Final = 0xFFFFFFFF
PAGE: Final = 4096
NAME, SIZE, SUM, AFTER_SUM = 100, 124, 148, 156  # in a tar header: the name's end, the size, the sum, what follows
MOST_BYTES: Final = 8**11 - 1  # that eleven octal digits tell
EMPTY: Final = bytes(BLOCK)


def part_file(job: Job, number: int) -> str:
    """Return the file that a part is in."""
    if job.to == "lmdb":
        return os.path.join(job.work, f"{number:05d}.pairs")
    if job.to == "array":
        return array_file(job)
    digits = max(5, len(str(len(job.bounds) - 2)))  # so that names are in order
    return os.path.join(job.folder, f"shard-{number:0{digits}d}.{job.to}")


# -- tar --------------------------------------------------------------------------------------------------------------


def _write_tar(part: Part) -> dict[str, Any]:
    path = part_file(part.job, part.number)
    names: list[list[str]] = []
    with draft(path, part.job.work) as name, Hashed(name) as file:
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
    if part.sums:
        tar.keep_index(path)
    return {"file": os.path.basename(path), **file.record(), "fields": names}


def _tarfile_header(name: str, nbytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = nbytes
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


_LIKE: Final = _tarfile_header("", 0)
_MODE, _TIME, _REST = _LIKE[NAME:SIZE], _LIKE[SIZE + 12 : SUM], _LIKE[AFTER_SUM:]
_SUM: Final = int(_LIKE[SUM : SUM + 6], 8) - sum(_LIKE[SIZE : SIZE + 12])  # of all but name and size


def tar_header(name: str, nbytes: int) -> bytes:
    """Return the header of a member, as tarfile writes it; ValueError for what a header cannot hold."""
    text = name.encode("utf-8", "surrogateescape")
    if len(text) > NAME or nbytes > MOST_BYTES:
        return _tarfile_header(name, nbytes)
    size = b"%011o\0" % nbytes
    total = b"%06o\0 " % (_SUM + sum(text) + sum(size))
    return b"".join((text.ljust(NAME, b"\0"), _MODE, size, _TIME, total, _REST))


class TarWriter:
    """Writes samples to a shard, one after the other."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self._at = file, 0  # in blocks
        self._first, self._ends = array("Q"), array("Q", [0])
        self._blocks, self._sizes, self._fields = array("Q"), array("Q"), array("Q")
        self._names: dict[str, int] = {}
        self._keys = bytearray()

    def add(self, key: str, fields: Sequence[tuple[str, bytes]]) -> None:
        """Write a sample: the ends of its files' names, which differ, and their bytes."""
        self._first.append(len(self._blocks))
        self._keys += key.encode()
        self._ends.append(len(self._keys))
        for field, data in fields:
            nbytes = len(data)
            for piece in (tar_header(f"{key}.{field}", nbytes), data, EMPTY[: -nbytes % BLOCK]):
                self._file.write(piece)
            self._blocks.append(self._at + 1)
            self._sizes.append(nbytes)
            self._fields.append(self._names.setdefault(field, len(self._names)))
            self._at += 1 + -(-nbytes // BLOCK)

    def end(self) -> None:
        """Write what an archive ends with: two empty blocks, and more, until it is a number of whole records."""
        self._file.write(EMPTY * (2 + -(self._at + 2) % (tarfile.RECORDSIZE // BLOCK)))

    def keep_index(self, path: str) -> None:
        """Write the index of the shard, which is at `path` now, beside it."""
        columns = (array("Q", [*self._first, len(self._blocks)]), self._ends, self._blocks, self._sizes, self._fields)
        names = b"\0".join(name.encode("utf-8", "surrogateescape") for name in self._names)
        keep(Shard(path, table_of(stamp(path), columns, bytes(self._keys), names)))


# -- parquet ----------------------------------------------------------------------------------------------------------


def _write_parquet(part: Part) -> dict[str, Any]:
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
        Hashed(name) as file,
        parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        for _, row in part.prepared(prepare):
            rows.append(row)
            part.written(*(value["bytes"] for value in row.values() if isinstance(value, dict)))
            if len(rows) == GROUP_ROWS:
                write(writer)
        write(writer)
    return {"file": os.path.basename(path), **file.record()}


def schema_like(row: dict[str, Any]) -> Any:
    """Return the schema of rows like this one."""
    arrow = import_optional("pyarrow", "pack(to='parquet')", "parquet")
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    kinds = {name: image if isinstance(value, dict) else arrow.array([value]).type for name, value in row.items()}
    return arrow.schema(list(kinds.items()))


# -- LMDB -------------------------------------------------------------------------------------------------------------


def _write_pairs(part: Part) -> dict[str, Any]:
    path = part_file(part.job, part.number)
    kind: str | None = None
    with draft(path, part.job.work, lasting=False) as name, Hashed(name) as file:
        for index, (image, label, label_kind) in part.prepared(lambda sample: values_of(sample, part.images)):
            kind = label_kind
            key = part.job.key(index).encode()
            head = PAIR.pack(len(key), len(image), NO_LABEL if label is None else len(label))
            for piece in (head + key, image, label or b""):
                file.write(piece)
            part.written(image, label)
    return {"file": "data.mdb", **file.record(), "label": kind}


def lmdb_file(job: Job) -> str:
    """Return where the database is while it is written."""
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
    """Yield keys and values, in the order of keys."""
    with open(path, "rb", buffering=COPY_BYTES) as file:
        while head := file.read(PAIR.size):
            of_key, of_image, of_label = PAIR.unpack(head)
            key = file.read(of_key)
            yield key + b".image", file.read(of_image)
            if of_label != NO_LABEL:
                yield key + b".label", file.read(of_label)


# -- array ------------------------------------------------------------------------------------------------------------


def array_file(job: Job) -> str:
    """Return where the array is while it is written."""
    return os.path.join(job.work, "images.npy")


def array_layout(job: Job, samples: int) -> tuple[bytes, int]:
    """Return what precedes the numbers of a ``.npy`` of so many samples, and the bytes of each sample."""
    dtype, shape, _ = job.like
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": (samples, *shape)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue(), int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _write_span(part: Part) -> dict[str, Any]:
    """Write good samples one behind the other, from where the part's first one would be."""
    job = part.job
    dtype, shape, _ = job.like
    header, each = array_layout(job, job.bounds[-1])
    labels: list[int | float | None] = []
    digest = sha256()

    def prepare(sample: Any) -> tuple[np.ndarray, int | float | None]:
        array, label, _ = array_of(sample, part.images)
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise DecodeError(
                f"an array holds entries of one shape, but this is {array.dtype} of shape {array.shape}, the first "
                f"{dtype} of shape {shape}; short_side makes squares of all"
            )
        return np.ascontiguousarray(array), label

    with open(array_file(job), "r+b", buffering=COPY_BYTES) as file:
        file.seek(len(header) + job.bounds[part.number] * each)
        for _, (array, label) in part.prepared(prepare):
            data = memoryview(array.reshape(-1).view(np.uint8))
            file.write(data)
            digest.update(data)
            labels.append(label)
            part.written(data)
        file.flush()
        os.fsync(file.fileno())
    return {"file": "images.npy", "bytes": each * len(labels), "sha256": digest.hexdigest(), "labels": labels}


WRITERS: Final[dict[str, Callable[[Part], dict[str, Any]]]] = {
    "tar": _write_tar,
    "parquet": _write_parquet,
    "lmdb": _write_pairs,
    "array": _write_span,
}
