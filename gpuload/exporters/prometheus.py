"""`Loader.stats` for Prometheus, read at each scrape in the thread that handles the scrape.

gpuload registers one collector per registry, for all loaders that are watched there, so that each metric appears once,
with the loader's name as a label. Collectors hold weak references, so a loader that has been garbage-collected is
missing from the next scrape. This module needs prometheus-client (the extra `metrics`). It runs in the main process,
and starts no thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuload.checks import string
from gpuload.errors import import_optional

if TYPE_CHECKING:
    from gpuload.loader.loader import Loader
    from gpuload.loader.stats import Stats

__all__ = ["Prometheus"]

Sample = tuple[tuple[str, ...], float]  # label values, and the sample's value


class _Metric(NamedTuple):
    name: str  # without the suffix "_total" of counters
    text: str
    samples: Callable[[Stats], Any]  # the value; with labels, the samples
    labels: tuple[str, ...] = ()

    def read(self, stats: Stats) -> Iterable[Sample]:
        value = self.samples(stats)
        return value if self.labels else [((), value)]


COUNTERS: Final = (
    _Metric("gpuload_batches", "Batches yielded to the loop.", attrgetter("batches")),
    _Metric("gpuload_images", "Images yielded to the loop.", attrgetter("images")),
    _Metric("gpuload_loop_seconds", "Time within epochs, for loading and training.", attrgetter("seconds")),
    _Metric("gpuload_wait_seconds", "Time that the loop waited in next().", lambda s: s.waiting * s.seconds),
    _Metric("gpuload_read_bytes", "Bytes read by the workers.", attrgetter("decode.read_bytes")),
    _Metric("gpuload_cache_hits", "Samples found in a cache.", attrgetter("cache.hits")),
    _Metric("gpuload_cache_misses", "Samples not found in a cache.", attrgetter("cache.misses")),
    _Metric("gpuload_errors", "Samples that failed.", attrgetter("faults.errors")),
    _Metric("gpuload_worker_restarts", "Workers restarted.", attrgetter("faults.restarts")),
    _Metric(
        "gpuload_part_seconds",
        "Time spent on one part of the work (read, decode, …), summed over all workers.",
        lambda s: [((part.name, part.where), part.seconds) for part in s.parts],
        ("part", "where"),
    ),
    _Metric(
        "gpuload_part_runs",
        "Number of times that a part of the work ran.",
        lambda s: [((part.name, part.where), part.count) for part in s.parts],
        ("part", "where"),
    ),
    _Metric(
        "gpuload_decoded_images",
        "Images decoded, by decoder.",
        lambda s: [((decoder,), count) for decoder, count in s.decode.counts.items()],
        ("decoder",),
    ),
)
GAUGES: Final = (
    _Metric("gpuload_epoch", "The last epoch that began, counted from 0.", attrgetter("epoch")),
    _Metric(
        "gpuload_next_seconds", "Mean host time of next() without waiting, in this epoch.", lambda s: s.next_ms / 1e3
    ),
    _Metric(
        "gpuload_start_seconds", "Time from iter() until the current workers were ready.", attrgetter("start.seconds")
    ),
    _Metric("gpuload_ready_chunks", "Chunks that are ready and not yet yielded.", attrgetter("chunks_ready")),
    _Metric("gpuload_ready_batches", "Batches that are ready and not yet yielded.", attrgetter("batches_ready")),
    _Metric("gpuload_ring_used_bytes", "Shared memory in use for decoded pixels.", attrgetter("ring.used_bytes")),
    _Metric("gpuload_ring_bytes", "Shared memory allocated for decoded pixels.", attrgetter("ring.bytes")),
    _Metric(
        "gpuload_ring_limit_bytes", "Limit of the shared memory for decoded pixels.", attrgetter("ring.limit_bytes")
    ),
    _Metric("gpuload_pinned_bytes", "Page-locked memory.", attrgetter("stage.pinned_bytes")),
    _Metric(
        "gpuload_worker_busy_ratio",
        "Fraction of this epoch, or of the time since its start if that was later, in which a worker was busy.",
        lambda s: [((str(worker.number),), worker.busy) for worker in s.workers],
        ("worker",),
    ),
)

_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()  # keyed by registry
_collectors_lock = threading.Lock()


class Prometheus:
    """An exporter of a loader's `Loader.stats` to Prometheus, read at each scrape.

    Counters start at 0 when the exporter is created, and continue across epochs. They start over with new workers:
    after `Loader.close`, and with each epoch if ``persistent_workers=False``. Gauges show current values, or values of
    the current epoch. All metrics are named ``gpuload_…`` and have the label ``loader``. An exporter does not keep its
    loader alive. Each rank is a separate process, and needs its own port.

    Args:
        loader: a `Loader`.
        name: the value of the label; must be unique within a registry.
        registry: a ``prometheus_client.CollectorRegistry``; default: the registry that ``start_http_server`` serves.

    Raises:
        ModuleNotFoundError: prometheus-client is not installed: ``pip install 'gpuload[metrics]'``.
        ValueError: a loader with this name is already being watched.

    Example:
        >>> import numpy as np
        >>> import gpuload as gl
        >>> from prometheus_client import CollectorRegistry
        >>> loader = gl.Loader([np.zeros((8, 8, 3), np.uint8)] * 6, batch_size=2, num_workers=0, device="cpu")
        >>> registry = CollectorRegistry()
        >>> exporter = gl.exporters.Prometheus(loader, name="train", registry=registry)
        >>> for images in loader:
        ...     pass
        >>> registry.get_sample_value("gpuload_batches_total", {"loader": "train"})
        3
        >>> exporter.close()
    """

    def __init__(self, loader: Loader, *, name: str = "default", registry: Any = None) -> None:
        core = import_optional("prometheus_client.core", "exporters.Prometheus", "metrics")
        self._registry = core.REGISTRY if registry is None else registry
        self._name = string("name", name)
        self._entry = weakref.ref(loader), loader.stats()
        with _collectors_lock:
            collector = _collectors.get(self._registry)
            existing_entry = None if collector is None else collector.loaders.get(name)
            if existing_entry is not None and existing_entry[0]() is not None:
                raise ValueError(
                    f"a loader named {name!r} is already watched in this registry; choose another name=…, or close() "
                    "the Prometheus exporter of the other loader"
                )
            if collector is None:
                collector = _Collector(core)
                self._registry.register(collector)  # may raise an error, so nothing is stored before
                _collectors[self._registry] = collector
            collector.loaders[name] = self._entry

    def close(self) -> None:
        """Stop watching the loader. Idempotent."""
        with _collectors_lock:
            collector = _collectors.get(self._registry)
            if collector is None or collector.loaders.get(self._name) is not self._entry:
                return
            del collector.loaders[self._name]
            if not collector.loaders:
                del _collectors[self._registry]
                self._registry.unregister(collector)


class _Collector:
    """The metrics of all watched loaders in a registry, which the registry collects at each scrape."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.loaders: dict[str, tuple[weakref.ref[Loader], Stats]] = {}  # loader and initial statistics, keyed by name

    def describe(self) -> Iterator[Any]:
        return self._build_families([])

    def collect(self) -> Iterator[Any]:
        snapshots = []
        for name, (reference, initial_stats) in list(self.loaders.items()):
            if (loader := reference()) is not None:
                snapshots.append((name, loader.stats(since=initial_stats), loader.stats()))
            del loader
        return self._build_families(snapshots)

    def _build_families(self, snapshots: list[tuple[str, Stats, Stats]]) -> Iterator[Any]:
        for metric in (*COUNTERS, *GAUGES):
            is_counter = metric in COUNTERS
            family_type = self._core.CounterMetricFamily if is_counter else self._core.GaugeMetricFamily
            family = family_type(metric.name, metric.text, labels=("loader", *metric.labels))
            for name, since_initial, epoch in snapshots:
                for labels, value in metric.read(since_initial if is_counter else epoch):
                    family.add_metric((name, *labels), value)
            yield family
