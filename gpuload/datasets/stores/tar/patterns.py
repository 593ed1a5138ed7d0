"""The shards that a pattern stands for: braces, then wildcards. Main process; pure but for looking into folders, and of
URLs with wildcards for listing theirs."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from gpuload.datasets.litter import without_litter
from gpuload.datasets.paths import full_path
from gpuload.datasets.stores.opening import client, is_url

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote

__all__ = ["Patterns", "as_list", "expand", "find_shards"]

Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
MOST: Final = 10_000_000
SHOWN: Final = 3


def find_shards(patterns: Patterns, remote: Remote | None = None) -> list[str]:
    """The absolute paths, in the order of the patterns; those of a wildcard sorted. URLs are looked at when they are
    opened.

    Raises:
        FileNotFoundError: a pattern finds nothing, or a file that it names is missing.
        TypeError, ValueError: it is no path; a range in it is too long.
    """
    given = as_list(patterns)
    found, missing = [], []
    for pattern in given:
        if not isinstance(pattern, str | os.PathLike):
            raise TypeError(f"shards are given as paths, got {pattern!r} ({type(pattern).__name__})")
        for name in expand(os.fsdecode(pattern)):
            if is_url(name):
                found += _at_url(name, remote)
                continue
            path = full_path(name)
            if os.path.lexists(path):
                found.append(path)
            elif glob.has_magic(path):
                matches = without_litter(sorted(glob.glob(path, recursive=True)), path)
                if not matches:
                    raise FileNotFoundError(f"no shard is found for {name!r} (looked for {path!r})")
                found += matches
            else:
                missing.append(path)
    if missing:
        shown = ", ".join(map(repr, missing[:SHOWN])) + (", …" if len(missing) > SHOWN else "")
        count = len(missing) + len(found)
        raise FileNotFoundError(f"{len(missing)} of {count} shards {'is' if count == 1 else 'are'} missing: {shown}")
    if not found:
        raise FileNotFoundError(f"no shard is found for {given!r}: an empty list of paths")
    return found


def as_list(patterns: Patterns) -> list[str | os.PathLike[str]]:
    """The patterns, if it is one or several."""
    return [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)


def _at_url(name: str, remote: Remote | None) -> list[str]:
    if "*" not in name:  # what else is a wildcard elsewhere may stand in a URL
        return [name]
    if not (matches := without_litter(client(remote).glob(name), name)):
        raise FileNotFoundError(f"no shard is found for {name!r}")
    return matches


def expand(pattern: str) -> Iterator[str]:
    """``a{1..3}`` and ``a{1,2,3}`` as a shell expands them: ``{000..099}`` keeps its zeros.

    Example:
        >>> list(expand("s-{08..10}.{tar,zip}"))
        ['s-08.tar', 's-08.zip', 's-09.tar', 's-09.zip', 's-10.tar', 's-10.zip']
    """
    for found in re.finditer(r"{", pattern):
        end, commas = _closing(pattern, found.start())
        inner = pattern[found.end() : end]
        if end < 0:
            continue
        if (span := RANGE.fullmatch(inner)) is not None:
            choices: Iterable[str] = _range(pattern, *span.groups())
        elif commas:
            cuts = [found.start(), *commas, end]
            choices = (name for low, high in itertools.pairwise(cuts) for name in expand(pattern[low + 1 : high]))
        else:
            continue
        before, after = pattern[: found.start()], list(expand(pattern[end + 1 :]))
        return (before + choice + rest for choice in choices for rest in after)
    return iter((pattern,))


def _closing(pattern: str, start: int) -> tuple[int, list[int]]:
    """Where the brace ends that begins at `start`, or -1; and where its own commas are."""
    depth, commas = 0, []
    for at in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if depth == 0:
            return at, commas
        if depth == 1 and pattern[at] == ",":
            commas.append(at)
    return -1, []


def _range(pattern: str, first: str, last: str, step: str | None) -> Iterator[str]:
    start, stop, by = int(first), int(last), abs(int(step or 1)) or 1
    if abs(stop - start) // by >= MOST:
        raise ValueError(f"{pattern!r} stands for more than {MOST:,} shards")
    padded = any(len(number.lstrip("-")) > 1 and number.lstrip("-")[0] == "0" for number in (first, last))
    width = max(len(first), len(last)) if padded else 0
    way = 1 if stop >= start else -1
    return (f"{number:0{width}d}" for number in range(start, stop + way, by * way))
