"""The bottleneck of a loader, and what to do about it: one sentence, by the first of ten rules that has one to say.

Rules are pure functions of a `View`: a snapshot, with what the machine allows. Shares are of the time after the first
batch of an epoch, since workers start and the first batches are made before it.

How long the loop waits decides first. Under 5%, and while the main process does little else for it, the training step
is the bottleneck. Where it waits, the workers' own counters say for what: a part of their work, if they are busy, and
then whether they need a CPU or wait for a disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Final

from gpuload.loader.autotune import LEAP
from gpuload.loader.limits import Machine
from gpuload.loader.options import LEAST_CHUNK
from gpuload.loader.stats import NOTHING, Part, Stats

__all__ = ["RULES", "View", "advice", "better_setting"]

FEW_BATCHES: Final = 3
LITTLE: Final = 0.05  # a share of the time that is not worth a word
BUSY: Final = 0.75  # workers that are the bottleneck are so busy, on average
ON_CPU: Final = 0.6  # work that needs a CPU has one for so much of the time that it does not wait for one
CROWDED: Final = 0.25  # workers wait for a CPU for so much of the time that their work takes
ALL: Final = 0.9  # so much of the CPUs' time is all of it
FULL: Final = 0.2  # the ring is full for so much of the time
SHORT_START: Final = 0.1  # of each epoch, where workers start anew in each
LARGE_BYTES: Final = 6_000_000  # of decoded pixels in an image: 2 megapixels
SMALL_BYTES: Final = 64 * 64 * 3  # of pixels in an image, and of its file
SMALL_LOCK_BYTES: Final = 64 << 20
UNLOCK: Final = "raise the limit: `ulimit -l unlimited`, in a container `--ulimit memlock=-1`"


class View:
    """A snapshot, and what follows from it, as rules see it. Shares of time are of the time after the first batch.

    Attributes:
        in_process: whether the main process does the workers' part.
        workers, busy: how many work at the same time, and how many of them were busy, on average.
        workers_busy: whether they have enough to do.
        waiting: the share of the time that the loop waits for a batch.
        issuing: the shares of the time that ``next()`` takes without waiting.
        loading: the share of the time that the loop would save if batches cost it nothing.
        start_s: how long the loop waited for workers to start.
        work_s: the time that all of the workers' work takes.
        queued: the share of the workers' work in which they wait for a CPU.
        on_cpu: whether their work needs CPUs, not a disk or a network, however long it waits for a CPU here.
        cpus_are_full: whether this process and its workers take all the CPUs that there are.
        image_bytes, file_bytes: decoded pixels of an image, and what the dataset gave for it, on average.
        bottleneck: "wait", a name in `issuing`, or "step".
        workers_bound: whether the loop waits for workers that have enough to do.
    """

    def __init__(self, stats: Stats, machine: Machine) -> None:
        self.stats, self.machine = stats, machine
        self.in_process = not stats.num_workers
        self.workers = max(1, stats.num_workers)
        self.busy = 1.0 if self.in_process else stats.busy
        self.workers_busy = self.busy >= BUSY * self.workers
        self.waiting = stats.waiting_later
        # With num_workers=0, batches of plain data are collated while the loop waits.
        rest = ("rest",) if self.in_process and not stats.bytes_decoded else ("collate", "rest")
        self.issuing = {name: self.share(name) for name in ("copy", "stage", "device decode")}
        self.issuing["rest"] = self.share(*rest)
        self.loading = min(1.0, self.waiting + sum(self.issuing.values()))
        start = stats.part("start", "workers")
        self.start_s = min(start.seconds / start.count, stats.first_s) if start.count else 0.0
        work = ("read", "header", "decode", "pack", "plan") + (() if self.in_process else ("collate",))
        self.work_s = sum(self._work(name).seconds for name in work)
        self.queued = min(1.0, stats.workers_queued_s / self.work_s) if self.work_s else 0.0
        self.on_cpu = stats.workers_cpu_s > ON_CPU * (self.work_s - stats.workers_queued_s)
        self.cpus_are_full = stats.cpu_s > ALL * machine.cpus * max(stats.seconds - self.start_s, 1e-9)
        images = max(1, stats.part("decode").count)
        self.image_bytes, self.file_bytes = stats.bytes_decoded / images, stats.bytes_read / images
        self.bottleneck = self._bottleneck()
        self.workers_bound = self.bottleneck == "wait" and self.workers_busy

    def share(self, *names: str, where: str = "main") -> float:
        """Return the share of the time that these parts take."""
        seconds = max(1e-9, self.stats.seconds - self.stats.first_s)
        return sum(self.stats.part(name, where).seconds for name in names) / seconds

    def _work(self, name: str) -> Part:
        return self.stats.part(name, "main" if self.in_process else "workers")

    def work(self, *names: str) -> float:
        """Return the share of the workers' work that these parts are."""
        return sum(self._work(name).seconds for name in names) / self.work_s if self.work_s else 0.0

    def each_ms(self, *names: str) -> float:
        """Return what these parts of the workers take for one sample, milliseconds."""
        return sum(1e3 * part.seconds / part.count for part in map(self._work, names) if part.count)

    def _bottleneck(self) -> str:
        stats, most = self.stats, max(self.issuing, key=self.issuing.__getitem__)
        largest = self.waiting >= self.issuing[most]
        # The loop and busy workers are a pipeline: its slower side decides, whatever share of the loop the stage has.
        # With num_workers=0 they take turns, and on CPUs that are full they take CPUs from each other.
        if self.waiting >= LITTLE and (largest or (self.workers_busy and not self.in_process)):
            main_cpu_s = stats.cpu_s - stats.workers_cpu_s
            has_the_cpus = stats.device == "cpu" and self.cpus_are_full and main_cpu_s > stats.workers_cpu_s
            return "stage" if has_the_cpus and self.issuing["stage"] > self.waiting else "wait"
        return most if self.loading >= 0.5 else "step"

    @property
    def why_refused(self) -> str:
        """Why memory may not have been page-locked."""
        limit = self.machine.memlock_bytes
        if limit is not None and limit < SMALL_LOCK_BYTES:
            return f"this process may lock {limit // 1024:,} KiB of memory"
        return "the driver refused it"

    @property
    def reading(self) -> tuple[str, ...]:
        """The parts in which a dataset gives its data: Pillow decodes an image when its sample is taken apart, and a
        mapped array is read when its pixels are copied."""
        if any(self.stats.decoders.values()) or not self.stats.bytes_decoded:
            return ("read",)
        return ("read", "header") if self.on_cpu else ("read", "header", "decode")

    @property
    def most_workers(self) -> int:
        """More workers than this do not help: there are no CPUs for them."""
        cpus, stats = self.machine.cpus, self.stats
        if stats.elsewhere:
            return 1 << 30
        if self.in_process:
            return cpus  # how much of its work waits is not known
        if self.cpus_are_full:
            return self.workers
        if self.on_cpu:
            return cpus
        return max(cpus, int(cpus * (self.work_s - stats.workers_queued_s) / max(stats.workers_cpu_s, 1e-3)))

    @cached_property
    def better(self) -> tuple[int, float] | None:
        """How many workers the loop would hardly wait for, and the throughput then, in times of today's; None if more
        workers do not help.

        All workers are busy, so n of them make a batch in the n-th part of the time; the rest of the loop stays.
        """
        loop = 1.0 - self.waiting
        now = 0 if self.in_process else self.workers
        # In the main process, the rest of the loop and the work take turns; workers do theirs meanwhile.
        work = self.waiting if self.in_process else 1.0 * now
        enough = math.ceil(work / max(loop, 1e-3) * (1 - LITTLE))
        count = min(max(enough, now + 1), self.most_workers, max(self.machine.cpus, LEAP * now))
        if count <= now:
            return None
        return count, 1.0 / max(loop, work / count)

    @property
    def more_workers(self) -> str:
        """What more workers would bring."""
        if self.better is None:
            cpus = f"{self.machine.cpus} CPU{'s' * (self.machine.cpus > 1)}"
            why = f"this process may use {cpus}"
            if self.cpus_are_full:
                why = f"this process uses all of its {cpus}"
            elif self.queued > CROWDED:
                why += f", and other programs use them too: workers wait {self.queued:.0%} of their time for a CPU"
            return f"more workers would not help, as {why}"
        count, times = self.better
        unit = "worker" if count == 1 else "workers"
        if self.queued > CROWDED and self.on_cpu:
            return (
                f"with {count} {unit} it would wait less, but workers wait {self.queued:.0%} of their time for a CPU "
                "that others have"
            )
        ahead = self.ahead_for(count)
        more = f" and prefetch_factor={ahead}" if ahead > self.stats.prefetch_factor else ""
        return f"with {count} {unit}{more}, about {times:.1f} times the throughput"

    def ahead_for(self, workers: int) -> int:
        """Return how many batches have to be in work for so many workers to have a chunk each."""
        batch, chunk = self.stats.images / max(1, self.stats.batches), self.stats.chunk_size
        if chunk >= batch:  # then each worker has a batch
            return self.stats.prefetch_factor
        chunk = min(chunk, max(LEAST_CHUNK, math.ceil(batch / workers)))
        return max(self.stats.prefetch_factor, math.ceil(workers / math.ceil(batch / chunk)))

    @property
    def how_busy(self) -> str:
        """How busy workers are, and how much the loop waits."""
        if self.in_process:
            return f"the main process does it itself (num_workers=0), for {self.waiting:.0%} of the time"
        unit = "worker" if self.workers == 1 else "workers"
        return f"{self.busy:.1f} of {self.workers} {unit} busy, the loop waits {self.waiting:.0%} of the time"


def starting(view: View) -> str | None:
    """Explain that the loop waited longer for the workers' start than for all else."""
    stats, again = view.stats, "persistent" in view.stats.untried
    least_s = max((SHORT_START if again else 0.5) * stats.seconds, view.waiting * (stats.seconds - stats.first_s))
    if not stats.batches or not view.start_s or view.start_s < least_s:
        return None
    remedy = (
        "persistent_workers=True starts them once, not in each epoch"
        if again
        else "it comes once, not in each epoch: ask again later, or for what came since with stats(since=…)"
    )
    return (
        f"the start of the workers is the bottleneck so far: {view.start_s:.1f} of {stats.seconds:.1f} s, in which "
        f"they import the dataset's modules and unpack the dataset; {remedy}"
    )


def nothing(view: View) -> str | None:
    """Explain that too little was measured."""
    if not view.stats.batches:
        return NOTHING
    if view.stats.batches < FEW_BATCHES:
        few = view.stats.batches
        return f"{few} batch{'es' * (few > 1)}, too few to name the bottleneck: ask again later"
    return None


def dying(view: View) -> str | None:
    """Explain that workers die, and new ones start."""
    died = view.stats.restarts
    if view.bottleneck != "wait" or not died or died < 0.1 * view.stats.batches:
        return None
    return (
        f"dying workers are the bottleneck: {died} died within {view.stats.batches} batches, and the loop waits "
        f"{view.waiting:.0%} of the time; look at loader.errors, and at the machine's memory"
    )


def small_ring(view: View) -> str | None:
    """Explain that workers have no slots."""
    full, stats = view.share("slot wait"), view.stats
    if view.bottleneck != "wait" or view.in_process or view.workers_busy or (full < FULL and not stats.ring_spilled):
        return None
    wanted = max(2 * stats.ring_limit_bytes, 1 << 20)
    return (
        f"the ring is the bottleneck: ring_bytes={stats.ring_limit_bytes:,} is too small for the batches in work, "
        f"which had no room for {min(full, 1.0):.0%} of the time, and the loop waits {view.waiting:.0%} of it; try "
        f"ring_bytes={wanted:,}"
    )


def small_images(view: View) -> str | None:
    """Explain that the work for each sample, whatever its size, takes most of the time."""
    slow = view.work(*view.reading) > 0.5 and view.each_ms("read") > 1.0
    if view.bottleneck not in ("wait", "rest") or slow or (view.bottleneck == "wait" and not view.workers_busy):
        return None
    if not 0 < view.image_bytes <= SMALL_BYTES or view.file_bytes > SMALL_BYTES:
        return None
    return (
        f"tiny images are the bottleneck: {view.image_bytes:,.0f} bytes of pixels each, so most of the time goes to "
        f"the samples around them ({view.how_busy}); keep them decoded in one file: `gpuload pack --to array`, then "
        "gl.ArrayFile"
    )


def reading(view: View) -> str | None:
    """Explain that the dataset is slow, and whether it computes or waits."""
    parts, stats = view.reading, view.stats
    if not view.workers_bound or view.work(*parts) <= 0.5 or stats.resident_bytes:
        return None
    what, each = "reading is the bottleneck", f"a sample takes {view.each_ms(*parts):.3g} ms"
    encoded = any(stats.decoders.values())
    remedies = []
    if view.on_cpu and not view.in_process:
        what, each = f"{what}, and takes CPU time", f"{each} in the dataset's own code"
    elif "cache" in stats.untried and not view.in_process and (encoded or not stats.bytes_decoded):
        remedies.append("gl.Cached(dataset, …) keeps what was read for the next epochs")
    if (view.on_cpu or view.in_process) and not encoded:
        remedies.append(
            "if the dataset decodes images itself, let it return gl.read(path) or gl.Encoded(bytes) instead, and give "
            "its transforms to the Loader: then only what the crop needs is decoded"
        )
    if "block" in stats.untried:
        remedies.append('shuffle="block" reads neighbours together')
    return "; ".join([f"{what} ({each}): {view.how_busy}", view.more_workers, *remedies])


def working(view: View) -> str | None:
    """Explain which part of the workers' work takes most of their time."""
    if not view.workers_bound or view.stats.resident_bytes:
        return None
    names = {"decode": "decode is", "header": "headers and draws are", "pack": "packing labels is",
             "collate": "collate_fn is", "plan": "planning batches is", "read": "reading is"}  # fmt: skip
    most = max(names, key=view.work)
    if most == "decode" and not any(view.stats.decoders.values()):
        names["decode"] = "copying the dataset's arrays is"
    what, whole = f"{names[most]} the bottleneck", view.stats.decoded_whole
    if most != "decode" or not view.stats.decoders.keys() - {"Pillow"}:  # no JPEGs
        return f"{what}: {view.how_busy}; {view.more_workers}"
    if view.work("decode") > 0.5 and 2 * whole >= view.stats.part("decode").count:
        return (
            f"{what}: {view.how_busy}; nvImageCodec cannot be used here, so {whole:,} JPEGs were decoded whole for a "
            "part of them: `gpuload doctor` says why, pip install 'gpuload[cu12]' (or cu13) brings it"
        )
    if view.work("decode") > 0.5 and view.image_bytes >= LARGE_BYTES:
        return (
            f"{what}, as the images are large ({view.image_bytes / 3e6:.1f} megapixels decoded of each): "
            f"{view.how_busy}; make them smaller once: `gpuload pack --short-side 512`; {view.more_workers}"
        )
    cheaper = ": smaller or cuttable JPEGs would (`gpuload pack`)" if view.better is None else ""
    return f"{what}: {view.how_busy}; {view.more_workers}{cheaper}"


def waiting(view: View) -> str | None:
    """Explain that the loop waits, and so do workers: one has all the work, or it comes in bursts."""
    if view.bottleneck != "wait" or view.stats.resident_bytes:
        return None
    busiest = max(view.stats.workers, key=lambda worker: worker.busy, default=None)
    others = 0.5 * (view.workers - 1)
    if busiest is not None and others and busiest.busy >= BUSY and view.busy - busiest.busy <= others:
        return (
            f"worker {busiest.number} is the bottleneck: it is busy {busiest.busy:.0%} of the time, all {view.workers} "
            f"together {view.busy / view.workers:.0%}, and the loop waits {view.waiting:.0%}; give workers equal "
            "shares, or in_order=False"
        )
    return (
        f"the bottleneck is too few batches in work: {view.how_busy}, so work comes in bursts; raise prefetch_factor, "
        f"to {max(view.ahead_for(view.workers), 2 * view.stats.prefetch_factor)} say, or lower chunk_size"
    )


def issuing(view: View) -> str | None:
    """Explain that ``next()`` itself takes the loop's time, or the stage the device's."""
    if view.bottleneck != "step":
        return _issuing(view, view.bottleneck, "is the bottleneck: it takes")
    on_device = view.share("stage", where="device")
    if on_device <= 0.5:
        return None
    return (
        f"the stage is the bottleneck: it takes {on_device:.0%} of the device's time; print(loader.plan()) says what "
        "runs where, and fewer of them leave more to the training"
    )


def _issuing(view: View, name: str, takes: str) -> str:
    """Say what a part of ``next()`` takes, and what to do about it."""
    stats, share = view.stats, view.issuing.get(name, view.waiting)
    if stats.resident_bytes and name in ("wait", "rest"):
        return (
            f"cutting batches out of kept samples {takes} {max(view.waiting, share):.0%} of the loop's time, in this "
            "process; workers would not help, as nothing is read: larger batches, and fewer values in a sample, take "
            "less for each image"
        )
    took = f"{takes} {share:.0%} of the loop's time"
    if name == "stage":
        each = 1e3 * stats.part("stage", "main").seconds / stats.batches
        remedy = (
            "transforms run on the CPU, in this process: fewer or cheaper transforms, smaller images, or a GPU"
            if stats.device == "cpu"
            else "print(loader.plan()) says what runs where"
        )
        return f"the stage {took}, {each:.3g} ms for each batch; {remedy}"
    if name == "copy":
        remedy = "decode less of each image, by a crop or a smaller Resize as the first transform"
        if stats.pinning_refused:
            remedy = f"the ring is not page-locked ({view.why_refused}), so each makes the host wait; {UNLOCK}"
        return f"copying batches to the device {took}; {remedy}"
    if name == "device decode":
        return f"waiting for the device's decoder {took}; Decode(where='both') shares the images with workers"
    what = "a collate_fn, or samples of many parts" if view.share("collate") > share / 2 else "many small chunks"
    return (
        f"the main process {took} to put batches together; {what} may be why: larger batches, or fewer values in a "
        "sample"
    )


def step(view: View) -> str | None:
    """Explain that loading keeps up."""
    more = view.loading / max(1.0 - view.loading, 0.01)
    said = [
        f"the training step is the bottleneck: the loop waits {view.waiting:.1%} of the time, and a faster loader "
        f"could bring at most {max(more, 0.01):.0%} more throughput"
    ]
    most = max(view.issuing, key=lambda name: view.issuing[name])
    if view.issuing[most] >= LITTLE:
        said.append(_issuing(view, most, "takes"))
    elif view.stats.pinning_refused:
        said.append(f"the ring is not page-locked ({view.why_refused}): {UNLOCK}")
    enough = max(1, math.ceil(view.busy / BUSY))
    if view.stats.workers and view.busy < 0.5 * view.workers and enough < view.workers:
        said.append(f"{view.busy:.1f} of {view.workers} workers are busy, {enough} would do")
    return "; ".join(said)


RULES: Final[tuple[Callable[[View], str | None], ...]] = (
    starting, nothing, dying, small_ring, small_images, reading, working, waiting, issuing, step,
)  # fmt: skip


def advice(stats: Stats, machine: Machine) -> str:
    """Name the bottleneck, and what to do about it."""
    view = View(stats, machine)
    return next(said for rule in RULES if (said := rule(view)) is not None)


def better_setting(stats: Stats, machine: Machine) -> tuple[int, int] | None:
    """Return the ``num_workers`` and ``prefetch_factor`` that the advice names; None if it is not workers that are
    missing."""
    view = View(stats, machine)
    if stats.batches < FEW_BATCHES or not view.workers_bound or view.better is None:
        return None
    return view.better[0], view.ahead_for(view.better[0])
