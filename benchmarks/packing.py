"""Whether `gpuload pack` is as fast as the disk or the decoder, whichever it uses: wall and CPU time beside bare loops.

    python -m benchmarks.packing --photos DIR [--json FILE]

What it is held against does the same work and nothing else: photographs as they are, a loop that reads each file, and
writes it to one; the same from the disk, in as many processes, with the next files named to the kernel; with
``--short-side``, one decoder, resizer and encoder; with ``--cuttable``, the function that makes a JPEG cuttable; the
latter two in as many processes, and without writing. Each way has a process of its own; all of them run in every round,
in an order that changes from round to round, and ratios are taken within rounds.

Times begin when modules are imported and the page cache has the photographs, or in the group "from the disk" none of
them, and nothing to write; they end when all that was written is on the disk (after `cp -r` all of the machine's: other
work counts there). `pack` starts its worker processes within them: what that takes is in a row of its own, and matters
less the larger the set is. CPU time is that of the process and of all that it started.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

import gpuload as gl
from benchmarks.machine import cpu_model, versions
from benchmarks.photos import copy_photos, find_photos, warm
from benchmarks.sources.pages import drop

__all__ = ["COLD", "GOAL", "GROUPS", "judge", "main", "ratios"]

REPOSITORY: Final = Path(__file__).parent.parent
SHORT_SIDE: Final = 256
QUALITY: Final = 90
LIMIT_S: Final = 1800
GOAL: Final = 1.2  # times the wall time of the bare loop, with a worker for each CPU
BARE: Final = "bare loop"
PACK: Final = "pack"
ONE: Final = "pack, 1 worker"
START: Final = "pack, the start alone"
COLD: Final = "from the disk"
AHEAD: Final = 16  # files that are named to the kernel before they are read
GROUPS: Final[dict[str, tuple[str, ...]]] = {  # of each the first is the measure
    "as they are": (BARE, "cp -r", "tar cf", ONE, PACK, START),
    COLD: (BARE, "its reading alone", "its writing alone", "one process, nothing named", "cp -r", "tar cf", ONE, PACK),
    "--short-side": (BARE, PACK),
    "--cuttable": (BARE, PACK),
}
SHARD_BYTES: Final = {
    "as they are": 32_000_000,
    COLD: 32_000_000,
    "--short-side": 2_000_000,
    "--cuttable": 8_000_000,
}  # some parts for each worker
TITLES: Final = {
    "as they are": "as they are, to tar; the bare loop is one process",
    COLD: "as they are, not in the page cache, to tar; the bare loop: as many processes, the next files named ahead",
    "--short-side": f"--short-side {SHORT_SIDE}, to tar; the bare loop does the same by Pillow, in as many processes",
    "--cuttable": "--cuttable, to tar; the bare loop calls make_cuttable, in as many processes",
}


def paths_in(root: str) -> list[str]:
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)


def read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def resize(path: str) -> None:
    """What `pack` does to a photograph, with no more than Pillow."""
    from PIL import Image
    from PIL.JpegImagePlugin import get_sampling

    image = Image.open(io.BytesIO(read(path)))
    sampling, (width, height) = get_sampling(image), image.size
    scale = SHORT_SIDE / min(width, height)
    size = (round(width * scale), round(height * scale))
    drafted = image.draft(None, (2 * size[0], 2 * size[1]))
    small = image.resize(size, Image.Resampling.LANCZOS, box=drafted[1] if drafted else None)
    small.save(io.BytesIO(), "JPEG", quality=QUALITY, subsampling=sampling, optimize=True)


def cut(path: str) -> None:
    from gpuload.packing.jpeg_cuttable import make_cuttable

    make_cuttable(read(path))


def each(function: Callable[[str], None]) -> Callable[[list[str], int], None]:
    """What calls it with each path of some, for `in_processes`."""

    def some(paths: list[str], number: int) -> None:
        for path in paths:
            function(path)

    return some


def in_processes(some: Callable[[list[str], int], object], paths: list[str], count: int) -> None:
    """Call it in so many processes, with their paths and the process's number."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=some, args=(paths[number::count], number)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process ended with status {process.exitcode}")


def write(target: str, parts: Iterator[bytes]) -> None:
    """Write all of it to one file, so that it lasts."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for part in parts:
        os.write(descriptor, part)
    os.close(descriptor)
    sync(target)


def ahead(paths: list[str]) -> Iterator[bytes]:
    """What is in the files, each of them named to the kernel while those before it are read."""
    opened: deque[int] = deque()
    for at in range(len(paths) + AHEAD):
        if at < len(paths):
            opened.append(os.open(paths[at], os.O_RDONLY))
            os.posix_fadvise(opened[-1], 0, 0, os.POSIX_FADV_WILLNEED)
        if at >= AHEAD:
            descriptor = opened.popleft()
            yield os.read(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)


def sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def pack(group: str, root: str, target: str, workers: int, **options: Any) -> None:
    gl.pack(gl.ImageFolder(root), target, to="tar", shard_bytes=SHARD_BYTES[group], workers=workers, **options)


def action(group: str, way: str, root: str, target: str, workers: int) -> Callable[[], object]:
    """What is measured."""
    match group, way:
        case "as they are", "bare loop":
            return lambda: write(target, map(read, paths_in(root)))
        case "from the disk", "bare loop":
            return lambda: in_processes(
                lambda some, number: write(f"{target}-{number}", ahead(some)), paths_in(root), workers
            )
        case "from the disk", "its reading alone":
            return lambda: in_processes(lambda some, number: deque(ahead(some), 0), paths_in(root), workers)
        case "from the disk", "its writing alone":
            content = {path: read(path) for path in paths_in(root)}
            return lambda: in_processes(
                lambda some, number: write(f"{target}-{number}", map(content.__getitem__, some)), list(content), workers
            )
        case "from the disk", "one process, nothing named":
            return lambda: write(target, map(read, paths_in(root)))
        case _, "cp -r":
            return lambda: (subprocess.run(["cp", "-r", root, target], check=True), os.sync())
        case _, "tar cf":
            return lambda: (subprocess.run(["tar", "cf", target, "-C", root, "."], check=True), sync(target))
        case "as they are", "pack, the start alone":
            few = next(entry.path for entry in os.scandir(root))  # a class
            two = f"{target}-two"
            for number, path in enumerate(paths_in(few)[:2]):
                os.makedirs(f"{two}/{number}")
                shutil.copy(path, f"{two}/{number}")
            # A shard for each, so that all processes start.
            return lambda: gl.pack(gl.ImageFolder(two), target, to="tar", workers=workers, shard_bytes=1)
        case "as they are" | "from the disk", _:
            return lambda: pack(group, root, target, 1 if way == ONE else workers)
        case "--short-side", "bare loop":
            return lambda: in_processes(each(resize), paths_in(root), workers)
        case "--short-side", _:
            return lambda: pack(group, root, target, workers, short_side=SHORT_SIDE, quality=QUALITY)
        case _, "bare loop":
            return lambda: in_processes(each(cut), paths_in(root), workers)
        case _:
            return lambda: pack(group, root, target, workers, cuttable=True)


def cpu_s() -> float:
    """Of this process, and of those that it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def measure(group: str, way: str, root: str, target: str, workers: int) -> dict[str, float]:
    """One way, in this process."""
    import gpuload.datasets.folder
    import gpuload.packing.jpeg_cuttable
    import gpuload.packing.pack
    import gpuload.packing.stores  # noqa: F401 (imports are not what is measured)

    run = action(group, way, root, target, workers)
    warm(Path(root)) if group != COLD else drop(Path(root), "files")
    os.sync()
    cpu, started = cpu_s(), time.perf_counter()
    run()
    return {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s() - cpu}


def run(group: str, way: str, root: Path, cache: Path, workers: int) -> dict[str, Any]:
    """One way, in a process of its own. Its result has `error` where it could not run."""
    place = cache / "packing"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    asked = json.dumps([group, way, str(root), str(place / "made"), workers])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.packing", "--measure", asked],
            cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
        return json.loads(done.stdout.strip().splitlines()[-1])
    finally:
        shutil.rmtree(place, ignore_errors=True)


Rounds = list[dict[str, dict[str, float]]]
"""Of each round, by way, wall and CPU seconds."""


def ratios(rounds: Rounds, way: str, other: str, what: str) -> list[float]:
    """How many times as long one way takes as another, in each round."""
    return [found[way][what] / found[other][what] for found in rounds]


def judge(results: dict[str, Rounds]) -> list[tuple[bool, str]]:
    """Which goals are met."""
    verdicts = []
    for group, rounds in results.items():
        if not rounds or PACK not in rounds[0] or BARE not in rounds[0]:
            continue
        found = statistics.median(ratios(rounds, PACK, BARE, "wall_s"))
        verdicts.append((found <= GOAL, f"{group}: at most {GOAL} times the bare loop's wall time: {found:.2f}"))
        if ONE in rounds[0]:
            found = statistics.median(ratios(rounds, PACK, ONE, "wall_s"))
            verdicts.append((found <= 1, f"{group}: more workers take no longer than one: {found:.2f} times as long"))
    return verdicts


def table(group: str, rounds: Rounds, count: int, nbytes: float, workers: int) -> Table:
    """A row for each way: medians, and medians of the ratios within rounds."""
    made = Table(title=TITLES[group], title_justify="left", box=box.SIMPLE)
    made.add_column("")
    for heading in (
        "wall s",
        "CPU s",
        "CPU ms\nan image",
        "images/s",
        "MB/s",
        "wall over\nbare loop",
        "CPU over\nbare loop",
    ):
        made.add_column(heading, justify="right")
    for way in GROUPS[group]:
        if any(way not in found for found in rounds):
            continue
        wall, cpu = (statistics.median(found[way][what] for found in rounds) for what in ("wall_s", "cpu_s"))
        over = [statistics.median(ratios(rounds, way, BARE, what)) for what in ("wall_s", "cpu_s")]
        rates = (
            ["", "", ""]
            if way == START
            else [f"{1000 * cpu / count:.2f}", f"{count / wall:.0f}", f"{nbytes / wall / 1e6:.0f}"]
        )
        name = f"{way}, {workers} workers" if way == PACK else way
        made.add_row(name, f"{wall:.2f}", f"{cpu:.2f}", *rates, *(f"{ratio:.2f}" for ratio in over))
    return made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=Path, help="folder of JPEGs (default: scikit-image's photographs, varied)")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".data", help="where files and sets are written")
    parser.add_argument("--files", type=int, default=24000, help="packed as they are (default 24000)")
    parser.add_argument("--changed", type=int, default=1600, help="resized, or made cuttable (default 1600)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is run (default 5)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each CPU")
    parser.add_argument("--only", choices=list(GROUPS), help="one group")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 where a way could not be run."""
    options = parse(arguments)
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    source = options.photos or find_photos(options.cache)[0]
    roots = {
        group: copy_photos(source, options.cache, options.files if group in ("as they are", COLD) else options.changed)
        for group in GROUPS
        if options.only in (None, group)
    }
    counts = {group: warm(root) for group, root in roots.items()}
    results: dict[str, Rounds] = {group: [] for group in roots}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for group, root in roots.items():
            found, ways = {}, GROUPS[group]
            turn = number % len(ways)
            for way in ways[turn:] + ways[:turn]:
                if f"{group}: {way}" in failed:
                    continue
                with console.status(f"round {number + 1} of {options.rounds}: {group}: {way}"):
                    told = run(group, way, root, options.cache, options.workers)
                if "error" in told:
                    failed[f"{group}: {way}"] = told["error"]
                else:
                    found[way] = told
            results[group].append(found)

    load = os.getloadavg()[0]
    console.print(
        f"photographs of {counts[next(iter(roots))][1]:.0f} KB on average, from {source}: "
        + ", ".join(f"{group}: {count:,}" for group, (count, _) in counts.items())
        + f"; medians of {options.rounds} rounds\n{cpu_model()}, {len(os.sched_getaffinity(0))} CPUs, load {load:.1f}; "
        + ", ".join(f"{name} {version}" for name, version in versions().items()),
        soft_wrap=True,
    )
    for group, rounds in results.items():
        if all(BARE in found for found in rounds):
            count, mean_kb = counts[group]
            console.print(table(group, rounds, count, count * mean_kb * 1000, options.workers))
    for name, error in failed.items():
        console.print(f"[red]{name} could not be run:[/] {error}", soft_wrap=True)
    for met, text in (verdicts := judge(results)):
        console.print(f"{'[green]met   [/]' if met else '[red]missed[/]'} {text}", soft_wrap=True)
    if options.json:
        everything = {
            "machine": {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0)), "load": load},
            "versions": versions(),
            "photos": {group: {"files": count, "mean_kb": mean_kb} for group, (count, mean_kb) in counts.items()},
            "workers": options.workers,
            "rounds": results,
            "failed": failed,
            "goals": [{"goal": text, "met": met} for met, text in verdicts],
        }
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
