"""``gpuload bench``: what this machine reads, decodes, augments and loads of the user's data, which setting is best,
and how gpuload compares to torch's DataLoader with the same work.

Runs in the main process. Each part of loading is measured alone: the loader's workers read, or read and decode, for a
consumer that takes their slots and gives them back; its stage makes one decoded batch again and again. So it reaches
into the Loader, as no user should. Then the Loader as a whole is measured with several settings, and the DataLoader
(`gpuload.cli.torch_way`) with several numbers of workers; the best of both take turns.

A sample that cannot be loaded is left out on both sides, and counted once, however often it comes.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves

import gpuload as gl
from gpuload.cli.console import busy, count_of, device_of, fail, make_console, progress, say, write_json
from gpuload.cli.processes import cpu_seconds
from gpuload.cli.source import load_recipe, source_of, usual_recipe
from gpuload.cli.torch_way import Way, data_loader, usual_way
from gpuload.datasets.sample import Encoded, Image, Mask
from gpuload.datasets.tree import flatten
from gpuload.errors import GpuloadError, LimitError
from gpuload.loader.advice import better_setting
from gpuload.loader.limits import default_workers, usable_cpus
from gpuload.order.place import Place
from gpuload.order.schedule import schedule_of

__all__ = [
    "Bench", "OnlyRead", "Row", "bound_by", "candidates", "compare", "comparison", "forever", "images_of",
    "measure_parts", "measure_settings", "measured", "medians", "next_images", "recommended", "remark_on", "run",
]  # fmt: skip

COPY_BYTES: Final = 64 << 20
PREFETCH: Final = 2  # batches ahead, gpuload's in total, DataLoader's for each worker: the defaults of both
MOST_MORE: Final = 2  # settings that are tried since ``loader.stats()`` names them
NEAR: Final = 0.97  # of the best rate: as good, with fewer processes
NOTHING: Final = "an epoch has no images: no sample can be loaded; gpuload inspect says why"
READS: Final = 0.5  # of a worker's time: then reading is the bottleneck, else decoding
Step = Callable[[], tuple[int, int]]  # does some work; returns how many images, and how many bytes


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rate that was measured, and of what.

    Attributes:
        name: ``"read"``, ``"decode"`` (with reading), ``"augment"``, ``"copy"``, ``"Loader"`` or ``"DataLoader"``.
        where: who did it.
        images_per_s, cpu_s_per_1000: the rate, and the processor seconds of all processes for 1,000 images.
        image_bytes: bytes of an image that were read, made or copied, on average; None: not counted.
        num_workers, prefetch_factor: of a Loader or DataLoader.
        better: the same two numbers as ``loader.stats()`` names them, if it does.
    """

    name: str = ""
    where: str = ""
    images_per_s: float
    cpu_s_per_1000: float = 0.0
    image_bytes: float | None = None
    num_workers: int = 0
    prefetch_factor: int = 0
    better: tuple[int, int] | None = None

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (10⁶) a second."""
        return None if self.image_bytes is None else self.images_per_s * self.image_bytes / 1e6

    @property
    def workers(self) -> str:
        return count_of(self.num_workers, "worker")

    def as_dict(self) -> dict[str, Any]:
        """Return what there is to say of it, for JSON."""
        values = {**asdict(self), "mb_per_s": self.mb_per_s}
        setting = () if "Loader" in self.name else ("num_workers", "prefetch_factor")
        return {name: value for name, value in values.items() if value is not None and name not in setting}


def images_of(batch: Any) -> torch.Tensor:
    """Return the images of a batch: its first tensor of images, or else its first tensor.

    Raises:
        ValueError: there is none.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    images = next((tensor for tensor in tensors if tensor.ndim >= 4), next(iter(tensors), None))
    if images is None:
        raise ValueError(f"a batch has no tensors, but is a {type(batch).__name__}")
    return images


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other. ValueError if an epoch has no image."""
    while True:
        images = 0
        for batch in loader:
            images += len(images_of(batch))
            yield batch
        if not images:
            raise ValueError(NOTHING)


def next_images(batches: Iterator[Any], device: torch.device) -> Step:
    """Return the step of a loader: take a batch to the device."""
    return lambda: (len(images_of(next(batches)).to(device, non_blocking=True)), 0)


def measured(step: Step, device: torch.device, *, skip: int, seconds: float = 0.0, images: int = 1) -> Row:
    """Repeat a step until so many seconds are over and it made so many images. `skip` steps before do not count:
    workers start, and batches were made before."""
    for _ in range(skip):
        step()
    _wait_for(device)
    count, nbytes, cpu_before_s, began_s = 0, 0, cpu_seconds(os.getpid()), time.perf_counter()
    while count < images or time.perf_counter() - began_s < seconds:
        more, bytes_more = step()
        count, nbytes = count + more, nbytes + bytes_more
    _wait_for(device)
    wall_s, cpu_s = time.perf_counter() - began_s, cpu_seconds(os.getpid()) - cpu_before_s
    image_bytes = nbytes / count if nbytes else None
    return Row(images_per_s=count / wall_s, cpu_s_per_1000=1000 * cpu_s / count, image_bytes=image_bytes)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# -- measuring --------------------------------------------------------------------------------------------------------


class OnlyRead:
    """A dataset that reads the samples of another one, and gives the number of bytes of their files and arrays."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        leaves: list[Any] = []
        flatten(self.dataset[index], leaves)
        return sum(map(_nbytes, leaves))


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, Encoded):
        return len(leaf.data)
    if isinstance(leaf, Image | Mask):
        return _nbytes(leaf.array)
    return leaf.nbytes if isinstance(leaf, np.ndarray) else 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, and for how long.

    Args:
        dataset: map-style.
        transforms, batch_size: as for `Loader`.
        device: where the batches go.
        seconds: of each measurement, in which at least one batch is made.

    Attributes:
        failed: indices of the samples that could not be loaded, by either side.
    """

    dataset: Any
    transforms: Sequence[Any]
    batch_size: int
    device: torch.device
    seconds: float
    failed: set[Any] = field(default_factory=set)

    def reading(self, workers: int) -> Row:
        """Measure workers that read samples, and do nothing with them."""
        with self.loader(workers, dataset=OnlyRead(self.dataset), transforms=(), device="cpu") as loader:
            batches = forever(loader)

            def step() -> tuple[int, int]:
                sizes = next(batches)
                return len(sizes), int(sizes.sum())

            return self._row("read", count_of(workers, "worker"), step)

    def decoding(self, workers: int) -> Row:
        """Measure workers that read, draw and decode."""
        with self.loader(workers) as loader:
            iter(loader)
            batches = _decoded(loader)

            def step() -> tuple[int, int]:
                batch = next(batches)
                return len(batch.spec.positions), sum(part.used_bytes for part in batch.parts)

            return self._row("decode", count_of(workers, "worker"), step)

    def staging(self, workers: int) -> Row:
        """Measure the stage alone: draws, transforms, collation; on a GPU the copies too. With as many threads as next
        to so many workers."""
        with self.loader(workers) as loader:
            iter(loader)
            session: Any = loader._session
            batch = next(_decoded(loader))

            def step() -> tuple[int, int]:
                with session.transfer.stream(after_consumer=False):
                    made = session.assembly.make(batch, False, lambda: None)
                    ticket = session.transfer.finish()
                session.transfer.hand_over(ticket, made.tensors)
                value = made.value if made.rest is None else made.rest()
                _wait_for(self.device)
                session.transfer.reclaim(False)
                return len(images_of(value)), 0

            return self._row("augment", self.device.type.upper(), step)

    def copying(self, image_bytes: float) -> Row:
        """Measure copies from page-locked memory to the GPU, in images of so many bytes."""
        source = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)

        def step() -> tuple[int, int]:
            target.copy_(source, non_blocking=True)
            _wait_for(self.device)
            return max(1, round(COPY_BYTES / image_bytes)), COPY_BYTES

        return self._row("copy", f"to {self.device}", step)

    def loading(self, workers: int, prefetch: int) -> Row:
        """Measure the whole Loader, without a training step."""
        with self.loader(workers, prefetch_factor=prefetch) as loader:
            step = next_images(forever(loader), self.device)
            for _ in range(1 + prefetch):  # workers start
                step()
            before = loader.stats()
            row = measured(step, self.device, skip=0, seconds=self.seconds)
            better = better_setting(loader.stats(since=before))
        where = f"{count_of(workers, 'worker')}, prefetch {prefetch}"
        return replace(row, name="Loader", where=where, num_workers=workers, prefetch_factor=prefetch, better=better)

    def peer_loading(self, workers: int, way: Way) -> Row:
        """Measure the DataLoader, without a training step."""
        skip = 1 + PREFETCH * max(1, workers)
        row = measured(self.peer_step(workers, way), self.device, skip=skip, seconds=self.seconds)
        return replace(row, name="DataLoader", where=count_of(workers, "worker"), num_workers=workers)

    @contextmanager
    def loader(self, workers: int, **options: Any) -> Iterator[gl.Loader]:
        """Yield a Loader of the data, which leaves out and notes what fails. Its workers end with it."""
        faults = gl.Faults(on_error="skip", max_error_rate=1.0, max_restarts=100)
        options = {"dataset": self.dataset, "transforms": self.transforms, "device": self.device, **options}
        options |= {"batch_size": self.batch_size, "shuffle": True, "num_workers": workers, "faults": faults}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that a sample is left out: they are counted
            with gl.Loader(**options) as loader:
                yield loader
                self.failed.update(record.index for record in loader.errors)

    def peer_step(self, workers: int, way: Way) -> Step:
        """Return the step of a DataLoader that does the same work; its workers end when the step is collected."""
        options = {"batch_size": self.batch_size, "num_workers": workers, "pin_memory": self.device.type != "cpu"}
        batches = forever(data_loader(self.dataset, way, **options))

        def step() -> tuple[int, int]:
            images, _, failed = next(batches)
            self.failed.update(failed)
            return len(images.to(self.device, non_blocking=True)), 0

        return step

    def _row(self, name: str, where: str, step: Step) -> Row:
        return replace(measured(step, self.device, skip=1, seconds=self.seconds), name=name, where=where)


def _decoded(loader: gl.Loader) -> Iterator[Any]:
    """Yield batches as they come from the workers; each is given back when the next one is asked for. ValueError if an
    epoch has no pixels."""
    session: Any = loader._session
    feed, epoch, pixels = session.feed, 0, 1
    while pixels:
        feed.begin(schedule_of(loader._options.order, loader.num_workers).batches(Place(epoch, 0)))
        epoch, pixels = epoch + 1, 0
        while (batch := feed.take()) is not None:
            if used := sum(part.used_bytes for part in batch.parts):
                pixels += used
                yield batch
            feed.release(batch)
    raise ValueError(NOTHING)


Report = Callable[[Row], Row]  # tells how far it is, and returns the row


def measure_parts(bench: Bench, workers: int, report: Report) -> dict[str, Row]:
    """Measure each part alone, with so many workers, and decoding with one. Return the rows by name, in order."""
    rows = {"read": report(bench.reading(workers))}
    if workers > 1:
        rows["decode with one"] = report(bench.decoding(1))
    rows["decode"] = report(bench.decoding(workers))
    rows["augment"] = report(bench.staging(workers))
    if bench.device.type != "cpu":
        rows["copy"] = report(bench.copying(rows["decode"].image_bytes or 1))
    return rows


def measure_settings(bench: Bench, numbers: Sequence[int], report: Report, remark: Callable[[str], None]) -> list[Row]:
    """Measure the Loader with these numbers of workers, with those that ``loader.stats()`` of the best one names (if
    there are several), and the best of all with twice the batches ahead. `remark` is told why one is left out.

    Raises:
        LimitError: not even one of them can be started.
    """
    rows: list[Row] = []
    to_try = [(workers, PREFETCH) for workers in numbers]
    while to_try:
        try:
            rows.append(report(bench.loading(*to_try.pop(0))))
        except LimitError as error:  # too few files or too little memory for so many
            if not rows:
                raise
            remark(str(error))
            continue
        if not to_try and 1 < len(numbers) <= len(rows) < len(numbers) + MOST_MORE:
            better = recommended(rows).better
            if better is not None and better[0] > max(row.num_workers for row in rows):
                to_try.append(better)
    best = recommended(rows)
    rows.append(report(bench.loading(best.num_workers, 2 * best.prefetch_factor)))
    return rows


def compare(bench: Bench, mine: Row, peer: Row, way: Way, rounds: int, report: Report) -> list[tuple[Row, Row]]:
    """Let the Loader and the DataLoader of these rows take turns. Each turn begins with batches that do not count: what
    was made ahead during the other one's turn."""
    pairs = []
    with bench.loader(mine.num_workers, prefetch_factor=mine.prefetch_factor) as loader:
        turns = [
            (mine, next_images(forever(loader), bench.device), 1 + mine.prefetch_factor),
            (peer, bench.peer_step(peer.num_workers, way), 1 + PREFETCH * max(1, peer.num_workers)),
        ]
        for _ in range(rounds):
            first, second = (
                report(replace(measured(step, bench.device, skip=skip, seconds=bench.seconds), name=row.name))
                for row, step, skip in turns
            )
            pairs.append((first, second))
    return pairs


def medians(pairs: Sequence[tuple[Row, Row]]) -> dict[str, float]:
    """Return the medians of rounds, gpuload's row first in each. A ratio is the median of the ratios within the rounds:
    above 1, gpuload is faster, or takes less."""
    values = {
        "images_per_s": [mine.images_per_s for mine, _ in pairs],
        "peer_images_per_s": [peer.images_per_s for _, peer in pairs],
        "rate_ratio": [mine.images_per_s / peer.images_per_s for mine, peer in pairs],
        "cpu_s_per_1000": [mine.cpu_s_per_1000 for mine, _ in pairs],
        "peer_cpu_s_per_1000": [peer.cpu_s_per_1000 for _, peer in pairs],
        "cpu_ratio": [peer.cpu_s_per_1000 / (mine.cpu_s_per_1000 or peer.cpu_s_per_1000 or 1) for mine, peer in pairs],
    }
    return {name: statistics.median(each) for name, each in values.items()}


# -- the verdict ------------------------------------------------------------------------------------------------------


def candidates(cpus: int, usual: int) -> list[int]:
    """Return the numbers of workers that are tried: one, half the CPUs, the default, all CPUs, and half as many again,
    which help where workers wait for a disk."""
    return sorted({1, max(1, cpus // 2), usual, cpus, cpus + max(1, cpus // 2)})


def recommended(rows: Sequence[Row]) -> Row:
    """Return, of those that are nearly as fast as the fastest, the one with the fewest workers, then batches ahead."""
    best = max(row.images_per_s for row in rows)
    good = [row for row in rows if row.images_per_s >= NEAR * best]
    return min(good, key=lambda row: (row.num_workers, row.prefetch_factor))


def remark_on(best: Row, rows: Sequence[Row]) -> str:
    """Explain a recommended row whose ``loader.stats()`` names more workers, since these reckon what was measured here;
    "" if they do not."""
    workers = best.num_workers
    if best.better is None or best.better[0] <= workers:
        return ""
    wanted = best.better[0]
    names = f"Of the Loader with {best.workers}, loader.stats() may say that {wanted} would be faster"
    more = [row for row in rows if row.num_workers > workers]
    if not more or wanted > max(row.num_workers for row in more):
        return f"{names}. So many were not measured: try --workers {wanted}"
    row = min(more, key=lambda row: abs(row.num_workers - wanted))
    return f"{names}, as it cannot try them: measured, {row.workers} load {row.images_per_s:,.0f} images/s"


def bound_by(parts: Mapping[str, Row], *, cpus: int, on_cpu: bool) -> tuple[str, str]:
    """Return the name of the part that is the bottleneck, and a sentence with the figures.

    Args:
        parts: of `measure_parts`. Decoding includes reading.
        on_cpu: batches are made on the CPU: the stage then takes processors away from the workers. The bottleneck is
            the part that takes more processor time, unless workers wait for the disk.
    """
    read, decode, augment = (parts[name] for name in ("read", "decode", "augment"))
    waits = decode.images_per_s / read.images_per_s > READS
    if on_cpu and not (waits and decode.images_per_s < augment.images_per_s):
        name = "decoding" if decode.cpu_s_per_1000 >= augment.cpu_s_per_1000 else "augmenting"
        return name, (
            f"{name} is the bottleneck: of the {count_of(cpus, 'CPU')}, an image takes workers "
            f"{decode.cpu_s_per_1000:.2f} ms and the transforms {augment.cpu_s_per_1000:.2f} ms"
        )
    rates = {"reading" if waits else "decoding": decode.images_per_s, "augmenting": augment.images_per_s}
    if not on_cpu:
        rates["copying"] = parts["copy"].images_per_s
    name = min(rates, key=lambda part: rates[part])
    others = ", ".join(f"{part} alone {rate:,.0f}" for part, rate in rates.items() if part != name)
    return name, f"{name} is the bottleneck, at {rates[name]:,.0f} images/s; {others}"


# -- the command ------------------------------------------------------------------------------------------------------


def run(
    data: str,
    *,
    store: Mapping[str, str | None],
    recipe: str | None = None,
    workers: int | None = None,
    batch_size: int,
    seconds: float,
    rounds: int,
    device: str | None = None,
    as_json: str | None = None,
    console: Console | None = None,
) -> int:
    """Measure and tell. Return the exit status. `store`: the options of `source_of`; all else is the command's."""
    console = console or make_console(stderr=as_json == "-")
    try:
        dataset, place = source_of(data, store), device_of(device)
        transforms = usual_recipe() if recipe is None else load_recipe(recipe)
        bench = Bench(dataset=dataset, transforms=transforms, batch_size=batch_size, device=place, seconds=seconds)
        way = usual_way() if recipe is None else None
        _introduce(console, bench, recipe, way)
        parts, settings, peers, pairs = _measure(bench, console, workers, way, rounds)
        verdict = bound_by(parts, cpus=usable_cpus(), on_cpu=place.type == "cpu")
        best = recommended(settings)
        console.print(_table([list(parts.values()), settings, peers], best))
        _conclude(console, bench, data, verdict[1])
        if way is not None:
            console.print(comparison(best, recommended(peers), pairs))
        if remark := remark_on(best, settings):
            say(console, remark)
        say(console, f"Recommended: num_workers={best.num_workers}, prefetch_factor={best.prefetch_factor}", "bold")
        if as_json is not None:
            report = {
                "data": data, "recipe": recipe, "seconds": seconds, **_context(bench),
                "failed": len(bench.failed), "parts": [row.as_dict() for row in parts.values()],
                "settings": [row.as_dict() for row in settings], "bound": verdict[0], "why": verdict[1],
                "recommended": {"num_workers": best.num_workers, "prefetch_factor": best.prefetch_factor},
            }  # fmt: skip
            if way is not None:
                rounds_made = [{"gpuload": mine.as_dict(), "peer": peer.as_dict()} for mine, peer in pairs]
                report["peer"] = {
                    "decoder": way.name, "note": way.note, "settings": [row.as_dict() for row in peers],
                    **medians(pairs), "rounds": rounds_made,
                }  # fmt: skip
            write_json(as_json, report)
    except (GpuloadError, OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        return fail(console, error)
    return 0


def _context(bench: Bench) -> dict[str, Any]:
    return {
        "dataset": repr(bench.dataset),
        "images": len(bench.dataset),
        "batch_size": bench.batch_size,
        "device": str(bench.device),
        "cpus": usable_cpus(),
        "machine": platform.machine(),
        "gpuload": gl.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _introduce(console: Console, bench: Bench, recipe: str | None, way: Way | None) -> None:
    cpus, recipe = count_of(usable_cpus(), "CPU"), recipe or "the usual recipe"
    say(console, repr(bench.dataset))
    say(console, f"on {bench.device}: {cpus}, batches of {bench.batch_size}, {recipe}, torch {torch.__version__}")
    if way is not None:
        say(console, f"The DataLoader decodes with {way.name} ({way.note})")
    else:
        say(console, "torch's DataLoader is measured with the usual recipe only, so not now")
    if remark := busy():
        say(console, remark, "yellow")


def _measure(
    bench: Bench, console: Console, workers: int | None, way: Way | None, rounds: int
) -> tuple[dict[str, Row], list[Row], list[Row], list[tuple[Row, Row]]]:
    """Return the parts, the Loader's settings, the DataLoader's, and the rounds of the best of both."""
    cpus = usable_cpus()
    numbers = candidates(cpus, default_workers(cpus, 1)) if workers is None else [workers]
    peers = [] if way is None else sorted({max(1, cpus // 2), cpus}) if workers is None else [workers]
    done, total = 0, 3 + (cpus > 1) + (bench.device.type != "cpu") + len(numbers) + 1 + len(peers)
    total += 0 if way is None else 2 * rounds
    with progress(console, "measurements") as tell:

        def report(row: Row) -> Row:
            nonlocal done
            done += 1
            where = f", {row.where}" if row.where else ""
            tell(done, max(total, done), f"{row.name}{where}: {row.images_per_s:,.0f} images/s")
            return row

        parts = measure_parts(bench, cpus, report)
        settings = measure_settings(bench, numbers, report, lambda remark: say(console, remark, "yellow"))
        if way is None:
            return parts, settings, [], []
        peer_rows = [report(bench.peer_loading(number, way)) for number in peers]
        pairs = compare(bench, recommended(settings), recommended(peer_rows), way, rounds, report)
    return parts, settings, peer_rows, pairs


def _table(groups: Sequence[Sequence[Row]], best: Row) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("", "images/s", "MB/s", "CPU s per 1,000"):
        table.add_column(name, justify="left" if not name else "right")
    for rows in groups:
        for row in rows:
            mb = "" if row.mb_per_s is None else f"{row.mb_per_s:,.0f}"
            figures = f"{row.images_per_s:,.0f}", mb, f"{row.cpu_s_per_1000:.2f}"
            table.add_row(f"{row.name}, {row.where}", *figures, style="bold" if row is best else None)
        table.add_section()
    return table


def _conclude(console: Console, bench: Bench, data: str, verdict: str) -> None:
    if failed := len(bench.failed):
        was, them = ("was", "it") if failed == 1 else ("were", "them")
        text = f"{count_of(failed, 'sample')} cannot be loaded, and {was} left out: gpuload inspect {data} names {them}"
        say(console, text, "yellow")
    say(console, verdict)


def comparison(mine: Row, peer: Row, pairs: Sequence[tuple[Row, Row]]) -> Table:
    """Return the table of rounds in which these two took turns."""
    values = medians(pairs)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("by turns")
    for name in (f"gpuload,\n{mine.workers}", f"{peer.name},\n{peer.workers}", "ratio"):
        table.add_column(name, justify="right", vertical="bottom")
    rates, costs = (("images_per_s", "peer_images_per_s"), ("cpu_s_per_1000", "peer_cpu_s_per_1000"))
    table.add_row("images/s", *(f"{values[name]:,.0f}" for name in rates), f"{values['rate_ratio']:.2f}")
    table.add_row("CPU s per 1,000 images", *(f"{values[name]:.2f}" for name in costs), f"{values['cpu_ratio']:.2f}")
    return table
