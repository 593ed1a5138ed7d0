"""What bounds a loader, and what to do about it: one sentence, by the first rule that has something to say.

Rules are pure functions of a `View`: a snapshot, with what the machine allows. Shares are of the time after the first
batch of an epoch, since workers start and the first batches are made before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gpuload.loader.cpus import usable_cpus
from gpuload.loader.stats import NOTHING, Stats

__all__ = ["RULES", "Machine", "View", "advice"]

FEW_BATCHES: Final = 3
LITTLE: Final = 0.05  # a share of the time that is not worth a word
BUSY: Final = 0.75  # so busy, on average, are workers that bound
ON_CPU: Final = 0.6  # so much of the time that it takes, work is on a CPU that could be nowhere else
ALL: Final = 0.9  # so much of the CPUs' time is all of it
FULL: Final = 0.2  # the ring is full for so much of the time
LARGE_BYTES: Final = 6_000_000  # of decoded pixels in an image: 2 megapixels
SMALL_BYTES: Final = 64 * 64 * 3  # of pixels in an image, and of its file
PER_CPU: Final = 4  # workers that mostly wait for a disk
SMALL_LOCK_BYTES: Final = 64 << 20
UNLOCK: Final = "raise the limit: `ulimit -l unlimited`, in a container `--ulimit memlock=-1`"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a process may use.

    Attributes:
        cpus: CPUs, by its affinity and its control group.
        memlock_bytes: memory that it may lock (``ulimit -l``); None: no limit, or not known.
    """

    cpus: int
    memlock_bytes: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """This process's."""
        try:
            import resource

            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            memlock = None if limit == resource.RLIM_INFINITY else limit
        except (ImportError, OSError, ValueError):
            memlock = None
        return cls(usable_cpus(), memlock)


class View:
    """A snapshot, as rules see it."""

    def __init__(self, stats: Stats, machine: Machine) -> None:
        self.stats, self.machine = stats, machine

    @cached_property
    def seconds(self) -> float:
        """The time after the first batch."""
        return max(1e-9, self.stats.seconds - self.stats.first_s)

    def share(self, *names: str, where: str = "main") -> float:
        """What these parts take of the time."""
        return sum(self.stats.part(name, where).seconds for name in names) / self.seconds

    @cached_property
    def waiting(self) -> float:
        """The share of the time that the loop waits for a batch."""
        return max(0.0, self.stats.waiting * self.stats.seconds - self.stats.first_s) / self.seconds

    @cached_property
    def bound(self) -> str:
        """What takes most of the time, of what loading takes; "step" if that is little."""
        shares = {
            "wait": self.waiting,
            "copy": self.share("copy"),
            "stage": self.share("stage"),
            "rest": self.share("collate", "rest"),
        }
        most = max(shares, key=lambda name: shares[name])
        return most if shares[most] >= LITTLE else "step"

    @property
    def why_refused(self) -> str:
        """Why memory may not have been page-locked."""
        limit = self.machine.memlock_bytes
        if limit is not None and limit < SMALL_LOCK_BYTES:
            return f"this process may lock {limit // 1024:,} KiB of memory"
        return "the driver refused it"

    # -- workers ------------------------------------------------------------------------------------------------------

    @property
    def at_home(self) -> bool:
        """Whether the main process does the workers' part."""
        return not self.stats.num_workers

    @property
    def workers(self) -> int:
        """How many work at the same time."""
        return max(1, self.stats.num_workers)

    @cached_property
    def busy(self) -> float:
        """How many workers were busy, on average, after the first batch."""
        if self.at_home:
            return 1.0
        return sum(min(1.0, worker.busy * self.stats.seconds / self.seconds) for worker in self.stats.workers)

    def work(self, *names: str) -> float:
        """What these parts take of the time that workers are busy."""
        where = "main" if self.at_home else "workers"
        every = ("read", "header", "decode", "pack", "plan") + (() if self.at_home else ("collate",))
        busy = sum(self.stats.part(name, where).seconds for name in every)
        return sum(self.stats.part(name, where).seconds for name in names) / busy if busy else 0.0

    @cached_property
    def reading(self) -> bool:
        """Whether workers mostly read."""
        return self.work("read") > 0.5

    def each_ms(self, *names: str) -> float:
        """What these parts of the workers take for one sample, milliseconds."""
        parts = [self.stats.part(name, "main" if self.at_home else "workers") for name in names]
        return sum(1e3 * part.seconds / part.count for part in parts if part.count)

    @cached_property
    def image_bytes(self) -> float:
        """Decoded pixels of an image, on average."""
        return self.stats.bytes_decoded / max(1, self.stats.part("decode").count)

    @cached_property
    def file_bytes(self) -> float:
        """What the dataset gave for an image, on average."""
        return self.stats.bytes_read / max(1, self.stats.part("decode").count)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether reading takes CPU time: then it is the dataset's own code, and no disk."""
        busy_s = sum(worker.busy for worker in self.stats.workers) * self.stats.seconds
        return bool(busy_s) and self.stats.workers_cpu_s / busy_s > ON_CPU

    @cached_property
    def most_workers(self) -> int:
        """More workers than this do not help: there are no CPUs for them."""
        if self.stats.elsewhere:
            return 1 << 30
        if self.reading and not self.on_cpu:
            return PER_CPU * self.machine.cpus
        return self.workers if self.cpus_are_full and not self.at_home else self.machine.cpus

    @cached_property
    def cpus_are_full(self) -> bool:
        """Whether this process and its workers take all the CPUs that there are."""
        return self.stats.cpu_s > ALL * self.machine.cpus * max(self.stats.seconds, 1e-9)

    @cached_property
    def better(self) -> tuple[int, float] | None:
        """How many workers the loop would hardly wait for, and how much it still would; None: more do not help.

        All workers are busy, so n of them make a batch in the n-th part of the time; the rest of the loop stays.
        """
        loop = 1.0 - self.waiting
        now = 0 if self.at_home else self.workers
        # In the main process, the rest of the loop and the work take turns; workers do theirs meanwhile.
        work = self.waiting if self.at_home else 1.0 * now
        enough = math.ceil(work / max(loop, 1e-3) * (1 - LITTLE))
        count = min(max(enough, now + 1), self.most_workers)
        if count <= now:
            return None
        return count, max(0.0, 1.0 - loop / max(loop, work / count))

    @property
    def more_workers(self) -> str:
        """What more workers would bring."""
        if self.better is None:
            cpus = f"{self.machine.cpus} CPU{'s' * (self.machine.cpus > 1)}"
            why = f"this process uses all of its {cpus}" if self.cpus_are_full else f"this process may use {cpus}"
            return f"more workers would not help, as {why}"
        count, waiting = self.better
        unit = "worker" if count == 1 else "workers"
        return (
            f"with {count} {unit} it would wait about {waiting:.0%}"
            if waiting >= 0.01
            else (f"with {count} {unit} it would hardly wait")
        )

    @property
    def how_busy(self) -> str:
        """How busy workers are, and how much the loop waits."""
        if self.at_home:
            return f"the main process does it itself (num_workers=0), for {self.waiting:.0%} of the time"
        unit = "worker" if self.workers == 1 else "workers"
        return f"{self.busy:.1f} of {self.workers} {unit} busy, the loop waits {self.waiting:.0%} of the time"

    @property
    def workers_bound(self) -> bool:
        """Whether the loop waits for workers that have enough to do."""
        return self.bound == "wait" and self.busy >= BUSY * self.workers


def nothing(view: View) -> str | None:
    """Too little was measured."""
    if not view.stats.batches:
        return NOTHING
    if view.stats.batches < FEW_BATCHES:
        few = view.stats.batches
        return f"{few} batch{'es' * (few > 1)}, too few to say what bounds: ask again later"
    return None


def refused_locks(view: View) -> str | None:
    """The ring is not page-locked, and copies make the host wait."""
    if not view.stats.pinning_refused or view.bound != "copy":
        return None
    return (
        f"copies bound: the ring is not page-locked ({view.why_refused}), so each copy makes the host wait, "
        f"{view.share('copy'):.0%} of the time; {UNLOCK}"
    )


def dying(view: View) -> str | None:
    """Workers die, and new ones start."""
    died = view.stats.restarts
    if view.bound != "wait" or not died or died < 0.1 * view.stats.batches:
        return None
    return (
        f"dying workers bound: {died} died within {view.stats.batches} batches, and the loop waits {view.waiting:.0%} "
        "of the time; look at loader.errors, and at the machine's memory"
    )


def small_ring(view: View) -> str | None:
    """Workers have no slots."""
    full, stats = view.share("slot wait"), view.stats
    if view.bound != "wait" or view.at_home or view.workers_bound or (full < FULL and not stats.ring_spilled):
        return None
    wanted = max(2 * stats.ring_limit_bytes, 1 << 20)
    return (
        f"the ring bounds: ring_bytes={stats.ring_limit_bytes:,} is too small for the batches in work, which had no "
        f"room for {min(full, 1.0):.0%} of the time, and the loop waits {view.waiting:.0%} of it; try "
        f"ring_bytes={wanted:,}"
    )


def kept_samples(view: View) -> str | None:
    """Batches are cut out of what a `DeviceCached` keeps."""
    if not view.stats.resident_bytes or view.bound not in ("wait", "rest"):
        return None
    return (
        f"cutting batches out of kept samples bounds: the loop waits {view.waiting:.0%} of the time for that, in this "
        "process; workers would not help, as nothing is read: larger batches, and fewer values in a sample, take less "
        "for each image"
    )


def small_images(view: View) -> str | None:
    """What is done for each sample, whatever its size, bounds."""
    slow = view.reading and view.each_ms("read") > 1.0
    if view.bound not in ("wait", "rest") or slow:
        return None
    if not 0 < view.image_bytes <= SMALL_BYTES or view.file_bytes > SMALL_BYTES:
        return None
    if view.bound == "wait" and not view.workers_bound:
        return None
    return (
        f"tiny images bound: {view.image_bytes:,.0f} bytes of pixels each, so most of the time goes to the samples "
        f"around them ({view.how_busy}); keep them decoded in one file: `gpuload pack --to array`, then gl.ArrayFile"
    )


def reading(view: View) -> str | None:
    """The dataset is slow."""
    if not view.workers_bound or not view.reading:
        return None
    each = f"a sample takes {view.each_ms('read'):.3g} ms"
    if view.on_cpu and not view.at_home:
        return (
            f"reading bounds, and takes CPU time ({each} in the dataset's own code): {view.how_busy}; "
            f"{view.more_workers}; if the dataset decodes, let it return gl.Encoded(bytes)"
        )
    return f"reading bounds ({each}): {view.how_busy}; {view.more_workers}"


def without_nvimagecodec(view: View) -> str | None:
    """JPEGs are decoded whole for a crop of each."""
    whole = view.stats.decoded_whole
    if not view.workers_bound or view.work("decode") <= 0.5 or 2 * whole < view.stats.part("decode").count:
        return None
    return (
        f"decode bounds: {view.how_busy}; nvImageCodec cannot be used here, so {whole:,} JPEGs were decoded whole for "
        "a part of them: `gpuload doctor` says why, pip install 'gpuload[cu12]' (or cu13) brings it"
    )


def large_images(view: View) -> str | None:
    """Pixels are decoded that nobody needs."""
    if not view.workers_bound or view.work("decode") <= 0.5 or view.image_bytes < LARGE_BYTES:
        return None
    return (
        f"decode bounds, as the images are large ({view.image_bytes / 3e6:.1f} megapixels decoded of each): "
        f"{view.how_busy}; make them smaller once: `gpuload pack --short-side 512`; {view.more_workers}"
    )


def working(view: View) -> str | None:
    """Workers have enough to do, whatever it is."""
    if not view.workers_bound:
        return None
    names = ("decode", "header", "pack", "collate", "plan", "read")
    most = max(names, key=view.work)
    what = {"header": "headers and draws bound", "pack": "packing labels bounds", "plan": "planning batches bounds",
            "collate": "collate_fn bounds", "read": "reading bounds"}.get(most, "decode bounds")  # fmt: skip
    if view.better is None:
        return f"{what}: {view.how_busy}; {view.more_workers}: smaller or cuttable JPEGs would (`gpuload pack`)"
    return f"{what}: {view.how_busy}; {view.more_workers}"


def uneven(view: View) -> str | None:
    """One worker has most of the work."""
    busiest = max(view.stats.workers, key=lambda worker: worker.busy, default=None)
    if view.bound != "wait" or busiest is None or view.workers < 2:
        return None
    if busiest.busy < BUSY or view.busy - busiest.busy > 0.5 * (view.workers - 1):
        return None
    return (
        f"worker {busiest.number} bounds: it is busy {busiest.busy:.0%} of the time, all {view.workers} together "
        f"{view.busy / view.workers:.0%}, and the loop waits {view.waiting:.0%}; give workers equal shares, or "
        "in_order=False"
    )


def waiting(view: View) -> str | None:
    """The loop waits, and so do workers."""
    if view.bound != "wait":
        return None
    return (
        f"too few batches in work bound: {view.how_busy}, so work comes in bursts; raise prefetch_factor, or lower "
        "chunk_size"
    )


def stage(view: View) -> str | None:
    """The transforms take the loop's time."""
    share = view.share("stage")
    if view.bound == "stage":
        each = 1e3 * view.stats.part("stage", "main").seconds / view.stats.batches
        remedy = (
            "transforms run on the CPU, in this process: fewer or cheaper transforms, smaller images, or a GPU"
            if view.stats.device == "cpu"
            else "print(loader.plan()) says what runs where"
        )
        return f"the stage bounds: it takes {share:.0%} of the loop's time, {each:.3g} ms for each batch; {remedy}"
    on_device = view.share("stage", where="device")
    if view.bound == "step" and on_device > 0.5:
        return (
            f"the stage bounds: it takes {on_device:.0%} of the device's time; print(loader.plan()) says what "
            "runs where, and fewer of them leave more to the training"
        )
    return None


def copying(view: View) -> str | None:
    """Copies take the loop's time."""
    if view.bound != "copy":
        return None
    return (
        f"copies bound: they take {view.share('copy'):.0%} of the loop's time; decode less of each image, by a crop or "
        "a smaller Resize as the first transform"
    )


def collating(view: View) -> str | None:
    """What else `next()` does takes the loop's time."""
    if view.bound != "rest":
        return None
    share = view.share("collate", "rest")
    what = "a collate_fn, or samples of many parts" if view.share("collate") > share / 2 else "many small chunks"
    return (
        f"the main process bounds: {share:.0%} of the loop's time goes to putting batches together; "
        f"{what} may be why: larger batches, or fewer values in a sample"
    )


def step(view: View) -> str | None:
    """Loading keeps up."""
    idle = ""
    if view.stats.workers and view.busy < 0.5 * view.workers and view.workers > 1:
        enough = max(1, math.ceil(view.busy / BUSY))
        if enough < view.workers:
            idle = f"; {view.busy:.1f} of {view.workers} workers are busy, {enough} would do"
    locks = f"; the ring is not page-locked ({view.why_refused}): {UNLOCK}" if view.stats.pinning_refused else ""
    return f"the training step bounds: the loop waits {view.waiting:.1%} of the time, so loading keeps up{idle}{locks}"


RULES: Final[tuple[Callable[[View], str | None], ...]] = (
    nothing, refused_locks, dying, small_ring, kept_samples, small_images, reading, without_nvimagecodec, large_images,
    working, uneven, waiting, stage, copying, collating, step,
)  # fmt: skip


def advice(stats: Stats, machine: Machine) -> str:
    """What bounds, and what to do about it."""
    view = View(stats, machine)
    return next(said for rule in RULES if (said := rule(view)) is not None)
