"""Is `gpuload pack` as fast as the disk or the decoder? Compares its wall and CPU times with those of bare loops.

    python -m benchmarks.packing --photos DIR [--json FILE]

docs/packing.md describes each way and shows results. Each way runs in its own process (`benchmarks.running`). The clock
starts after the imports, with the photographs in the page cache (in the group "from the disk", with none of them) and
no pending writes. It stops when all output is on the disk. Each way begins cold, as a command that runs once does, so
the start of `pack`'s worker processes is included. CPU time is that of the process and its children.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import gpuload as gl
from benchmarks import running
from benchmarks.machine import versions
from benchmarks.photos import copy_photos, find_photos, warm_page_cache
from benchmarks.running import take_turns
from benchmarks.sources.reading import drop

SHORT_SIDE: Final = 256
QUALITY: Final = 90
LIMIT_S: Final = 1800
GOAL: Final = 1.3  # multiple of the bare loop's wall time, with one worker per CPU
BARE: Final = "bare loop"
PACK: Final = "pack"
ONE_WORKER: Final = "pack, 1 worker"
WARM: Final = "as they are"
COLD: Final = "from the disk"
READ_AHEAD_FILES: Final = 16  # the number of files that the kernel is told to read in advance
# For each group: its ways, beginning with the baseline; the bytes per shard, small enough for each worker to get
# shards; and a title.
GROUPS: Final = {
    WARM: ((BARE, ONE_WORKER, PACK), 32_000_000, "in the page cache; the bare loop is one process"),
    COLD: ((BARE, ONE_WORKER, PACK), 32_000_000, "the bare loop: as many processes, with read-ahead of the next files"),
    "--short-side": ((BARE, PACK), 2_000_000, "the bare loop does the same with Pillow, in as many processes"),
    "--cuttable": ((BARE, PACK), 8_000_000, "the bare loop calls make_cuttable, in as many processes"),
}
Rounds = list[dict[str, dict[str, float]]]
"""For each round, the wall and CPU seconds of each way."""


def read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def resize(path: str) -> None:
    """Resize a photograph as `pack` does, using only Pillow."""
    from PIL import Image
    from PIL.JpegImagePlugin import get_sampling

    image = Image.open(io.BytesIO(read_file(path)))
    sampling, (width, height) = get_sampling(image), image.size
    scale = SHORT_SIDE / min(width, height)
    size = (round(width * scale), round(height * scale))
    drafted = image.draft(None, (2 * size[0], 2 * size[1]))
    small = image.resize(size, Image.Resampling.LANCZOS, box=drafted[1] if drafted else None)
    small.save(io.BytesIO(), "JPEG", quality=QUALITY, subsampling=sampling, optimize=True)


def make_cuttable_copy(path: str) -> None:
    from gpuload.packing.jpeg_cuttable import make_cuttable

    make_cuttable(read_file(path))


def run_in_processes(work: Callable[[Iterator[str], int], object], paths: list[str], count: int) -> None:
    """Call `work` in `count` processes, each with an iterator over paths and its index. The processes take the paths in
    turns."""
    fork = multiprocessing.get_context("fork")
    counter = fork.Value("q", 0)

    def run(i: int) -> None:
        work((paths[number] for number in take_turns(len(paths), counter, at_once=1)), i)

    processes = [fork.Process(target=run, args=(i,)) for i in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process ended with status {process.exitcode}")


def write(target: str, pieces: Iterator[bytes]) -> None:
    """Write all pieces to one file and sync it to the disk."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for piece in pieces:
        os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)


def read_ahead(paths: Iterator[str]) -> Iterator[bytes]:
    """Yield the contents of the files; the kernel reads the next `READ_AHEAD_FILES` files in advance."""
    opened: deque[int] = deque()
    for path in itertools.chain(paths, itertools.repeat(None, READ_AHEAD_FILES)):
        if path is not None:
            opened.append(os.open(path, os.O_RDONLY))
            os.posix_fadvise(opened[-1], 0, 0, os.POSIX_FADV_WILLNEED)
        if opened and (path is None or len(opened) > READ_AHEAD_FILES):
            descriptor = opened.popleft()
            yield os.read(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)


def choose_action(group: str, way: str, root: str, target: str, workers: int) -> Callable[[], object]:
    """Return the function to measure."""
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    if way == BARE and group == WARM:
        return lambda: write(target, map(read_file, paths))
    if way == BARE and group == COLD:
        return lambda: run_in_processes(
            lambda process_paths, i: write(f"{target}-{i}", read_ahead(process_paths)), paths, workers
        )
    if way == BARE:
        function = resize if group == "--short-side" else make_cuttable_copy
        return lambda: run_in_processes(lambda process_paths, i: deque(map(function, process_paths), 0), paths, workers)
    options: dict[str, Any] = {
        "--short-side": {"short_side": SHORT_SIDE, "quality": QUALITY},
        "--cuttable": {"cuttable": True},
    }.get(group, {})
    options |= {"shard_bytes": GROUPS[group][1], "workers": 1 if way == ONE_WORKER else workers}
    return lambda: gl.pack(gl.ImageFolder(root), target, to="tar", **options)


def total_cpu_s() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(group: str, way: str, root: str, target: str, workers: int) -> dict[str, float]:
    """Measure one way in this process."""
    import gpuload.datasets.folder
    import gpuload.packing.jpeg_cuttable
    import gpuload.packing.pack  # noqa: F401 (keeps the imports out of the measurement)

    measured_action = choose_action(group, way, root, target, workers)
    warm_page_cache(Path(root)) if group != COLD else drop(Path(root), "files")
    os.sync()
    cpu_s_before, started_s = total_cpu_s(), time.perf_counter()
    measured_action()
    return {"wall_s": time.perf_counter() - started_s, "cpu_s": total_cpu_s() - cpu_s_before}


def run(group: str, way: str, root: Path, cache: Path, workers: int) -> dict[str, Any]:
    """Run one way in its own process and return its result, which has the key `error` if the way could not run."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="packing-", dir=cache) as folder:
        arguments = json.dumps([group, way, str(root), f"{folder}/made", workers])
        return running.run_module(["benchmarks.packing", "--measure", arguments], LIMIT_S)


def ratios(rounds: Rounds, way: str, baseline: str, figure: str) -> list[float]:
    """Return a figure of `way` divided by that of `baseline`, for each round."""
    return [times[way][figure] / times[baseline][figure] for times in rounds]


def judge(results: dict[str, Rounds]) -> list[running.Verdict]:
    """Return a verdict for each goal."""
    verdicts = []
    for group, rounds in results.items():
        if not rounds or PACK not in rounds[0] or BARE not in rounds[0]:
            continue
        times = statistics.median(ratios(rounds, PACK, BARE, "wall_s"))
        verdicts.append(
            running.Verdict(f"{group}: at most {GOAL} times the bare loop's wall time: {times:.2f}", times <= GOAL)
        )
        if ONE_WORKER in rounds[0]:
            times = statistics.median(ratios(rounds, PACK, ONE_WORKER, "wall_s"))
            text = f"{group}: more workers take no longer than one: {times:.2f} times as long"
            verdicts.append(running.Verdict(text, times <= 1))
    return verdicts


def report(group: str, rounds: Rounds, count: int, nbytes: float, workers: int) -> str:
    """Format a table with a row for each way: medians, and medians of the ratios within rounds."""
    ways, _, title = GROUPS[group]
    rows = []
    for way in ways:
        if any(way not in times for times in rounds):
            continue
        wall, cpu = (statistics.median(times[way][figure] for times in rounds) for figure in ("wall_s", "cpu_s"))
        overheads = [statistics.median(ratios(rounds, way, BARE, figure)) for figure in ("wall_s", "cpu_s")]
        rates = [f"{1000 * cpu / count:.2f}", f"{count / wall:.0f}", f"{nbytes / wall / 1e6:.0f}"]
        name = f"{way}, {workers} workers" if way == PACK else way
        rows.append([name, f"{wall:.2f}", f"{cpu:.2f}", *rates, *(f"{ratio:.2f}" for ratio in overheads)])
    headings = [
        "",
        "wall s",
        "CPU s",
        "CPU ms per image",
        "images/s",
        "MB/s",
        "wall over bare loop",
        "CPU over bare loop",
    ]
    return running.format_table(headings, rows, f"{group}, to tar: {title}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    numbers = {"files": 24000, "rounds": 5, "workers": len(os.sched_getaffinity(0))}
    parser = running.make_parser("packing", __doc__, "photos", "cache", "json", **numbers)
    parser.add_argument("--changed", type=int, default=1600, help="files to resize or make cuttable (default 1600)")
    parser.add_argument("--only", choices=list(GROUPS), help="measure one group")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Return the exit status: 1 if a way could not be run."""
    options = parse(arguments)
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return 0
    source, _ = find_photos(options.cache, options.photos)
    results: dict[str, Rounds] = {}
    failed: dict[str, str] = {}
    photos: dict[str, tuple[int, float]] = {}
    for group, (ways, *_) in GROUPS.items():
        if options.only not in (None, group):
            continue
        root = copy_photos(source, options.cache, options.files if group in (WARM, COLD) else options.changed)
        photos[group], errors = warm_page_cache(root), {}

        def measure_way(way: str, group: str = group, root: Path = root) -> dict[str, Any]:
            return run(group, way, root, options.cache, options.workers)

        results[group] = running.run_rounds(ways, options.rounds, measure_way, errors)
        failed |= {f"{group}: {way}": error["error"] for way, error in errors.items()}

    print(
        f"photographs of {photos[next(iter(photos))][1]:.0f} KB on average, from {source}: "
        + ", ".join(f"{group}: {count:,}" for group, (count, _) in photos.items())
        + f"; medians of {options.rounds} rounds\n{running.describe_machine()}; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    for group, rounds in results.items():
        if all(BARE in times for times in rounds):
            count, mean_kb = photos[group]
            print("\n" + report(group, rounds, count, count * mean_kb * 1000, options.workers))
    running.print_verdicts(verdicts := judge(results))
    figures = {"versions": versions(), "photos": photos, "workers": options.workers}
    running.write_results(options.json, {**figures, "rounds": results, "failed": failed}, verdicts)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
