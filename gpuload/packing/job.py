"""A job, and one part of it: read samples i … j, prepare them, write them, say what was written.

`make_part` depends on the job and the part's number alone, so it can run anywhere that the dataset and the folder can
be reached from: in this process, in worker processes (`pool`), as a task of a cluster. A part that is made twice at
once does no harm: each writes under a name of its own, and the bytes are equal.

`begin_part` makes all of it but for what the disk takes its time for, so that the next one can begin meanwhile.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from gpuload.errors import DecodeError, GpuloadError, one_line
from gpuload.packing.durable import WORK, HashName, write_json
from gpuload.packing.images import ImageOptions, Images
from gpuload.packing.reading import each_sample
from gpuload.packing.samples import Unfit

__all__ = ["Job", "Report", "Store", "begin_part", "make_part", "record_path"]

Store = Literal["tar", "lmdb", "parquet", "array"]
Report = Callable[[int, int], None]
"""Called with how many more samples are done, and how many more bytes were written."""

MACHINES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)  # no sample's fault


@dataclass(frozen=True)
class Job:
    """What every part of a job needs to know.

    Attributes:
        bounds: part k has the samples bounds[k] … bounds[k + 1] − 1.
        form: what samples are: an image alone, a pair of image and target, a dict.
        like: for ``"array"``, dtype and shape of each entry; for ``"parquet"``, the schema.
        digits: of a sample's number in its key.
        hash: of parts, in their records.
    """

    dataset: Any
    folder: str
    to: Store
    options: ImageOptions
    bounds: list[int]
    form: Literal["alone", "pair", "dict"] = "pair"
    like: Any = None
    digits: int = 8
    hash: HashName = "sha256"

    @property
    def work(self) -> str:
        """Where unfinished things are."""
        return os.path.join(self.folder, WORK)

    @property
    def root(self) -> str | None:
        """The folder that the dataset's paths are in, if it says one."""
        root = getattr(self.dataset, "root", None)
        return root if isinstance(root, str) else None

    def key(self, index: int) -> str:
        """The key of a sample: its number in the dataset, so that keys are in order and never change."""
        return f"{index:0{self.digits}d}"


@dataclass
class Part:
    """What comes of the samples of a part, as a store writes them."""

    job: Job
    number: int
    report: Report
    images: Images
    bad: list[dict[str, Any]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    @property
    def span(self) -> range:
        return range(self.job.bounds[self.number], self.job.bounds[self.number + 1])

    def prepared(self, prepare: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
        """The samples' numbers with what `prepare` makes of each; damaged ones are noted and left out."""
        for index, sample in each_sample(self.job.dataset, self.span):
            try:
                if isinstance(sample, Exception):
                    raise sample
                made = prepare(sample)
            except (DecodeError, OSError, ValueError, LookupError) as error:
                if isinstance(error, OSError) and error.errno in MACHINES:
                    raise
                self.bad.append(
                    {"index": index, "source": _source(self.job.dataset, sample, index), "cause": _cause(error)}
                )
                self.report(1, 0)
            except Unfit as error:
                raise GpuloadError(f"sample {index} of {self.job.dataset!r} cannot be packed: {error}") from error
            else:
                yield index, made

    def written(self, *parts: bytes | memoryview | None) -> None:
        """Note that a sample is written that consists of these bytes."""
        total, nbytes = 0, 0
        for part in parts:
            if part is not None:
                total, nbytes = zlib.crc32(part, total), nbytes + len(part)
        self.sums.append(total)
        self.report(1, nbytes)


def _ignore(samples: int, nbytes: int) -> None:
    pass


def make_part(job: Job, number: int, report: Report = _ignore) -> dict[str, Any]:
    """Make one part, and write its record when it lies on the disk. Returns the record: plain values.

    Raises:
        GpuloadError: the dataset yields what the store has no form for.
        OSError: something cannot be written.
    """
    return begin_part(job, number, report)()


def begin_part(job: Job, number: int, report: Report = _ignore) -> Callable[[], dict[str, Any]]:
    """The same, but for its end: that is the function returned, which any thread may call."""
    from gpuload.packing import stores

    part = Part(job, number, report, Images(job.options))
    writing = stores.WRITERS[job.to](part)
    next(writing)

    def end() -> dict[str, Any]:
        told: dict[str, Any] = {}
        try:
            next(writing)
        except StopIteration as ended:
            told = ended.value
        record = {
            "part": number,
            "first": job.bounds[number],
            "samples": len(part.sums),
            "crc32": np.array(part.sums, "<u4").tobytes().hex(),
            "bad": part.bad,
            "kept": part.images.kept,
            "made_of": stamp_of(job.dataset, part.span),
            **told,
        }
        # One with damaged samples is made again, when they are mended or left out: it has no record.
        # Nor does a record have to outlive a loss of power: without it the part is made again.
        write_json(record_path(job, number), record, job.work, lasting=False)
        return record

    return end


def record_path(job: Job, number: int) -> str:
    return os.path.join(job.work, f"{number:05d}.json")


def stamp_of(dataset: Any, span: range) -> str | None:
    """By what the files of these samples are known to be the same: their sizes and times. None: it has no paths."""
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
    """Where a sample came from, for who has to mend it."""
    for leaf in sample if isinstance(sample, tuple) else sample.values() if isinstance(sample, dict) else (sample,):
        if isinstance(found := getattr(leaf, "source", None) or getattr(leaf, "filename", None), str):
            return found
    paths = getattr(dataset, "paths", None)
    return paths[index] if paths is not None else None


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error))}"
