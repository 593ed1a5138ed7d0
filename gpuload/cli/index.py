"""``gpuload index``: the indexes of tar archives, made before a training needs them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from gpuload.cli.console import count_of, fail, make_console, progress, say
from gpuload.datasets.litter import is_litter
from gpuload.datasets.stores.tar.shards import find_shards, open_shards

__all__ = ["run"]


def run(shards: Sequence[str], *, workers: int | None, again: bool) -> int:
    """Make the indexes of these shards, and of all shards in a folder. Return the exit status: 1 if a shard is missing
    or damaged."""
    console = make_console()
    made = done = 0
    try:
        paths = list(dict.fromkeys(find_shards([path for pattern in shards for path in _shards_in(pattern)])))
        with progress(console, "shards", len(paths)) as tell, warnings.catch_warnings():

            def ready(path: str, new: bool) -> None:
                nonlocal made, done
                made, done = made + new, done + 1
                tell(done)

            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *others: say(console, str(message), "yellow")
            opened = open_shards(paths, workers=workers, again=again, progress=ready)
    except (OSError, ValueError) as error:
        return fail(console, error)
    samples, members = (sum(getattr(shard, name) for shard in opened) for name in ("samples", "members"))
    nbytes = sum(shard.table.nbytes for shard in opened)
    size = sum(os.stat(path).st_size for path in paths)
    files, fresh = count_of(members, "file"), len(opened) - made
    each = f", {nbytes / samples:.0f} for a sample" if samples else ""
    say(console, f"{count_of(len(opened), 'shard')} of {size:,} bytes: {count_of(samples, 'sample')} of {files}")
    say(console, f"{count_of(made, 'index', 'indexes')} made, {fresh:,} fresh; {nbytes:,} bytes{each}")
    return 0


def _shards_in(pattern: str) -> list[str]:
    """Return the shards of a folder, such as one that `gpuload pack` wrote; or the pattern itself.

    Raises:
        FileNotFoundError: the folder has none.
    """
    if not os.path.isdir(pattern):
        return [pattern]
    names = sorted(name for name in os.listdir(pattern) if name.endswith(".tar") and not is_litter(os.fsencode(name)))
    if not names:
        raise FileNotFoundError(f"the folder {pattern!r} has no shards; expected files whose names end in .tar")
    return [os.path.join(pattern, name) for name in names]
