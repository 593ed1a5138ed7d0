"""A job, and one part of it: read samples i … j, prepare them, write them, note what was written.

`make_part` depends on the job and the part's number alone, so it can run anywhere that the dataset and the folder can
be reached from: in this process, in worker processes (`pool`) of this machine or a cluster. A part that is made
twice at once does no harm: each process writes under a name of its own, and the bytes are equal.

Samples are read as the Loader's workers read them: in order, neighbours together where the dataset can, and the next
ones named to the kernel while they come from a disk (`gpuload.workers.source`).
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Final, Literal

import numpy as np

from gpuload.errors import DecodeError, GpuloadError, one_line
from gpuload.packing.durable import WORK, telling_of_a_full_disk, write_json
from gpuload.packing.images import ImageOptions, Images
from gpuload.packing.samples import Unfit
from gpuload.packing.stores import WRITERS
from gpuload.workers.protocol import Request
from gpuload.workers.source import Source

__all__ = ["Job", "Part", "Parts", "Report", "Store", "each_sample", "make_part", "record_path", "source_stamp"]

Store = Literal["tar", "lmdb", "parquet", "array"]
Report = Callable[[int, int], None]
"""Called with how many more samples are done, and how many more bytes were written."""

MACHINES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)  # no sample's fault
FAILURES: Final = (DecodeError, OSError, ValueError, LookupError)  # of one sample
PROGRESS: Final = struct.Struct("=qq")
AT_ONCE: Final = 32  # samples that are asked for together


@dataclass(frozen=True)
class Job:
    """What every part of a job needs to know.

    Attributes:
        bounds: part k has the samples bounds[k] … bounds[k + 1] − 1.
        form: what samples are: an image alone, a pair of image and target, a dict.
        like: for ``"array"``, dtype and shape of each entry; for ``"parquet"``, the schema.
        digits: of a sample's number in its key.
    """

    dataset: Any
    folder: str
    to: Store
    options: ImageOptions
    bounds: list[int]
    form: Literal["alone", "pair", "dict"] = "pair"
    like: Any = None
    digits: int = 8

    @property
    def work(self) -> str:
        """The folder of unfinished files."""
        return os.path.join(self.folder, WORK)

    @property
    def root(self) -> str | None:
        """The folder that the dataset's paths are in, if the dataset names one."""
        root = getattr(self.dataset, "root", None)
        return root if isinstance(root, str) else None

    def span(self, number: int) -> range:
        """Return the samples of a part."""
        return range(self.bounds[number], self.bounds[number + 1])

    def key(self, index: int) -> str:
        """Return the key of a sample: its number in the dataset, so that keys are in order and never change."""
        return f"{index:0{self.digits}d}"


@dataclass
class Part:
    """What becomes of the samples of a part, as a store writes them."""

    job: Job
    number: int
    report: Report
    images: Images
    bad: list[dict[str, Any]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def prepared(self, prepare: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
        """Yield the samples' numbers with what `prepare` makes of each; damaged ones are noted and left out."""
        dataset = self.job.dataset
        for index, sample in each_sample(dataset, self.job.span(self.number)):
            try:
                if isinstance(sample, Exception):
                    raise sample
                prepared = prepare(sample)
            except FAILURES as error:
                if isinstance(error, OSError) and error.errno in MACHINES:
                    raise
                cause = f"{type(error).__name__}: {one_line(str(error))}"
                self.bad.append({"index": index, "source": _source(dataset, sample, index), "cause": cause})
                self.report(1, 0)
            except Unfit as error:
                raise GpuloadError(f"sample {index} of {dataset!r} cannot be packed: {error}") from error
            else:
                yield index, prepared

    def written(self, *pieces: bytes | memoryview | None) -> None:
        """Note that a sample is written that consists of these bytes."""
        total, nbytes = 0, 0
        for piece in pieces:
            if piece is not None:
                total, nbytes = zlib.crc32(piece, total), nbytes + len(piece)
        self.sums.append(total)
        self.report(1, nbytes)


def _ignore(samples: int, nbytes: int) -> None:
    pass


def make_part(job: Job, number: int, report: Report = _ignore) -> dict[str, Any]:
    """Make one part, and write its record once it is on the disk. Returns the record: plain values.

    Raises:
        GpuloadError: the dataset yields what the store has no form for, or the disk is full.
        OSError: something cannot be written.
    """
    part = Part(job, number, report, Images(job.options))
    with telling_of_a_full_disk(job.folder):
        record = {
            **WRITERS[job.to](part),
            "part": number,
            "first": job.bounds[number],
            "samples": len(part.sums),
            "crc32": np.array(part.sums, "<u4").tobytes().hex(),
            "bad": part.bad,
            "kept": part.images.kept,
            "sources": source_stamp(job.dataset, job.span(number)),
        }
        # It need not survive a loss of power: without it the part is made again.
        write_json(record_path(job, number), record, job.work, lasting=False)
    return record


class Parts:
    """The parts of a job as samples of a dataset: to read one is to make it, and what comes is its record, as JSON.

    Args:
        job: whose parts they are.
        is_local: workers are on this machine. Then they note in a file how far they are: samples done and bytes written
            of each part, int64.
    """

    def __init__(self, job: Job, *, is_local: bool) -> None:
        self.job = job
        self._progress = os.path.join(job.work, "progress") if is_local else os.devnull
        if is_local:
            with open(self._progress, "wb") as file:
                file.write(bytes(PROGRESS.size * len(self)))

    def __len__(self) -> int:
        return len(self.job.bounds) - 1

    def __getitem__(self, number: int) -> str:
        if not os.path.isdir(self.job.work):
            raise GpuloadError(
                f"{self.job.folder!r} is not on the machine {os.uname().nodename!r} of the cluster; all of its "
                "machines have to see the set's folder (and the source) under one path, on a file system that they "
                "share"
            )
        samples = nbytes = 0

        def report(more_samples: int, more_bytes: int) -> None:
            nonlocal samples, nbytes
            samples, nbytes = samples + more_samples, nbytes + more_bytes
            file.seek(PROGRESS.size * number)
            file.write(PROGRESS.pack(samples, nbytes))

        with open(self._progress, "r+b", buffering=0) as file:
            return json.dumps(make_part(self.job, number, report))

    def counted(self) -> tuple[int, int]:
        """Return how many samples are done, and how many bytes are written."""
        samples, nbytes = np.fromfile(self._progress, np.int64).reshape(-1, 2).sum(0).tolist()
        return samples, nbytes


def record_path(job: Job, number: int) -> str:
    """Return where the record of a part is."""
    return os.path.join(job.work, f"{number:05d}.json")


def source_stamp(dataset: Any, span: range) -> str | None:
    """Return what changes with the sizes and times of the files of these samples; None if the dataset has no paths."""
    paths = getattr(dataset, "paths", None)
    if paths is None:
        return None
    total = 0
    for index in span:
        try:
            status = os.stat(paths[index])
            text = b"%d %d" % (status.st_size, status.st_mtime_ns)
        except OSError:
            text = b"missing"
        total = zlib.crc32(text, total)
    return f"{total:08x}"


def _source(dataset: Any, sample: Any, index: int) -> str | None:
    """Return where a sample came from, for whoever has to repair it."""
    for leaf in sample if isinstance(sample, tuple) else sample.values() if isinstance(sample, dict) else (sample,):
        if isinstance(source := getattr(leaf, "source", None) or getattr(leaf, "filename", None), str):
            return source
    paths = getattr(dataset, "paths", None)
    return paths[index] if paths is not None else None


def each_sample(dataset: Any, span: range) -> Iterator[tuple[int, Any]]:
    """Yield the numbers of samples and the samples, in order; an exception in the place of one that fails."""
    source = Source(dataset, 0)
    source.seeding = None  # what a dataset draws is its own affair
    chunks = [np.arange(at, min(at + AT_ONCE, span.stop)) for at in range(span.start, span.stop, AT_ONCE)]
    requests = [Request(0, 0, 0, 0, chunk, chunk) for chunk in chunks]
    for chunk, request, following in zip(chunks, requests, [*requests[1:], None], strict=True):
        if source.reads_ahead:
            source.will_need(following)
        sample_of = source.open(request)
        began_ns = perf_counter_ns()
        for row, index in enumerate(chunk.tolist()):
            try:
                sample = sample_of(row)
            except FAILURES as error:
                sample = error
            source.count(began_ns)
            yield index, sample
            began_ns = perf_counter_ns()
