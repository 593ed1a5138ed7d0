"""``gpuload demo``: loads photographs with gpuload and torch's DataLoader, alternating, and writes an HTML page about
them. Runs in the main process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from rich.console import Console

import gpuload as gl
from gpuload.cli import inspect
from gpuload.cli.bench import PREFETCH, Bench, Row, comparison_table, report_rows
from gpuload.cli.console import echo, format_count, make_console, progress, report_error, select_device, warn_if_busy
from gpuload.cli.pictures import PhotographsMissing, make_folder
from gpuload.cli.source import default_recipe, open_source
from gpuload.cli.torch_way import DECODER
from gpuload.errors import GpuloadError
from gpuload.loader.limits import usable_cpus

__all__ = ["run"]

MAX_WORKERS: Final = 8


def run(
    data: str | None,
    *,
    out: Path,
    workers: int | None,
    batch_size: int,
    seconds: float,
    rounds: int,
    device: str | None,
    images: int,
    console: Console | None = None,
) -> int:
    """Run the demo. Return the exit status: 0, or `FAILED`."""
    console = console or make_console()
    try:
        root, origin = data, data
        if root is None:
            with progress(console, "photographs created", images) as report_progress:
                root = str(make_folder(out / "photographs", count=images, progress=report_progress))
            origin = f"{root}, made from scikit-image's photographs"
        dataset, torch_device = open_source(root, {}), select_device(device)
        workers = min(MAX_WORKERS, usable_cpus()) if workers is None else workers
        bench = Bench(
            dataset=dataset, transforms=default_recipe(), batch_size=batch_size, device=torch_device, seconds=seconds
        )
        classes = list(getattr(dataset, "classes", []))
        in_classes = f" of {format_count(len(classes), 'class', 'classes')}" if classes else ""
        cpus, worker_count = format_count(usable_cpus(), "CPU"), format_count(workers, "worker")
        echo(
            console,
            f"gpuload {gl.__version__} on {torch_device}: {cpus}, batches of {batch_size}, torch {torch.__version__}",
        )
        echo(console, f"{format_count(len(dataset), 'image')}{in_classes} in {origin}")
        echo(console, f"Both loaders decode, crop at random to 224×224, flip and normalise, with {worker_count} each")
        echo(console, f"The DataLoader uses {DECODER} and torch's own resize\n")
        warn_if_busy(console)
        gpuload_row, peer_row = (
            Row(name=name, num_workers=workers, prefetch_factor=PREFETCH) for name in ("gpuload", "DataLoader")
        )
        with report_rows(console, "rounds", 2 * rounds) as report:
            pairs = bench.measure_alternately(gpuload_row, peer_row, rounds, report)
        console.print(comparison_table(gpuload_row, peer_row, pairs))
        if failed := len(bench.failed):
            echo(console, f"{format_count(failed, 'image')} cannot be loaded; skipped in both loaders", "yellow")
        echo(console, "Inspecting the images (gpuload inspect):\n")
        out.mkdir(parents=True, exist_ok=True)
        inspect.run([root], html=str(out / "inspect.html"), workers=workers, console=console)
    except (GpuloadError, PhotographsMissing, OSError, ValueError, TypeError, RuntimeError) as error:
        return report_error(console, error)
    return 0
