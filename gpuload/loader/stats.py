"""What `Loader.stats` gives: a frozen snapshot of what loading took, in numbers and as a table. Plain values; it refers
to nothing of its loader, and can be kept, compared and pickled.

How the numbers come about: `gpuload.loader.totals`. What is said of them at the end: `gpuload.loader.advice`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from gpuload.loader.totals import Totals

__all__ = ["NOTHING", "Part", "Stats", "WorkerStats"]

NOTHING: Final = "nothing was loaded yet: ask again after some batches"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the work.

    Attributes:
        name: ``"start"`` (of workers, until they can take a chunk), ``"read"`` (the dataset gives a sample),
            ``"header"`` (samples taken apart, headers read, regions drawn),
            ``"decode"``, ``"pack"`` (labels and descriptions to the slot), ``"collate"``, ``"plan"`` (of batches, for
            the fused kernels), ``"idle"`` (workers without a chunk), ``"wait"`` (the loop, for a batch), ``"hold"``
            (the host, for a device that is behind), ``"device decode"`` (the host, for images that the device decodes),
            ``"slot wait"`` (chunks, for room in the ring), ``"copy"``, ``"stage"`` (the transforms), ``"rest"`` (what
            else ``next()`` does), ``"step"`` (the loop itself).
        where: who does it: the ``"workers"``, all together; the ``"main"`` process; or the ``"device"``, whose times
            are measured for one batch of eight and scaled up.
        seconds: how long it took.
        count: how often: samples for what workers do to each, chunks or batches otherwise.
    """

    name: str
    where: Literal["workers", "main", "device"]
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker.

    Attributes:
        number: its number, as in `get_worker_info().id`.
        busy: the share of the time since its start ended in which it had something to do, 0 to 1.
        samples: how many it did.
        restarts: how often it died, and another took its place.
    """

    number: int
    busy: float
    samples: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a `Loader` did since its epoch began, or since an earlier snapshot: ``print(loader.stats())``.

    Only time within epochs counts: not what lies between two of them.

    Attributes:
        epoch: the number of the last epoch that began.
        seconds: how long the snapshot covers.
        batches, images, images_per_s: what the loop was given; samples count as images.
        waiting: the share of the time that the loop waited in ``next()`` for a batch, 0 to 1.
        next_ms: host time of a ``next()``, milliseconds, without that waiting.
        first_s: how long it waited for the first batch of the epoch, seconds, if that is covered.
        parts: what took the time.
        workers: those that there are, and those that left meanwhile; none with ``num_workers=0``, where the main
            process does their parts.
        chunks_ready, batches_ready: done and not given yet, at this moment.
        ring_used_bytes, ring_bytes, ring_limit_bytes: shared memory of slots in use, of all slots, and the most that
            there may be, at this moment; ring_segments: slots there are, ring_grown: slots that were made,
            ring_spilled: chunks that were moved out of a full ring into ordinary memory.
        pinned_bytes: of `ring_bytes`, what is page-locked; pinning_refused: the driver refused to lock some.
        bytes_read: of image files and arrays, as the dataset gave them.
        bytes_decoded: of pixels that went to the slots.
        decoders: how many images each decoder did; ``"cut"``: crops cut out of a JPEG with restart markers first;
            ``"scaled"``: images decoded smaller and resized, with ``Decode(scale="fast")``.
        device_refused: how many images the device's decoder refused, by its reasons; the CPU got them, in this process.
        decode_peak_bytes: the most that was decoded at a time on the device, before it was cropped.
        decoded_whole: JPEGs decoded whole for a part of them, since nvImageCodec cannot be used.
        cache_hits, cache_misses: of `Cached` datasets, by all processes of this machine that share them; and samples of
            a `DeviceCached`. resident_bytes: the pixels that this one keeps on the device.
        errors: samples that failed; restarts: workers that died.
        device: where the batches go; placement: where workers and ring are on a machine with several NUMA nodes, or why
            they are anywhere; "" for batches on the CPU.
        num_workers: how many workers there are; elsewhere: they are on other machines; chunk_size: how many samples one
            does at a time, at most; prefetch_factor: how many batches are in work beside the one in use.
        cpus: how many CPUs this process may use; cpu_s: CPU seconds of this process and its workers together;
            workers_cpu_s: those of workers; workers_queued_s: for how long busy workers were runnable while others had
            the CPUs, where the kernel tells.
        untried: what could help and is not in use: ``"block"`` (``shuffle="block"``, of data sets with several samples
            in a file), ``"cache"`` (`Cached`), ``"persistent"`` (``persistent_workers=True``).
        advice: what the bottleneck is, and what to do about it, in one sentence.

    Example:
        >>> import gpuload as gl, numpy as np
        >>> pictures = [np.zeros((40, 60, 3), np.uint8)] * 64
        >>> loader = gl.Loader(pictures, batch_size=8, num_workers=0, device="cpu")
        >>> for images in loader:
        ...     pass
        >>> stats = loader.stats()
        >>> stats.batches, stats.images, stats.errors
        (8, 64, 0)
    """

    epoch: int = 0
    seconds: float = 0.0
    batches: int = 0
    images: int = 0
    images_per_s: float = 0.0
    waiting: float = 0.0
    next_ms: float = 0.0
    first_s: float = 0.0
    parts: tuple[Part, ...] = ()
    workers: tuple[WorkerStats, ...] = ()
    chunks_ready: int = 0
    batches_ready: int = 0
    ring_used_bytes: int = 0
    ring_bytes: int = 0
    ring_limit_bytes: int = 0
    ring_segments: int = 0
    ring_grown: int = 0
    ring_spilled: int = 0
    pinned_bytes: int = 0
    pinning_refused: bool = False
    bytes_read: int = 0
    bytes_decoded: int = 0
    decoders: dict[str, int] = field(default_factory=dict)
    device_refused: dict[str, int] = field(default_factory=dict)
    decode_peak_bytes: int = 0
    decoded_whole: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    resident_bytes: int = 0
    errors: int = 0
    restarts: int = 0
    device: str = "cpu"
    placement: str = ""
    num_workers: int = 0
    elsewhere: bool = False
    chunk_size: int = 1
    prefetch_factor: int = 2
    cpus: int = 1
    cpu_s: float = 0.0
    workers_cpu_s: float = 0.0
    workers_queued_s: float = 0.0
    untried: tuple[str, ...] = ()
    advice: str = NOTHING
    totals: Totals | None = field(default=None, repr=False, compare=False)  # for `since=`

    def part(self, name: str, where: str | None = None) -> Part:
        """The part of this name; one of 0 seconds if there is none. Several (of workers and main) are summed up, unless
        `where` says which."""
        found = [part for part in self.parts if part.name == name and where in (None, part.where)]
        if len(found) == 1:
            return found[0]
        seconds, count = sum(part.seconds for part in found), sum(part.count for part in found)
        return Part(name, found[0].where if found else "main", seconds, count)

    @property
    def busy(self) -> float:
        """How many workers were busy, on average, since they were started."""
        return sum(worker.busy for worker in self.workers)

    @property
    def waiting_later(self) -> float:
        """The share of the time after the first batch that the loop waited, 0 to 1."""
        later_s = self.seconds - self.first_s
        return max(0.0, self.waiting * self.seconds - self.first_s) / later_s if later_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        found = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "totals"}
        for name in ("parts", "workers"):
            found[name] = [{own.name: getattr(one, own.name) for own in fields(one)} for one in found[name]]
        return found | {"decoders": dict(self.decoders), "device_refused": dict(self.device_refused)}

    def __str__(self) -> str:
        from gpuload.loader.table import table_of

        return table_of(self)

    def _repr_html_(self) -> str:
        from gpuload.loader.html import stats_html

        return stats_html(self)
