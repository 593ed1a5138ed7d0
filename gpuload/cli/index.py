"""``gpuload index``: the indexes of tar archives, made before a training needs them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from rich.console import Console

from gpuload.cli.console import fail, make_console, progress, say
from gpuload.datasets.stores.tar.shards import find_shards, open_shards

__all__ = ["run"]


def run(
    patterns: Sequence[str], *, workers: int | None = None, again: bool = False, console: Console | None = None
) -> int:
    """Make the indexes of these shards. Returns the exit status: 1 if a shard is missing or damaged."""
    console = console or make_console()
    made = 0
    try:
        paths = list(dict.fromkeys(find_shards(patterns)))
        done = 0
        with progress(console, "shards", len(paths)) as tell, warnings.catch_warnings():

            def ready(path: str, new: bool) -> None:
                nonlocal made, done
                made, done = made + new, done + 1
                tell(done)

            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *others: say(console, str(message), "yellow")
            shards = open_shards(paths, workers=workers, again=again, progress=ready)
    except (OSError, ValueError) as error:
        return fail(console, error)
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
