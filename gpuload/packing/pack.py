"""`pack`: a dataset becomes a packed set. Runs in the main process: plans, takes up what is done, has the rest made.

Everything unfinished is in ``.gpuload-pack`` within the set's folder: the plan, the records of parts, drafts. The
manifest is written last, and then that folder is removed. So at any moment that a process may be killed, what is there
says what is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, Final

import numpy as np

from gpuload.datasets.kinds import is_iterable
from gpuload.datasets.scan import full_path
from gpuload.errors import GpuloadError
from gpuload.loader.limits import usable_cpus
from gpuload.packing import durable, manifest
from gpuload.packing.durable import WORK, as_json, write_file
from gpuload.packing.images import ImageOptions
from gpuload.packing.manifest import ARRAY, DATABASE, MANIFEST, difference
from gpuload.packing.plan import Job, Store, begun_plan, identity_of, planned, source_stamp
from gpuload.packing.pool import make_parts
from gpuload.packing.stores import append_to_lmdb, array_layout, committed_parts, part_file, place_array, record_path

__all__ = ["BadSamples", "Packed", "Progress", "pack"]

PLAN: Final = "plan.json"
MOST_WORKERS: Final = 16
SHOWN: Final = 20
STORES: Final = ("tar", "lmdb", "parquet", "array")
NOTED: Final = ("file", "first", "samples", "bytes", "sha256")  # of a part, in the manifest

Progress = Callable[[int, int, int], None]
"""Called with how many samples are done, of how many, and how many bytes were written."""


class BadSamples(GpuloadError):
    """Samples are damaged, so the set is not finished.

    Attributes:
        bad: for each its ``index`` in the dataset, its ``source``, and the ``cause``.
    """

    def __init__(self, bad: list[dict[str, Any]], total: int, folder: str) -> None:
        self.bad = bad
        shown = "".join(f"\n  {_line(one)}" for one in bad[:SHOWN])
        more = f"\n  and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
        super().__init__(
            f"{len(bad):,} of {total:,} samples are damaged, so {folder!r} is not finished:{shown}{more}\n"
            "Repair them and run the same again (what is done is kept), or leave them out with --on-error skip (in "
            "Python skip_bad=True)"
        )


@dataclass(frozen=True)
class Packed:
    """The set that `pack` has written.

    Attributes:
        folder: where the set is, an absolute path.
        samples: how many are in it; files: how many shards or other files hold them; nbytes: of these files.
        left_out: the damaged samples, each with its ``index`` in the dataset, its ``source``, and the ``cause``.
        kept: of images that stayed as they were though something was asked for, how many, by why.
        taken_up: how many samples were there already, from a run before.
        read: the line of Python that reads it.
    """

    folder: str
    samples: int
    files: int
    nbytes: int
    left_out: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    taken_up: int = 0
    read: str = ""


def pack(
    dataset: Any,
    folder: str | os.PathLike[str],
    *,
    to: Store,
    short_side: int | None = None,
    quality: int = 90,
    cuttable: bool = False,
    shard_bytes: int = 256_000_000,
    workers: int | None = None,
    skip_bad: bool = False,
    check: bool = False,
    exif: bool = False,
    ray: str | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write a dataset to few large files, from which the same samples are read in the same order.

    It may be killed at any time: called again with the same arguments, it continues. The bytes depend on the samples
    and the options alone, not on `workers`, nor on how often it was stopped (but for the indexes beside tar shards, and
    ``manifest-sources.json``, which hold times).

    Args:
        dataset: any map-style dataset that yields `Encoded`, ``(Encoded, target)``, or dicts with these; for an array
            also `Image`.
        folder: where the set goes; it is made. It may hold nothing else.
        to: ``"tar"`` (shards by WebDataset's convention), ``"parquet"``, ``"lmdb"``, or ``"array"``, one ``.npy`` of
            decoded images.
        short_side: resize larger images so that their shorter side has this length. JPEG and PNG of 8 bits keep format,
            ICC profile and EXIF (pixels are resized as they are stored); others are kept as they are, and counted. For
            an array: the middle square of each image, resized to this side.
        quality: of JPEGs that are resized, 1 to 100. All others keep their bytes.
        cuttable: put an index into JPEGs, so that crops are cut before they are decoded (progressive ones need
            jpegtran). What cannot be made cuttable is kept as it is, and counted.
        shard_bytes: about how large a shard may be. Where images are stored as they are, none is larger.
        workers: processes; 0 for none but this one. Default: the CPUs that this process may use, up to 16; for a single
            shard none.
        skip_bad: leave out damaged samples. Else they end in an error, when all others are done.
        check: decode every image, to find all damage. Else headers and ends of files are looked at, and what is
            resized.
        exif: for an array, turn images upright, as ``Decode(exif=True)`` does.
        ray: the address of a Ray cluster that makes the parts (``pip install 'gpuload[ray]'``), ``"auto"`` for the
            cluster of this machine. All its machines see the source and the folder under the same paths. `workers` are
            then those of the whole cluster; default: its CPUs.
        progress: called with samples done, samples in all, and bytes written, a few times a second.

    Raises:
        BadSamples: samples are damaged; it lists them.
        FileExistsError: the folder holds something else, another set, or the same set of files that have changed since.
        GpuloadError: the dataset yields what the store has no form for; jpegtran is missing; another process packs to
            the same folder; the disk is full.
        TypeError, ValueError: an argument is not valid.
        OSError: something cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> from gpuload import ImageFolder, TarShards
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("cat/1.jpg", "dog/2.jpg"):
        ...         path = pathlib.Path(root, "images", name)
        ...         path.parent.mkdir(parents=True)
        ...         Image.new("RGB", (20, 30)).save(path)
        ...     made = pack(ImageFolder(f"{root}/images"), f"{root}/packed", to="tar", workers=0)
        ...     image, label = TarShards(f"{root}/packed/*.tar", fields=("jpg", "cls"))[1]
        >>> made.samples, made.files, label
        (2, 1, 1)
    """
    options = ImageOptions(short_side, quality, cuttable, check, exif)
    _check(dataset, to, options, shard_bytes, workers)
    full = full_path(folder)
    work = os.path.join(full, WORK)
    _refuse_others(full, work)
    plan = {
        "format": manifest.FORMAT,
        "to": to,
        "options": asdict(options),
        "shard_bytes": shard_bytes,
        "dataset": identity_of(dataset),
    }
    with durable.telling_of_a_full_disk(full):
        os.makedirs(work, exist_ok=True)
        with _locked(work, full):
            if os.path.exists(os.path.join(full, MANIFEST)):
                return _finished(dataset, full, plan)
            job = _taken_up(planned(dataset, full, to, options, shard_bytes), plan)
            records, taken_up = _records(job, workers, ray, skip_bad, progress)
            return _finish(job, plan, records, taken_up)


def _finished(dataset: Any, folder: str, plan: dict[str, Any]) -> Packed:
    """Return what is there already, if it is the set that was asked for."""
    shutil.rmtree(os.path.join(folder, WORK))
    written = manifest.read_manifest(folder)
    _refuse_other_plan(written["plan"], plan, folder, "holds a finished set")
    bounds = [*(part["first"] for part in written["parts"]), len(dataset)]
    stamps = manifest.source_stamps(folder, len(bounds) - 1)
    changed = [
        span
        for span, stamp in zip(pairwise(bounds), stamps, strict=True)
        if stamp is not None and stamp != source_stamp(dataset, range(*span))
    ]
    if changed:
        first, stop = changed[0]
        more = f", and others in {len(changed) - 1:,} more parts" if len(changed) > 1 else ""
        raise FileExistsError(
            f"{folder!r} holds a finished set of files that have other sizes or times now: among the samples {first:,} "
            f"to {stop - 1:,}{more}. To pack them as they are now, use another folder, or remove this one; if they "
            "were only copied or touched, the set is complete as it is"
        )
    return _summary(folder, written, written["samples"])


def _check(dataset: Any, to: str, options: ImageOptions, shard_bytes: int, workers: int | None) -> None:
    if to not in STORES:
        raise ValueError(f"to must be one of {', '.join(map(repr, STORES))}, got {to!r}")
    if is_iterable(dataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"pack() takes map-style datasets, with a length and dataset[i], got {type(dataset).__name__}; a stream "
            "cannot be read from its middle, so no job on it can be taken up"
        )
    if not len(dataset):
        raise ValueError(f"{dataset!r} has no samples to pack")
    for name, value, low, high in (
        ("short_side", options.short_side, 1, 65_500),
        ("quality", options.quality, 1, 100),
        ("shard_bytes", shard_bytes, 1, 1 << 50),
        ("workers", workers, 0, 4096),
    ):
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    if options.exif and to != "array":
        raise ValueError(
            f"exif=True is for to='array': in a {to} the orientation stays in the files, for Decode(exif=True)"
        )
    if options.cuttable and to == "array":
        raise ValueError("cuttable=True is for JPEGs, and an array holds pixels")


def _refuse_others(folder: str, work: str) -> None:
    """Refuse a folder with something else in it, and one whose unfinished work is elsewhere."""
    if not os.path.isdir(folder):
        if os.path.lexists(folder):
            raise FileExistsError(f"{folder!r} is a file; expected a folder that is new or empty")
        return
    if os.path.islink(work):
        raise FileExistsError(f"{work!r} is a link, and files where it leads to would be removed; remove the link")
    names = sorted(os.listdir(folder))
    if names and WORK not in names and MANIFEST not in names:
        raise FileExistsError(
            f"{folder!r} holds other files ({', '.join(map(repr, names[:3]))} …); expected a folder that is new or "
            "empty, or that the same pack has begun"
        )


def _refuse_other_plan(theirs: dict[str, Any], plan: dict[str, Any], folder: str, what: str) -> None:
    flat, wanted = ({**one, **one["options"], "options": None} for one in (theirs, plan))
    differing = [name for name in wanted if flat.get(name) != wanted[name]]
    if differing:
        shown = ", ".join(
            "other data" if name == "dataset" else f"{name}={flat.get(name)!r} instead of {wanted[name]!r}"
            for name in differing
        )
        raise FileExistsError(
            f"{folder!r} {what} that was asked for otherwise: {shown}. Use the same arguments, another folder, or "
            "remove this one"
        )


@contextlib.contextmanager
def _locked(work: str, folder: str) -> Iterator[None]:
    """Let no two processes pack to one folder; the kernel frees the lock with the process."""
    with open(os.path.join(work, "lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuloadError(f"another process is packing to {folder!r}; wait for it, or end it") from None
        yield


def _taken_up(job: Job, plan: dict[str, Any]) -> Job:
    """Return the job as it was begun, if it was; write its plan if it was not."""
    path, like = os.path.join(job.work, PLAN), str(job.like)
    begun = begun_plan(path, job.folder)
    for name in os.listdir(job.work):
        if name.endswith(".part") or (begun is None and name != "lock"):  # of a run that was killed
            os.unlink(os.path.join(job.work, name))
    if begun is None:
        write_file(path, as_json({**plan, "bounds": job.bounds, "like": like}), job.work, lasting=False)
    else:
        _refuse_other_plan(begun, plan, job.folder, "holds the beginning of a set")
        if begun["like"] != like:
            raise FileExistsError(
                f"{job.folder!r} was begun with samples like {begun['like']}, now they are like {like}; remove it"
            )
        job = replace(job, bounds=begun["bounds"])
    for name in (ARRAY, DATABASE):  # of a run that was killed as it put things in their places
        with contextlib.suppress(FileNotFoundError):
            if not os.path.exists(os.path.join(job.work, name)):
                os.replace(os.path.join(job.folder, name), os.path.join(job.work, name))
    array = os.path.join(job.work, ARRAY)
    if job.to == "array" and not os.path.exists(array):
        header, each = array_layout(job, job.bounds[-1])
        with durable.draft(array, job.work) as file:
            file.write(header)
            file.truncate(len(header) + job.bounds[-1] * each)
    return job


def _records(
    job: Job, workers: int | None, ray: str | None, skip_bad: bool, progress: Progress | None
) -> tuple[list[dict[str, Any]], int]:
    """Make the parts that are missing. Return the records of all, and how many samples were there already."""
    count, total, committed = len(job.bounds) - 1, job.bounds[-1], committed_parts(job)
    records: dict[int, dict[str, Any]] = {}
    for number in range(count):
        record = durable.read_json(record_path(job, number))
        if not difference(record, manifest.record_like(job.to, number)) and _is_done(job, record, skip_bad, committed):
            records[number] = record
    taken_up = sum(record["samples"] for record in records.values())
    done, written = sum(len(job.span(number)) for number in records), 0

    def report(samples: int, nbytes: int) -> None:
        nonlocal done, written
        done, written = done + samples, written + nbytes
        if progress is not None:
            progress(done, total, written)

    report(0, 0)
    missing = [number for number in range(count) if number not in records]
    if workers is None and ray is None:  # to start a worker takes as long as to copy a thousand photographs
        workers = min(MOST_WORKERS, usable_cpus()) if len(missing) > 1 else 0
    with contextlib.closing(make_parts(job, missing, workers, report, ray)) as results:
        while True:
            while job.to == "lmdb" and committed in records and (skip_bad or not records[committed]["bad"]):
                append_to_lmdb(job, committed)
                committed += 1
            record = next(results, None)
            if record is None:
                break
            records[record["part"]] = record
    ordered = [records[number] for number in range(count)]
    bad = [one for record in ordered for one in record["bad"]]
    if bad and not skip_bad:
        raise BadSamples(bad, total, job.folder)
    if len(bad) == total:
        raise GpuloadError(f"all {total:,} samples are damaged; the first: {_line(bad[0])}")
    return ordered, taken_up


def _is_done(job: Job, record: dict[str, Any], skip_bad: bool, committed: int) -> bool:
    """Return whether the part of a record is there, and was made of the files as they are now."""
    number = record["part"]
    if (record["bad"] and not skip_bad) or record["sources"] != source_stamp(job.dataset, job.span(number)):
        return False
    path = part_file(job, number)
    if job.to == "lmdb":
        return number < committed or (os.path.exists(path) and durable.hash_of(path) == record["sha256"])
    return job.to == "array" or (os.path.exists(path) and os.path.getsize(path) == record["bytes"])


def _finish(job: Job, plan: dict[str, Any], records: list[dict[str, Any]], taken_up: int) -> Packed:
    """Move what is done to its place, and write the manifest beside it, last."""
    sums = np.frombuffer(bytes.fromhex("".join(record["crc32"] for record in records)), "<u4")
    files = {manifest.SUMS: _npy(sums)}
    classes = getattr(job.dataset, "classes", None)
    if isinstance(classes, list) and all(isinstance(name, str) for name in classes):
        files[manifest.CLASSES] = json.dumps(classes, ensure_ascii=False, indent=1).encode() + b"\n"
    if job.to == "array" and job.form == "pair":
        files[manifest.LABELS] = _npy(np.array([label for record in records for label in record["labels"]]))
    hashes = {name: sha256(data).hexdigest() for name, data in files.items()}
    files[manifest.SOURCES] = as_json([record["sources"] for record in records])
    if job.to == "array":
        place_array(job, records)
        hashes[ARRAY] = sha256(array_layout(job, len(sums))[0]).hexdigest()
    elif job.to == "lmdb":
        hashes[DATABASE] = durable.hash_of(os.path.join(job.work, DATABASE))
        os.replace(os.path.join(job.work, DATABASE), os.path.join(job.folder, DATABASE))
    for name, data in files.items():
        write_file(os.path.join(job.folder, name), data, job.work)
    durable.sync_names(job.folder)
    written = manifest.sealed(
        {
            "format": manifest.FORMAT,
            "to": job.to,
            "form": job.form,
            "digits": job.digits,
            "samples": len(sums),
            "read": manifest.how_to_read(job.to, job.form, records, job.like),
            "parts": [{name: record[name] for name in NOTED} for record in records],
            "files": hashes,
            "left_out": [one for record in records for one in record["bad"]],
            "kept": dict(sum((Counter(record["kept"]) for record in records), Counter())),
            "plan": plan,
        }
    )
    write_file(os.path.join(job.folder, MANIFEST), as_json(written), job.work)
    durable.sync_names(job.folder)
    shutil.rmtree(job.work)
    return _summary(job.folder, written, taken_up)


def _summary(folder: str, written: dict[str, Any], taken_up: int) -> Packed:
    names = dict.fromkeys(part["file"] for part in written["parts"])
    nbytes = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    read = manifest.reading_line(folder, written["read"])
    return Packed(folder, written["samples"], len(names), nbytes, written["left_out"], written["kept"], taken_up, read)


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, (1, 0), allow_pickle=False)
    return file.getvalue()


def _line(one: dict[str, Any]) -> str:
    return f"{one['source'] or 'sample ' + str(one['index'])}: {one['cause']}"
