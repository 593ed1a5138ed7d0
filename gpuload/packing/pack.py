"""`pack`: a dataset becomes a packed set. In the main process: plans, takes up what is whole, has the rest made, ends.

Everything unfinished lies in ``.gpuload-pack`` within the set's folder: the plan, the records of parts, drafts. The
manifest is written last, and then that folder goes. So at any moment that a process may be killed, what lies there
says what is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from gpuload.datasets.kinds import is_iterable
from gpuload.datasets.paths import full_path
from gpuload.errors import GpuloadError, import_optional
from gpuload.loader.limits import usable_cpus
from gpuload.packing import manifest as set_manifest
from gpuload.packing.durable import WORK, draft, hash_of, new_hash, read_json, write_json, write_whole
from gpuload.packing.expected import differences
from gpuload.packing.images import ImageOptions
from gpuload.packing.job import Job, Report, Store, record_path, stamp_of
from gpuload.packing.plan import PLAN, begun_plan, identity_of, planned
from gpuload.packing.pool import make_parts, started
from gpuload.packing.ray_tasks import make_parts_on_ray
from gpuload.packing.stores import append_to_lmdb, array_file, lmdb_file, npy_header, part_file

__all__ = ["BadSamples", "Packed", "Progress", "pack"]

MOST_WORKERS: Final = 16
EARLY: Final = 500  # so many samples for each worker that starts before the parts are cut
SHOWN: Final = 20
STORES: Final = ("tar", "lmdb", "parquet", "array")

Progress = Callable[[int, int, int], None]
"""Called with how many samples are done, of how many, and how many bytes were written."""


Making = Callable[[Sequence[int], Report], Generator[dict[str, Any], None, None]]


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
            "Mend them and run the same again (what is done is kept), or leave them out with --on-error skip (in "
            "Python skip_bad=True)"
        )


@dataclass(frozen=True)
class Packed:
    """What `pack` has made.

    Attributes:
        folder: where it is, an absolute path.
        samples: how many are in it; files: how many shards or other files hold them; nbytes: of these.
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

    It may be killed at any time: called again with the same arguments, it goes on. The bytes depend on the samples and
    the options alone, not on `workers`, nor on how often it was stopped. (The indexes beside tar shards hold their
    times, and so differ.)

    Args:
        dataset: a map-style dataset that yields `Encoded`, ``(Encoded, target)``, or dicts with these; for an array
            also `Image`. gpuload's own, and any other that does so.
        folder: where the set goes; it is made. It may hold nothing else.
        to: ``"tar"`` (shards by WebDataset's convention), ``"parquet"``, ``"lmdb"``, or ``"array"``, one ``.npy`` of
            decoded images.
        short_side: resize larger images so that their shorter side has this length; smaller ones stay. JPEG and PNG of
            8 bits keep format, ICC profile and EXIF (so orientation too: pixels are resized as they are stored); others
            are kept as they are, and counted. For an array: the middle square of each image, resized to this side.
        quality: of JPEGs that are resized, 1 to 100. All others keep their bytes.
        cuttable: put an index into JPEGs, so that crops are cut before they are decoded (progressive ones need
            jpegtran). What cannot be made cuttable is kept as it is, and counted.
        shard_bytes: about how large a shard may be. Where images are stored as they are, none is larger.
        workers: processes; 0 for none but this one. Default: the CPUs that this process may use, up to 16.
        skip_bad: leave out damaged samples. Else they end in an error, when all others are done.
        check: decode every image, to find all damage. Else headers and ends of files are looked at, and what is
            resized.
        exif: for an array, turn images upright by their EXIF orientation, as ``Decode(exif=True)`` does. (In all other
            stores the orientation stays in the file.)
        ray: the address of a Ray cluster that makes the parts, ``"auto"`` for the one that this machine belongs to. Its
            machines have to see the source and the folder under the same paths. `workers` are then tasks at once, on
            the whole cluster; default: its CPUs. Needs ray: ``pip install 'gpuload[ray]'``.
        progress: called with samples done, samples in all, and bytes written, a few times a second.

    Raises:
        BadSamples: samples are damaged; it lists them.
        FileExistsError: the folder holds something else, or another set.
        GpuloadError: the dataset yields what the store has no form for; jpegtran is missing; another process packs to
            the same folder.
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
    _refuse_others(full)
    asked = {
        "format": set_manifest.FORMAT,
        "to": to,
        "options": asdict(options),
        "shard_bytes": shard_bytes,
        "dataset": identity_of(dataset),
    }
    os.makedirs(work, exist_ok=True)
    with _locked(work, full):
        begun = read_json(os.path.join(work, PLAN))
        version = begun.get("format") if isinstance(begun, dict) else None
        if type(version) is int and version in set_manifest.HASHES:
            asked["format"] = version  # by an older gpuload: ended as it was begun
        if os.path.exists(os.path.join(full, set_manifest.MANIFEST)):
            finished = set_manifest.read_manifest(full)
            _refuse_other_plan(finished["plan"], {**asked, "format": finished["format"]}, full, "holds a finished set")
            shutil.rmtree(work)
            return _summary(full, finished, finished["samples"])
        here = min(MOST_WORKERS, usable_cpus()) if workers is None else workers
        with started(0 if ray is not None else min(here, len(dataset) // EARLY)) as early:
            job = planned(dataset, full, to, options, shard_bytes)
            job = _taken_up(replace(job, hash=set_manifest.HASHES[asked["format"]]), asked)

            def making(numbers: Sequence[int], report: Report) -> Generator[dict[str, Any], None, None]:
                if ray is not None:
                    return make_parts_on_ray(job, numbers, ray, workers, report)
                return make_parts(job, numbers, here, report, early)

            return _run(job, asked, making, skip_bad, progress)


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


def _refuse_others(folder: str) -> None:
    """A folder with something else in it is not written to, nor one whose unfinished work lies elsewhere."""
    if not os.path.isdir(folder):
        if os.path.lexists(folder):
            raise FileExistsError(f"{folder!r} is a file; expected a folder that is new or empty")
        return
    if os.path.islink(work := os.path.join(folder, WORK)):
        raise FileExistsError(f"{work!r} is a link, and files where it leads to would be removed; remove the link")
    names = set(os.listdir(folder))
    if names and WORK not in names and set_manifest.MANIFEST not in names:
        shown = ", ".join(map(repr, sorted(names)[:3]))
        raise FileExistsError(
            f"{folder!r} holds other files ({shown} …); expected a folder that is new or empty, or that the same pack "
            "has begun"
        )


def _refuse_other_plan(found: dict[str, Any], asked: dict[str, Any], folder: str, what: str) -> None:
    flat, wanted = ({**plan, **plan["options"], "options": None} for plan in (found, asked))
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
    """No two processes pack to one folder; the kernel frees the lock with the process."""
    descriptor = os.open(os.path.join(work, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuloadError(f"another process is packing to {folder!r}; wait for it, or end it") from None
        yield
    finally:
        os.close(descriptor)


def _taken_up(job: Job, asked: dict[str, Any]) -> Job:
    """The job as it was planned when it was begun, or from now on."""
    path = os.path.join(job.work, PLAN)
    plan = begun_plan(path, job)
    like = str(job.like)
    if plan is None:
        for name in os.listdir(job.work):  # of a run that was killed before it had a plan
            if name != "lock":
                os.unlink(os.path.join(job.work, name))
        write_json(path, {**asked, "bounds": job.bounds, "like": like}, job.work)
    else:
        _refuse_other_plan(plan, asked, job.folder, "holds the beginning of a set")
        if plan["like"] != like:
            raise FileExistsError(
                f"{job.folder!r} was begun with samples like {plan['like']}, now they are like {like}; remove it"
            )
        job = replace(job, bounds=plan["bounds"])
    for name in os.listdir(job.work):
        if name.endswith(".part"):
            os.unlink(os.path.join(job.work, name))
    for name in ("images.npy", "data.mdb"):  # of a run that was killed as it put things in their places
        with contextlib.suppress(FileNotFoundError):
            if not os.path.exists(os.path.join(job.work, name)):
                os.replace(os.path.join(job.folder, name), os.path.join(job.work, name))
    if job.to == "array" and not os.path.exists(array_file(job)):
        dtype, shape, _ = job.like
        header = npy_header(dtype, (job.bounds[-1], *shape))
        nbytes = len(header) + job.bounds[-1] * int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        with draft(array_file(job), job.work) as name, open(name, "xb") as file:
            file.write(header)
            file.truncate(nbytes)
    return job


def _run(job: Job, asked: dict[str, Any], making: Making, skip_bad: bool, progress: Progress | None) -> Packed:
    count, total = len(job.bounds) - 1, job.bounds[-1]
    committed = _committed(job)
    records: dict[int, dict[str, Any]] = {}
    for number in range(count):
        record = read_json(record_path(job, number))
        foreign = any(differences(record, set_manifest.record_like(asked["format"], job.to, number)))
        if not foreign and _is_whole(job, number, record, skip_bad, committed):
            records[number] = record
    taken_up = sum(record["samples"] for record in records.values())
    done, written = sum(job.bounds[number + 1] - job.bounds[number] for number in records), 0

    def report(samples: int, nbytes: int) -> None:
        nonlocal done, written
        done, written = done + samples, written + nbytes
        if progress is not None:
            progress(done, total, written)

    report(0, 0)
    missing = [number for number in range(count) if number not in records]
    appended = committed
    with contextlib.closing(making(missing, report)) as made:
        while True:
            while job.to == "lmdb" and appended in records and (skip_bad or not records[appended]["bad"]):
                append_to_lmdb(job, appended)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part_file(job, appended))
                appended += 1
            record = next(made, None)
            if record is None:
                break
            records[record["part"]] = record
    ordered = [records[number] for number in range(count)]
    bad = [one for record in ordered for one in record["bad"]]
    if bad and not skip_bad:
        raise BadSamples(bad, total, job.folder)
    if len(bad) == total:
        raise GpuloadError(f"all {total:,} samples are damaged; the first: {_line(bad[0])}")
    return _finish(job, asked, ordered, bad, taken_up)


def _committed(job: Job) -> int:
    """How many parts are in the LMDB."""
    if job.to != "lmdb" or not os.path.exists(lmdb_file(job)):
        return 0
    lmdb = import_optional("lmdb", "pack(to='lmdb')", "lmdb")
    try:
        with lmdb.open(lmdb_file(job), subdir=False, lock=False, readonly=True) as env:
            return env.info()["last_txnid"]
    except lmdb.Error:  # it had not even its first pages yet
        os.unlink(lmdb_file(job))
        return 0


def _is_whole(job: Job, number: int, record: dict[str, Any], skip_bad: bool, committed: int) -> bool:
    """Whether what a record tells of lies there, and was made of the files as they are now."""
    if (record["bad"] and not skip_bad) or record["made_of"] != stamp_of(
        job.dataset, range(*job.bounds[number : number + 2])
    ):
        return False
    if job.to == "array":
        return True
    path = part_file(job, number)
    if job.to == "lmdb":
        return number < committed or (os.path.exists(path) and hash_of(path, job.hash) == record[job.hash])
    return os.path.exists(path) and os.path.getsize(path) == record["bytes"]


def _finish(job: Job, asked: dict[str, Any], records: list[dict[str, Any]], bad: list[Any], taken_up: int) -> Packed:
    """Put what is done in its place, and the manifest beside it, last."""
    files: dict[str, bytes] = {}
    sums = set_manifest.sums_of(records)
    files[set_manifest.SUMS] = _npy(sums)
    classes = getattr(job.dataset, "classes", None)
    if isinstance(classes, list) and all(isinstance(name, str) for name in classes):
        files[set_manifest.CLASSES] = json.dumps(classes, ensure_ascii=False, indent=1).encode() + b"\n"
    if job.to == "array":
        labels = [label for record in records for label in record["labels"]]
        if job.form == "pair":
            files[set_manifest.LABELS] = _npy(np.array(labels))
        _place_array(job, records)
    elif job.to == "lmdb":
        os.replace(lmdb_file(job), os.path.join(job.folder, "data.mdb"))
    for name, data in files.items():
        write_whole(os.path.join(job.folder, name), data, job.work)
    kept: dict[str, int] = {}
    for record in records:
        for why, number in record["kept"].items():
            kept[why] = kept.get(why, 0) + number
    made = set_manifest.sealed(
        {
            "format": asked["format"],
            "to": job.to,
            "form": job.form,
            "digits": job.digits,
            "samples": len(sums),
            "read": set_manifest.how_to_read(job.to, job.form, records, job.like),
            "parts": [
                {name: record[name] for name in ("file", "first", "samples", "bytes", job.hash)} for record in records
            ],
            "files": {name: new_hash(job.hash, data).hexdigest() for name, data in files.items()},
            "left_out": bad,
            "kept": kept,
            "plan": asked,
        }
    )
    write_json(os.path.join(job.folder, set_manifest.MANIFEST), made, job.work)
    shutil.rmtree(job.work)
    return _summary(job.folder, made, taken_up)


def _place_array(job: Job, records: list[dict[str, Any]]) -> None:
    """Rename the array; where samples were left out, write it anew without their gaps."""
    path, source = os.path.join(job.folder, "images.npy"), array_file(job)
    samples = sum(record["samples"] for record in records)
    if samples == job.bounds[-1]:
        os.replace(source, path)
        return
    dtype, shape, _ = job.like
    each = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    before = len(npy_header(dtype, (job.bounds[-1], *shape)))
    with draft(path, job.work) as name, open(name, "xb") as file, open(source, "rb") as old:
        file.write(npy_header(dtype, (samples, *shape)))
        for record in records:
            old.seek(before + record["first"] * each)
            left = record["bytes"]
            while left:
                piece = old.read(min(left, 16 << 20))
                file.write(piece)
                left -= len(piece)


def _summary(folder: str, made: dict[str, Any], taken_up: int) -> Packed:
    names = dict.fromkeys(part["file"] for part in made["parts"])
    nbytes = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    return Packed(
        folder, made["samples"], len(names), nbytes, made["left_out"], made["kept"], taken_up,
        set_manifest.told(folder, made["read"]),
    )  # fmt: skip


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, (1, 0), allow_pickle=False)
    return file.getvalue()


def _line(one: dict[str, Any]) -> str:
    return f"{one['source'] or 'sample ' + str(one['index'])}: {one['cause']}"
