"""Making one part of a job: `make_part` reads a range of samples, prepares them, and writes them and a record.

The result depends only on the job and the part's number. So `make_part` can run wherever the dataset and the folder are
accessible: in this process, or in worker processes (`pool`) on this machine or a cluster. Two processes may make the
same part concurrently: each writes under a different name, and the bytes are equal.

- ``tar``: a shard with its index. Members have no owner and no modification time, so the bytes depend only on the
  samples. Headers are identical to tarfile's, but take 1 µs instead of 60 µs, which is the time to read, hash and
  write a small photo.
- ``parquet``: a file written by pyarrow, with small, uncompressed row groups and page checksums.
- ``lmdb``: one database, which only one process can write. So each part becomes a tar of keys and values, and
  `append_to_lmdb` adds the parts in order, with one transaction per part, and reopens the file each time. (LMDB does
  not clear the unused bytes of pages; in a newly opened file, they are always zero.)
- ``array``: a range of one ``.npy`` file, whose size is known in advance.
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

from gpuload.datasets.stores.opening import OpenFile, buffered_read_at
from gpuload.datasets.stores.tar.headers import BLOCK, Damage, members
from gpuload.datasets.stores.tar.index import build
from gpuload.datasets.stores.tar.shards import SUFFIX
from gpuload.errors import DecodeError, import_optional, one_line
from gpuload.packing.durable import encode_json, explain_full_disk, open_draft, size_and_hash, write_file
from gpuload.packing.images import ImageConverter
from gpuload.packing.manifest import ARRAY, DATABASE
from gpuload.packing.plan import PackJob, source_stamp

__all__ = [
    "Report", "append_to_lmdb", "array_layout", "committed_parts", "make_part", "move_array", "part_file",
    "record_path", "tar_header",
]  # fmt: skip

Report = Callable[[int, int], None]
"""A callback that gets the number of samples done and of bytes written since the last call."""

BUFFER_BYTES: Final = 1 << 20
GROUP_ROWS: Final = 16  # small, because in a shuffled order nearly every sample needs a different row group
PAGE: Final = 4096
NAME, SIZE, SUM = slice(0, 100), slice(124, 136), slice(148, 156)  # fields in the header of a tar member
MAX_MEMBER_BYTES: Final = 8**11 - 1  # the largest number with eleven octal digits


@dataclass
class PartWriter:
    """A part that is being written.

    Attributes:
        bad: the damaged samples, which are not written.
        sums: the CRC-32 of each sample written so far.
    """

    job: PackJob
    number: int
    report: Report
    converter: ImageConverter
    bad: list[dict[str, Any]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def prepare_samples(
        self, convert: Callable[[Any], object] = lambda prepared: prepared
    ) -> Iterator[tuple[int, Any]]:
        """Yield the index and the prepared data of each intact sample, as in `PackJob.prepare_samples`. Record damaged
        samples in `bad`, and skip them."""
        for index, sample, prepared in self.job.prepare_samples(self.job.span(self.number), self.converter, convert):
            if isinstance(prepared, Exception):
                source = _source_path(self.job.dataset, sample, index)
                cause = f"{type(prepared).__name__}: {one_line(str(prepared))}"
                self.bad.append({"index": index, "source": source, "cause": cause})
                self.report(1, 0)
            else:
                yield index, prepared

    def record_written(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Record the CRC-32 of a sample that was written, whose bytes are the concatenated `pieces`, and report the
        progress."""
        checksum, nbytes = 0, 0
        for piece in pieces:
            checksum, nbytes = zlib.crc32(piece, checksum), nbytes + len(piece)
        self.sums.append(checksum)
        self.report(1, nbytes)


def make_part(job: PackJob, part_number: int, report: Report) -> dict[str, Any]:
    """Make one part, and write its record when the part is on disk. Return the record, which JSON can represent.

    Raises:
        GpuloadError: the store cannot hold the dataset's samples, or the disk is full.
        OSError: a file cannot be written.
    """
    part = PartWriter(job, part_number, report, ImageConverter(job.options, job.exif))
    write = {"tar": _write_tar, "lmdb": _write_tar, "parquet": _write_parquet, "array": _write_array}[job.to]
    with explain_full_disk(job.folder):
        record = {
            **write(part, part_file(job, part_number)),
            "part": part_number,
            "first": job.bounds[part_number],
            "samples": len(part.sums),
            "crc32": np.array(part.sums, "<u4").tobytes().hex(),
            "bad": part.bad,
            "kept": part.converter.unchanged_counts,
            "sources": source_stamp(job.dataset, job.span(part_number)),
        }
        # The record need not survive a power failure: without it, the part is made again.
        write_file(record_path(job, part_number), encode_json(record), job.work_folder, sync=False)
    return record


def record_path(job: PackJob, part_number: int) -> str:
    """Return the path of a part's record."""
    return os.path.join(job.work_folder, f"{part_number:05d}.json")


def part_file(job: PackJob, part_number: int) -> str:
    """Return the path of the file that holds a part until the set is finished."""
    if job.to == "lmdb":
        return os.path.join(job.work_folder, f"{part_number:05d}.pairs")
    if job.to == "array":
        return os.path.join(job.work_folder, ARRAY)
    digits = max(5, len(str(len(job.bounds) - 2)))  # so that sorting the names keeps the order of the parts
    return os.path.join(job.folder, f"shard-{part_number:0{digits}d}.{job.to}")


def _source_path(dataset: object, sample: object, index: int) -> str | None:
    """Return the path of a sample's file, so that the user can find it; None if it is unknown."""
    for value in sample if isinstance(sample, tuple) else sample.values() if isinstance(sample, dict) else (sample,):
        if isinstance(path := getattr(value, "source", None) or getattr(value, "filename", None), str):
            return path
    paths = getattr(dataset, "paths", None)
    return paths[index] if paths is not None else None


# -- tar --------------------------------------------------------------------------------------------------------------


def _write_tar(part: PartWriter, path: str) -> dict[str, Any]:
    """Write a shard, or for an LMDB, a tar whose member names are the keys."""
    is_shard = part.job.to == "tar"
    extensions: list[dict[str, None]] = []  # one ordered set per position in a sample
    with open_draft(path, part.job.work_folder, sync=is_shard) as file:
        for index, fields in part.prepare_samples():
            key = part.job.key(index)
            for position, (extension, data) in enumerate(fields):
                name = f"{key}.{extension}" if is_shard else f"{key}.{'label' if position else 'image'}"
                for piece in (tar_header(name, len(data)), data, bytes(-len(data) % BLOCK)):
                    file.write(piece)
                if position == len(extensions):
                    extensions.append({})
                extensions[position][extension] = None
            part.record_written(data for _, data in fields)
        file.write(bytes(2 * BLOCK))  # the end of the archive, padded to a multiple of the record size
        file.write(bytes(-file.tell() % tarfile.RECORDSIZE))
    if is_shard and part.sums:
        with contextlib.suppress(Damage, OSError):  # another process may be replacing the part
            write_file(path + SUFFIX, build(path).table.data, part.job.work_folder, sync=False)
    return {
        "file": os.path.basename(path) if is_shard else DATABASE,
        **size_and_hash(file),
        "fields": [*map(list, extensions)],
    }


def _tarfile_header(name: str, nbytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = nbytes
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


HEADER_TEMPLATE: Final = bytearray(_tarfile_header("", 0))
HEADER_TEMPLATE[SUM] = b" " * 8  # the checksum is computed with spaces in its field


def tar_header(name: str, nbytes: int) -> bytes:
    """Return the header of a member, identical to tarfile's.

    Raises:
        ValueError: the name or the size does not fit into a header.
    """
    encoded_name = name.encode("utf-8", "surrogateescape")
    if len(encoded_name) > NAME.stop or nbytes > MAX_MEMBER_BYTES:
        return _tarfile_header(name, nbytes)
    header = HEADER_TEMPLATE.copy()
    header[NAME], header[SIZE] = encoded_name.ljust(NAME.stop, b"\0"), b"%011o\0" % nbytes
    header[SUM] = b"%06o\0 " % ((zlib.adler32(header) & 0xFFFF) - 1)  # 1 + the sum of the bytes, which is below 65,521
    return bytes(header)


# -- parquet ----------------------------------------------------------------------------------------------------------


def _write_parquet(part: PartWriter, path: str) -> dict[str, Any]:
    arrow = import_optional("pyarrow", "pack(to='parquet')", "parquet")
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    schema = part.job.entry_type
    rows: list[dict[str, Any]] = []

    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row.keys() != set(schema.names):
            columns, expected = (", ".join(map(repr, names)) for names in (row, schema.names))
            raise ValueError(f"the sample has the columns {columns}, but the first sample has {expected}")
        arrow.RecordBatch.from_pylist([row], schema)  # raises ArrowInvalid, a ValueError, if a value has another type
        return row

    def write_group() -> None:
        if rows:
            writer.write_table(arrow.Table.from_pylist(rows, schema), row_group_size=GROUP_ROWS)
            rows.clear()

    options = {"compression": "none", "write_page_checksum": True, "use_dictionary": False, "write_statistics": False}
    with open_draft(path, part.job.work_folder) as file, parquet.ParquetWriter(file, schema, **options) as writer:
        for _, row in part.prepare_samples(check):
            rows.append(row)
            part.record_written(value["bytes"] for value in row.values() if isinstance(value, dict))
            if len(rows) == GROUP_ROWS:
                write_group()
        write_group()
    return {"file": os.path.basename(path), **size_and_hash(file)}


# -- LMDB -------------------------------------------------------------------------------------------------------------


def committed_parts(job: PackJob) -> int:
    """Return the number of parts that the LMDB database already contains; 0 for other stores."""
    path = os.path.join(job.work_folder, DATABASE)
    if job.to != "lmdb" or not os.path.exists(path):
        return 0
    lmdb = import_optional("lmdb", "pack(to='lmdb')", "lmdb")
    try:
        with lmdb.open(path, subdir=False, lock=False, readonly=True) as env:
            return env.info()["last_txnid"]
    except lmdb.Error:  # the run was killed before it wrote the first pages
        os.unlink(path)
        return 0


def append_to_lmdb(job: PackJob, part_number: int) -> None:
    """Add a part to the database in its own transaction, and remove the part's file."""
    lmdb = import_optional("lmdb", "pack(to='lmdb')", "lmdb")
    path, pairs_path = os.path.join(job.work_folder, DATABASE), part_file(job, part_number)
    # The size of the map is stored in the file, so it must not depend on the number of attempts.
    new_bytes = used_bytes = 0
    for key, value in _read_pairs(pairs_path):
        new_bytes += 3 * PAGE + len(key) + len(value)
    if part_number:
        with lmdb.open(path, subdir=False, lock=False, readonly=True) as env:
            used_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    map_size = (used_bytes + 2 * new_bytes + 256 * PAGE) // PAGE * PAGE
    with lmdb.open(path, subdir=False, lock=False, map_size=map_size) as env, env.begin(write=True) as transaction:
        for key, value in _read_pairs(pairs_path):
            transaction.put(key, value, append=True)
        if not new_bytes:
            # `committed_parts` counts transactions, so a part without samples must commit a change too.
            transaction.put(b"__empty__", b"")
            transaction.delete(b"__empty__")
    os.unlink(pairs_path)


def _read_pairs(path: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the key and the value of each entry of a part, sorted by key."""
    read_at = buffered_read_at(OpenFile(path), BUFFER_BYTES)
    for name, _, start, nbytes in members(read_at, path):
        yield name, read_at(start, nbytes)


# -- array ------------------------------------------------------------------------------------------------------------


def array_layout(job: PackJob, samples: int) -> tuple[bytes, int]:
    """Return the header of a ``.npy`` file with this number of samples, and the size of one sample in bytes."""
    dtype, shape, _ = job.entry_type
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": (samples, *shape)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue(), int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _write_array(part: PartWriter, path: str) -> dict[str, Any]:
    """Write the intact samples without gaps, starting at the offset of the part's first sample."""
    job = part.job
    dtype, shape, _ = job.entry_type
    header, sample_bytes = array_layout(job, job.bounds[-1])
    labels: list[int | float | None] = []
    digest = sha256()

    def convert(prepared: tuple[Any, Any, bool]) -> tuple[memoryview, Any]:
        array, label, _ = prepared
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise DecodeError(
                f"all entries of an array must have the dtype and shape of the first, {dtype} of shape {shape}, got "
                f"{array.dtype} of shape {array.shape}; pass short_side= to make all images square, or pack to a tar"
            )
        contiguous: Any = np.ascontiguousarray(array)
        return memoryview(contiguous.reshape(-1).view(np.uint8)), label

    with open(path, "r+b", buffering=BUFFER_BYTES) as file:
        file.seek(len(header) + job.bounds[part.number] * sample_bytes)
        for _, (data, label) in part.prepare_samples(convert):
            file.write(data)
            digest.update(data)
            labels.append(label)
            part.record_written([data])
        file.flush()
        os.fsync(file.fileno())
    return {"file": ARRAY, "bytes": sample_bytes * len(labels), "sha256": digest.hexdigest(), "labels": labels}


def move_array(job: PackJob, records: list[dict[str, Any]]) -> None:
    """Move the array to the set's folder. If samples were skipped, write a copy without gaps instead."""
    path, work_path = os.path.join(job.folder, ARRAY), os.path.join(job.work_folder, ARRAY)
    samples = sum(record["samples"] for record in records)
    if samples == job.bounds[-1]:
        os.replace(work_path, path)
        return
    header, sample_bytes = array_layout(job, job.bounds[-1])
    with open_draft(path, job.work_folder) as file, open(work_path, "rb") as work_file:
        file.write(array_layout(job, samples)[0])
        for record in records:
            work_file.seek(len(header) + record["first"] * sample_bytes)
            for _ in range(record["samples"]):
                file.write(work_file.read(sample_bytes))
