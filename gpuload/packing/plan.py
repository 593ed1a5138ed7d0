"""Before a job begins: where its parts are cut, what all entries are like, and how a begun job is recognized.

Parts must not depend on the number of workers, so they are cut before anything is made: exactly, by the sizes of the
files, where these are stored as they are; else by the mean size of a few samples that are prepared on trial, taken
evenly from the whole. The plan is written down, and a job that is taken up again follows it.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from gpuload.errors import DecodeError, GpuloadError, one_line
from gpuload.packing.durable import read_json, sha256
from gpuload.packing.expected import differences
from gpuload.packing.images import ImageOptions, Images
from gpuload.packing.manifest import READERS, plan_like
from gpuload.packing.parts import Job, Store, each_sample
from gpuload.packing.samples import Unfit, array_of, fields_of, row_of, values_of
from gpuload.packing.stores import schema_like

__all__ = ["PLAN", "begun_plan", "identity_of", "planned"]

PLAN: Final = "plan.json"
TRIALS: Final = 32
PART_BYTES: Final = 16 << 20  # of a store that is one file: how much a worker does at a time
TAR_BLOCK: Final = 512
FIELD_BYTES: Final = 64  # about what a target takes
FORMS: Final[dict[str, Callable[[Any, Images, Job], Any]]] = {
    "tar": lambda sample, images, job: fields_of(sample, images),
    "lmdb": lambda sample, images, job: values_of(sample, images),
    "parquet": lambda sample, images, job: row_of(sample, images, job.root),
    "array": lambda sample, images, job: array_of(sample, images),
}


def planned(dataset: Any, folder: str, to: Store, options: ImageOptions, shard_bytes: int) -> Job:
    """Return the job, with its parts cut.

    Raises:
        GpuloadError: none of the samples that are tried can be read, or the store has no form for them.
    """
    count = len(dataset)
    job = Job(dataset, folder, to, options, [0, count], digits=max(8, len(str(count - 1))))
    tried = [_try(job, at) for at in np.unique(np.linspace(0, count - 1, min(TRIALS, count)).astype(int)).tolist()]
    good = [one for one in tried if not isinstance(one, Exception)]
    if not good:
        raise GpuloadError(
            f"none of {len(tried)} samples from all over {dataset!r} can be read; the first: {one_line(str(tried[0]))}"
        ) from tried[0]
    form, prepared = good[0]
    limit = shard_bytes if to in ("tar", "parquet") else min(shard_bytes, PART_BYTES)
    limit -= tarfile.RECORDSIZE if to == "tar" else 0  # which an archive is filled up to
    sizes = _file_sizes(dataset) if options.short_side is None and not options.cuttable and to != "array" else None
    if sizes is not None:
        bounds = _cut(sizes, limit)
    else:
        mean = max(1.0, float(np.mean([_nbytes(to, one) for _, one in good])))
        bounds = [*range(0, count, max(1, int(limit // mean))), count]
    like: Any = None
    if to == "array":
        array, _, raw = prepared
        like = array.dtype.str, array.shape, raw
    elif to == "parquet":
        like = schema_like(prepared)
    return replace(job, bounds=bounds, like=like, form=form)


def begun_plan(path: str, job: Job) -> dict[str, Any] | None:
    """Return the plan by which a job was begun; None if there is none.

    Raises:
        FileExistsError: it is not a plan that gpuload writes, for as many samples.
    """
    plan = read_json(path)
    if plan is None:
        return None
    for difference in differences(plan, {**plan_like(tuple(READERS)), "bounds": [int], "like": str}):
        raise FileExistsError(f"{path!r} is not a plan of gpuload pack: {difference}; remove {job.folder!r}")
    bounds, ends = plan["bounds"], [0, plan["dataset"]["samples"]]
    if bounds != sorted(set(bounds)) or [*bounds[:1], *bounds[-1:]] != ends:
        raise FileExistsError(
            f"{path!r} is not a plan of gpuload pack: its parts do not have each of {ends[1]:,} samples once; remove "
            f"{job.folder!r}"
        )
    return plan


def _try(job: Job, index: int) -> Any:
    """Return the form of one sample and what becomes of it, or why it cannot be read."""
    ((_, sample),) = each_sample(job.dataset, range(index, index + 1))
    if isinstance(sample, Exception):
        return sample
    form = (
        "dict" if isinstance(sample, Mapping) else "pair" if isinstance(sample, tuple) and len(sample) > 1 else "alone"
    )
    try:
        return form, FORMS[job.to](sample, Images(job.options), job)
    except Unfit as error:
        raise GpuloadError(f"sample {index} of {job.dataset!r} cannot be packed: {error}") from error
    except (DecodeError, OSError, ValueError) as error:
        return error


def _nbytes(to: Store, made: Any) -> int:
    """Return how many bytes a sample takes in the store."""
    match to:
        case "tar":
            return sum(TAR_BLOCK + _padded(len(data)) for _, data in made)
        case "array":
            return made[0].nbytes
        case "parquet":
            return sum(len(value["bytes"]) if isinstance(value, dict) else FIELD_BYTES for value in made.values())
        case _:
            return sum(len(value) + FIELD_BYTES for value in made[:2] if value is not None)


def _padded(nbytes: Any) -> Any:
    return -(-nbytes // TAR_BLOCK) * TAR_BLOCK


def _file_sizes(dataset: Any) -> np.ndarray | None:
    """Return how many bytes each sample takes in a tar, a little less elsewhere; None if samples are not files."""
    paths = getattr(dataset, "paths", None)
    if paths is None:
        return None
    sizes = np.fromiter((_file_size(paths[index]) for index in range(len(dataset))), np.int64, len(dataset))
    return np.where(sizes < 0, 0, _padded(sizes) + 2 * TAR_BLOCK) + TAR_BLOCK


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1  # reported when it is read


def _cut(sizes: np.ndarray, limit: int) -> list[int]:
    """Return the bounds of parts with at most so many bytes, or one sample."""
    ends, bounds = np.cumsum(sizes), [0]
    while bounds[-1] < len(sizes):
        before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, before + limit, "right"))))
    return bounds


def identity_of(dataset: Any) -> dict[str, Any]:
    """Return how a dataset is recognized when a job is taken up: names, not the contents of its files.

    A store's files count with their sizes and times. The files of single samples do not: those of each part are
    compared when that is looked at (`parts.source_stamp`).
    """
    digest = sha256()
    for name in ("paths", "keys", "files", "shards", "path"):
        value = getattr(dataset, name, None)
        if value is None:
            continue
        if hasattr(value, "data") and hasattr(value, "offsets"):  # packed paths
            digest.update(os.fsencode(value.root) + value.offsets.tobytes() + value.data.tobytes())
        elif isinstance(value, str):
            digest.update(os.fsencode(value) + _stamp(value))
        elif isinstance(value, list):
            digest.update(b"".join(os.fsencode(path) + b"\0" + _stamp(path) for path in value))
    labels = getattr(dataset, "labels", None)
    if isinstance(labels, np.ndarray):
        digest.update(labels.tobytes())
    kind = type(dataset)
    return {"kind": f"{kind.__module__}.{kind.__qualname__}", "samples": len(dataset), "digest": digest.hexdigest()}


def _stamp(path: str) -> bytes:
    try:
        status = os.stat(path)
    except OSError:
        return b"missing"
    return b"" if os.path.isdir(path) else b"%d %d" % (status.st_size, status.st_mtime_ns)
