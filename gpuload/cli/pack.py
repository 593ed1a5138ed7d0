"""The commands ``gpuload pack``, ``verify`` and ``index``."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from gpuload.cli.console import STOPPED, echo, format_count, make_console, progress, report_error
from gpuload.cli.source import OPTIONS_OF, open_source
from gpuload.datasets.litter import is_litter
from gpuload.datasets.stores.tar.shards import find_shards, open_shards
from gpuload.errors import GpuloadError
from gpuload.packing.manifest import MANIFEST
from gpuload.packing.pack import Packed, describe_bad_sample, pack
from gpuload.packing.verify import verify

__all__ = ["parse_bytes", "run_index", "run_pack", "run_verify"]

UNITS: Final = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
SHOWN: Final = 20


def run_pack(data: str, folder: str, *, shard_bytes: str, on_error: str, **options: Any) -> int:
    """Pack a dataset; `options` are the options of `open_source` and `pack`.

    Return the exit status: 0 on success, also if damaged samples were skipped; `STOPPED` on ctrl-C; else 1.
    """
    console = make_console()
    store = {name: options.pop(name) for name in OPTIONS_OF if name in options}
    try:
        dataset = open_source(data, store)
        echo(console, f"{dataset!r}")
        with progress(console, "samples") as update_progress:

            def report(done: int, total: int, nbytes: int) -> None:
                update_progress(done, total, f"{nbytes / 1e6:,.0f} MB" if nbytes >= 1e6 else "")

            packed = pack(
                dataset,
                folder,
                shard_bytes=parse_bytes(shard_bytes),
                skip_bad=on_error == "skip",
                progress=report,
                **options,
            )
    except (GpuloadError, OSError, ValueError, TypeError, ImportError) as error:
        return report_error(console, error)
    except KeyboardInterrupt:
        echo(console, "stopped; run the same command again to continue", "yellow")
        return STOPPED
    _print_summary(console, packed)
    return 0


def run_verify(folder: str) -> int:
    """Verify a packed set. Return the exit status: 1 if the set differs from its manifest."""
    console = make_console()
    try:
        with progress(console, "parts") as update_progress:
            problems = verify(folder, progress=update_progress)
    except (GpuloadError, OSError, ImportError) as error:
        return report_error(console, error)
    for problem in problems:
        echo(console, problem, "red")
    if problems:
        echo(
            console,
            f"{format_count(len(problems), 'problem')} in {folder}: copy these files again, or pack the set again",
        )
        return 1
    echo(console, f"{folder}: intact")
    return 0


def run_index(shards: Sequence[str], *, workers: int | None, again: bool) -> int:
    """Build the index of each given shard, and of each shard in a given folder. Return the exit status: 1 if a shard is
    missing or damaged."""
    console = make_console()
    built_count = done_count = 0
    try:
        paths = list(dict.fromkeys(find_shards([path for pattern in shards for path in _shards_in(pattern)])))
        with progress(console, "shards", len(paths)) as update_progress, warnings.catch_warnings():

            def on_ready(path: str, is_new: bool) -> None:
                nonlocal built_count, done_count
                built_count, done_count = built_count + is_new, done_count + 1
                update_progress(done_count)

            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *other_arguments: echo(console, str(message), "yellow")
            opened_shards = open_shards(paths, workers=workers, rebuild=again, progress=on_ready)
    except (OSError, ValueError) as error:
        return report_error(console, error)
    samples, members = (sum(getattr(shard, name) for shard in opened_shards) for name in ("samples", "members"))
    nbytes = sum(shard.table.nbytes for shard in opened_shards)
    size = sum(os.stat(path).st_size for path in paths)
    files, up_to_date_count = format_count(members, "file"), len(opened_shards) - built_count
    per_sample = f", {nbytes / samples:.0f} per sample" if samples else ""
    shard_count, sample_count = format_count(len(opened_shards), "shard"), format_count(samples, "sample")
    index_count = format_count(built_count, "index", "indexes")
    echo(console, f"{shard_count} ({size:,} bytes in total): {sample_count} in {files}")
    echo(console, f"{index_count} built, {up_to_date_count:,} up to date: {nbytes:,} bytes in total{per_sample}")
    return 0


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: ``256MB``, ``1GiB``, ``1000``.

    Raises:
        ValueError: the text is not a number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"expected a number of bytes such as 256MB or 1GiB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def _print_summary(console: Console, packed: Packed) -> None:
    reused = f" ({packed.taken_up:,} from an earlier run)" if packed.taken_up else ""
    samples, files = format_count(packed.samples, "sample"), format_count(packed.files, "file")
    echo(console, f"{samples}{reused}, {packed.nbytes:,} bytes in {files} in {packed.folder}")
    for why, count in packed.kept.items():
        echo(console, f"{format_count(count, 'image')} kept unchanged, {why}")
    for item in packed.left_out[:SHOWN]:
        echo(console, f"skipped: {describe_bad_sample(item)}", "yellow")
    if len(packed.left_out) > SHOWN:
        echo(console, f"skipped: {len(packed.left_out) - SHOWN:,} more, listed in {MANIFEST}", "yellow")
    echo(console, f"Read it with {packed.read}", to_copy=True)


def _shards_in(pattern: str) -> list[str]:
    """Return the paths of the shards in a folder. If `pattern` is not a folder, return it unchanged.

    Raises:
        FileNotFoundError: the folder has no shards.
    """
    if not os.path.isdir(pattern):
        return [pattern]
    names = sorted(name for name in os.listdir(pattern) if name.endswith(".tar") and not is_litter(os.fsencode(name)))
    if not names:
        raise FileNotFoundError(f"the folder {pattern!r} has no shards; expected files whose names end in .tar")
    return [os.path.join(pattern, name) for name in names]
