"""The sentence that names a loader's bottleneck and a remedy, from a table of conditions and sentences.

All shares refer to the time after the first batch of an epoch. Before that, workers start and nothing is prefetched.

The waiting time is checked first. If the loop waits less than 5% of the time, and the main process spends little time
on loading, the training step is the bottleneck. Otherwise, the workers' counters show the reason: if workers are busy,
they show which part of the work takes longest, and whether that part needs a CPU or waits for a disk.
"""

from __future__ import annotations

import math
from typing import Final

from gpuload.loader.autotune import MAX_WORKER_GROWTH
from gpuload.loader.limits import lockable_bytes
from gpuload.loader.options import MIN_CHUNK, look_ahead
from gpuload.loader.stats import NOTHING_LOADED, Stats, WorkerStats

__all__ = ["advice", "better_setting"]

MIN_BATCHES: Final = 3
# Thresholds, as shares of the time.
NEGLIGIBLE: Final = 0.05  # not worth mentioning
BUSY: Final = 0.75  # workers are the bottleneck if they are at least this busy on average
CPU_BOUND: Final = 0.6  # work is CPU-bound if it computes for this share of the time, excluding waits for a CPU
CPU_CONTENTION: Final = 0.25  # CPUs are contended if workers wait for a CPU for this share of their work
CPUS_FULL: Final = 0.9  # CPUs count as fully used from this utilization
RING_FULL: Final = 0.2  # the ring is too small if it is full for this share of the time
EPOCH_START: Final = 0.1  # starting workers in each epoch is the bottleneck if it takes this share of the epoch
LARGE_BYTES: Final = 6_000_000  # decoded bytes of a large image: 2 megapixels
SMALL_BYTES: Final = 64 * 64 * 3  # decoded bytes, and file size, of a tiny image
SMALL_LOCK_BYTES: Final = 64 << 20  # a lower limit explains why the ring is not page-locked
PART_NAMES: Final = {
    "copy": "copying batches to the device",
    "stage": "the stage",
    "device decode": "waiting for the device's decoder",
    "rest": "putting batches together",
    "step": "the training step",
}
WORK_NAMES: Final = {
    "decode": "decode is",
    "header": "reading image headers and drawing random parameters is",
    "pack": "packing labels is",
    "collate": "collate_fn is",
    "plan": "planning batches is",
    "read": "reading is",
}
RAISE_LOCK_LIMIT: Final = "raise the limit: `ulimit -l unlimited`, in a container `--ulimit memlock=-1`"


class _Figures:
    """The figures, phrases and conditions of the sentences, derived from a snapshot that covers at least one batch."""

    def __init__(self, stats: Stats) -> None:
        self.stats, cpu = stats, stats.cpu
        self.waiting, self.in_process = stats.waiting_later, not stats.num_workers
        self.workers = max(1, stats.num_workers)  # processes that load in parallel
        self.busy = 1.0 if self.in_process else stats.busy  # the average number of busy workers
        self.saturated = self.busy >= BUSY * self.workers
        start = stats.part("start", "workers")
        self.start_s = min(start.seconds / start.count, stats.first_s) if start.count else 0.0
        where = "main" if self.in_process else "workers"
        self.seconds = {name: stats.part(name, where).seconds for name in WORK_NAMES}
        self.work_s = sum(self.seconds.values()) - self.in_process * self.seconds["collate"]  # summed over all workers
        self.queued_share = min(1.0, cpu.queued_s / self.work_s) if self.work_s else 0.0  # waiting for a CPU
        # Whether the work mainly needs CPUs, not a disk or a network; time spent waiting for a CPU does not count.
        self.cpu_bound = cpu.workers_s > CPU_BOUND * (self.work_s - cpu.queued_s)
        self.cpus_are_full = cpu.seconds > CPUS_FULL * cpu.count * max(stats.seconds - self.start_s, 1e-9)
        self._find_bottleneck()
        self._suggest_workers()
        self._analyse_work()

    def _find_bottleneck(self) -> None:
        """Set `bottleneck` to "wait", a name in `issuing_shares`, or "step".

        Besides waiting, `next()` issues work: it copies, launches the stage, decodes on the device, and collates
        ("rest"). `issuing_shares` are the shares of the time that each takes. With num_workers=0, collating plain data
        counts as waiting.
        """
        stats, cpu, waiting = self.stats, self.stats.cpu, self.waiting
        elapsed_s, on_cpu = max(1e-9, stats.seconds - stats.first_s), stats.stage.device == "cpu"
        names = ("copy", "stage", "device decode", "rest", "collate", "slot wait")
        shares = {name: stats.part(name, "main").seconds / elapsed_s for name in names}
        collate_share, self.ring_full = shares.pop("collate"), min(1.0, shares.pop("slot wait"))
        if not self.in_process or stats.decode.bytes:
            shares["rest"] += collate_share
        self.issuing_shares, costliest = shares, max(shares, key=shares.__getitem__)
        # The share of the time that an infinitely fast loader would save.
        self.loading_share = min(1.0, waiting + sum(shares.values()))
        self.bottleneck = costliest if self.loading_share >= 0.5 else "step"
        # The loop and busy workers form a pipeline that runs at the speed of its slower side, whatever the stage's
        # share of the loop. But with num_workers=0 loading and the loop alternate, and if all CPUs are in use, they
        # compete.
        if waiting >= NEGLIGIBLE and (waiting >= shares[costliest] or (self.saturated and not self.in_process)):
            main_fills_cpus = on_cpu and self.cpus_are_full and cpu.seconds > 2 * cpu.workers_s
            self.bottleneck = "stage" if main_fills_cpus and shares["stage"] > waiting else "wait"
        self.device_share = stats.part("stage", "device").seconds / elapsed_s
        self.step_gain = max(self.loading_share / max(1.0 - self.loading_share, 0.01), 0.01)
        # The part of `next()` to describe. If the step is the bottleneck, there is a note on the costliest part.
        self.part, predicate = self.bottleneck, "is the bottleneck: it takes"
        if self.bottleneck == "step":
            self.part, predicate = costliest, "takes"
        self.share = shares.get(self.part, waiting)
        self.cost = f"{predicate} {self.share:.0%} of the loop's time"
        self.stage_ms = 1e3 * stats.part("stage", "main").seconds / stats.batches
        has_costly_collate = collate_share > shares["rest"] / 2
        self.cause = "a collate_fn, or samples with many parts" if has_costly_collate else "many small chunks"

    def _suggest_workers(self) -> None:
        """Set `more_workers` to the number of workers with which the loop would hardly wait, or to 0 if more workers do
        not help; `speedup`, the factor by which throughput would grow; and how many batches must be in flight to keep
        the current number of workers, and that number, busy.

        All workers are busy, so n workers take 1/n of the time that one worker takes; the loop's own time stays the
        same.
        """
        cpu, loop, current = self.stats.cpu, 1.0 - self.waiting, self.stats.num_workers
        maximum = cpu.count  # the largest number of workers for which there are CPUs
        if self.stats.elsewhere:
            maximum = 1 << 30
        elif self.cpus_are_full and not self.in_process:
            maximum = self.workers
        elif not self.cpu_bound and not self.in_process:  # in this process, the share of waiting is unknown
            maximum = max(maximum, int(maximum * (self.work_s - cpu.queued_s) / max(cpu.workers_s, 1e-3)))
        # In the main process, loading and the loop alternate; workers load while the loop runs.
        work = self.waiting if self.in_process else 1.0 * current
        sufficient = math.ceil(work / max(loop, 1e-3) * (1 - NEGLIGIBLE))
        count = min(max(sufficient, current + 1), maximum, max(cpu.count, MAX_WORKER_GROWTH * current))
        self.more_workers, self.speedup = count if count > current else 0, 1.0 / max(loop, work / count)
        self.sufficient_ahead, self.suggested_ahead = self._batches_ahead(self.workers), self._batches_ahead(count)

    def _batches_ahead(self, workers: int) -> int:
        batch, chunk = self.stats.images / self.stats.batches, self.stats.chunk_size
        if chunk >= batch:  # each worker makes entire batches
            return self.stats.prefetch_factor
        chunk = min(chunk, max(MIN_CHUNK, math.ceil(batch / workers)))
        return max(self.stats.prefetch_factor, look_ahead(workers, math.ceil(batch / chunk)))

    def _analyse_work(self) -> None:
        """Find out what the workers do while the loop waits."""
        stats, decode, busiest, seconds = self.stats, self.stats.decode, WorkerStats(0, 0.0, 0, 0), self.seconds
        samples = max(1, stats.part("read").count, stats.part("decode").count)
        self.image_bytes, file_bytes = decode.bytes / samples, decode.read_bytes / samples
        self.megapixels, self.decodes_images = self.image_bytes / 3e6, any(decode.counts.values())
        # PIL images are decoded when a sample is unpacked ("header"), and a memory-mapped array is read when its pixels
        # are copied ("decode").
        reading_s = seconds["read"]
        if decode.bytes and not self.decodes_images:
            reading_s += seconds["header"] + (0.0 if self.cpu_bound else seconds["decode"])
        self.reading_ms, reads_most_of_the_time = 1e3 * reading_s / samples, reading_s > 0.5 * self.work_s
        slowest = max(seconds, key=seconds.__getitem__)
        copies_arrays = slowest == "decode" and not self.decodes_images
        self.slowest = "copying the dataset's arrays is" if copies_arrays else WORK_NAMES[slowest]
        self.busiest = max(stats.workers, key=lambda worker: worker.busy, default=busiest)
        self.average_busy = self.busy / self.workers

        self.larger_ring_bytes = max(2 * stats.ring.limit_bytes, 1 << 20)
        self.doubled_prefetch = 2 * stats.prefetch_factor
        waits, busy = self.bottleneck == "wait", self.bottleneck == "wait" and self.saturated
        is_slow_read = reads_most_of_the_time and 1e3 * seconds["read"] > samples
        is_tiny = 0 < self.image_bytes <= SMALL_BYTES and file_bytes <= SMALL_BYTES and not is_slow_read
        ring_is_full = self.ring_full >= RING_FULL or stats.ring.spilled > 0
        jpegs_are_slow = busy and slowest == "decode" and bool(decode.counts.keys() - {"Pillow"})
        jpegs_dominate = jpegs_are_slow and seconds["decode"] > 0.5 * self.work_s
        others_are_idle = self.busy - self.busiest.busy <= 0.5 * (self.workers - 1)
        self.starves = self.sufficient_ahead > stats.prefetch_factor  # the default would be larger
        self.conditions = {
            self.bottleneck: True,
            self.part: True,
            "step on a busy device": self.bottleneck == "step" and self.device_share > 0.5,
            "dying workers": waits and stats.faults.restarts >= 0.1 * stats.batches,
            "small ring": waits and not busy and ring_is_full,
            "tiny images": is_tiny and (busy or self.bottleneck == "rest"),
            "stage on the CPU": self.part == "stage" and stats.stage.device == "cpu",
            "copy without locking": self.part == "copy" and stats.stage.pinning_refused,
            "computing dataset": busy and reads_most_of_the_time and self.cpu_bound and not self.in_process,
            "slow dataset": busy and reads_most_of_the_time,
            "no nvImageCodec": jpegs_dominate and 2 * decode.whole >= samples,
            "large JPEGs": jpegs_dominate and self.image_bytes >= LARGE_BYTES,
            "JPEGs and no CPUs": jpegs_are_slow and not self.more_workers,
            "busy workers": busy,
            "uneven work": self.workers > 1 and self.busiest.busy >= BUSY and others_are_idle,
            "small prefetch_factor": self.starves,
        }

    def choose(self, sentences: dict[str, str]) -> str:
        """Return the first sentence whose condition holds."""
        sentence = next(text for condition, text in sentences.items() if self.conditions.get(condition))
        return sentence.format(f=self, stats=self.stats)

    @property
    def more_workers_effect(self) -> str:
        cpu_count = f"{self.stats.cpu.count} CPU{'s' * (self.stats.cpu.count > 1)}"
        is_contended = self.queued_share > CPU_CONTENTION
        queued = f"workers wait {self.queued_share:.0%} of their time for a CPU"
        if not self.more_workers:
            reason = f"this process may use only {cpu_count}"
            if self.cpus_are_full:
                reason = f"this process uses all of its {cpu_count}"
            elif is_contended:
                reason += f", and other programs use them too: {queued}"
            return f"more workers would not help, as {reason}"
        workers = f"{self.more_workers} worker{'s' * (self.more_workers > 1)}"
        if is_contended and self.cpu_bound:
            return f"with {workers} the loop would wait less, but {queued} that other programs use"
        # Unless a smaller number than the default was requested, the default follows the number of workers.
        prefetch = f" and prefetch_factor={self.suggested_ahead}" if self.starves else ""
        # A device works on earlier steps while the loop waits, so the loop is slower than its own time suggests.
        bound = "about" if self.stats.stage.device == "cpu" else "at most"
        return f"{workers}{prefetch} would give {bound} {self.speedup:.1f} times the throughput"

    @property
    def load(self) -> str:
        if self.in_process:
            return f"the main process does this itself (num_workers=0) for {self.waiting:.0%} of the time"
        unit = "worker is" if self.workers == 1 else "workers are"
        return f"{self.busy:.1f} of {self.workers} {unit} busy, and the loop waits {self.waiting:.0%} of the time"

    @property
    def reading_remedies(self) -> str:
        untried, has_images = self.stats.untried, self.decodes_images
        remedies = [self.more_workers_effect]
        if (
            "cache" in untried
            and not (self.cpu_bound or self.in_process)
            and (has_images or not self.stats.decode.bytes)
        ):
            remedies.append("gl.Cached(dataset, …) keeps the data for the next epochs")
        if (self.cpu_bound or self.in_process) and not has_images:
            remedies.append(
                "if the dataset decodes images itself, have it return gl.read(path) or gl.Encoded(bytes) instead, and "
                "pass its transforms to the Loader, which decodes only the region that the crop needs"
            )
        if "block" in untried:
            remedies.append('shuffle="block" reads neighbouring samples together')
        return "; ".join(remedies)

    @property
    def lock_problem(self) -> str:
        limit = lockable_bytes()
        reason = "the driver refused it"
        if limit is not None and limit < SMALL_LOCK_BYTES:
            reason = f"this process may lock only {limit // 1024:,} KiB of memory"
        return f"the ring is not page-locked ({reason})"

    @property
    def step_notes(self) -> str:
        notes = []
        if self.share >= NEGLIGIBLE:
            notes.append(self.choose(COSTS))
        elif self.stats.stage.pinning_refused:
            notes.append(f"{self.lock_problem}: {RAISE_LOCK_LIMIT}")
        sufficient = max(1, math.ceil(self.busy / BUSY))
        if self.stats.workers and self.busy < 0.5 * self.workers and sufficient < self.workers:
            notes.append(f"{self.busy:.1f} of {self.workers} workers are busy, and {sufficient} would be enough")
        return "".join(f"; {note}" for note in notes)


# Conditions, and sentences: the first sentence whose condition holds is the advice. The sentences in COSTS describe a
# part of `next()`; one of them becomes a note if the training step is the bottleneck.
COSTS: Final = {
    "stage on the CPU": "the stage {f.cost}, {f.stage_ms:.3g} ms per batch; transforms run on the CPU, in this "
    "process: use fewer or cheaper transforms, smaller images, or a GPU",
    "stage": "the stage {f.cost}, {f.stage_ms:.3g} ms per batch; print(loader.plan()) shows what runs where",
    "copy without locking": "copying batches to the device {f.cost}; {f.lock_problem}, so each copy makes the host "
    "wait; " + RAISE_LOCK_LIMIT,
    "copy": "copying batches to the device {f.cost}; decode less of each image, with a crop or a smaller "
    "Resize as the first transform",
    "device decode": "waiting for the device's decoder {f.cost}; Decode(where='both', device_share=…) leaves "
    "some images to workers",
    "rest": "the main process {f.cost} to put batches together, probably because of {f.cause}; use "
    "larger batches, or fewer values per sample",
}
SENTENCES: Final = {
    "step on a busy device": "the stage is the bottleneck: it takes {f.device_share:.0%} of the device's time; "
    "print(loader.plan()) shows what runs where, and fewer transforms on the device leave more time for training",
    "step": "the training step is the bottleneck: the loop waits {f.waiting:.1%} of the time, and a faster "
    "loader could raise throughput by at most {f.step_gain:.0%}{f.step_notes}",
    "dying workers": "dying workers are the bottleneck: {stats.faults.restarts} died within {stats.batches} batches, "
    "and the loop waits {f.waiting:.0%} of the time; check loader.errors and the machine's memory",
    "small ring": "the ring is the bottleneck: ring_bytes={stats.ring.limit_bytes:,} is too small for the batches "
    "in flight. It is full {f.ring_full:.0%} of the time, and the loop waits {f.waiting:.0%} of the time; try "
    "ring_bytes={f.larger_ring_bytes:,}",
    "tiny images": "tiny images are the bottleneck: {f.image_bytes:,.0f} bytes of pixels each, so most of the time "
    "is spent on the overhead of each sample ({f.load}); store the images decoded in one file: `gpuload pack --to "
    "array`, then gl.ArrayFile",
    **COSTS,
    "computing dataset": "reading is the bottleneck, and takes CPU time (a sample takes {f.reading_ms:.3g} ms in the "
    "dataset's own code): {f.load}; {f.reading_remedies}",
    "slow dataset": "reading is the bottleneck (a sample takes {f.reading_ms:.3g} ms): {f.load}; {f.reading_remedies}",
    "no nvImageCodec": "decode is the bottleneck: {f.load}; nvImageCodec cannot be used here, so "
    "{stats.decode.whole:,} JPEGs were fully decoded where a part would do; `gpuload doctor` says why, and pip install "
    "'gpuload[cu12]' (or cu13) installs it",
    "large JPEGs": "decode is the bottleneck, as the images are large ({f.megapixels:.1f} megapixels decoded per "
    "image): {f.load}; shrink them once with `gpuload pack --short-side 512`; {f.more_workers_effect}",
    "JPEGs and no CPUs": "decode is the bottleneck: {f.load}; {f.more_workers_effect}, but smaller or cuttable JPEGs "
    "would help (`gpuload pack`)",
    "busy workers": "{f.slowest} the bottleneck: {f.load}; {f.more_workers_effect}",
    "uneven work": "worker {f.busiest.number} is the bottleneck: it is busy {f.busiest.busy:.0%} of the time, the "
    "average of all {f.workers} workers is {f.average_busy:.0%}, and the loop waits {f.waiting:.0%}; give workers "
    "equal shares of the data, or set in_order=False",
    "small prefetch_factor": "prefetch_factor={stats.prefetch_factor} is the bottleneck: it gives {f.workers} workers "
    "too few chunks to work on ({f.load}); leave it out, or set it to {f.sufficient_ahead}",
    "wait": "the bottleneck is too few batches in flight: {f.load}, so work comes in bursts; raise "
    "prefetch_factor (for example to {f.doubled_prefetch}) or lower chunk_size",
}


def advice(stats: Stats) -> str:
    """Return a sentence that names the bottleneck and a remedy."""
    count = stats.batches
    if not count:
        return NOTHING_LOADED
    figures = _Figures(stats)
    minimum_share = 0.5
    remedy = "workers start only once, not in each epoch: ask again later, or exclude the start with stats(since=…)"
    if "persistent" in stats.untried:
        minimum_share, remedy = EPOCH_START, "persistent_workers=True starts them once, not in each epoch"
    minimum_s = max(minimum_share * stats.seconds, figures.waiting * (stats.seconds - stats.first_s))
    if figures.start_s and figures.start_s >= minimum_s:
        return (
            f"starting the workers is the bottleneck so far: it took {figures.start_s:.1f} of {stats.seconds:.1f} s, "
            f"during which they import the dataset's modules and unpickle the dataset; {remedy}"
        )
    if count < MIN_BATCHES:
        return f"{count} batch{'es' * (count > 1)}, too few to name the bottleneck: ask again later"
    sentence = figures.choose(SENTENCES)
    if figures.bottleneck != "wait":
        return sentence
    gain = figures.waiting / max(1.0 - figures.waiting, 0.01)
    shares = figures.issuing_shares | {"step": 1.0 - figures.loading_share}
    next_part = max(shares, key=shares.__getitem__)
    return (
        f"{sentence}; faster loading could raise throughput by at most {gain:,.0%}; next comes "
        f"{PART_NAMES[next_part]}, which takes {shares[next_part]:.0%} of the loop's time"
    )


def better_setting(stats: Stats) -> tuple[int, int] | None:
    """Return the ``num_workers`` and ``prefetch_factor`` that the advice suggests; None if more workers would not
    help."""
    if stats.batches < MIN_BATCHES:
        return None
    figures = _Figures(stats)
    if figures.bottleneck != "wait" or not figures.saturated or not figures.more_workers:
        return None
    return figures.more_workers, figures.suggested_ahead
