"""The bottleneck of a loader, and what to do about it: one sentence.

Shares are of the time after the first batch of an epoch, since workers start and the first batches are made before it.

How long the loop waits decides first. Under 5%, and while the main process does little else for it, the training step
is the bottleneck. Where it waits, the workers' own counters say for what: a part of their work, if they are busy, and
then whether they need a CPU or wait for a disk.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Final

from gpuload.loader.autotune import LEAP
from gpuload.loader.limits import lockable_bytes
from gpuload.loader.options import MIN_CHUNK
from gpuload.loader.stats import NOTHING, Part, Stats

__all__ = ["advice", "better_setting"]

FEW_BATCHES: Final = 3
LITTLE: Final = 0.05  # a share of the time that is not worth a word
BUSY: Final = 0.75  # workers that are the bottleneck are so busy, on average
ON_CPU: Final = 0.6  # work that needs a CPU has one for so much of the time that it does not wait for one
CROWDED: Final = 0.25  # workers wait for a CPU for so much of the time that their work takes
ALL: Final = 0.9  # so much of the CPUs' time is all of it
FULL: Final = 0.2  # the ring is full for so much of the time
SHORT_START: Final = 0.1  # of each epoch, where each epoch starts new workers
LARGE_BYTES: Final = 6_000_000  # of decoded pixels in an image: 2 megapixels
SMALL_BYTES: Final = 64 * 64 * 3  # of pixels in an image, and of its file
SMALL_LOCK_BYTES: Final = 64 << 20
UNLOCK: Final = "raise the limit: `ulimit -l unlimited`, in a container `--ulimit memlock=-1`"


class _View:
    """A snapshot of at least one batch, and what follows from it."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.in_process = not stats.num_workers
        self.workers = max(1, stats.num_workers)  # that work at the same time
        self.busy = 1.0 if self.in_process else stats.busy  # how many of them were, on average
        self.workers_busy = self.busy >= BUSY * self.workers  # whether they have enough to do
        self.waiting = stats.waiting_later
        # The shares of the time that `next()` takes without waiting. With num_workers=0, batches of plain data are
        # collated while the loop waits.
        self.issuing = {name: self.share(name) for name in ("copy", "stage", "device decode")}
        self.issuing["rest"] = self.share("rest")
        if not self.in_process or stats.bytes_decoded:
            self.issuing["rest"] = self.share("collate", "rest")
        self.most_issuing = max(self.issuing, key=self.issuing.__getitem__)
        self.loading = min(1.0, self.waiting + sum(self.issuing.values()))  # saved if batches cost the loop nothing
        start = stats.part("start", "workers")
        self.start_s = min(start.seconds / start.count, stats.first_s) if start.count else 0.0
        work = ("read", "header", "decode", "pack", "plan") + (() if self.in_process else ("collate",))
        self.work_s = sum(self._work(name).seconds for name in work)  # of all workers
        self.queued = min(1.0, stats.workers_queued_s / self.work_s) if self.work_s else 0.0  # waiting for a CPU
        # Whether the work needs CPUs, not a disk or a network, however long it waits for a CPU here.
        self.on_cpu = stats.workers_cpu_s > ON_CPU * (self.work_s - stats.workers_queued_s)
        self.cpus_are_full = stats.cpu_s > ALL * stats.cpus * max(stats.seconds - self.start_s, 1e-9)
        images = max(1, stats.part("decode").count)
        self.image_bytes, self.file_bytes = stats.bytes_decoded / images, stats.bytes_read / images
        self.decodes = any(stats.decoders.values())

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

    @cached_property
    def bottleneck(self) -> str:
        """Return "wait", a name in `issuing`, or "step"."""
        stats, largest = self.stats, self.waiting >= self.issuing[self.most_issuing]
        # The loop and busy workers are a pipeline: its slower side decides, whatever share of the loop the stage has.
        # With num_workers=0 they take turns, and on CPUs that are full they take CPUs from each other.
        if self.waiting >= LITTLE and (largest or (self.workers_busy and not self.in_process)):
            main_cpu_s = stats.cpu_s - stats.workers_cpu_s
            has_the_cpus = stats.device == "cpu" and self.cpus_are_full and main_cpu_s > stats.workers_cpu_s
            return "stage" if has_the_cpus and self.issuing["stage"] > self.waiting else "wait"
        return self.most_issuing if self.loading >= 0.5 else "step"

    @property
    def reading(self) -> tuple[str, ...]:
        """The parts in which a dataset gives its data: Pillow decodes an image when its sample is taken apart, and a
        mapped array is read when its pixels are copied."""
        if self.decodes or not self.stats.bytes_decoded:
            return ("read",)
        return ("read", "header") if self.on_cpu else ("read", "header", "decode")

    @property
    def most_workers(self) -> int:
        """More workers than this do not help: there are no CPUs for them."""
        cpus, stats = self.stats.cpus, self.stats
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
        now = self.stats.num_workers
        # In the main process, the rest of the loop and the work take turns; workers do theirs meanwhile.
        work = self.waiting if self.in_process else 1.0 * now
        enough = math.ceil(work / max(loop, 1e-3) * (1 - LITTLE))
        count = min(max(enough, now + 1), self.most_workers, max(self.stats.cpus, LEAP * now))
        return (count, 1.0 / max(loop, work / count)) if count > now else None

    @property
    def more_workers(self) -> str:
        """Return what more workers would bring."""
        if self.better is None:
            cpus = f"{self.stats.cpus} CPU{'s' * (self.stats.cpus > 1)}"
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
        """Return how many batches have to be in work for this many workers to have a chunk each."""
        batch, chunk = self.stats.images / self.stats.batches, self.stats.chunk_size
        if chunk >= batch:  # then each worker has a batch
            return self.stats.prefetch_factor
        chunk = min(chunk, max(MIN_CHUNK, math.ceil(batch / workers)))
        return max(self.stats.prefetch_factor, math.ceil(workers / math.ceil(batch / chunk)))

    @property
    def how_busy(self) -> str:
        """How busy workers are, and how much the loop waits."""
        if self.in_process:
            return f"the main process does it itself (num_workers=0), for {self.waiting:.0%} of the time"
        unit = "worker" if self.workers == 1 else "workers"
        return f"{self.busy:.1f} of {self.workers} {unit} busy, the loop waits {self.waiting:.0%} of the time"

    @property
    def not_locked(self) -> str:
        """Return the remark that memory is not page-locked, and why."""
        limit = lockable_bytes()
        why = "the driver refused it"
        if limit is not None and limit < SMALL_LOCK_BYTES:
            why = f"this process may lock {limit // 1024:,} KiB of memory"
        return f"the ring is not page-locked ({why})"


def advice(stats: Stats) -> str:
    """Name the bottleneck, and what to do about it."""
    few = stats.batches
    if not few:
        return NOTHING
    view = _View(stats)
    again = "persistent" in stats.untried
    least_s = max((SHORT_START if again else 0.5) * stats.seconds, view.waiting * (stats.seconds - stats.first_s))
    if view.start_s and view.start_s >= least_s:
        remedy = (
            "persistent_workers=True starts them once, not in each epoch"
            if again
            else "it comes once, not in each epoch: ask again later, or for what came since with stats(since=…)"
        )
        return (
            f"the start of the workers is the bottleneck so far: {view.start_s:.1f} of {stats.seconds:.1f} s, in which "
            f"they import the dataset's modules and unpack the dataset; {remedy}"
        )
    if few < FEW_BATCHES:
        return f"{few} batch{'es' * (few > 1)}, too few to name the bottleneck: ask again later"
    if view.bottleneck == "step":
        return _step(view)
    if view.bottleneck == "wait":
        return _wait(view)
    return (_tiny_images(view) if view.bottleneck == "rest" else "") or _issuing(view, "is the bottleneck: it takes")


def _wait(view: _View) -> str:
    """Explain what the loop waits for: workers that cannot work, or their work, or better shares of it."""
    stats = view.stats
    if stats.restarts and stats.restarts >= 0.1 * stats.batches:
        return (
            f"dying workers are the bottleneck: {stats.restarts} died within {stats.batches} batches, and the loop "
            f"waits {view.waiting:.0%} of the time; look at loader.errors, and at the machine's memory"
        )
    full = view.share("slot wait")
    if not view.in_process and not view.workers_busy and (full >= FULL or stats.ring_spilled):
        return (
            f"the ring is the bottleneck: ring_bytes={stats.ring_limit_bytes:,} is too small for the batches in work, "
            f"which had no room for {min(full, 1.0):.0%} of the time, and the loop waits {view.waiting:.0%} of it; try "
            f"ring_bytes={max(2 * stats.ring_limit_bytes, 1 << 20):,}"
        )
    if view.workers_busy and (sentence := _tiny_images(view)):
        return sentence
    if stats.resident_bytes:
        return _issuing(view, "is the bottleneck: it takes")
    if view.workers_busy:
        return _reading(view) if view.work(*view.reading) > 0.5 else _working(view)
    busiest = max(stats.workers, key=lambda worker: worker.busy, default=None)
    others = 0.5 * (view.workers - 1)
    if busiest is not None and others and busiest.busy >= BUSY and view.busy - busiest.busy <= others:
        return (
            f"worker {busiest.number} is the bottleneck: it is busy {busiest.busy:.0%} of the time, all {view.workers} "
            f"together {view.busy / view.workers:.0%}, and the loop waits {view.waiting:.0%}; give workers equal "
            "shares, or in_order=False"
        )
    return (
        f"the bottleneck is too few batches in work: {view.how_busy}, so work comes in bursts; raise prefetch_factor, "
        f"to {max(view.ahead_for(view.workers), 2 * stats.prefetch_factor)} say, or lower chunk_size"
    )


def _tiny_images(view: _View) -> str:
    """Explain that the work for each sample, whatever its size, takes most of the time; "" if it does not."""
    slow = view.work(*view.reading) > 0.5 and view.each_ms("read") > 1.0
    if slow or not 0 < view.image_bytes <= SMALL_BYTES or view.file_bytes > SMALL_BYTES:
        return ""
    return (
        f"tiny images are the bottleneck: {view.image_bytes:,.0f} bytes of pixels each, so most of the time goes to "
        f"the samples around them ({view.how_busy}); keep them decoded in one file: `gpuload pack --to array`, then "
        "gl.ArrayFile"
    )


def _reading(view: _View) -> str:
    """Explain that the dataset is slow, and whether it computes or waits."""
    stats = view.stats
    what, each = "reading is the bottleneck", f"a sample takes {view.each_ms(*view.reading):.3g} ms"
    remedies = []
    if view.on_cpu and not view.in_process:
        what, each = f"{what}, and takes CPU time", f"{each} in the dataset's own code"
    elif "cache" in stats.untried and not view.in_process and (view.decodes or not stats.bytes_decoded):
        remedies.append("gl.Cached(dataset, …) keeps what was read for the next epochs")
    if (view.on_cpu or view.in_process) and not view.decodes:
        remedies.append(
            "if the dataset decodes images itself, let it return gl.read(path) or gl.Encoded(bytes) instead, and give "
            "its transforms to the Loader: then only what the crop needs is decoded"
        )
    if "block" in stats.untried:
        remedies.append('shuffle="block" reads neighbours together')
    return "; ".join([f"{what} ({each}): {view.how_busy}", view.more_workers, *remedies])


def _working(view: _View) -> str:
    """Explain which part of the workers' work takes most of their time."""
    names = {"decode": "decode is" if view.decodes else "copying the dataset's arrays is",
             "header": "headers and draws are", "pack": "packing labels is", "collate": "collate_fn is",
             "plan": "planning batches is", "read": "reading is"}  # fmt: skip
    most = max(names, key=view.work)
    what, whole, remedy = f"{names[most]} the bottleneck", view.stats.decoded_whole, view.more_workers
    if most == "decode" and view.stats.decoders.keys() - {"Pillow"}:  # JPEGs
        if view.work("decode") > 0.5 and 2 * whole >= view.stats.part("decode").count:
            remedy = (
                f"nvImageCodec cannot be used here, so {whole:,} JPEGs were decoded whole for a part of them: `gpuload "
                "doctor` says why, pip install 'gpuload[cu12]' (or cu13) brings it"
            )
        elif view.work("decode") > 0.5 and view.image_bytes >= LARGE_BYTES:
            what += f", as the images are large ({view.image_bytes / 3e6:.1f} megapixels decoded of each)"
            remedy = f"make them smaller once: `gpuload pack --short-side 512`; {remedy}"
        elif view.better is None:
            remedy += ": smaller or cuttable JPEGs would (`gpuload pack`)"
    return f"{what}: {view.how_busy}; {remedy}"


def _issuing(view: _View, takes: str, name: str = "") -> str:
    """Explain what a part of ``next()`` takes, by default the bottleneck, and what to do about it."""
    stats, name = view.stats, name or view.bottleneck
    share = view.issuing.get(name, view.waiting)
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
            remedy = f"{view.not_locked}, so each makes the host wait; {UNLOCK}"
        return f"copying batches to the device {took}; {remedy}"
    if name == "device decode":
        return f"waiting for the device's decoder {took}; Decode(where='both', device_share=…) leaves some to workers"
    what = "a collate_fn, or samples of many parts" if view.share("collate") > share / 2 else "many small chunks"
    return (
        f"the main process {took} to put batches together; {what} may be why: larger batches, or fewer values in a "
        "sample"
    )


def _step(view: _View) -> str:
    """Explain that the stage takes the device's time, or that loading keeps up."""
    on_device = view.share("stage", where="device")
    if on_device > 0.5:
        return (
            f"the stage is the bottleneck: it takes {on_device:.0%} of the device's time; print(loader.plan()) says "
            "what runs where, and fewer of them leave more to the training"
        )
    more = view.loading / max(1.0 - view.loading, 0.01)
    clauses = [
        f"the training step is the bottleneck: the loop waits {view.waiting:.1%} of the time, and a faster loader "
        f"could bring at most {max(more, 0.01):.0%} more throughput"
    ]
    if view.issuing[view.most_issuing] >= LITTLE:
        clauses.append(_issuing(view, "takes", view.most_issuing))
    elif view.stats.pinning_refused:
        clauses.append(f"{view.not_locked}: {UNLOCK}")
    enough = max(1, math.ceil(view.busy / BUSY))
    if view.stats.workers and view.busy < 0.5 * view.workers and enough < view.workers:
        clauses.append(f"{view.busy:.1f} of {view.workers} workers are busy, {enough} would do")
    return "; ".join(clauses)


def better_setting(stats: Stats) -> tuple[int, int] | None:
    """Return the ``num_workers`` and ``prefetch_factor`` that the advice names; None if it is not workers that are
    missing."""
    if stats.batches < FEW_BATCHES:
        return None
    view = _View(stats)
    if view.bottleneck != "wait" or not view.workers_busy or view.better is None:
        return None
    return view.better[0], view.ahead_for(view.better[0])
