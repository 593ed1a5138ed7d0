"""``gpuload pack`` and ``gpuload verify``: what the source is, how far the job is, what came of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpuload import datasets
from gpuload.datasets.folder import EXTENSIONS
from gpuload.errors import GpuloadError
from gpuload.packing.manifest import MANIFEST, open_packed
from gpuload.packing.pack import Packed, pack
from gpuload.packing.verify import verify

__all__ = ["run_pack", "run_verify", "size_of", "source_of"]

UNITS: Final = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
STEPS: Final = 10  # lines that say how far it is, where there is no terminal
SHOWN: Final = 20
OPTIONS_OF: Final = {
    "fields": ("TarShards",),
    "image": ("LMDB", "Parquet", "HDF5"),
    "target": ("LMDB", "Parquet", "HDF5"),
    "extensions": ("ImageFolder", "ImageFiles"),
}


def run_pack(
    source: str,
    folder: str,
    *,
    given: dict[str, str | None],
    console: Console | None = None,
    **options: Any,
) -> int:
    """Pack a source. Returns the exit status: 1 if samples are damaged, or it cannot be done."""
    console = console or Console(highlight=False)
    try:
        dataset = source_of(source, {name: value for name, value in given.items() if value is not None})
        _say(console, f"{dataset!r}")
        with _progress(console, "samples") as tell:
            made = pack(dataset, folder, progress=lambda done, total, nbytes: tell(done, total, nbytes), **options)
    except (GpuloadError, OSError, ValueError, TypeError, ImportError) as error:
        _say(console, str(error), "red")
        return 1
    except KeyboardInterrupt:
        _say(console, "stopped; what is done is kept: run the same again to go on", "yellow")
        return 130
    _tell(console, made)
    return 0


def run_verify(folder: str, *, console: Console | None = None) -> int:
    """Verify a packed set. Returns the exit status: 1 if it is not what was packed."""
    console = console or Console(highlight=False)
    try:
        with _progress(console, "parts") as tell:
            problems = verify(folder, progress=lambda done, total: tell(done, total, 0))
    except (GpuloadError, OSError, ImportError) as error:
        _say(console, str(error), "red")
        return 1
    for problem in problems:
        _say(console, problem, "red")
    if problems:
        _say(console, f"{len(problems)} problem(s) in {folder}: copy these files again, or pack the set again")
        return 1
    _say(console, f"{folder}: all is as it was packed")
    return 0


def source_of(source: str, given: dict[str, str]) -> Any:
    """The dataset that a command line names: by what is there, else by the end of the name.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is of no known kind, or options do not go with it.
    """
    name = _kind_of(source)
    for option in given:
        if name not in OPTIONS_OF[option]:
            raise ValueError(f"--{option} is for {', '.join(OPTIONS_OF[option])}, and {source!r} is read by {name}")
    if name == "packed":
        return open_packed(os.path.abspath(source))
    options: dict[str, Any] = dict(given)
    for several in ("fields", "extensions"):
        if several in options:
            options[several] = tuple(options[several].split(","))
    if options.get("target") == "":
        options["target"] = None
    return getattr(datasets, name)(source, **options)


def _kind_of(source: str) -> str:
    endings: dict[str, str] = {
        ".tar": "TarShards", ".parquet": "Parquet", ".mdb": "LMDB", ".lmdb": "LMDB", ".npy": "ArrayFile",
        ".h5": "HDF5", ".hdf5": "HDF5", ".csv": "FileList", ".tsv": "FileList",
    }  # fmt: skip
    if os.path.isdir(source):
        names = os.listdir(source)
        if MANIFEST in names:
            return "packed"
        if "data.mdb" in names:
            return "LMDB"
        if any(name.endswith(".parquet") for name in names):
            return "Parquet"
        flat = any(name.lower().endswith(EXTENSIONS) for name in names)
        return (
            "ImageFiles"
            if flat or not any(os.path.isdir(os.path.join(source, name)) for name in names)
            else "ImageFolder"
        )
    for ending, name in endings.items():
        if source.lower().endswith(ending):
            return name
    if not os.path.exists(source) and not any(character in source for character in "*?{"):
        raise FileNotFoundError(f"{source!r} does not exist; expected a folder of images, shards, or a file of a store")
    raise ValueError(
        f"{source!r} is of no kind that is known: expected a folder of images, or a name that ends in "
        f"{', '.join(endings)}. In Python, gpuload.pack(dataset, …) takes any dataset"
    )


def size_of(text: str) -> int:
    """A number of bytes: ``256MB``, ``1GiB``, ``1000``.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"expected a number of bytes such as 256MB or 1GiB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])


@contextmanager
def _progress(console: Console, what: str) -> Iterator[Callable[[int, int, int], None]]:
    """A bar in a terminal, else a line for each tenth."""
    if not console.is_terminal:
        told = 0

        def line(done: int, total: int, nbytes: int) -> None:
            nonlocal told
            if total and (step := done * STEPS // total) > told:
                told = step
                _say(console, f"{done:,} of {total:,} {what}")

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, TextColumn("{task.fields[written]}"), console=console, transient=True) as progress:
        task = progress.add_task(what, total=None, written="")

        def bar(done: int, total: int, nbytes: int) -> None:
            progress.update(task, completed=done, total=total, written=f"{nbytes / 1e6:,.0f} MB" if nbytes else "")

        yield bar


def _tell(console: Console, made: Packed) -> None:
    went_on = f" ({made.taken_up:,} of them were there already)" if made.taken_up else ""
    _say(
        console, f"{made.samples:,} samples{went_on}, {made.nbytes:,} bytes in {made.files:,} file(s) in {made.folder}"
    )
    for why, count in made.kept.items():
        _say(console, f"{count:,} images kept as they are, {why}")
    for one in made.left_out[:SHOWN]:
        _say(console, f"left out: {one['source'] or 'sample ' + str(one['index'])}: {one['cause']}", "yellow")
    if len(made.left_out) > SHOWN:
        _say(console, f"left out: {len(made.left_out) - SHOWN:,} more, listed in {MANIFEST}", "yellow")
    _say(console, f"Read it with {made.read}")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)
