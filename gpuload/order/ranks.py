"""Checks the rank of this process and the number of ranks, or discovers them.

The rank is discovered at each `iter()`, since `torch.distributed` may be initialized after a `Loader` was created.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from typing import Any

from gpuload.checks import integer

__all__ = ["announce", "check_rank", "exchange", "find_caller", "find_group", "find_rank"]

_calls: Counter[tuple[str, int]] = Counter()


def check_rank(rank: Any, world_size: Any) -> None:
    """Raise a TypeError or ValueError if rank or world_size is invalid. Both can be None, which means that `find_rank`
    discovers them."""
    if rank is None and world_size is None:
        return
    if rank is None or world_size is None:
        raise ValueError(
            f"rank and world_size must be given together, got {rank=}, {world_size=}; pass both or neither"
        )
    integer("rank", rank, minimum=0, below=integer("world_size", world_size, minimum=1))


def find_group() -> tuple[str, int, int] | None:
    """Return the backend, rank and world size of `torch.distributed`; None if it is not initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return str(distributed.get_backend()), distributed.get_rank(), distributed.get_world_size()


def announce(content: str, rank: int) -> int:
    """Announce `content` in the store that all ranks of `torch.distributed` share. Return the first rank that announced
    it, which is `rank` itself if no other rank did. This does not wait for other ranks."""
    if find_group() is None:
        return rank
    from torch.distributed import distributed_c10d

    with contextlib.suppress(Exception):  # the backend may have no store, or the store's process may have exited
        store = distributed_c10d._get_default_store()
        return int(store.compare_set(f"gpuload/{content}", "", str(rank)))
    return rank


def exchange(name: str, content: str, rank: int, world_size: int) -> dict[int, str]:
    """Write `content` under `name` to the store that all ranks of `torch.distributed` share. Return what other ranks
    have written under this name so far, keyed by rank. This does not wait for other ranks."""
    contents: dict[int, str] = {}
    if find_group() is None:
        return contents
    from torch.distributed import distributed_c10d

    with contextlib.suppress(Exception):  # as in `announce`
        store = distributed_c10d._get_default_store()
        keys = [f"gpuload/{name}/{number}" for number in range(world_size)]
        store.set(keys[rank], content)
        for other, key in enumerate(keys):
            if other != rank and store.check([key]):
                contents[other] = store.get(key).decode()
    return contents


def find_caller() -> str:
    """Return a name for the place in the user's program that calls gpuload now, and for the number of this call: the
    same on all ranks that run the same program."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "gpuload":
        frame = frame.f_back
    place = os.path.basename(frame.f_code.co_filename), frame.f_lineno
    _calls[place] += 1
    return f"{place[0]}:{place[1]}, call {_calls[place]}"


def find_rank() -> tuple[int, int]:
    """Return (rank, world_size) from `torch.distributed` if initialized, else from torchrun's variables, else (0, 1).

    Raises:
        ValueError: the environment's RANK and WORLD_SIZE are not valid.
    """
    if (group := find_group()) is not None:
        return group[1:]
    variables = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if variables[0] is None or variables[1] is None:
        return 0, 1
    try:
        rank, world_size = int(variables[0]), int(variables[1])
        check_rank(rank, world_size)
    except ValueError as error:
        raise ValueError(
            f"the environment has RANK={variables[0]!r} and WORLD_SIZE={variables[1]!r}, which torchrun never sets "
            f"({error}); unset them, or pass rank= and world_size="
        ) from None
    return rank, world_size
