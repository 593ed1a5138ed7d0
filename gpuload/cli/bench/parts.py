"""Measures the parts of loading one by one, and the loader as a whole. Main process.

The parts are the loader's own: its workers read, or read and decode, for a consumer that takes their slots and gives
them back; its stage makes one decoded batch again and again. So it reaches into the Loader, as no user should.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

import gpuload as gl
from gpuload.cli.bench.reading import OnlyRead
from gpuload.cli.bench.verdict import Part, Setting, candidates, recommended, worth_trying
from gpuload.cli.console import count_of
from gpuload.cli.measure import forever, images_of, one_round
from gpuload.cli.processes import cpu_seconds
from gpuload.errors import LimitError
from gpuload.loader.advice import better_setting
from gpuload.loader.limits import default_workers
from gpuload.order.place import Place
from gpuload.order.schedule import schedule_of

__all__ = ["Bench", "Found", "measure_all"]

COPY_BYTES: Final = 64 << 20
PREFETCH: Final = 2  # the loader's own; twice as many is tried with the best number of workers
MOST_MORE: Final = 2  # settings that are tried since ``loader.stats()`` names them
Step = Callable[[], tuple[int, int]]  # does some work; returns how many images, and how many bytes


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, and for how long.

    Args:
        dataset: map-style.
        transforms, batch_size: as for `Loader`.
        device: where the batches go.
        seconds: of each measurement, in which at least one batch is made.
    """

    dataset: Any
    transforms: Sequence[Any]
    batch_size: int
    device: torch.device
    seconds: float

    def reading(self, workers: int) -> Part:
        """Workers that read samples, and do nothing with them."""
        options: dict[str, Any] = {"num_workers": workers, "device": "cpu", "shuffle": True, "on_error": "skip"}
        with gl.Loader(OnlyRead(self.dataset), self.batch_size, **options) as loader:
            batches = forever(loader)

            def step() -> tuple[int, int]:
                sizes = next(batches)
                return len(sizes), int(sizes.sum())

            return self._rate("read", count_of(workers, "worker"), step)

    def decoding(self, workers: int) -> Part:
        """Workers that read, draw and decode."""
        with self._loader(workers) as loader:
            iter(loader)
            batches = _decoded(loader)

            def step() -> tuple[int, int]:
                batch = next(batches)
                return len(batch.spec.positions), sum(part.used_bytes for part in batch.parts)

            return self._rate("decode", count_of(workers, "worker"), step)

    def staging(self, workers: int) -> Part:
        """The stage alone: draws, transforms, collation; on a GPU the copies too. With as many threads as beside so
        many workers."""
        with self._loader(workers) as loader:
            iter(loader)
            session: Any = loader._session
            batch = next(_decoded(loader))

            def step() -> tuple[int, int]:
                with session.transfer.stream(after_consumer=False):
                    made = session.assembly.make(batch, False, lambda: None)
                    ticket = session.transfer.finish()
                session.transfer.hand_over(ticket, made.tensors)
                value = made.value if made.rest is None else made.rest()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)
                session.transfer.reclaim(False)
                return len(images_of(value)), 0

            return self._rate("augment", self.device.type.upper(), step)

    def copying(self, image_bytes: float) -> Part:
        """From page-locked memory to the GPU; or within memory, where there is none."""
        target: Any
        if self.device.type == "cpu":
            source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
            where = "within memory"
        else:
            source = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
            target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
            where = f"to {self.device}"

        def step() -> tuple[int, int]:
            if isinstance(source, np.ndarray):
                np.copyto(target, source)
            else:
                target.copy_(source, non_blocking=True)
                torch.accelerator.synchronize(self.device)
            return 1, COPY_BYTES

        made = self._rate("copy", where, step, seconds=min(1.0, self.seconds))
        images = COPY_BYTES / max(1.0, image_bytes)  # in each step
        return Part("copy", where, made.images_per_s * images, made.cpu_s_per_1000 / images, image_bytes)

    def loading(self, workers: int, prefetch: int) -> tuple[Setting, int]:
        """The whole loader, without a training step. Returns also how many samples failed."""
        with self._loader(workers, prefetch_factor=prefetch) as loader:
            batches = forever(loader)
            for _ in range(1 + prefetch):  # workers start
                next(batches)
            before = loader.stats()
            made = one_round(batches, self.seconds, self.device)
            stats = loader.stats(since=before)
            better = better_setting(stats)
            rates = made.images_per_s, made.cpu_s_per_1000
            return Setting(workers, prefetch, *rates, stats.advice, better), len(loader.errors)

    def _loader(self, workers: int, **options: Any) -> gl.Loader:
        return gl.Loader(
            self.dataset,
            self.batch_size,
            shuffle=True,
            transforms=self.transforms,
            num_workers=workers,
            device=self.device,
            on_error="skip",
            **options,
        )

    def _rate(self, name: str, where: str, step: Step, seconds: float | None = None) -> Part:
        """The rate of a step that is repeated; its first time does not count, in which workers start."""
        step()
        images, nbytes, cpu_before, started = 0, 0, cpu_seconds(os.getpid()), time.perf_counter()
        while (spent := time.perf_counter() - started) < (seconds or self.seconds) or not images:
            more, bytes_more = step()
            images, nbytes = images + more, nbytes + bytes_more
        cpu_s = cpu_seconds(os.getpid()) - cpu_before
        return Part(name, where, images / spent, 1000 * cpu_s / images, nbytes / images if nbytes else None)


def _decoded(loader: gl.Loader) -> Iterator[Any]:
    """Batches as they come from the workers, each given back when the next one is asked for."""
    session: Any = loader._session
    feed, epoch = session.feed, 0
    while True:
        feed.begin(schedule_of(loader._options.order, loader.num_workers).batches(Place(epoch, 0)))
        epoch += 1
        while (batch := feed.take()) is not None:
            yield batch
            feed.release(batch)


@dataclass(frozen=True)
class Found:
    """All that was measured: `parts` in order, some of them by name; `failed`: samples that could not be loaded."""

    parts: Sequence[Part]
    read: Part
    decode: Part
    augment: Part
    copy: Part
    settings: Sequence[Setting]
    failed: int


def measure_all(
    bench: Bench,
    cpus: int,
    report: Callable[[int, int, Part | Setting], None],
    remark: Callable[[str], None],
) -> Found:
    """Measure each part and several settings. `report` is told how many are done, of how many, and the latest; `remark`
    why a setting is left out.

    Raises:
        LimitError: not even one worker can be started.
    """
    usual = default_workers(cpus, 1)
    most, numbers = max(cpus, usual), candidates(cpus, usual)
    total = 4 + (most > 1) + len(numbers) + 1
    parts: list[Part] = []
    settings: list[Setting] = []

    def part(made: Part) -> Part:
        parts.append(made)
        report(len(parts), total, made)
        return made

    def setting(workers: int, prefetch: int) -> int:
        made, failed = bench.loading(workers, prefetch)
        settings.append(made)
        report(len(parts) + len(settings), total, made)
        return failed

    read = part(bench.reading(most))
    if most > 1:
        part(bench.decoding(1))
    decode = part(bench.decoding(most))
    augment = part(bench.staging(most))
    copy = part(bench.copying(decode.image_bytes or 1))
    failed = 0
    tried = [(workers, PREFETCH) for workers in numbers]
    while tried:
        try:
            failed = max(failed, setting(*tried.pop(0)))
        except LimitError as error:  # too few files or too little memory for so many
            if not settings:
                raise
            remark(str(error))
            continue
        more = worth_trying(settings) if not tried and len(settings) < len(numbers) + MOST_MORE else None
        if more is not None:
            tried, total = [more], total + 1
    best = recommended(settings)
    setting(best.num_workers, 2 * best.prefetch_factor)
    return Found(parts, read, decode, augment, copy, settings, failed)
