"""Time to the first batch, the memory usage of the processes, and the compile time of the fused kernels.

    python -m benchmarks.startup --photos DIR [--workers 1,2,8,16] [--rounds 3] [--only NAME] [--json FILE]

Each cell is measured in its own process, and begins cold: the seconds from `iter()` to the first batch, the CPU seconds
of all processes in that time, and their memory once prefetching has finished. Memory is split into the processes' own
(PSS without shared memory) and shared memory, which counts whether or not a process maps it, since DataLoader's batches
in flight are not mapped. For gpuload, the time from the death of a worker until its replacement is ready is also
measured. The output shows medians of the rounds.

- folder: `gl.ImageFolder`, which imports little; DataLoader uses torchvision's ImageFolder with the same crops.
- torchvision: torchvision's ImageFolder with v2 transforms inside, the same object for both loaders.
- huggingface: a Hugging Face dataset with an image and a label; DataLoader crops with v2.
- kernels: what an empty cache of Triton costs on a GPU, for ten everyday recipes: the kernels that are compiled for
  the first batch, for compute capability 9.0, and the CPU seconds that this takes. They are not run, so no GPU is
  needed. DataLoader has no such row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROWS: Final = ("folder", "torchvision", "huggingface", "kernels")
LOADERS: Final = ("gpuload", "fork", "forkserver", "spawn")
BATCH: Final = 64
DEATHS: Final = 9
COLUMNS: Final = {
    "first_batch_s": "first batch, s",
    "cpu_s": "CPU s",
    "own_mb": "own, MB",
    "shared_mb": "shared, MB",
    "back_ms": "back after, ms",
    "kernels": "kernels",
}
IDLE_CHECK_S: Final = 1.0
LIMIT_S: Final = 600
SIZE: Final = 224


def recipes(size: int) -> dict[str, list[Any]]:
    """Return ten everyday recipes, which make square images of this size."""
    from gpuload import transforms as T

    crop, flip = T.RandomResizedCrop(size), T.RandomHorizontalFlip()
    return {
        "classic": [crop, flip],
        "bicubic": [T.RandomResizedCrop(size, interpolation="bicubic"), flip],
        "evaluation": [T.Resize(size * 8 // 7), T.CenterCrop(size)],
        "CIFAR": [T.RandomCrop(size, padding=4, pad_if_needed=True), flip],
        "colours": [crop, flip, T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
        "RandAugment": [crop, T.RandAugment()],
        "TrivialAugment": [T.CenterCrop(size), T.TrivialAugmentWide()],
        "SimCLR": [crop, flip, T.RandomGrayscale(0.5), T.RandomApply([T.GaussianBlur(5)])],
        "warps": [T.CenterCrop(size), T.RandomRotation(20), T.RandomPerspective(0.4)],
        "AugMix": [crop, T.AugMix()],
    }


def build_hugging_face_dataset(root: Path) -> Any:
    """Build a Hugging Face dataset that holds the encoded photographs of a folder, and their classes."""
    import datasets

    paths = sorted(root.rglob("*.jpg"))
    names = sorted({path.parent.name for path in paths})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {
        "image": [{"bytes": path.read_bytes(), "path": None} for path in paths],
        "label": [names.index(path.parent.name) for path in paths],
    }
    return datasets.Dataset.from_dict(rows, features=features)


def build(row: str, loader: str, workers: int, root: Path) -> Any:
    """Build the loader of a cell."""
    if row == "torchvision" or loader != "gpuload":
        from benchmarks.peers.torchvision_import import Cropped, Folder
    if loader == "gpuload":
        import gpuload as gl
        from gpuload import transforms as T

        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers, "device": "cpu"}
        if row == "torchvision":
            return gl.Loader(Folder(str(root), SIZE), **options)
        dataset = gl.ImageFolder(root) if row == "folder" else gl.wrap(build_hugging_face_dataset(root))
        return gl.Loader(dataset, transforms=[T.RandomResizedCrop(SIZE)], **options)
    import torch.utils.data

    rows: Any = Cropped(build_hugging_face_dataset(root), SIZE) if row == "huggingface" else Folder(str(root), SIZE)
    return torch.utils.data.DataLoader(
        rows, BATCH, shuffle=True, num_workers=workers, multiprocessing_context=loader, persistent_workers=True
    )


def measure(row: str, loader: str, workers: int, root: Path) -> dict[str, float]:
    """Measure one cell in this process."""
    if row == "kernels":
        return measure_kernels(loader)
    from gpuload.cli.processes import cpu_seconds

    batch_loader = build(row, loader, workers, root)
    cpu_s_before, started_s = cpu_seconds(os.getpid()), time.perf_counter()
    batches = iter(batch_loader)
    next(batches)
    figures = {"first_batch_s": time.perf_counter() - started_s, "cpu_s": cpu_seconds(os.getpid()) - cpu_s_before}
    for _ in range(3):
        next(batches, None)
    figures["own_mb"], figures["shared_mb"] = _measure_idle_memory()
    if loader == "gpuload":
        figures["back_ms"] = _measure_restart_ms(batch_loader._session.engine)
        batch_loader.close()
    return figures


def measure_kernels(name: str) -> dict[str, float]:
    """Compile the kernels of a recipe for batches of float16 in channels-last format, in this process, with an empty
    cache and without a GPU. Return their number and the CPU seconds, including the assembler's."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"}
        import torch
        import triton
        from triton.backends.compiler import GPUTarget

        from benchmarks.peers.protocol import MEAN, STD
        from gpuload import transforms as T
        from gpuload.stage import Stage
        from gpuload.stage.fused import FusedBackend
        from gpuload.stage.fused.variants import KERNELS
        from gpuload.stage.reference.backend import TorchBackend

        class AbsentGpu:
            """A driver for a GPU that does not exist."""

            def get_current_target(self) -> GPUTarget:
                return GPUTarget("cuda", 90, 32)

            def get_current_device(self) -> int:
                return 0

            def get_current_stream(self, device: int) -> int:
                return 0

        class Compiler(FusedBackend):
            """The backend, except that kernels are only compiled, one after the other, and not loaded."""

            count = 0

            def compile(self, kernels: set[Any]) -> None:
                for variant in kernels:
                    KERNELS[variant.kernel].warmup(*variant.args, grid=(1, 1), **dict(variant.options))
                self.count += len(kernels)

        triton.runtime.driver.set_active(AbsentGpu())  # pyright: ignore[reportArgumentType]
        device = torch.device("cpu")
        backend, chain = Compiler(device), T.Chain([*recipes(SIZE)[name], T.Normalize(MEAN, STD)])
        stage = Stage(
            chain,
            reference=TorchBackend(device),
            backend=backend,
            note=None,
            dtype="float16",
            memory_format="channels_last",
            ragged="error",
            pad_to=None,
            cpu_threads=None,
        )
        started = os.times()
        stage.prepare()
        cpu_s = sum(os.times()[:4]) - sum(started[:4])
    return {"kernels": backend.count, "cpu_s": cpu_s}


def _measure_idle_memory() -> tuple[float, float]:
    """Wait until the processes are idle. Return the processes' own memory and the shared memory in MB."""
    from benchmarks.memory import proportional_mb, shared_mb
    from gpuload.cli.processes import cpu_seconds, tree

    cpu_s, before_s = cpu_seconds(os.getpid()), -1.0
    while cpu_s - before_s > 0.05:  # the measurement itself also takes some CPU time
        time.sleep(IDLE_CHECK_S)
        before_s, cpu_s = cpu_s, cpu_seconds(os.getpid())
    processes, files = tree(os.getpid()), {}
    for file in [path for process in processes for path in Path(f"/proc/{process}/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor that iterdir() had open is closed again
            if os.readlink(file).startswith(("/dev/shm/", "/memfd:")):
                status = file.stat()
                files[status.st_dev, status.st_ino] = status.st_blocks * 512 / 2**20
    return sum(map(proportional_mb, processes)) - sum(map(shared_mb, processes)), sum(files.values())


def _measure_restart_ms(engine: Any) -> float:
    """Return the median time from the death of a worker until its replacement is ready, over `DEATHS` deaths."""
    times = []
    for _ in range(DEATHS):
        [victim, *_] = engine.pids
        os.kill(victim, signal.SIGKILL)
        started = time.perf_counter()
        while victim in engine.pids or not engine.ready:
            engine.collect_events(0.001)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cells, print the results, and return the exit status 0."""
    from benchmarks.running import format_table, make_parser, run_module, run_rounds, write_json

    parser = make_parser("startup", __doc__, "photos", "cache", "json", files=2048, rounds=3)
    parser.add_argument("--workers", default="1,2,8,16", help="numbers of workers (default 1,2,8,16)")
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--cell", nargs=3, metavar=("ROW", "LOADER", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        row, loader, workers = options.cell
        print(json.dumps(measure(row, loader, int(workers), options.photos)))
        return 0
    from benchmarks.photos import (
        copy_photos,
        find_photos,
    )  # imported here, because it would add to the memory of a cell

    rows, root = [options.only] if options.only else ROWS, options.photos
    if rows != ["kernels"]:
        root = copy_photos(find_photos(options.cache, options.photos)[0], options.cache, options.files)
    cells = [
        (row, loader, workers)
        for row in rows
        for workers in (["0"] if row == "kernels" else options.workers.split(","))
        for loader in (recipes(SIZE) if row == "kernels" else LOADERS)
    ]
    ways, failed = [" ".join(cell) for cell in cells], {}

    def run(cell: str) -> dict[str, float]:
        return run_module(["benchmarks.startup", "--photos", str(root), "--cell", *cell.split()], LIMIT_S)

    rounds = run_rounds(ways, options.rounds, run, failed)
    results = {cell: [by_cell[cell] for by_cell in rounds if cell in by_cell] for cell in ways}
    write_json(options.json, results)
    rows = []
    for name, runs in results.items():
        medians = {key: statistics.median(figures[key] for figures in runs) for key in runs[0]} if runs else {}
        rows.append([name, *(f"{medians[key]:.2f}" if key in medians else "–" for key in COLUMNS)])
    print(format_table(["", *COLUMNS.values()], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
