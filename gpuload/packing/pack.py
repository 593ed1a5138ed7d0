"""`pack`: write a dataset as a packed set. The main process plans the job, and has workers make the missing parts.

Unfinished work (the plan, the records of parts, drafts) is in ``.gpuload-pack`` inside the set's folder. The manifest
is written last, and then ``.gpuload-pack`` is removed. So if a process is killed, the files on disk show which parts
are done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, Final, get_args

import numpy as np

from gpuload.checks import flag, function, integer, one_of, optional
from gpuload.datasets.drafts import DRAFT
from gpuload.datasets.kinds import is_iterable
from gpuload.datasets.scan import full_path
from gpuload.errors import GpuloadError, list_some
from gpuload.loader.limits import usable_cpus
from gpuload.packing import durable, manifest
from gpuload.packing.durable import WORK_FOLDER, encode_json, encode_npy, write_file
from gpuload.packing.images import ImageOptions
from gpuload.packing.manifest import ARRAY, DATABASE, MANIFEST, find_difference
from gpuload.packing.plan import PackJob, Store, identity_of, load_plan, plan_job, source_stamp
from gpuload.packing.pool import make_parts
from gpuload.packing.stores import append_to_lmdb, array_layout, committed_parts, move_array, part_file, record_path

__all__ = ["BadSamples", "Packed", "Progress", "describe_bad_sample", "pack"]

PLAN: Final = "plan.json"
MAX_WORKERS: Final = 16
MAX_LISTED: Final = 20
PROGRESS_S: Final = 0.2  # the minimum time between two reports
STORES: Final = get_args(Store)
PART_FIELDS: Final = ("file", "first", "samples", "bytes", "sha256")  # the manifest's fields for each part

Progress = Callable[[int, int, int], None]
"""A callback that gets the number of samples done, the total number of samples, and the number of bytes written."""


class BadSamples(GpuloadError):
    """The error for damaged samples that prevent a set from being finished.

    Attributes:
        bad: one dict per damaged sample: its ``index`` in the dataset, its ``source``, and the ``cause``.
    """

    def __init__(self, bad: list[dict[str, Any]], total: int, folder: str) -> None:
        self.bad = bad
        listed = list_some(bad, MAX_LISTED, "\n  ", "\n  and ", describe_bad_sample)
        super().__init__(
            f"{len(bad):,} of {total:,} samples are damaged, so {folder!r} is not finished:\n  {listed}\n"
            "Repair them and run the same command again (finished parts are kept), or skip them with --on-error skip "
            "(skip_bad=True in Python)"
        )


@dataclass(frozen=True)
class Packed:
    """A set that `pack` has written.

    Attributes:
        folder: the absolute path of the set.
        samples, files, nbytes: the number of samples, the number of files that hold them, and the size of these files.
        left_out: one dict per skipped damaged sample: its ``index`` in the dataset, its ``source``, and the ``cause``.
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
            format, ICC profile and EXIF (the orientation is not applied); other images are copied unchanged and counted
            in `Packed.kept`. With ``to="array"``: crop each image to its central square and resize it to this length.
        quality: the JPEG quality of resized JPEGs, 1 to 100. All other images keep their bytes.
        cuttable: add an index to JPEGs, so that crops are cut before decoding (progressive JPEGs need jpegtran).
            Images that cannot be made cuttable are copied unchanged and counted in `Packed.kept`.
        shard_bytes: the approximate maximum size of a shard; an exact limit for image files that are stored unchanged.
        workers: the number of worker processes; 0 packs in this process. Default: the number of CPUs that this process
            may use, up to 16; 0 if only one part is missing.
        skip_bad: skip damaged samples. Otherwise they raise an error after all other samples are done.
        check: decode every image to find all damage. Otherwise only headers, the ends of files, and resized images are
            checked.
        exif: with ``to="array"``, turn images upright, as ``Decode(exif=True)`` does. By default, and in other stores,
            images are upright if they are in the dataset (`Encoded.exif`), as Hugging Face's are.
        ray: the address of a Ray cluster that makes the parts (``pip install 'gpuload[ray]'``), ``"auto"`` for the
            cluster of this machine. All machines must see the source and the folder under the same paths. `workers`
            then counts the workers of the entire cluster; default: the number of its CPUs.
        progress: called a few times per second, see `Progress`.

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
    shard_bytes = integer("shard_bytes", shard_bytes, minimum=1, maximum=1 << 50)
    workers = optional(integer, "workers", workers, minimum=0, maximum=4096)
    skip_bad, progress = flag("skip_bad", skip_bad), optional(function, "progress", progress)
    _check_arguments(dataset, one_of("to", to, STORES), options)
    root = full_path(folder)
    work_folder = os.path.join(root, WORK_FOLDER)
    _check_folder(root, work_folder)
    plan = {
        "format": manifest.FORMAT,
        "to": to,
        "options": asdict(options),
        "shard_bytes": shard_bytes,
        "dataset": identity_of(dataset),
    }
    with durable.explain_full_disk(root):
        os.makedirs(work_folder, exist_ok=True)
        with _lock_folder(work_folder, root):
            if os.path.exists(os.path.join(root, MANIFEST)):
                return _reopen_set(dataset, root, plan)
            job = _resume_job(plan_job(dataset, root, to, options, shard_bytes), plan)
            records, taken_up = _make_missing_parts(job, workers, ray, skip_bad, progress)
            return _finish(job, plan, records, taken_up)


def _reopen_set(dataset: Any, folder: str, plan: dict[str, Any]) -> Packed:
    """Return the set that the folder already holds.

    Raises:
        FileExistsError: the set has another plan, or its source files have changed.
    """
    shutil.rmtree(os.path.join(folder, WORK_FOLDER))
    stored_manifest = manifest.read_manifest(folder)
    _refuse_different_plan(stored_manifest["plan"], plan, folder, "holds a finished set")
    part_bounds = [*(part["first"] for part in stored_manifest["parts"]), len(dataset)]
    stamps = manifest.source_stamps(folder, len(part_bounds) - 1)
    changed_spans = [
        span
        for span, stamp in zip(pairwise(part_bounds), stamps, strict=True)
        if stamp is not None and stamp != source_stamp(dataset, range(*span))
    ]
    if changed_spans:
        first, stop = changed_spans[0]
        suffix = f" and in other parts ({len(changed_spans):,} in total)" if len(changed_spans) > 1 else ""
        raise FileExistsError(
            f"{folder!r} holds a finished set, but source files have since changed in size or modification "
            f"time: among samples {first:,} to {stop - 1:,}{suffix}. To pack the changed files, use another folder or "
            "remove this one; if they were only copied or touched, keep the set: it is complete"
        )
    return _summarize(folder, stored_manifest, stored_manifest["samples"])


def _check_arguments(dataset: Any, to: str, options: ImageOptions) -> None:
    if is_iterable(dataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"pack() needs a map-style dataset, with a length and dataset[i], got {type(dataset).__name__}; a stream "
            "cannot be read from the middle, so an interrupted job could not be resumed"
        )
    if not len(dataset):
        raise ValueError(f"{dataset!r} has no samples to pack")
    if options.exif and to != "array":
        raise ValueError(
            f"exif=True needs to='array', got {to!r}; omit it, because packed files keep their orientation, and read "
            "them with Decode(exif=True)"
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
    if names and WORK_FOLDER not in names and MANIFEST not in names:
        raise FileExistsError(
            f"{folder!r} holds other files ({', '.join(map(repr, names[:3]))} …); expected a new or empty "
            "folder, or one with an unfinished set of the same job"
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
            f"{folder!r} {state} packed with other arguments: {differences}. Use the same arguments, use another "
            "folder, or remove this one"
        )


@contextlib.contextmanager
def _lock_folder(work_folder: str, folder: str) -> Iterator[None]:
    """Keep other processes from packing to the same folder. The kernel releases the lock if this process is killed."""
    with open(os.path.join(work_folder, "lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuloadError(f"another process is packing to {folder!r}; wait for it to finish, or stop it") from None
        yield


def _resume_job(job: PackJob, plan: dict[str, Any]) -> PackJob:
    """Return an interrupted job with its saved bounds; for a new job, save its plan and return the job unchanged."""
    plan_path, entry_type_text = os.path.join(job.work_folder, PLAN), str(job.entry_type)
    saved_plan = load_plan(plan_path, job.folder)
    for name in os.listdir(job.work_folder):
        if name.endswith(DRAFT) or (saved_plan is None and name != "lock"):  # left behind by a killed run
            os.unlink(os.path.join(job.work_folder, name))
    if saved_plan is None:
        write_file(plan_path, encode_json({**plan, "bounds": job.bounds, "like": entry_type_text}), job.work_folder)
        durable.sync_names(job.work_folder)
    else:
        _refuse_different_plan(saved_plan, plan, job.folder, "holds an unfinished set")
        if saved_plan["like"] != entry_type_text:
            raise FileExistsError(
                f"{job.folder!r} was started with samples of type {saved_plan['like']}, but their type is now "
                f"{entry_type_text}; remove the folder"
            )
        job = replace(job, bounds=saved_plan["bounds"])
    for name in (ARRAY, DATABASE):  # a run that was killed in `_finish` may have moved the file
        with contextlib.suppress(FileNotFoundError):
            if not os.path.exists(os.path.join(job.work_folder, name)):
                os.replace(os.path.join(job.folder, name), os.path.join(job.work_folder, name))
    array_path = os.path.join(job.work_folder, ARRAY)
    if job.to == "array" and not os.path.exists(array_path):
        header, sample_bytes = array_layout(job, job.bounds[-1])
        with durable.open_draft(array_path, job.work_folder) as file:
            file.write(header)
            file.truncate(len(header) + job.bounds[-1] * sample_bytes)
    return job


def _make_missing_parts(
    job: PackJob, workers: int | None, ray: str | None, skip_bad: bool, progress: Progress | None
) -> tuple[list[dict[str, Any]], int]:
    """Make the missing parts. Return the records of all parts, and the number of samples that were already packed."""
    part_count, sample_count, committed = len(job.bounds) - 1, job.bounds[-1], committed_parts(job)
    records: dict[int, dict[str, Any]] = {}
    for part_number in range(part_count):
        record = durable.read_json(record_path(job, part_number))
        if not find_difference(record, manifest.record_schema(job.to, part_number)) and _is_done(
            job, record, skip_bad, committed
        ):
            records[part_number] = record
    taken_up = sum(record["samples"] for record in records.values())
    samples_done, bytes_written = sum(len(job.span(part_number)) for part_number in records), 0

    def report(samples: int, nbytes: int) -> None:
        nonlocal samples_done, bytes_written, reported_s
        samples_done, bytes_written, now_s = samples_done + samples, bytes_written + nbytes, time.monotonic()
        if progress is not None and (now_s - reported_s > PROGRESS_S or samples_done == sample_count):
            reported_s = now_s
            progress(samples_done, sample_count, bytes_written)

    reported_s = 0.0
    report(0, 0)
    missing = [part_number for part_number in range(part_count) if part_number not in records]
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
    ordered_records = [records[part_number] for part_number in range(part_count)]
    bad_samples = [sample for record in ordered_records for sample in record["bad"]]
    if bad_samples and not skip_bad:
        raise BadSamples(bad_samples, sample_count, job.folder)
    if len(bad_samples) == sample_count:
        raise GpuloadError(
            f"all {sample_count:,} samples are damaged; the first is {describe_bad_sample(bad_samples[0])}"
        )
    return ordered_records, taken_up


def _is_done(job: PackJob, record: dict[str, Any], skip_bad: bool, committed: int) -> bool:
    """Return whether the part exists and its source files have not changed since it was made."""
    part_number = record["part"]
    if (record["bad"] and not skip_bad) or record["sources"] != source_stamp(job.dataset, job.span(part_number)):
        return False
    path = part_file(job, part_number)
    if job.to == "lmdb":
        return part_number < committed or (os.path.exists(path) and durable.hash_of(path) == record["sha256"])
    return job.to == "array" or (os.path.exists(path) and os.path.getsize(path) == record["bytes"])


def _finish(job: PackJob, plan: dict[str, Any], records: list[dict[str, Any]], taken_up: int) -> Packed:
    """Move the finished files into the set's folder, then write the manifest."""
    sums = np.frombuffer(bytes.fromhex("".join(record["crc32"] for record in records)), "<u4")
    files = {manifest.SUMS: encode_npy(sums)}
    classes = getattr(job.dataset, "classes", None)
    if isinstance(classes, list) and all(isinstance(name, str) for name in classes):
        files[manifest.CLASSES] = json.dumps(classes, ensure_ascii=False, indent=1).encode() + b"\n"
    if job.to == "array" and job.form == "pair":
        files[manifest.LABELS] = encode_npy(np.array([label for record in records for label in record["labels"]]))
    hashes = {name: sha256(data).hexdigest() for name, data in files.items()}
    files[manifest.SOURCES] = encode_json([record["sources"] for record in records])
    if job.to == "array":
        move_array(job, records)
        hashes[ARRAY] = sha256(array_layout(job, len(sums))[0]).hexdigest()
    elif job.to == "lmdb":
        hashes[DATABASE] = durable.hash_of(os.path.join(job.work_folder, DATABASE))
        os.replace(os.path.join(job.work_folder, DATABASE), os.path.join(job.folder, DATABASE))
    for name, data in files.items():
        write_file(os.path.join(job.folder, name), data, job.work_folder)
    durable.sync_names(job.folder)
    finished_manifest = manifest.add_hash(
        {
            "format": manifest.FORMAT,
            "to": job.to,
            "form": job.form,
            "digits": job.digits,
            "samples": len(sums),
            "read": manifest.describe_reader(job.to, job.form, records, job.entry_type, exif=bool(job.exif)),
            "parts": [{name: record[name] for name in PART_FIELDS} for record in records],
            "files": hashes,
            "left_out": [sample for record in records for sample in record["bad"]],
            "kept": dict(sum((Counter(record["kept"]) for record in records), Counter())),
            "plan": plan,
        }
    )
    write_file(os.path.join(job.folder, MANIFEST), encode_json(finished_manifest), job.work_folder)
    durable.sync_names(job.folder)
    shutil.rmtree(job.work_folder)
    return _summarize(job.folder, finished_manifest, taken_up)


def _summarize(folder: str, contents: dict[str, Any], taken_up: int) -> Packed:
    names = dict.fromkeys(part["file"] for part in contents["parts"])
    nbytes = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    read = manifest.format_open_call(folder, contents["read"])
    return Packed(
        folder, contents["samples"], len(names), nbytes, contents["left_out"], contents["kept"], taken_up, read
    )


def describe_bad_sample(sample: dict[str, Any]) -> str:
    """Return a line with the sample's source, or its index, and the cause of the damage."""
    return f"{sample['source'] or 'sample ' + str(sample['index'])}: {sample['cause']}"
