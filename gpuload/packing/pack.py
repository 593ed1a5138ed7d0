"""`pack`: write a dataset as a packed set. The main process plans the job, and has workers make the missing parts.

Unfinished work (the plan, the records of parts, drafts) is in ``.gpuload-pack`` inside the set's folder. The manifest
is written last, and then ``.gpuload-pack`` is removed. So if a process is killed, the files on disk show which parts
are done.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import time
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
from gpuload.packing.plan import Job, Store, identity_of, load_plan, plan_job, source_stamp
from gpuload.packing.pool import make_parts
from gpuload.packing.stores import append_to_lmdb, array_layout, committed_parts, part_file, place_array, record_path

__all__ = ["BadSamples", "Packed", "Progress", "pack"]

PLAN: Final = "plan.json"
MAX_WORKERS: Final = 16
MAX_LISTED: Final = 20
PROGRESS_S: Final = 0.2  # the minimum time between two reports
STORES: Final = ("tar", "lmdb", "parquet", "array")
PART_FIELDS: Final = ("file", "first", "samples", "bytes", "sha256")  # the manifest's fields for each part

Progress = Callable[[int, int, int], None]
"""A callback that gets the number of samples done, the total number of samples, and the number of bytes written."""


class BadSamples(GpuloadError):
    """The error for damaged samples, because of which the set is not finished.

    Attributes:
        bad: a dict for each damaged sample: its ``index`` in the dataset, its ``source``, and the ``cause``.
    """

    def __init__(self, bad: list[dict[str, Any]], total: int, folder: str) -> None:
        self.bad = bad
        listed = "".join(f"\n  {_describe_bad(sample)}" for sample in bad[:MAX_LISTED])
        suffix = f"\n  and {len(bad) - MAX_LISTED:,} more" if len(bad) > MAX_LISTED else ""
        super().__init__(
            f"{len(bad):,} of {total:,} samples are damaged, so {folder!r} is not finished:{listed}{suffix}\n"
            "Repair them and run the same command again (finished parts are kept), or skip them with --on-error skip "
            "(skip_bad=True in Python)"
        )


@dataclass(frozen=True)
class Packed:
    """A set that `pack` has written.

    Attributes:
        folder: the absolute path of the set.
        samples, files, nbytes: the number of samples, the number of files that hold them, and the size of these files.
        left_out: the skipped damaged samples, each with its ``index`` in the dataset, ``source`` and ``cause``.
        kept: the number of images that could not be changed as requested and were copied unchanged, by reason.
        taken_up: the number of samples that an earlier run had already packed.
        read: a line of Python that opens the set.
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
    """Write a dataset to a few large files, from which the same samples are read in the same order.

    If a run is killed, call `pack` again with the same arguments to continue. The bytes depend only on the samples and
    the options, not on `workers` or interruptions (except for the indexes of tar shards and ``manifest-sources.json``,
    which hold modification times).

    Args:
        dataset: any map-style dataset that yields `Encoded`, ``(Encoded, target)``, or dicts that contain `Encoded`;
            with ``to="array"``, `Image` works too.
        folder: the folder to write, created if it does not exist. It must not contain other files.
        to: ``"tar"`` (shards that follow WebDataset's convention), ``"parquet"``, ``"lmdb"``, or ``"array"``, a single
            ``.npy`` file of decoded images.
        short_side: resize larger images so that their shorter side has this length. 8-bit JPEG and PNG files keep their
            format, ICC profile and EXIF (the orientation is not applied); other images are copied unchanged, and
            counted. With ``to="array"``: crop each image to its central square and resize it to this length.
        quality: the JPEG quality of resized JPEGs, 1 to 100. All other images keep their bytes.
        cuttable: add an index to JPEGs, so that crops are cut before decoding (progressive JPEGs need jpegtran).
            Images that cannot be made cuttable are copied unchanged, and counted.
        shard_bytes: the approximate maximum size of a shard; an exact limit if images are stored unchanged.
        workers: the number of worker processes; 0 packs in this process. Default: the number of CPUs that this process
            may use, up to 16; 0 if only one part is missing.
        skip_bad: skip damaged samples. Otherwise they raise an error after all other samples are done.
        check: decode every image to find all damage. Otherwise only headers, the ends of files, and resized images are
            checked.
        exif: with ``to="array"``, turn images upright, as ``Decode(exif=True)`` does.
        ray: the address of a Ray cluster that makes the parts (``pip install 'gpuload[ray]'``), ``"auto"`` for the
            cluster of this machine. All machines must see the source and the folder under the same paths. `workers`
            then counts the workers of the entire cluster; default: the number of its CPUs.
        progress: called a few times per second with samples done, total samples, and bytes written.

    Raises:
        BadSamples: samples are damaged; the error lists them.
        FileExistsError: the folder holds other files, another set, or this set made from files that have since changed.
        GpuloadError: the store cannot hold the dataset's samples; jpegtran is missing; another process packs to the
            same folder; the disk is full.
        TypeError, ValueError: an argument is not valid.
        OSError: a file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> from gpuload import ImageFolder, TarShards
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("cat/1.jpg", "dog/2.jpg"):
        ...         path = pathlib.Path(root, "images", name)
        ...         path.parent.mkdir(parents=True)
        ...         Image.new("RGB", (20, 30)).save(path)
        ...     packed = pack(ImageFolder(f"{root}/images"), f"{root}/packed", to="tar", workers=0)
        ...     image, label = TarShards(f"{root}/packed/*.tar", fields=("jpg", "cls"))[1]
        >>> packed.samples, packed.files, label
        (2, 1, 1)
    """
    options = ImageOptions(short_side, quality, cuttable, check, exif)
    _check_arguments(dataset, to, options, shard_bytes, workers)
    full = full_path(folder)
    work_folder = os.path.join(full, WORK)
    _check_folder(full, work_folder)
    plan = {
        "format": manifest.FORMAT,
        "to": to,
        "options": asdict(options),
        "shard_bytes": shard_bytes,
        "dataset": identity_of(dataset),
    }
    with durable.explain_full_disk(full):
        os.makedirs(work_folder, exist_ok=True)
        with _locked(work_folder, full):
            if os.path.exists(os.path.join(full, MANIFEST)):
                return _reopen_finished(dataset, full, plan)
            job = _resume_job(plan_job(dataset, full, to, options, shard_bytes), plan)
            records, taken_up = _make_records(job, workers, ray, skip_bad, progress)
            return _finish(job, plan, records, taken_up)


def _reopen_finished(dataset: Any, folder: str, plan: dict[str, Any]) -> Packed:
    """Return the set that the folder already holds.

    Raises:
        FileExistsError: the set has another plan, or its source files have changed.
    """
    shutil.rmtree(os.path.join(folder, WORK))
    written = manifest.read_manifest(folder)
    _refuse_different_plan(written["plan"], plan, folder, "holds a finished set")
    bounds = [*(part["first"] for part in written["parts"]), len(dataset)]
    stamps = manifest.source_stamps(folder, len(bounds) - 1)
    changed_spans = [
        span
        for span, stamp in zip(pairwise(bounds), stamps, strict=True)
        if stamp is not None and stamp != source_stamp(dataset, range(*span))
    ]
    if changed_spans:
        first, stop = changed_spans[0]
        suffix = f", and in {len(changed_spans) - 1:,} more parts" if len(changed_spans) > 1 else ""
        raise FileExistsError(
            f"{folder!r} holds a finished set, but source files have since changed in size or modification "
            f"time: among samples {first:,} to {stop - 1:,}{suffix}. To pack the changed files, use another folder or "
            "remove this one; if they were only copied or touched, keep the set: it is complete"
        )
    return _summary(folder, written, written["samples"])


def _check_arguments(dataset: Any, to: str, options: ImageOptions, shard_bytes: int, workers: int | None) -> None:
    if to not in STORES:
        raise ValueError(f"to must be one of {', '.join(map(repr, STORES))}, got {to!r}")
    if is_iterable(dataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"pack() needs a map-style dataset, with a length and dataset[i], got {type(dataset).__name__}; a stream "
            "cannot be read from the middle, so an interrupted job could not be resumed"
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
            f"exif=True needs to='array', got {to!r}: packed files keep their orientation; read with Decode(exif=True)"
        )
    if options.cuttable and to == "array":
        raise ValueError("cuttable=True needs JPEG files, but to='array' stores pixels; use only one of them")


def _check_folder(folder: str, work_folder: str) -> None:
    """Raise a FileExistsError if the folder contains other files, or its work folder is a link."""
    if not os.path.isdir(folder):
        if os.path.lexists(folder):
            raise FileExistsError(f"{folder!r} is a file; expected a new or empty folder")
        return
    if os.path.islink(work_folder):
        raise FileExistsError(f"{work_folder!r} is a link, so files at its target would be removed; remove the link")
    names = sorted(os.listdir(folder))
    if names and WORK not in names and MANIFEST not in names:
        raise FileExistsError(
            f"{folder!r} holds other files ({', '.join(map(repr, names[:3]))} …); expected a folder that is "
            "new, empty, or holds an unfinished set of the same job"
        )


def _refuse_different_plan(previous: dict[str, Any], plan: dict[str, Any], folder: str, state: str) -> None:
    old, new = ({**fields, **fields["options"], "options": None} for fields in (previous, plan))
    differing = [name for name in new if old.get(name) != new[name]]
    if differing:
        differences = ", ".join(
            "different data" if name == "dataset" else f"{name}={old.get(name)!r} instead of {new[name]!r}"
            for name in differing
        )
        raise FileExistsError(
            f"{folder!r} {state} packed with other arguments: {differences}. Use the same arguments or another folder, "
            "or remove this one"
        )


@contextlib.contextmanager
def _locked(work_folder: str, folder: str) -> Iterator[None]:
    """Keep other processes from packing to the same folder; the kernel releases the lock when the process ends."""
    with open(os.path.join(work_folder, "lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuloadError(f"another process is packing to {folder!r}; wait for it to finish, or stop it") from None
        yield


def _resume_job(job: Job, plan: dict[str, Any]) -> Job:
    """Resume an interrupted job with its saved bounds, or save the plan of a new job. Return the job."""
    path, entry_type = os.path.join(job.work_folder, PLAN), str(job.entry_type)
    saved_plan = load_plan(path, job.folder)
    for name in os.listdir(job.work_folder):
        if name.endswith(".part") or (saved_plan is None and name != "lock"):  # left behind by a killed run
            os.unlink(os.path.join(job.work_folder, name))
    if saved_plan is None:
        write_file(path, as_json({**plan, "bounds": job.bounds, "like": entry_type}), job.work_folder)
        durable.sync_names(job.work_folder)
    else:
        _refuse_different_plan(saved_plan, plan, job.folder, "holds an unfinished set")
        if saved_plan["like"] != entry_type:
            raise FileExistsError(
                f"{job.folder!r} was started with samples of {saved_plan['like']}, but they are now {entry_type}; "
                "remove the folder"
            )
        job = replace(job, bounds=saved_plan["bounds"])
    for name in (ARRAY, DATABASE):  # a run that was killed in `_finish` has moved it
        with contextlib.suppress(FileNotFoundError):
            if not os.path.exists(os.path.join(job.work_folder, name)):
                os.replace(os.path.join(job.folder, name), os.path.join(job.work_folder, name))
    array = os.path.join(job.work_folder, ARRAY)
    if job.to == "array" and not os.path.exists(array):
        header, sample_bytes = array_layout(job, job.bounds[-1])
        with durable.draft(array, job.work_folder) as file:
            file.write(header)
            file.truncate(len(header) + job.bounds[-1] * sample_bytes)
    return job


def _make_records(
    job: Job, workers: int | None, ray: str | None, skip_bad: bool, progress: Progress | None
) -> tuple[list[dict[str, Any]], int]:
    """Make the missing parts. Return the records of all parts, and the number of samples that were already packed."""
    count, total, committed = len(job.bounds) - 1, job.bounds[-1], committed_parts(job)
    records: dict[int, dict[str, Any]] = {}
    for number in range(count):
        record = durable.read_json(record_path(job, number))
        if not difference(record, manifest.record_schema(job.to, number)) and _is_done(
            job, record, skip_bad, committed
        ):
            records[number] = record
    taken_up = sum(record["samples"] for record in records.values())
    samples_done, bytes_written = sum(len(job.span(number)) for number in records), 0

    def report(samples: int, nbytes: int) -> None:
        nonlocal samples_done, bytes_written, reported_s
        samples_done, bytes_written, now_s = samples_done + samples, bytes_written + nbytes, time.monotonic()
        if progress is not None and (now_s - reported_s > PROGRESS_S or samples_done == total):
            reported_s = now_s
            progress(samples_done, total, bytes_written)

    reported_s = 0.0
    report(0, 0)
    missing = [number for number in range(count) if number not in records]
    if workers is None and ray is None:  # starting a worker takes as long as copying 1,000 photos
        workers = min(MAX_WORKERS, usable_cpus()) if len(missing) > 1 else 0
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
    bad = [sample for record in ordered for sample in record["bad"]]
    if bad and not skip_bad:
        raise BadSamples(bad, total, job.folder)
    if len(bad) == total:
        raise GpuloadError(f"all {total:,} samples are damaged; the first is {_describe_bad(bad[0])}")
    return ordered, taken_up


def _is_done(job: Job, record: dict[str, Any], skip_bad: bool, committed: int) -> bool:
    """Return whether the part exists and its source files have not changed since it was made."""
    number = record["part"]
    if (record["bad"] and not skip_bad) or record["sources"] != source_stamp(job.dataset, job.span(number)):
        return False
    path = part_file(job, number)
    if job.to == "lmdb":
        return number < committed or (os.path.exists(path) and durable.hash_of(path) == record["sha256"])
    return job.to == "array" or (os.path.exists(path) and os.path.getsize(path) == record["bytes"])


def _finish(job: Job, plan: dict[str, Any], records: list[dict[str, Any]], taken_up: int) -> Packed:
    """Move the finished files into the set's folder, then write the manifest."""
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
        hashes[DATABASE] = durable.hash_of(os.path.join(job.work_folder, DATABASE))
        os.replace(os.path.join(job.work_folder, DATABASE), os.path.join(job.folder, DATABASE))
    for name, data in files.items():
        write_file(os.path.join(job.folder, name), data, job.work_folder)
    durable.sync_names(job.folder)
    written = manifest.seal(
        {
            "format": manifest.FORMAT,
            "to": job.to,
            "form": job.form,
            "digits": job.digits,
            "samples": len(sums),
            "read": manifest.reader_description(job.to, job.form, records, job.entry_type),
            "parts": [{name: record[name] for name in PART_FIELDS} for record in records],
            "files": hashes,
            "left_out": [sample for record in records for sample in record["bad"]],
            "kept": dict(sum((Counter(record["kept"]) for record in records), Counter())),
            "plan": plan,
        }
    )
    write_file(os.path.join(job.folder, MANIFEST), as_json(written), job.work_folder)
    durable.sync_names(job.folder)
    shutil.rmtree(job.work_folder)
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


def _describe_bad(sample: dict[str, Any]) -> str:
    return f"{sample['source'] or 'sample ' + str(sample['index'])}: {sample['cause']}"
