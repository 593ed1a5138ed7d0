"""One part of a job: read samples i … j, prepare them, write them to the store, and note what was written.

`make_part` depends on the job and the part's number alone, so it can run anywhere that the dataset and the folder can
be reached from: in this process, in worker processes (`pool`) of this machine or a cluster. A part that is made
twice at once does no harm: each process writes under a name of its own, and the bytes are equal.

- ``tar``: a shard with its index. Members have no owner and no time, so that the bytes depend on the samples alone;
  they are those that tarfile writes. A header costs 1 µs, by tarfile 60: more than to read, hash and write a small
  photograph.
- ``parquet``: a file, by pyarrow: small row groups, uncompressed, pages with checksums.
- ``lmdb``: one database, which only one process can write: a part becomes a tar of keys and values, which
  `append_to_lmdb` puts into it in order, each in a transaction and with the file opened again. (LMDB leaves what was
  in its memory before in the unused part of pages: opened again, that is always zeros.)
- ``array``: the part's span of one ``.npy``, whose size is known before.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import numpy as np

from gpuload.datasets.stores.tar.headers import BLOCK, Damage, members
from gpuload.datasets.stores.tar.index import build
from gpuload.datasets.stores.tar.shards import keep
from gpuload.errors import DecodeError, import_optional, one_line
from gpuload.packing.durable import as_json, draft, record_of, telling_of_a_full_disk, write_file
from gpuload.packing.images import Images
from gpuload.packing.manifest import ARRAY, DATABASE
from gpuload.packing.plan import Job, source_stamp

__all__ = [
    "Report", "append_to_lmdb", "array_layout", "committed_parts", "make_part", "part_file", "place_array",
    "record_path", "tar_header",
]  # fmt: skip

Report = Callable[[int, int], None]
"""Called with how many more samples are done, and how many more bytes were written."""

COPY_BYTES: Final = 1 << 20
GROUP_ROWS: Final = 16  # in a shuffled order nearly each sample is of another group, which is read as a whole
PAGE: Final = 4096
NAME, SIZE, SUM = slice(0, 100), slice(124, 136), slice(148, 156)  # in the header of a tar
MOST_BYTES: Final = 8**11 - 1  # that eleven octal digits tell


@dataclass
class Part:
    """A part of a store as it is written: its samples and its file."""

    job: Job
    number: int
    report: Report
    images: Images
    bad: list[dict[str, Any]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def prepared(self, check: Callable[[Any], Any] = lambda prepared: prepared) -> Iterator[tuple[int, Any]]:
        """Yield good samples as `Job.prepared`; damaged ones are noted and left out."""
        for index, sample, prepared in self.job.prepared(self.job.span(self.number), self.images, check):
            if isinstance(prepared, Exception):
                source = _source(self.job.dataset, sample, index)
                cause = f"{type(prepared).__name__}: {one_line(str(prepared))}"
                self.bad.append({"index": index, "source": source, "cause": cause})
                self.report(1, 0)
            else:
                yield index, prepared

    def written(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Note that a sample is written that consists of these bytes."""
        total, nbytes = 0, 0
        for piece in pieces:
            total, nbytes = zlib.crc32(piece, total), nbytes + len(piece)
        self.sums.append(total)
        self.report(1, nbytes)


def make_part(job: Job, number: int, report: Report) -> dict[str, Any]:
    """Make one part, and write its record once it is on the disk. Returns the record: plain values.

    Raises:
        GpuloadError: the dataset yields what the store has no form for, or the disk is full.
        OSError: something cannot be written.
    """
    part = Part(job, number, report, Images(job.options))
    write = {"tar": _write_tar, "lmdb": _write_tar, "parquet": _write_parquet, "array": _write_span}[job.to]
    with telling_of_a_full_disk(job.folder):
        record = {
            **write(part, part_file(job, number)),
            "part": number,
            "first": job.bounds[number],
            "samples": len(part.sums),
            "crc32": np.array(part.sums, "<u4").tobytes().hex(),
            "bad": part.bad,
            "kept": part.images.kept,
            "sources": source_stamp(job.dataset, job.span(number)),
        }
        # It need not survive a loss of power: without it the part is made again.
        write_file(record_path(job, number), as_json(record), job.work, lasting=False)
    return record


def record_path(job: Job, number: int) -> str:
    """Return where the record of a part is."""
    return os.path.join(job.work, f"{number:05d}.json")


def part_file(job: Job, number: int) -> str:
    """Return the file that a part is in while the set is not finished."""
    if job.to == "lmdb":
        return os.path.join(job.work, f"{number:05d}.pairs")
    if job.to == "array":
        return os.path.join(job.work, ARRAY)
    digits = max(5, len(str(len(job.bounds) - 2)))  # so that names are in order
    return os.path.join(job.folder, f"shard-{number:0{digits}d}.{job.to}")


def _source(dataset: Any, sample: Any, index: int) -> str | None:
    """Return where a sample came from, for whoever has to repair it."""
    for leaf in sample if isinstance(sample, tuple) else sample.values() if isinstance(sample, dict) else (sample,):
        if isinstance(source := getattr(leaf, "source", None) or getattr(leaf, "filename", None), str):
            return source
    paths = getattr(dataset, "paths", None)
    return paths[index] if paths is not None else None


# -- tar --------------------------------------------------------------------------------------------------------------


def _write_tar(part: Part, path: str) -> dict[str, Any]:
    """Write a shard, or the values for an LMDB, whose keys are the names of the members."""
    is_shard = part.job.to == "tar"
    names: list[dict[str, None]] = []  # at each place of a sample, in the order of their appearance
    with draft(path, part.job.work, lasting=is_shard) as file:
        for index, fields in part.prepared():
            key = part.job.key(index)
            for place, (ending, data) in enumerate(fields):
                name = f"{key}.{ending}" if is_shard else f"{key}.{'label' if place else 'image'}"
                for piece in (tar_header(name, len(data)), data, bytes(-len(data) % BLOCK)):
                    file.write(piece)
                if place == len(names):
                    names.append({})
                names[place][ending] = None
            part.written(data for _, data in fields)
        file.write(bytes(2 * BLOCK))  # the end, and more, until it is a number of whole records
        file.write(bytes(-file.tell() % tarfile.RECORDSIZE))
    if is_shard and part.sums:
        with contextlib.suppress(Damage, OSError):  # another process has made this part too, and replaces it just now
            keep(build(path))
    return {"file": os.path.basename(path) if is_shard else DATABASE, **record_of(file), "fields": [*map(list, names)]}


def _tarfile_header(name: str, nbytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = nbytes
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


LIKE: Final = bytearray(_tarfile_header("", 0))
LIKE[SUM] = b" " * 8  # as which it is summed up


def tar_header(name: str, nbytes: int) -> bytes:
    """Return the header of a member, as tarfile writes it; ValueError for what a header cannot hold."""
    text = name.encode("utf-8", "surrogateescape")
    if len(text) > NAME.stop or nbytes > MOST_BYTES:
        return _tarfile_header(name, nbytes)
    header = LIKE.copy()
    header[NAME], header[SIZE] = text.ljust(NAME.stop, b"\0"), b"%011o\0" % nbytes
    header[SUM] = b"%06o\0 " % ((zlib.adler32(header) & 0xFFFF) - 1)  # the sum of the bytes, which is below 65,521
    return bytes(header)


# -- parquet ----------------------------------------------------------------------------------------------------------


def _write_parquet(part: Part, path: str) -> dict[str, Any]:
    arrow = import_optional("pyarrow", "pack(to='parquet')", "parquet")
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    schema = part.job.like
    rows: list[dict[str, Any]] = []

    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row.keys() != set(schema.names):
            columns_here, first = (", ".join(map(repr, names)) for names in (row, schema.names))
            raise ValueError(f"it has the columns {columns_here}, the first sample has {first}")
        arrow.RecordBatch.from_pylist([row], schema)  # ArrowInvalid, a ValueError, where a value is of another type
        return row

    def write_group() -> None:
        if rows:
            writer.write_table(arrow.Table.from_pylist(rows, schema), row_group_size=GROUP_ROWS)
            rows.clear()

    options = {"compression": "none", "write_page_checksum": True, "use_dictionary": False, "write_statistics": False}
    with draft(path, part.job.work) as file, parquet.ParquetWriter(file, schema, **options) as writer:
        for _, row in part.prepared(check):
            rows.append(row)
            part.written(value["bytes"] for value in row.values() if isinstance(value, dict))
            if len(rows) == GROUP_ROWS:
                write_group()
        write_group()
    return {"file": os.path.basename(path), **record_of(file)}


# -- LMDB -------------------------------------------------------------------------------------------------------------


def committed_parts(job: Job) -> int:
    """Return how many parts are in the database."""
    path = os.path.join(job.work, DATABASE)
    if job.to != "lmdb" or not os.path.exists(path):
        return 0
    lmdb = import_optional("lmdb", "pack(to='lmdb')", "lmdb")
    try:
        with lmdb.open(path, subdir=False, lock=False, readonly=True) as env:
            return env.info()["last_txnid"]
    except lmdb.Error:  # it had not even its first pages yet
        os.unlink(path)
        return 0


def append_to_lmdb(job: Job, number: int) -> None:
    """Put a part into the database as its next transaction, unless it is there already, and remove its file."""
    lmdb = import_optional("lmdb", "pack(to='lmdb')", "lmdb")
    path, pairs = os.path.join(job.work, DATABASE), part_file(job, number)
    # The size of the map is written to the file, so it must not depend on how often this was tried.
    room = before = 0
    for key, value in _pairs(pairs):
        room += 3 * PAGE + len(key) + len(value)
    if number:
        with lmdb.open(path, subdir=False, lock=False, readonly=True) as env:
            before = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    map_size = (before + 2 * room + 256 * PAGE) // PAGE * PAGE
    with lmdb.open(path, subdir=False, lock=False, map_size=map_size) as env, env.begin(write=True) as transaction:
        for key, value in _pairs(pairs):
            transaction.put(key, value, append=True)
        if not room:
            transaction.put(b"__empty__", b"")  # so that each part is a transaction
            transaction.delete(b"__empty__")
    os.unlink(pairs)


def _pairs(path: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values, in the order of keys."""
    with open(path, "rb", buffering=COPY_BYTES) as file:

        def read_at(offset: int, nbytes: int) -> bytes:
            file.seek(offset)
            return file.read(nbytes)

        for name, _, start, nbytes in members(read_at, path):
            yield name, read_at(start, nbytes)


# -- array ------------------------------------------------------------------------------------------------------------


def array_layout(job: Job, samples: int) -> tuple[bytes, int]:
    """Return what precedes the numbers of a ``.npy`` of this many samples, and the bytes of each sample."""
    dtype, shape, _ = job.like
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": (samples, *shape)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue(), int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _write_span(part: Part, path: str) -> dict[str, Any]:
    """Write good samples one behind the other, from where the part's first one would be."""
    job = part.job
    dtype, shape, _ = job.like
    header, each = array_layout(job, job.bounds[-1])
    labels: list[int | float | None] = []
    digest = sha256()

    def check(prepared: tuple[Any, Any, bool]) -> tuple[memoryview, Any]:
        array, label, _ = prepared
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise DecodeError(
                f"an array holds entries of one shape, but this is {array.dtype} of shape {array.shape}, the first "
                f"{dtype} of shape {shape}; short_side makes squares of all"
            )
        contiguous: Any = np.ascontiguousarray(array)
        return memoryview(contiguous.reshape(-1).view(np.uint8)), label

    with open(path, "r+b", buffering=COPY_BYTES) as file:
        file.seek(len(header) + job.bounds[part.number] * each)
        for _, (data, label) in part.prepared(check):
            file.write(data)
            digest.update(data)
            labels.append(label)
            part.written([data])
        file.flush()
        os.fsync(file.fileno())
    return {"file": ARRAY, "bytes": each * len(labels), "sha256": digest.hexdigest(), "labels": labels}


def place_array(job: Job, records: list[dict[str, Any]]) -> None:
    """Move the array to its place; where samples were left out, write it again without their gaps."""
    path, source = os.path.join(job.folder, ARRAY), os.path.join(job.work, ARRAY)
    samples = sum(record["samples"] for record in records)
    if samples == job.bounds[-1]:
        os.replace(source, path)
        return
    before, each = array_layout(job, job.bounds[-1])
    with draft(path, job.work) as file, open(source, "rb") as old:
        file.write(array_layout(job, samples)[0])
        for record in records:
            old.seek(len(before) + record["first"] * each)
            for _ in range(record["samples"]):
                file.write(old.read(each))
