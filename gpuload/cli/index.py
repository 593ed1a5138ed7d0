"""``gpuload index``: the indexes of tar archives, made before a training needs them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gpuload.datasets.stores.tar.patterns import find_shards
from gpuload.datasets.stores.tar.shards import open_shards

__all__ = ["run"]


def run(
    patterns: Sequence[str], *, workers: int | None = None, again: bool = False, console: Console | None = None
) -> int:
    """Make the indexes of these shards. Returns the exit status: 1 if a shard is missing or damaged."""
    console = console or Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    made = 0
    try:
        paths = list(dict.fromkeys(find_shards(patterns)))
        quiet = not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=quiet) as progress, warnings.catch_warnings():
            task = progress.add_task("shards", total=len(paths))

            def ready(path: str, new: bool) -> None:
                nonlocal made
                made += new
                progress.advance(task)

            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *others: console.print(
                str(message), style="yellow", markup=False, soft_wrap=True
            )
            shards = open_shards(paths, workers=workers, again=again, progress=ready)
    except (OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    samples = sum(shard.samples for shard in shards)
    members = sum(shard.members for shard in shards)
    nbytes = sum(shard.table.nbytes for shard in shards)
    size = sum(os.stat(path).st_size for path in paths)
    each = f", {nbytes / samples:.0f} for a sample" if samples else ""
    console.print(
        f"{len(shards):,} shards with {size:,} bytes: {samples:,} samples of {members:,} files\n"
        f"{made:,} indexes made, {len(shards) - made:,} fresh; they have {nbytes:,} bytes{each}",
        soft_wrap=True,
    )
    return 0
