"""Planning a job: the bounds of its parts, the common type of its entries, and the identity of its dataset, which is
checked when the job is resumed.

Parts must not depend on the number of workers, so their bounds are determined in advance. If files are stored
unchanged, their sizes give the exact bounds. Otherwise the bounds follow from the mean size of a few trial samples that
are spread evenly over the dataset. The plan is saved, and an interrupted job is resumed with the same plan.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Final, Literal

import numpy as np

from gpuload.errors import GpuloadError, import_optional, one_line
from gpuload.packing.durable import WORK_FOLDER, read_json
from gpuload.packing.images import ImageConverter, ImageOptions
from gpuload.packing.manifest import READERS, find_difference, plan_schema
from gpuload.packing.samples import FAILURES, UnfitSample, array_entry_of, fields_of, read_samples, row_of, values_of

__all__ = ["PackJob", "Store", "identity_of", "load_plan", "plan_job", "source_stamp"]

Store = Literal["tar", "lmdb", "parquet", "array"]
MACHINE_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)  # not the fault of a sample
TRIAL_SAMPLES: Final = 32  # samples to read for planning
PART_BYTES: Final = 16 << 20  # the size of a part in stores that are a single file
TAR_BLOCK: Final = 512
FIELD_BYTES: Final = 64  # the approximate size of a target


@dataclass(frozen=True)
class PackJob:
    """The data and options that a process needs to make any part of a job.

    Attributes:
        bounds: part k contains the samples bounds[k] … bounds[k + 1] − 1.
        form: the structure of a sample: an image alone, a pair of image and target, or a dict.
        entry_type: for ``"array"``, the dtype and shape of each entry, and whether entries are arrays rather than
            images; for ``"parquet"``, the schema.
        exif: whether the images are turned upright when they are read, see `Encoded`.
        digits: the number of digits in a key.
    """

    dataset: Any
    folder: str
    to: Store
    options: ImageOptions
    bounds: list[int]
    form: Literal["alone", "pair", "dict"] = "pair"
    entry_type: Any = None
    exif: bool | None = None
    digits: int = 8

    @property
    def work_folder(self) -> str:
        """The folder for unfinished files."""
        return os.path.join(self.folder, WORK_FOLDER)

    def span(self, part_number: int) -> range:
        """Return the indices of a part's samples."""
        return range(self.bounds[part_number], self.bounds[part_number + 1])

    def key(self, index: int) -> str:
        """Return the key of a sample: its index in the dataset, padded with zeros, so the order of keys is that of the
        samples."""
        return f"{index:0{self.digits}d}"

    def prepare_samples(
        self, span: range, converter: ImageConverter, check: Callable[[Any], object] = lambda prepared: prepared
    ) -> Iterator[tuple[int, Any, Any]]:
        """Yield the index of each sample, the sample, and its prepared data, which `check` has accepted or converted.
        If the sample is damaged, yield the exception in place of the data.

        Raises:
            GpuloadError: the store cannot hold a sample of this type.
            OSError: the machine ran out of memory, disk space or file descriptors.
        """
        root = getattr(self.dataset, "root", None)
        prepare = {
            "tar": fields_of,
            "lmdb": values_of,
            "parquet": partial(row_of, root=root if isinstance(root, str) else None),
            "array": array_entry_of,
        }[self.to]
        for index, sample in read_samples(self.dataset, span):
            prepared = sample
            try:
                if not isinstance(sample, Exception):
                    prepared = check(prepare(sample, converter))
            except FAILURES as error:
                prepared = error
            except UnfitSample as error:
                raise GpuloadError(f"sample {index} of {self.dataset!r} cannot be packed: {error}") from error
            if isinstance(prepared, OSError) and prepared.errno in MACHINE_ERRORS:
                raise prepared
            yield index, sample, prepared


def plan_job(dataset: Any, folder: str, to: Store, options: ImageOptions, shard_bytes: int) -> PackJob:
    """Return the job, with the bounds of its parts.

    Raises:
        GpuloadError: none of the trial samples can be read, or the store cannot hold them.
    """
    sample_count = len(dataset)
    job = PackJob(dataset, folder, to, options, [0, sample_count], digits=max(8, len(str(sample_count - 1))))
    trial_indices = np.unique(np.linspace(0, sample_count - 1, min(TRIAL_SAMPLES, sample_count)).astype(int)).tolist()
    converter = ImageConverter(options)
    trials = [trial for index in trial_indices for trial in job.prepare_samples(range(index, index + 1), converter)]
    intact = [(sample, prepared) for _, sample, prepared in trials if not isinstance(prepared, Exception)]
    if not intact:
        error = trials[0][2]
        raise GpuloadError(
            f"none of {len(trials)} trial samples of {dataset!r} can be read; the first error: {one_line(str(error))}"
        ) from error
    limit_bytes = shard_bytes if to in ("tar", "parquet") else min(shard_bytes, PART_BYTES)
    limit_bytes -= tarfile.RECORDSIZE if to == "tar" else 0  # reserved for the padding at the end of an archive
    paths = getattr(dataset, "paths", None)
    if paths is not None and options.short_side is None and not options.cuttable and to != "array":
        bounds = _part_bounds(_tar_sizes(paths, sample_count), limit_bytes)
    else:
        mean_bytes = max(1.0, float(np.mean([_sample_bytes(to, prepared) for _, prepared in intact])))
        bounds = [*range(0, sample_count, max(1, int(limit_bytes // mean_bytes))), sample_count]
    sample, first_prepared = intact[0]
    is_pair = isinstance(sample, tuple) and len(sample) > 1
    form = "dict" if isinstance(sample, Mapping) else "pair" if is_pair else "alone"
    entry_type: Any = None
    if to == "array":
        array, _, is_data = first_prepared
        entry_type = array.dtype.str, array.shape, is_data
    elif to == "parquet":
        entry_type = _infer_schema(first_prepared)
    return replace(job, bounds=bounds, entry_type=entry_type, form=form, exif=converter.exif)


def _sample_bytes(to: Store, prepared: Any) -> int:
    """Return the size of a sample in the store, in bytes."""
    match to:
        case "tar":
            return sum(TAR_BLOCK + _round_up_to_block(len(data)) for _, data in prepared)
        case "lmdb":
            return sum(len(data) + FIELD_BYTES for _, data in prepared)
        case "parquet":
            return sum(len(value["bytes"]) if isinstance(value, dict) else FIELD_BYTES for value in prepared.values())
    return prepared[0].nbytes


def _infer_schema(row: dict[str, Any]) -> Any:
    arrow = import_optional("pyarrow", "pack(to='parquet')", "parquet")
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    types = {name: image if isinstance(value, dict) else arrow.array([value]).type for name, value in row.items()}
    return arrow.schema(list(types.items()))


def _round_up_to_block(nbytes: Any) -> Any:
    return -(-nbytes // TAR_BLOCK) * TAR_BLOCK


def _tar_sizes(paths: Any, sample_count: int) -> np.ndarray:
    """Return the size of each sample in a tar, in bytes; one block for a missing file. Other stores need less."""
    statuses = (_read_status(paths[index]) for index in range(sample_count))
    sizes = np.fromiter((-1 if status is None else status.st_size for status in statuses), np.int64, sample_count)
    return np.where(sizes < 0, 0, _round_up_to_block(sizes) + 2 * TAR_BLOCK) + TAR_BLOCK


def _part_bounds(sizes: np.ndarray, limit_bytes: int) -> list[int]:
    """Return the bounds of parts of at most `limit_bytes`. A larger sample gets a part of its own."""
    ends, bounds = np.cumsum(sizes), [0]
    while bounds[-1] < len(sizes):
        previous_end = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, previous_end + limit_bytes, "right"))))
    return bounds


def load_plan(path: str, folder: str) -> dict[str, Any] | None:
    """Return the saved plan of an interrupted job; None if no plan was saved.

    Raises:
        FileExistsError: the file is not a plan written by gpuload, or its parts do not cover all samples.
    """
    plan = read_json(path)
    if plan is None:
        return None
    problem = find_difference(plan, {**plan_schema(tuple(READERS)), "bounds": [int], "like": str})
    if problem is None:
        bounds, sample_count = plan["bounds"], plan["dataset"]["samples"]
        if bounds != sorted(set(bounds)) or [*bounds[:1], *bounds[-1:]] != [0, sample_count]:
            problem = f"its parts do not contain each of {sample_count:,} samples exactly once"
    if problem is not None:
        raise FileExistsError(f"{path!r} is not a plan of `gpuload pack`: {problem}; remove {folder!r}")
    return plan


def identity_of(dataset: Any) -> dict[str, Any]:
    """Return the identity of a dataset, which must match when a job is resumed.

    It depends on the names of files but not on their contents. It includes the sizes and modification times of a
    store's files, but not those of image files, which `source_stamp` includes for each part.
    """
    digest = sha256()
    for name in ("paths", "keys", "files", "shards", "path"):
        value: Any = getattr(dataset, name, None)
        if hasattr(value, "data") and hasattr(value, "offsets"):  # packed paths
            digest.update(os.fsencode(value.root) + value.offsets.tobytes() + value.data.tobytes())
        elif isinstance(value, str):
            digest.update(os.fsencode(value) + _file_stamp(value))
        elif isinstance(value, list):
            digest.update(b"".join(os.fsencode(path) + b"\0" + _file_stamp(path) for path in value))
    labels = getattr(dataset, "labels", None)
    if isinstance(labels, np.ndarray):
        digest.update(labels.tobytes())
    cls = type(dataset)
    return {"kind": f"{cls.__module__}.{cls.__qualname__}", "samples": len(dataset), "digest": digest.hexdigest()}


def source_stamp(dataset: object, span: range) -> str | None:
    """Return a checksum of the sizes and modification times of samples' files; None if the dataset has no paths."""
    paths = getattr(dataset, "paths", None)
    return None if paths is None else f"{zlib.crc32(b''.join(_file_stamp(paths[index]) for index in span)):08x}"


def _file_stamp(path: str) -> bytes:
    status = _read_status(path)
    if status is None:
        return b"missing"
    return b"" if stat.S_ISDIR(status.st_mode) else b"%d %d" % (status.st_size, status.st_mtime_ns)


def _read_status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
