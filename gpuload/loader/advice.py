"""The sentence that names a loader's bottleneck and a remedy.

All shares refer to the time after the first batch of an epoch. Before that, workers start and nothing is prefetched.

The waiting time is checked first. If the loop waits less than 5% of the time, and the main process spends little time
on loading, the training step is the bottleneck. Otherwise, the workers' counters show the reason: if workers are busy,
they show which part of the work takes longest, and whether that part needs a CPU or waits for a disk.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Final

from gpuload.loader.autotune import MAX_WORKER_GROWTH
from gpuload.loader.limits import lockable_bytes
from gpuload.loader.options import MIN_CHUNK, look_ahead
from gpuload.loader.stats import NOTHING_LOADED, Part, Stats

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
RAISE_LOCK_LIMIT: Final = "raise the limit: `ulimit -l unlimited`, in a container `--ulimit memlock=-1`"


class _Figures:
    """Figures derived from a snapshot that covers at least one batch."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.in_process = not stats.num_workers
        self.workers = max(1, stats.num_workers)  # processes that load in parallel
        self.busy = 1.0 if self.in_process else stats.busy  # the average number of busy workers
        self.workers_saturated = self.busy >= BUSY * self.workers
        self.waiting = stats.waiting_later
        # Besides waiting, `next()` issues work: it copies, launches the stage, decodes on the device, and collates
        # ("rest"). These are the shares of the time that each takes. With num_workers=0, collating plain data counts
        # as waiting.
        self.issuing_shares = {name: self.share(name) for name in ("copy", "stage", "device decode")}
        self.issuing_shares["rest"] = self.share("rest")
        if not self.in_process or stats.bytes_decoded:
            self.issuing_shares["rest"] = self.share("collate", "rest")
        self.costliest_issuing_part = max(self.issuing_shares, key=self.issuing_shares.__getitem__)
        # The share of the time that an infinitely fast loader would save.
        self.loading_share = min(1.0, self.waiting + sum(self.issuing_shares.values()))
        start = stats.part("start", "workers")
        self.start_s = min(start.seconds / start.count, stats.first_s) if start.count else 0.0
        work = ("read", "header", "decode", "pack", "plan") + (() if self.in_process else ("collate",))
        self.work_s = sum(self._worker_part(name).seconds for name in work)  # summed over all workers
        self.queued_share = min(1.0, stats.workers_queued_s / self.work_s) if self.work_s else 0.0  # waiting for a CPU
        # Whether the work mainly needs CPUs, not a disk or a network; time spent waiting for a CPU does not count.
        self.cpu_bound = stats.workers_cpu_s > CPU_BOUND * (self.work_s - stats.workers_queued_s)
        self.cpus_are_full = stats.cpu_s > CPUS_FULL * stats.cpus * max(stats.seconds - self.start_s, 1e-9)
        images = max(1, stats.part("decode").count)
        self.image_bytes, self.file_bytes = stats.bytes_decoded / images, stats.bytes_read / images
        self.decodes_images = any(stats.decoders.values())

    def share(self, *names: str, where: str = "main") -> float:
        """Return the share of the time that these parts take."""
        seconds = max(1e-9, self.stats.seconds - self.stats.first_s)
        return sum(self.stats.part(name, where).seconds for name in names) / seconds

    def _worker_part(self, name: str) -> Part:
        return self.stats.part(name, "main" if self.in_process else "workers")

    def share_of_work(self, *names: str) -> float:
        """Return these parts' share of the workers' work."""
        return sum(self._worker_part(name).seconds for name in names) / self.work_s if self.work_s else 0.0

    def ms_per_sample(self, *names: str) -> float:
        """Return the milliseconds per sample that workers spend on these parts."""
        return sum(1e3 * part.seconds / part.count for part in map(self._worker_part, names) if part.count)

    @property
    def gain(self) -> str:
        """Describe by how much the loop could become faster if it did not wait, and what would limit it then."""
        gain = self.waiting / max(1.0 - self.waiting, 0.01)
        shares = self.issuing_shares | {"step": 1.0 - self.loading_share}
        next_part = max(shares, key=shares.__getitem__)
        return (
            f"faster loading could raise throughput by at most {gain:,.0%}; next comes {PART_NAMES[next_part]}, which "
            f"takes {shares[next_part]:.0%} of the loop's time"
        )

    @cached_property
    def bottleneck(self) -> str:
        """Return "wait", a name in `issuing_shares`, or "step"."""
        stats, is_largest = self.stats, self.waiting >= self.issuing_shares[self.costliest_issuing_part]
        # The loop and busy workers form a pipeline that runs at the speed of its slower side, whatever the stage's
        # share of the loop. But with num_workers=0 loading and the loop alternate, and if all CPUs are in use, they
        # compete.
        if self.waiting >= NEGLIGIBLE and (is_largest or (self.workers_saturated and not self.in_process)):
            main_cpu_s = stats.cpu_s - stats.workers_cpu_s
            main_fills_cpus = stats.device == "cpu" and self.cpus_are_full and main_cpu_s > stats.workers_cpu_s
            return "stage" if main_fills_cpus and self.issuing_shares["stage"] > self.waiting else "wait"
        return self.costliest_issuing_part if self.loading_share >= 0.5 else "step"

    @property
    def reading_parts(self) -> tuple[str, ...]:
        """Return the parts that include reading the dataset: "read"; "header", since PIL images are decoded when a
        sample is unpacked; and "decode", since a memory-mapped array is read when its pixels are copied."""
        if self.decodes_images or not self.stats.bytes_decoded:
            return ("read",)
        return ("read", "header") if self.cpu_bound else ("read", "header", "decode")

    @property
    def max_workers(self) -> int:
        """Return the largest number of workers for which there are CPUs."""
        cpus, stats = self.stats.cpus, self.stats
        if stats.elsewhere:
            return 1 << 30
        if self.in_process:
            return cpus  # the share of the work that is waiting is unknown
        if self.cpus_are_full:
            return self.workers
        if self.cpu_bound:
            return cpus
        return max(cpus, int(cpus * (self.work_s - stats.workers_queued_s) / max(stats.workers_cpu_s, 1e-3)))

    @cached_property
    def suggested_workers(self) -> tuple[int, float] | None:
        """Return the number of workers with which the loop would hardly wait, and the factor by which throughput would
        grow; None if more workers do not help.

        All workers are busy, so n workers take 1/n of the time that one worker takes; the loop's own time stays the
        same.
        """
        loop = 1.0 - self.waiting
        current = self.stats.num_workers
        # In the main process, loading and the loop alternate; workers load while the loop runs.
        work = self.waiting if self.in_process else 1.0 * current
        sufficient = math.ceil(work / max(loop, 1e-3) * (1 - NEGLIGIBLE))
        count = min(max(sufficient, current + 1), self.max_workers, max(self.stats.cpus, MAX_WORKER_GROWTH * current))
        return (count, 1.0 / max(loop, work / count)) if count > current else None

    @property
    def more_workers_effect(self) -> str:
        """Describe the effect of more workers."""
        if self.suggested_workers is None:
            cpu_count = f"{self.stats.cpus} CPU{'s' * (self.stats.cpus > 1)}"
            reason = f"this process may use only {cpu_count}"
            if self.cpus_are_full:
                reason = f"this process uses all of its {cpu_count}"
            elif self.queued_share > CPU_CONTENTION:
                reason += (
                    f", and other programs use them too: workers wait {self.queued_share:.0%} of their time for a CPU"
                )
            return f"more workers would not help, as {reason}"
        count, speedup = self.suggested_workers
        unit = "worker" if count == 1 else "workers"
        if self.queued_share > CPU_CONTENTION and self.cpu_bound:
            return (
                f"with {count} {unit} the loop would wait less, but workers wait {self.queued_share:.0%} of their time "
                "for a CPU that other programs use"
            )
        # Unless a smaller number than the default was requested, the default follows the number of workers.
        starves = self.batches_ahead(self.workers) > self.stats.prefetch_factor
        prefetch = f" and prefetch_factor={self.batches_ahead(count)}" if starves else ""
        # A device works on earlier steps while the loop waits, so the loop is slower than its own time suggests.
        bound = "about" if self.stats.device == "cpu" else "at most"
        return f"{count} {unit}{prefetch} would give {bound} {speedup:.1f} times the throughput"

    def batches_ahead(self, workers: int) -> int:
        """Return how many batches must be in flight to keep this many workers busy."""
        batch, chunk = self.stats.images / self.stats.batches, self.stats.chunk_size
        if chunk >= batch:  # each worker makes entire batches
            return self.stats.prefetch_factor
        chunk = min(chunk, max(MIN_CHUNK, math.ceil(batch / workers)))
        return max(self.stats.prefetch_factor, look_ahead(workers, math.ceil(batch / chunk)))

    @property
    def load_description(self) -> str:
        """Describe how busy workers are and how much the loop waits."""
        if self.in_process:
            return f"the main process does this itself (num_workers=0) for {self.waiting:.0%} of the time"
        unit = "worker is" if self.workers == 1 else "workers are"
        return f"{self.busy:.1f} of {self.workers} {unit} busy, and the loop waits {self.waiting:.0%} of the time"

    @property
    def lock_problem(self) -> str:
        """Describe why the ring is not page-locked."""
        limit = lockable_bytes()
        reason = "the driver refused it"
        if limit is not None and limit < SMALL_LOCK_BYTES:
            reason = f"this process may lock only {limit // 1024:,} KiB of memory"
        return f"the ring is not page-locked ({reason})"


def advice(stats: Stats) -> str:
    """Return a sentence that names the bottleneck and a remedy."""
    count = stats.batches
    if not count:
        return NOTHING_LOADED
    figures = _Figures(stats)
    restarts = "persistent" in stats.untried
    minimum_s = max(
        (EPOCH_START if restarts else 0.5) * stats.seconds, figures.waiting * (stats.seconds - stats.first_s)
    )
    if figures.start_s and figures.start_s >= minimum_s:
        remedy = (
            "persistent_workers=True starts them once, not in each epoch"
            if restarts
            else "workers start only once, not in each epoch: ask again later, or exclude the start with stats(since=…)"
        )
        return (
            f"starting the workers is the bottleneck so far: it took {figures.start_s:.1f} of {stats.seconds:.1f} s, "
            f"during which they import the dataset's modules and unpickle the dataset; {remedy}"
        )
    if count < MIN_BATCHES:
        return f"{count} batch{'es' * (count > 1)}, too few to name the bottleneck: ask again later"
    if figures.bottleneck == "step":
        return _explain_step(figures)
    if figures.bottleneck == "wait":
        return f"{_explain_wait(figures)}; {figures.gain}"
    return (_explain_tiny_images(figures) if figures.bottleneck == "rest" else "") or _explain_issuing(
        figures, "is the bottleneck: it takes"
    )


def _explain_wait(figures: _Figures) -> str:
    """Explain why the loop waits: workers cannot work, workers are too slow, or the work is badly distributed."""
    stats = figures.stats
    if stats.restarts and stats.restarts >= 0.1 * stats.batches:
        return (
            f"dying workers are the bottleneck: {stats.restarts} died within {stats.batches} batches, and the loop "
            f"waits {figures.waiting:.0%} of the time; check loader.errors and the machine's memory"
        )
    ring_full = figures.share("slot wait")
    if not figures.in_process and not figures.workers_saturated and (ring_full >= RING_FULL or stats.ring_spilled):
        return (
            f"the ring is the bottleneck: ring_bytes={stats.ring_limit_bytes:,} is too small for the batches in "
            f"flight. It is full {min(ring_full, 1.0):.0%} of the time, and the loop waits {figures.waiting:.0%} of "
            f"the time; try ring_bytes={max(2 * stats.ring_limit_bytes, 1 << 20):,}"
        )
    if figures.workers_saturated and (sentence := _explain_tiny_images(figures)):
        return sentence
    if figures.workers_saturated:
        return (
            _explain_reading(figures) if figures.share_of_work(*figures.reading_parts) > 0.5 else _explain_work(figures)
        )
    busiest = max(stats.workers, key=lambda worker: worker.busy, default=None)
    half_of_others = 0.5 * (figures.workers - 1)
    if (
        busiest is not None
        and half_of_others
        and busiest.busy >= BUSY
        and figures.busy - busiest.busy <= half_of_others
    ):
        return (
            f"worker {busiest.number} is the bottleneck: it is busy {busiest.busy:.0%} of the time, the average of all "
            f"{figures.workers} workers is {figures.busy / figures.workers:.0%}, and the loop waits "
            f"{figures.waiting:.0%}; give workers equal shares of the data, or set in_order=False"
        )
    sufficient = figures.batches_ahead(figures.workers)
    if sufficient > stats.prefetch_factor:  # the default would be larger
        return (
            f"prefetch_factor={stats.prefetch_factor} is the bottleneck: it gives {figures.workers} workers too few "
            f"chunks to work on ({figures.load_description}); leave it out, or set it to {sufficient}"
        )
    prefetch = 2 * stats.prefetch_factor
    return (
        f"the bottleneck is too few batches in flight: {figures.load_description}, so work comes in bursts; raise "
        f"prefetch_factor (for example to {prefetch}) or lower chunk_size"
    )


def _explain_tiny_images(figures: _Figures) -> str:
    """Explain that most of the time is spent on the fixed cost per sample; return "" if it is not."""
    is_slow_read = figures.share_of_work(*figures.reading_parts) > 0.5 and figures.ms_per_sample("read") > 1.0
    if is_slow_read or not 0 < figures.image_bytes <= SMALL_BYTES or figures.file_bytes > SMALL_BYTES:
        return ""
    return (
        f"tiny images are the bottleneck: {figures.image_bytes:,.0f} bytes of pixels each, so most of the time is "
        f"spent on the overhead of each sample ({figures.load_description}); store the images decoded in one file: "
        "`gpuload pack --to array`, then gl.ArrayFile"
    )


def _explain_reading(figures: _Figures) -> str:
    """Explain that the dataset is slow, and whether it computes or waits."""
    stats = figures.stats
    bottleneck, cost = (
        "reading is the bottleneck",
        f"a sample takes {figures.ms_per_sample(*figures.reading_parts):.3g} ms",
    )
    remedies = []
    if figures.cpu_bound and not figures.in_process:
        bottleneck, cost = f"{bottleneck}, and takes CPU time", f"{cost} in the dataset's own code"
    elif "cache" in stats.untried and not figures.in_process and (figures.decodes_images or not stats.bytes_decoded):
        remedies.append("gl.Cached(dataset, …) keeps the data for the next epochs")
    if (figures.cpu_bound or figures.in_process) and not figures.decodes_images:
        remedies.append(
            "if the dataset decodes images itself, have it return gl.read(path) or gl.Encoded(bytes) instead, and pass "
            "its transforms to the Loader, which decodes only the region that the crop needs"
        )
    if "block" in stats.untried:
        remedies.append('shuffle="block" reads neighbouring samples together')
    return "; ".join([f"{bottleneck} ({cost}): {figures.load_description}", figures.more_workers_effect, *remedies])


def _explain_work(figures: _Figures) -> str:
    """Name the part of the workers' work that takes longest."""
    names = {"decode": "decode is" if figures.decodes_images else "copying the dataset's arrays is",
             "header": "reading image headers and drawing random parameters is",
             "pack": "packing labels is", "collate": "collate_fn is",
             "plan": "planning batches is", "read": "reading is"}  # fmt: skip
    slowest = max(names, key=figures.share_of_work)
    bottleneck, full_decodes, remedy = (
        f"{names[slowest]} the bottleneck",
        figures.stats.decoded_whole,
        figures.more_workers_effect,
    )
    if slowest == "decode" and figures.stats.decoders.keys() - {"Pillow"}:  # JPEGs
        if figures.share_of_work("decode") > 0.5 and 2 * full_decodes >= figures.stats.part("decode").count:
            remedy = (
                f"nvImageCodec cannot be used here, so {full_decodes:,} JPEGs were fully decoded where a part would "
                "do; `gpuload doctor` says why, and pip install 'gpuload[cu12]' (or cu13) installs it"
            )
        elif figures.share_of_work("decode") > 0.5 and figures.image_bytes >= LARGE_BYTES:
            bottleneck += f", as the images are large ({figures.image_bytes / 3e6:.1f} megapixels decoded per image)"
            remedy = f"shrink them once with `gpuload pack --short-side 512`; {remedy}"
        elif figures.suggested_workers is None:
            remedy += ", but smaller or cuttable JPEGs would help (`gpuload pack`)"
    return f"{bottleneck}: {figures.load_description}; {remedy}"


def _explain_issuing(figures: _Figures, predicate: str, name: str = "") -> str:
    """Return a sentence about a part of ``next()`` (default: the bottleneck): its name, `predicate`, its share of the
    loop's time, and a remedy."""
    stats, name = figures.stats, name or figures.bottleneck
    share = figures.issuing_shares.get(name, figures.waiting)
    cost = f"{predicate} {share:.0%} of the loop's time"
    if name == "stage":
        stage_ms = 1e3 * stats.part("stage", "main").seconds / stats.batches
        remedy = (
            "transforms run on the CPU, in this process: use fewer or cheaper transforms, smaller images, or a GPU"
            if stats.device == "cpu"
            else "print(loader.plan()) shows what runs where"
        )
        return f"the stage {cost}, {stage_ms:.3g} ms per batch; {remedy}"
    if name == "copy":
        remedy = "decode less of each image, with a crop or a smaller Resize as the first transform"
        if stats.pinning_refused:
            remedy = f"{figures.lock_problem}, so each copy makes the host wait; {RAISE_LOCK_LIMIT}"
        return f"copying batches to the device {cost}; {remedy}"
    if name == "device decode":
        remedy = "Decode(where='both', device_share=…) leaves some images to workers"
        return f"waiting for the device's decoder {cost}; {remedy}"
    cause = "a collate_fn, or samples with many parts" if figures.share("collate") > share / 2 else "many small chunks"
    return (
        f"the main process {cost} to put batches together, probably because of {cause}; use larger batches, or fewer "
        "values per sample"
    )


def _explain_step(figures: _Figures) -> str:
    """Explain that the stage occupies the device, or that loading keeps up."""
    on_device = figures.share("stage", where="device")
    if on_device > 0.5:
        return (
            f"the stage is the bottleneck: it takes {on_device:.0%} of the device's time; print(loader.plan()) shows "
            "what runs where, and fewer transforms on the device leave more time for training"
        )
    gain = figures.loading_share / max(1.0 - figures.loading_share, 0.01)
    clauses = [
        f"the training step is the bottleneck: the loop waits {figures.waiting:.1%} of the time, and a faster loader "
        f"could raise throughput by at most {max(gain, 0.01):.0%}"
    ]
    if figures.issuing_shares[figures.costliest_issuing_part] >= NEGLIGIBLE:
        clauses.append(_explain_issuing(figures, "takes", figures.costliest_issuing_part))
    elif figures.stats.pinning_refused:
        clauses.append(f"{figures.lock_problem}: {RAISE_LOCK_LIMIT}")
    sufficient = max(1, math.ceil(figures.busy / BUSY))
    if figures.stats.workers and figures.busy < 0.5 * figures.workers and sufficient < figures.workers:
        clauses.append(f"{figures.busy:.1f} of {figures.workers} workers are busy, and {sufficient} would be enough")
    return "; ".join(clauses)


def better_setting(stats: Stats) -> tuple[int, int] | None:
    """Return the ``num_workers`` and ``prefetch_factor`` that the advice suggests; None if more workers would not
    help."""
    if stats.batches < MIN_BATCHES:
        return None
    figures = _Figures(stats)
    if figures.bottleneck != "wait" or not figures.workers_saturated or figures.suggested_workers is None:
        return None
    return figures.suggested_workers[0], figures.batches_ahead(figures.suggested_workers[0])
