"""How fast each store is read: images/s, cold and warm, in order and in a random one, bytes and decoded batches.

    python -m benchmarks.sources --photos DIR [--files 2000] [--rounds 3] [--json FILE]

Beside gpuload's datasets stand other libraries' readers of the same photographs (`natives`), and memcpy. Each reader,
level and order has a process of its own; all of them run in every round, in an order that changes from round to round.
Ratios are taken within rounds. What each level and state is, `reading` says.

Other libraries' packages are looked for in ``CACHE/peers``, an environment that ``--install`` makes (their own
requirements do not go together with each other's, so they are installed without them), else in the one that runs this.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.photos import copy_photos, find_photos
from benchmarks.running import REPOSITORY, in_turns, machine, make_console, run_module, say_verdicts, write_results
from benchmarks.sources.pages import best_drop
from benchmarks.sources.reading import LEVELS, MEMCPY, NATIVE, ORDERS, Task
from benchmarks.sources.stores import STORES, write
from benchmarks.sources.tables import judge, rates_table

__all__ = ["main"]

LIMIT_S: Final = 600
# Memory that was freed stays with the process, as it does in one that has been at work for a while; for all readers.
MALLOC: Final = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=134217728:glibc.malloc.mmap_threshold=33554432"}
# The packages, and what they import of others that gpuload's tests do not bring.
PEERS: Final = (
    "webdataset==1.0.2", "braceexpand==0.1.7",
    "litdata==0.2.76", "boto3==1.44.5", "botocore==1.44.5", "s3transfer==0.19.3", "jmespath==1.1.0", "obstore==0.12.1",
    "mosaicml-streaming==0.13.0", "Brotli==1.2.1", "python-snappy==0.7.3", "cramjam==2.14.0", "zstd==1.5.7.2",
    "catalogue==2.0.10",
)  # fmt: skip


def install(cache: Path) -> None:
    """Make the environment of other libraries: it sees the packages of this one too."""
    place = cache / "peers"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    own = next(place.glob("lib/python*/site-packages"))
    (own / "shared.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--no-deps", *PEERS]
    subprocess.run(pip, check=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sources", description=(__doc__ or "").splitlines()[0])
    readers = [*STORES, MEMCPY, *NATIVE]
    parser.add_argument("--photos", type=Path, help="folder of JPEGs (default: scikit-image's photographs, varied)")
    parser.add_argument("--files", type=int, default=2000, help="how many files they are copied to (default 2000)")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".data", help="where the stores are kept")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run (default 3)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of loaders (default 2)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--only", help=f"readers, separated by semicolons, of: {'; '.join(readers)}")
    parser.add_argument("--level", choices=LEVELS, help="one level (default: both)")
    parser.add_argument(
        "--drop",
        choices=("kernel", "files"),
        default=best_drop(),
        help="how the page cache is emptied: by the kernel, all of it (default, where allowed), or file by file",
    )
    parser.add_argument("--install", action="store_true", help="install other libraries in CACHE/peers first")
    parser.add_argument("--quick", action="store_true", help="a dry run: one round of the bytes alone")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args(arguments)
    options.readers = [name.strip() for name in options.only.split(";")] if options.only else readers
    if unknown := set(options.readers) - set(readers):
        parser.error(f"--only takes some of {'; '.join(readers)}; got {'; '.join(sorted(unknown))}")
    options.levels = [options.level] if options.level else ["raw"] if options.quick else list(LEVELS)
    if options.quick:
        options.rounds, options.drop = 1, "files"
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 where a reader that is installed could not be measured."""
    options = parse(arguments)
    console = make_console(150)
    if options.install:
        install(options.cache)
    python = options.cache / "peers" / "bin" / "python"
    python = str(python) if python.exists() else sys.executable
    source = options.photos or find_photos(options.cache)[0]
    base = copy_photos(source, options.cache, options.files).parent
    write(base, [name for name in options.readers if name in STORES] + ["ArrayFile"] * (MEMCPY in options.readers))

    failed: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}

    def measure(reader: str) -> dict[str, Any]:
        """All levels and orders of a reader."""
        figures: dict[str, Any] = {}
        for level in options.levels:
            for order in ORDERS:
                task = Task(
                    reader=reader,
                    base=str(base),
                    workers=options.workers,
                    batch_size=options.batch_size,
                    level=level,
                    random=order == "random",
                    how=options.drop,
                )
                command = ["benchmarks.sources.reading", task.to_json()]
                figures[f"{level}, {order}"] = result = run_module(command, LIMIT_S, python=python, more=MALLOC)
                if "error" in result:
                    return result
                versions.update(result.pop("versions"))
        return figures

    rounds = in_turns(options.readers, options.rounds, measure, console, failed)
    errors = {reader: result["error"] for reader, result in failed.items()}
    for level in options.levels:
        console.print(rates_table(level, options.readers, rounds, errors))
    say_verdicts(console, verdicts := judge(rounds, list(NATIVE)))
    nbytes = sum(path.stat().st_size for path in (base / "train").rglob("*.jpg")) / options.files / 1000
    console.print(
        f"\n{options.files:,} photographs of {nbytes:.0f} KB on average, from {source}; medians of {options.rounds}\n"
        f"cold: the page cache emptied {'by the kernel' if options.drop == 'kernel' else 'of these files'}; decoded: "
        f"RandomResizedCrop(224), flip, normalise, batch {options.batch_size}, {options.workers} workers\n"
        f"machine: {machine()['cpu']}, {machine()['cpus']} CPUs\n"
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        soft_wrap=True,
    )
    photos = {"source": str(source), "files": options.files, "mean_kb": nbytes}
    everything = {"photos": photos, "drop": options.drop, "versions": versions, "rounds": rounds, "failed": errors}
    write_results(options.json, everything, verdicts)
    absent = [error for error in errors.values() if "ModuleNotFoundError" in error]
    return 1 if len(errors) > len(absent) else 0


if __name__ == "__main__":
    sys.exit(main())
